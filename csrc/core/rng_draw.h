/* rng_draw.h -- the generator of rng.h, also for the kernels: xoshiro256** and
 * its seeding, with four words of state. */
#ifndef CER_RNG_DRAW_H
#define CER_RNG_DRAW_H

#include "base_shared.h"

/* The use of a stream; part of its key, so streams of different uses never
 * coincide. Values must never change. */
typedef enum cer_rng_use {
    CER_RNG_ROWS = 1,      /* row order: (seed, epoch, first part of the mix) */
    CER_RNG_WRITE = 2,     /* write order of a dataset's rows */
    CER_RNG_TRANSFORM = 3, /* random transforms: (seed, epoch, row) */
    CER_RNG_SPACE = 4,     /* search spaces: (seed, trial, dimension) */
    CER_RNG_EVAL = 5,      /* evaluation seeds: (seed, trial, epoch) */
    CER_RNG_SPLIT = 6,     /* stratified and grouped splits */
    CER_RNG_SEARCH = 7,    /* random choices of searchers */
    CER_RNG_DRAWS = 8,     /* rows drawn by weight: (seed, epoch, part) */
    CER_RNG_GROUPS = 9,    /* shards that are mixed: (seed, epoch, pool) */
} cer_rng_use;

/* splitmix64: advances the state and mixes the result. */
CER_SHARED uint64_t
cer_draw_split(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;

    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    x ^= x >> 31;
    return x;
}

CER_SHARED void
cer_draw_seed(uint64_t s[4], uint64_t seed, uint64_t use, uint64_t a,
              uint64_t b)
{
    uint64_t state = seed;

    /* Each part passes through the mixer before the next one is added, so
     * (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common. */
    state = cer_draw_split(&state) ^ use;
    state = cer_draw_split(&state) ^ a;
    state = cer_draw_split(&state) ^ b;
    for (int i = 0; i < 4; i++)
        s[i] = cer_draw_split(&state);
}

CER_SHARED uint64_t
cer_draw_rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

CER_SHARED uint64_t
cer_draw_next(uint64_t s[4])
{
    uint64_t result = cer_draw_rotl(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = cer_draw_rotl(s[3], 45);
    return result;
}

CER_SHARED uint64_t
cer_draw_below(uint64_t s[4], uint64_t bound)
{
    uint64_t x = cer_draw_next(s), low = x * bound;

    if (low < bound) {
        uint64_t reject_below = (0 - bound) % bound;

        while (low < reject_below) {
            x = cer_draw_next(s);
            low = x * bound;
        }
    }
    return CER_MULHI64(x, bound);
}

CER_SHARED double
cer_draw_double(uint64_t s[4])
{
    return (double)(cer_draw_next(s) >> 11) * 0x1.0p-53;
}

#endif
