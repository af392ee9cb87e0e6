#include "mt19937.h"

#include <string.h>

#include "check.h"

/* The generator as it is published, one number at a time. */
typedef struct plain_generator {
    uint32_t table[624];
    int at;
} plain_generator;

static void
seed(plain_generator *g, uint32_t value)
{
    g->table[0] = value;
    for (uint32_t i = 1; i < 624; i++)
        g->table[i] =
            UINT32_C(1812433253) * (g->table[i - 1] ^ g->table[i - 1] >> 30) +
            i;
    g->at = 624;
}

static uint32_t
next(plain_generator *g)
{
    uint32_t y;

    if (g->at == 624) {
        for (int i = 0; i < 624; i++) {
            uint32_t mixed = (g->table[i] & 0x80000000U) |
                             (g->table[(i + 1) % 624] & 0x7fffffffU);

            g->table[i] = g->table[(i + 397) % 624] ^ mixed >> 1 ^
                          (mixed % 2 != 0 ? UINT32_C(0x9908b0df) : 0);
        }
        g->at = 0;
    }
    y = g->table[g->at++];
    y ^= y >> 11;
    y ^= y << 7 & UINT32_C(0x9d2c5680);
    y ^= y << 15 & UINT32_C(0xefc60000);
    return y ^ y >> 18;
}

/* The bytes of PyTorch's state of this generator. */
static void
put(uint8_t *state, const plain_generator *g, bool fresh)
{
    int32_t left = 625 - g->at, seeded = 1;
    uint64_t at = fresh ? 0 : (uint64_t)g->at;

    memset(state, 7, CER_MT19937_BYTES);
    memcpy(state + 8, &left, sizeof left);
    memcpy(state + 12, &seeded, sizeof seeded);
    memcpy(state + 16, &at, sizeof at);
    for (size_t i = 0; i < 624; i++) {
        uint64_t number = g->table[i];

        memcpy(state + 24 + 8 * i, &number, sizeof number);
    }
}

static void
the_reference_is_the_published_generator(void)
{
    plain_generator g;
    uint32_t number = 0;

    seed(&g, 5489);
    for (int i = 0; i < 10000; i++)
        number = next(&g);
    CHECK_EQ_INT(number, 4123659995);
}

static void
draws_are_those_of_the_reference(void)
{
    static const size_t sizes[] = {1, 5, 311, 312, 313, 0, 624, 5000, 2};
    static const double probabilities[] = {0, 1e-300, 0.2, 0.5, 0.999, 1};
    static float out[5001];
    static uint8_t state[CER_MT19937_BYTES], expected[CER_MT19937_BYTES];
    plain_generator g;
    cer_error err = {0};

    for (int odd = 0; odd < 2; odd++) {
        seed(&g, 77);
        if (odd)
            (void)next(&g); /* the two numbers of a draw lie in two tables */
        put(state, &g, !odd);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            for (size_t i = 0; i < 6; i++) {
                double p = probabilities[i];

                out[sizes[s]] = 3;
                CHECK(cer_mt19937_bernoulli(state, sizeof state, p, out,
                                            sizes[s], &err) == CER_OK);
                CHECK(out[sizes[s]] == 3);
                for (size_t j = 0; j < sizes[s]; j++) {
                    uint64_t top = next(&g) & 0x1fffff;
                    uint64_t drawn = top << 32 | next(&g);
                    double uniform = (double)drawn / 9007199254740992.0;

                    CHECK(out[j] == (uniform < p ? 1 : 0));
                }
            }
        }
        put(expected, &g, false);
        CHECK(memcmp(state, expected, sizeof state) == 0);
    }
}

/* What is not a state of the generator is refused and stays as it is. */
static void
other_bytes_are_refused(void)
{
    static uint8_t state[CER_MT19937_BYTES], before[CER_MT19937_BYTES];
    static const int32_t lefts[] = {0, -1, 625, INT32_MIN};
    float out = 5;
    plain_generator g;
    cer_error err = {0};

    seed(&g, 1);
    (void)next(&g);
    put(state, &g, false);
    CHECK_EQ_INT(
        cer_mt19937_bernoulli(state, sizeof state - 1, 0.5, &out, 1, &err),
        CER_INVALID);
    for (int i = 0; i < 2; i++)
        CHECK_EQ_INT(cer_mt19937_bernoulli(state, sizeof state,
                                           i == 0 ? -0.1 : 1.1, &out, 1, &err),
                     CER_INVALID);
    for (size_t i = 0; i < 6; i++) {
        uint64_t at = i == 4 ? 3 : 1;
        int32_t seeded = i == 5 ? 0 : 1;

        put(state, &g, false);
        if (i < 4)
            memcpy(state + 8, &lefts[i], sizeof lefts[i]);
        memcpy(state + 12, &seeded, sizeof seeded);
        memcpy(state + 16, &at, sizeof at);
        memcpy(before, state, sizeof state);
        CHECK_EQ_INT(
            cer_mt19937_bernoulli(state, sizeof state, 0.5, &out, 1, &err),
            CER_INVALID);
        CHECK(memcmp(state, before, sizeof state) == 0);
    }
    CHECK(out == 5);
}

CHECK_MAIN(the_reference_is_the_published_generator,
           draws_are_those_of_the_reference, other_bytes_are_refused)
