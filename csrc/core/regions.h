/* regions.h -- pieces of memory that are saved, restored and compared at once.
 *
 * A buffer has the bytes of all regions, one after the other without gaps. */
#ifndef CER_REGIONS_H
#define CER_REGIONS_H

#include "base.h"

typedef struct cer_region {
    uint8_t *start; /* may be NULL if there are no bytes */
    size_t nbytes;
} cer_region;

typedef struct cer_regions cer_regions;

/* Makes a list, which copies `regions` but not their memory; the memory must
 * outlive the calls below. Errors: CER_NOMEM; CER_INVALID if a region has bytes
 * but no address, or if the sizes do not add up in a size_t. */
cer_status cer_regions_new(const cer_region *regions, size_t n,
                           cer_regions **out, cer_error *err);
void cer_regions_free(cer_regions *regions); /* NULL allowed */

/* The number of bytes of all regions, which every buffer below must have. */
size_t cer_regions_nbytes(const cer_regions *regions);

void cer_regions_save(const cer_regions *regions, uint8_t *buffer);
void cer_regions_restore(const cer_regions *regions, const uint8_t *buffer);

/* Returns the first region whose bytes are different in `buffer`, or the number
 * of regions. other: the buffer to compare with; NULL: the regions' memory. */
size_t cer_regions_differing(const cer_regions *regions, const uint8_t *buffer,
                             const uint8_t *other);

#endif
