/* random_values.h -- reproducible random values. */
#ifndef RANDOM_VALUES_H
#define RANDOM_VALUES_H

#include "rng.h"

/* Fills with values from -1 to 1 that depend only on the key. */
static inline void
fill(float *values, size_t n, uint64_t key)
{
    cer_rng rng;

    cer_rng_seed(&rng, key, CER_RNG_SEARCH, 0, 0);
    for (size_t i = 0; i < n; i++)
        values[i] = (float)(2 * cer_rng_double(&rng) - 1);
}

#endif
