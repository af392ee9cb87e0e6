/* gather.h -- rows copied from anywhere in a column to one place. */
#ifndef CER_GATHER_H
#define CER_GATHER_H

#include "base.h"

/* Copies row rows[i], the row_bytes bytes at src + rows[i] * row_bytes, to
 * dst + i * row_bytes, for i below n. dst and src do not overlap. */
void cer_gather_rows(void *dst, const void *src, size_t row_bytes,
                     const uint32_t *rows, size_t n);

#endif
