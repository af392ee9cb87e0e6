#include "hash.h"

#include <inttypes.h>
#include <stdio.h>

#define XXH_INLINE_ALL
#include "xxhash.h"

struct cer_hasher {
    XXH3_state_t state; /* needs 64-byte alignment: cer_aligned_alloc */
};

uint64_t
cer_hash64(const void *data, size_t len_bytes)
{
    return XXH3_64bits(data, len_bytes);
}

cer_hash128
cer_hash128_of(const void *data, size_t len_bytes)
{
    XXH128_hash_t hash = XXH3_128bits(data, len_bytes);

    return (cer_hash128){.low = hash.low64, .high = hash.high64};
}

void
cer_hash64_hex(uint64_t hash, char out[17])
{
    (void)snprintf(out, 17, "%016" PRIx64, hash);
}

void
cer_hash128_hex(cer_hash128 hash, char out[33])
{
    (void)snprintf(out, 33, "%016" PRIx64 "%016" PRIx64, hash.high, hash.low);
}

cer_hasher *
cer_hasher_new(void)
{
    cer_hasher *hasher = cer_aligned_alloc(sizeof *hasher);

    if (hasher != NULL)
        (void)XXH3_64bits_reset(&hasher->state);
    return hasher;
}

void
cer_hasher_update(cer_hasher *hasher, const void *data, size_t len_bytes)
{
    (void)XXH3_64bits_update(&hasher->state, data, len_bytes);
}

uint64_t
cer_hasher_result(const cer_hasher *hasher)
{
    return XXH3_64bits_digest(&hasher->state);
}

void
cer_hasher_free(cer_hasher *hasher)
{
    cer_aligned_free(hasher);
}
