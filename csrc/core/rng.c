#include "rng.h"

void
cer_rng_seed(cer_rng *rng, uint64_t seed, cer_rng_use use, uint64_t a,
             uint64_t b)
{
    cer_draw_seed(rng->s, seed, (uint64_t)use, a, b);
}

uint64_t
cer_rng_next(cer_rng *rng)
{
    return cer_draw_next(rng->s);
}

uint64_t
cer_rng_below(cer_rng *rng, uint64_t bound)
{
    return cer_draw_below(rng->s, bound);
}

double
cer_rng_double(cer_rng *rng)
{
    return cer_draw_double(rng->s);
}

/* Swap targets are drawn this many steps ahead and prefetched: a large table
 * misses the cache at nearly every step, and this hides most of the wait. */
enum { AHEAD = 16 };

void
cer_rng_permute(cer_rng *rng, uint32_t *order, uint32_t n)
{
    uint32_t target[AHEAD];
    uint32_t next; /* the position whose target is drawn next; counts down */

    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    if (n < 2)
        return;
    next = n - 1;
    for (uint32_t k = 0; k < AHEAD && next >= 1; k++, next--)
        target[next % AHEAD] = (uint32_t)cer_rng_below(rng, (uint64_t)next + 1);
    for (uint32_t i = n - 1; i >= 1; i--) {
        uint32_t j = target[i % AHEAD];
        uint32_t swapped = order[i];

        order[i] = order[j];
        order[j] = swapped;
        if (next >= 1) {
            j = (uint32_t)cer_rng_below(rng, (uint64_t)next + 1);
            target[next % AHEAD] = j;
            __builtin_prefetch(&order[j], 1);
            next--;
        }
    }
}

uint32_t
cer_trial_seed(uint64_t seed, uint32_t trial)
{
    uint64_t state = seed;
    uint64_t key = cer_draw_split(&state);
    uint32_t x = trial ^ (uint32_t)key;

    /* Every step is a bijection of 32 bits, so trials never share a seed. */
    x ^= x >> 16;
    x *= UINT32_C(0x85ebca6b);
    x ^= x >> 13;
    x *= UINT32_C(0xc2b2ae35);
    x ^= x >> 16;
    x ^= (uint32_t)(key >> 32);
    x ^= x >> 15;
    x *= UINT32_C(0x2c1b3c6d);
    x ^= x >> 12;
    return x;
}
