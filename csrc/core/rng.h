/* rng.h -- keyed random streams, orders of rows and the visit order.
 *
 * Everything random in Cerebro is a pure function of a key and never depends on
 * earlier draws elsewhere. It uses only integer arithmetic, so the bits are the
 * same on every platform and at every optimization level. The test vectors in
 * tests/c/test_rng.c are part of the format: a change breaks every recorded
 * run.
 *
 * The generator is xoshiro256** (Blackman and Vigna, "Scrambled linear
 * pseudorandom number generators", 2021), seeded by splitmix64 of the key;
 * bounds are drawn by Lemire's method ("Fast random integer generation in an
 * interval", 2019). */
#ifndef CER_RNG_H
#define CER_RNG_H

#include "base.h"
#include "rng_draw.h"

typedef struct cer_rng {
    uint64_t s[4];
} cer_rng;

void cer_rng_seed(cer_rng *rng, uint64_t seed, cer_rng_use use, uint64_t a,
                  uint64_t b);
uint64_t cer_rng_next(cer_rng *rng);

/* Uniform in [0, bound); bound > 0. */
uint64_t cer_rng_below(cer_rng *rng, uint64_t bound);

/* Uniform in [0, 1) with 53 random bits. */
double cer_rng_double(cer_rng *rng);

/* Writes a random permutation of 0..n-1 (Fisher-Yates). */
void cer_rng_permute(cer_rng *rng, uint32_t *order, uint32_t n);

/* Shuffles what is in `order` (Fisher-Yates). */
void cer_rng_shuffle(cer_rng *rng, uint32_t *order, uint32_t n);

/* Draws n of 0..n-1 with replacement. `sums` has n running sums of the weights,
 * which begin at `before` and must not decrease; the last is above it. An index
 * whose sum equals the one before it is never drawn. */
void cer_rng_draw(cer_rng *rng, uint64_t before, const uint64_t *sums,
                  uint32_t *order, uint32_t n);

/* The seed of a trial's generators: below 2**32, the limit of NumPy's legacy
 * generator, and different for every trial of one seed. */
uint32_t cer_trial_seed(uint64_t seed, uint32_t trial);

/* The part of an epoch that a trial visits at step `step` (step < shards, the
 * number of parts): round robin from (trial + epoch) mod shards, or from 0
 * without stagger. */
static inline uint32_t
cer_visit_shard(uint32_t trial, uint32_t epoch, uint32_t step, uint32_t shards,
                bool stagger)
{
    uint64_t first = stagger ? (uint64_t)trial + epoch : 0;

    return (uint32_t)((first + step) % shards);
}

#endif
