#include "rng.h"

static uint64_t
mix64(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    x ^= x >> 31;
    return x;
}

static uint64_t
splitmix64(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    return mix64(*state);
}

void
cer_rng_seed(cer_rng *rng, uint64_t seed, cer_rng_use use, uint64_t a,
             uint64_t b)
{
    uint64_t state = seed;

    /* Each part passes through the mixer before the next one is added, so
     * (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common. */
    state = splitmix64(&state) ^ (uint64_t)use;
    state = splitmix64(&state) ^ a;
    state = splitmix64(&state) ^ b;
    for (int i = 0; i < 4; i++)
        rng->s[i] = splitmix64(&state);
}

static uint64_t
rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

uint64_t
cer_rng_next(cer_rng *rng)
{
    uint64_t *s = rng->s;
    uint64_t result = rotl(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
}

uint64_t
cer_rng_below(cer_rng *rng, uint64_t bound)
{
    __extension__ typedef unsigned __int128 u128;
    u128 m = (u128)cer_rng_next(rng) * bound;
    uint64_t low = (uint64_t)m;

    if (low < bound) {
        uint64_t reject_below = (0 - bound) % bound;

        while (low < reject_below) {
            m = (u128)cer_rng_next(rng) * bound;
            low = (uint64_t)m;
        }
    }
    return (uint64_t)(m >> 64);
}

double
cer_rng_double(cer_rng *rng)
{
    return (double)(cer_rng_next(rng) >> 11) * 0x1.0p-53;
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
    uint64_t key = splitmix64(&state);
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
