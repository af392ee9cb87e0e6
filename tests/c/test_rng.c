/* The vectors below are part of the data format: see rng.h. */
#include "rng.h"

#include <stdlib.h>

#include "check.h"

static void
streams_are_keyed(void)
{
    cer_rng a, b;

    cer_rng_seed(&a, 0, CER_RNG_ROWS, 1, 0);
    cer_rng_seed(&b, 1, CER_RNG_ROWS, 0, 0);
    CHECK(cer_rng_next(&a) != cer_rng_next(&b));
    cer_rng_seed(&a, 0, CER_RNG_ROWS, 0, 0);
    cer_rng_seed(&b, 0, CER_RNG_WRITE, 0, 0);
    CHECK(cer_rng_next(&a) != cer_rng_next(&b));
}

static void
permutations_are_permutations(void)
{
    enum { N = 10007 };
    static uint32_t order[N];
    static bool seen[N];
    cer_rng rng;

    for (uint32_t n = 0; n < 40; n++) {
        uint64_t sum = 0;

        cer_rng_seed(&rng, n, CER_RNG_ROWS, 0, 0);
        cer_rng_permute(&rng, order, n);
        for (uint32_t i = 0; i < n; i++)
            sum |= UINT64_C(1) << order[i];
        CHECK_EQ_HEX(sum, (UINT64_C(1) << n) - 1);
    }
    cer_rng_seed(&rng, 3, CER_RNG_ROWS, 5, 7);
    cer_rng_permute(&rng, order, N);
    for (uint32_t i = 0; i < N; i++) {
        CHECK(order[i] < N && !seen[order[i]]);
        seen[order[i]] = true;
    }
}

/* All 24 orders of four rows must be equally likely: with 24,000 draws the
 * chi-square statistic of 23 degrees of freedom stays far below 60. */
static void
permutations_are_uniform(void)
{
    uint32_t counts[256] = {0}, order[4];
    double chi2 = 0;

    for (uint32_t draw = 0; draw < 24000; draw++) {
        cer_rng rng;

        cer_rng_seed(&rng, 11, CER_RNG_ROWS, draw, 2);
        cer_rng_permute(&rng, order, 4);
        counts[order[0] << 6 | order[1] << 4 | order[2] << 2 | order[3]]++;
    }
    for (int i = 0; i < 256; i++) {
        if (counts[i] != 0)
            chi2 += (counts[i] - 1000.0) * (counts[i] - 1000.0) / 1000.0;
    }
    CHECK(chi2 < 60);
}

/* The first index whose sum is above the drawn number, found one by one. */
static void
draws_follow_their_definition(void)
{
    enum { MOST = 40 };
    uint64_t sums[MOST];
    uint32_t order[MOST];
    cer_rng weights, rng, same;

    cer_rng_seed(&weights, 5, CER_RNG_SEARCH, 0, 0);
    for (uint32_t n = 1; n <= MOST; n++) {
        uint64_t total = 0;

        for (uint32_t i = 0; i < n; i++)
            sums[i] = total += cer_rng_below(&weights, 4) << i;
        sums[n - 1] += total == 0;
        cer_rng_seed(&rng, n, CER_RNG_DRAWS, 3, 1);
        same = rng;
        cer_rng_draw(&rng, 0, sums, order, n);
        for (uint32_t i = 0; i < n; i++) {
            uint64_t at = cer_rng_below(&same, sums[n - 1]);
            uint32_t k = 0;

            while (sums[k] <= at)
                k++;
            CHECK_EQ_INT(order[i], k);
            CHECK(k == 0 || sums[k] != sums[k - 1]); /* no weight of 0 */
        }
    }
}

/* A piece of running sums is drawn as if it were all. */
static void
draws_begin_at_a_sum(void)
{
    static const uint64_t whole[] = {7, 9, 10, 10, 16, 21};
    static const uint64_t shifted[] = {1, 1, 7, 12};
    uint32_t order[4], same[4];
    cer_rng rng;

    for (uint64_t seed = 0; seed < 50; seed++) {
        cer_rng_seed(&rng, seed, CER_RNG_DRAWS, 0, 0);
        cer_rng_draw(&rng, 9, whole + 2, order, 4);
        cer_rng_seed(&rng, seed, CER_RNG_DRAWS, 0, 0);
        cer_rng_draw(&rng, 0, shifted, same, 4);
        CHECK(memcmp(order, same, sizeof order) == 0);
    }
}

/* A permutation is a shuffle of 0..n-1; what is shuffled does not matter. */
static void
shuffles_move_what_is_there(void)
{
    uint32_t order[100], shuffled[100];
    cer_rng rng;

    for (uint32_t n = 0; n <= 100; n += 20) {
        for (uint32_t i = 0; i < n; i++)
            shuffled[i] = 1000 - i / 2;
        cer_rng_seed(&rng, 3, CER_RNG_ROWS, n, 0);
        cer_rng_permute(&rng, order, n);
        cer_rng_seed(&rng, 3, CER_RNG_ROWS, n, 0);
        cer_rng_shuffle(&rng, shuffled, n);
        for (uint32_t i = 0; i < n; i++)
            CHECK_EQ_INT(shuffled[i], 1000 - order[i] / 2);
    }
}

