/* gather_place.h -- where a row is, for the kernels too. */
#ifndef CER_GATHER_PLACE_H
#define CER_GATHER_PLACE_H

#include "base_shared.h"

/* Row `row` of part `part`: of a loader's parts, a shard. */
typedef struct cer_row_place {
    uint32_t row, part;
} cer_row_place;

#endif
