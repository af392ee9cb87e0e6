#include "regions.h"

#include <string.h>

struct cer_regions {
    size_t n, nbytes;
    cer_region regions[];
};

cer_status
cer_regions_new(const cer_region *regions, size_t n, cer_regions **out,
                cer_error *err)
{
    cer_regions *made;
    size_t size, nbytes = 0;

    *out = NULL;
    for (size_t i = 0; i < n; i++) {
        if (regions[i].start == NULL && regions[i].nbytes != 0)
            return cer_fail(err, CER_INVALID, "region %zu has no address", i);
        if (!cer_add_size(nbytes, regions[i].nbytes, &nbytes))
            return cer_fail(err, CER_INVALID, "the regions are too large");
    }
    if (!cer_mul_size(n, sizeof *regions, &size) ||
        !cer_add_size(size, sizeof *made, &size))
        return cer_fail(err, CER_INVALID, "there are too many regions");
    if ((made = cer_alloc(size)) == NULL)
        return cer_fail(err, CER_NOMEM, "no memory for %zu regions", n);
    made->n = n;
    made->nbytes = nbytes;
    if (n != 0)
        memcpy(made->regions, regions, n * sizeof *regions);
    *out = made;
    return CER_OK;
}

void
cer_regions_free(cer_regions *regions)
{
    cer_free(regions);
}

size_t
cer_regions_nbytes(const cer_regions *regions)
{
    return regions->nbytes;
}

/* A region without bytes may lack an address, which memcpy and memcmp must not
 * see. */

void
cer_regions_save(const cer_regions *regions, uint8_t *buffer)
{
    for (size_t i = 0; i < regions->n; i++) {
        const cer_region *region = &regions->regions[i];

        if (region->nbytes != 0) {
            memcpy(buffer, region->start, region->nbytes);
            buffer += region->nbytes;
        }
    }
}

void
cer_regions_restore(const cer_regions *regions, const uint8_t *buffer)
{
    for (size_t i = 0; i < regions->n; i++) {
        const cer_region *region = &regions->regions[i];

        if (region->nbytes != 0) {
            memcpy(region->start, buffer, region->nbytes);
            buffer += region->nbytes;
        }
    }
}

size_t
cer_regions_differing(const cer_regions *regions, const uint8_t *buffer,
                      const uint8_t *other)
{
    size_t at = 0;

    for (size_t i = 0; i < regions->n; i++) {
        const cer_region *region = &regions->regions[i];
        const uint8_t *one = other == NULL ? region->start : other + at;

        if (region->nbytes != 0 &&
            memcmp(one, buffer + at, region->nbytes) != 0)
            return i;
        at += region->nbytes;
    }
    return regions->n;
}