static void
draws_are_in_proportion(void)
{
    static const uint64_t sums[] = {1, 1, 4, 10}; /* weights 1, 0, 3, 6 */
    static const double expected[] = {1000, 0, 3000, 6000};
    double counts[4] = {0}, chi2 = 0;
    uint32_t order[4];
    cer_rng rng;

    cer_rng_seed(&rng, 2, CER_RNG_DRAWS, 0, 0);
    for (int pass = 0; pass < 2500; pass++) {
        cer_rng_draw(&rng, 0, sums, order, 4);
        for (int i = 0; i < 4; i++)
            counts[order[i]]++;
    }
    CHECK(counts[1] == 0);
    for (int i = 0; i < 4; i++) {
        if (expected[i] != 0)
            chi2 += (counts[i] - expected[i]) * (counts[i] - expected[i]) /
                    expected[i];
    }
    CHECK(chi2 < 16); /* 2 degrees of freedom */
}

static void
bounds_hold(void)
{
    cer_rng rng;

    cer_rng_seed(&rng, 1, CER_RNG_SPACE, 2, 3);
    for (int i = 0; i < 1000; i++) {
        double d = cer_rng_double(&rng);

        CHECK(cer_rng_below(&rng, 7) < 7);
        CHECK(d >= 0 && d < 1);
    }
    CHECK_EQ_INT(cer_rng_below(&rng, 1), 0);
}

static int
compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static void
trial_seeds_never_coincide(void)
{
    enum { N = 100000 };
    static uint32_t seeds[N];

    for (uint32_t t = 0; t < N; t++)
        seeds[t] = cer_trial_seed(42, t);
    qsort(seeds, N, sizeof seeds[0], compare_u32);
    for (uint32_t t = 1; t < N; t++)
        CHECK(seeds[t] != seeds[t - 1]);
    CHECK(cer_trial_seed(0, 0) != cer_trial_seed(1, 0));
}

static void
visits_go_round(void)
{
    CHECK_EQ_INT(cer_visit_shard(2, 1, 0, 8, true), 3);
    CHECK_EQ_INT(cer_visit_shard(2, 1, 6, 8, true), 1);
    CHECK_EQ_INT(cer_visit_shard(2, 1, 6, 8, false), 6);
    CHECK_EQ_INT(cer_visit_shard(UINT32_MAX, 1, 0, 7, true), 4294967296 % 7);
}

static void
vectors(void)
{
    static const uint64_t next[4] = {
        UINT64_C(0x946d8de9ea692808), UINT64_C(0xc4cd8332a0a25e99),
        UINT64_C(0x432861a4b1837d82), UINT64_C(0x5ace9e03f8585eea)};
    static const uint32_t permuted[20] = {13, 0, 5, 12, 18, 1, 10, 19, 15, 16,
                                          9,  7, 3, 8,  17, 2, 6,  4,  14, 11};
    static const uint32_t seeds[4] = {
        UINT32_C(0x39c71828), UINT32_C(0xe0785232), UINT32_C(0xac294360),
        UINT32_C(0x24239e2b)};
    static const uint64_t sums[8] = {5, 6, 20, 20, 100, 103, 110, 128};
    static const uint32_t drawn[8] = {4, 4, 2, 4, 4, 4, 4, 7};
    uint32_t order[20];
    cer_rng rng;

    cer_rng_seed(&rng, 7, CER_RNG_ROWS, 2, 3);
    for (int i = 0; i < 4; i++)
        CHECK_EQ_HEX(cer_rng_next(&rng), next[i]);
    cer_rng_seed(&rng, 7, CER_RNG_ROWS, 2, 3);
    cer_rng_permute(&rng, order, 20);
    for (int i = 0; i < 20; i++)
        CHECK_EQ_INT(order[i], permuted[i]);
    cer_rng_seed(&rng, 7, CER_RNG_DRAWS, 2, 3);
    cer_rng_draw(&rng, 0, sums, order, 8);
    for (int i = 0; i < 8; i++)
        CHECK_EQ_INT(order[i], drawn[i]);
    for (uint32_t t = 0; t < 4; t++)
        CHECK_EQ_INT(cer_trial_seed(42, t), seeds[t]);
}

CHECK_MAIN(streams_are_keyed, permutations_are_permutations,
           permutations_are_uniform, draws_follow_their_definition,
           draws_begin_at_a_sum, shuffles_move_what_is_there,
           draws_are_in_proportion, bounds_hold, trial_seeds_never_coincide,
           visits_go_round, vectors)
