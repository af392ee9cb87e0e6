/* hash.h -- XXH3 checksums of data files (64 bits) and states (128 bits).
 *
 * They detect damage, not malice. Only hash.c includes xxhash.h, which is
 * therefore compiled once. */
#ifndef CER_HASH_H
#define CER_HASH_H

#include "base.h"

typedef struct cer_hash128 {
    uint64_t low, high;
} cer_hash128;

uint64_t cer_hash64(const void *data, size_t len_bytes);
cer_hash128 cer_hash128_of(const void *data, size_t len_bytes);

/* Write canonical hexadecimal (big-endian, as in XXH3's specification),
 * terminated: 17 and 33 bytes. */
void cer_hash64_hex(uint64_t hash, char out[17]);
void cer_hash128_hex(cer_hash128 hash, char out[33]);

/* A running 64-bit hash, for files written in pieces. */
typedef struct cer_hasher cer_hasher;
cer_hasher *cer_hasher_new(void); /* NULL: out of memory */
void cer_hasher_update(cer_hasher *hasher, const void *data, size_t len_bytes);
uint64_t cer_hasher_result(const cer_hasher *hasher);
void cer_hasher_free(cer_hasher *hasher); /* NULL allowed */

#endif
