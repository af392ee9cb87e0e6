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
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    cer_rng_shuffle(rng, order, n);
}

void
cer_rng_shuffle(cer_rng *rng, uint32_t *order, uint32_t n)
{
    uint32_t target[AHEAD];
    uint32_t next; /* the position whose target is drawn next; counts down */

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

/* Draws that are searched together: each step of a search waits for memory, but
 * not for the other searches. */
enum { TOGETHER = 16 };

void
cer_rng_draw(cer_rng *rng, uint64_t before, const uint64_t *sums,
             uint32_t *order, uint32_t n)
{
    uint64_t at[TOGETHER];

    for (uint32_t done = 0; done < n;) {
        uint32_t *first = &order[done];
        uint32_t count = n - done < TOGETHER ? n - done : TOGETHER;

        for (uint32_t k = 0; k < count; k++) {
            at[k] = before + cer_rng_below(rng, sums[n - 1] - before);
            first[k] = 0;
        }
        /* The first sum above `at`, by halving: all searches take the same
         * steps, without a branch that a processor would have to guess. */
        for (uint32_t left = n; left > 1; left -= left / 2) {
            uint32_t half = left / 2;

            for (uint32_t k = 0; k < count; k++)
                first[k] +=
                    half & -(uint32_t)(sums[first[k] + half - 1] <= at[k]);
        }
        done += count;
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
