#include "pointwise.h"

#include <stdlib.h>

#include "check.h"

static cer_pointwise *
new_chain(cer_dtype from, size_t channels)
{
    cer_pointwise *chain;

    if (cer_pointwise_new(from, channels, &chain, NULL) != CER_OK)
        abort();
    return chain;
}

static void
finish(cer_pointwise *chain)
{
    if (cer_pointwise_finish(chain, NULL) != CER_OK)
        abort();
}

static void
scale_divides_by_whole_numbers(void)
{
    cer_pointwise *chain = new_chain(CER_F32, 1);
    float x[2] = {7, 200}, y[2];

    CHECK_EQ_INT(cer_pointwise_scale(chain, 1.0 / 255, NULL), CER_OK);
    finish(chain);
    cer_pointwise_run(chain, y, x, 2);
    CHECK(y[0] == 7.0f / 255.0f && y[1] == 200.0f / 255.0f);
    cer_pointwise_free(chain);
    chain = new_chain(CER_F32, 1);
    CHECK_EQ_INT(cer_pointwise_scale(chain, 0.3, NULL), CER_OK);
    finish(chain);
    cer_pointwise_run(chain, y, x, 2);
    CHECK(y[0] == 7.0f * 0.3f);
    cer_pointwise_free(chain);
}

/* A table and the operations themselves give the same bits: the second chain is
 * the first one on bytes cast to int32. */
static void
tables_have_the_bits_of_the_operations(void)
{
    static const double mean[3] = {0.485, 0.456, 0.406};
    static const double std[3] = {0.229, 0.224, 0.225};
    enum { N = 3 * 256 };
    uint8_t bytes[N];
    int32_t words[N];
    float by_table[N], by_steps[N];
    size_t tables;

    for (int i = 0; i < N; i++)
        words[i] = bytes[i] = (uint8_t)(i / 3);
    for (int kind = 0; kind < 2; kind++) {
        cer_pointwise *chain = new_chain(kind == 0 ? CER_U8 : CER_I32, 3);

        CHECK_EQ_INT(cer_pointwise_scale(chain, 1.0 / 255, NULL), CER_OK);
        CHECK_EQ_INT(cer_pointwise_normalize(chain, mean, std, 3, NULL),
                     CER_OK);
        finish(chain);
        CHECK((cer_pointwise_table(chain, &tables) != NULL) == (kind == 0));
        cer_pointwise_run(chain, kind == 0 ? by_table : by_steps,
                          kind == 0 ? (void *)bytes : (void *)words, N);
        cer_pointwise_free(chain);
    }
    CHECK(memcmp(by_table, by_steps, sizeof by_table) == 0);
    for (int i = 0; i < N; i++) {
        float x = (float)bytes[i] / 255.0f;

        CHECK(by_steps[i] == (x - (float)mean[i % 3]) / (float)std[i % 3]);
    }
}

/* Channel counts that do not divide the piece or exceed it, and lengths that
 * end within a period. */
static void
channels_go_round(void)
{
    static const size_t all_channels[] = {1, 2, 7, 1000, 1024, 1500};

    for (size_t k = 0; k < 6; k++) {
        size_t channels = all_channels[k], n = channels * 3 + channels / 2;
        double *mean = malloc(channels * sizeof *mean);
        double *std = malloc(channels * sizeof *std);
        double *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
        cer_pointwise *chain = new_chain(CER_F64, channels);

        for (size_t i = 0; i < channels; i++) {
            mean[i] = (double)i;
            std[i] = 2;
        }
        for (size_t i = 0; i < n; i++)
            x[i] = (double)(i % channels) + 8;
        CHECK_EQ_INT(cer_pointwise_normalize(chain, mean, std, channels, NULL),
                     CER_OK);
        finish(chain);
        CHECK_EQ_INT(cer_pointwise_dtype(chain), CER_F64);
        cer_pointwise_run(chain, y, x, n);
        for (size_t i = 0; i < n; i++)
            CHECK(y[i] == 4);
        cer_pointwise_constant(chain, 0, 8, y);
        for (size_t i = 0; i < channels; i++)
            CHECK(y[i] == (8 - (double)i) / 2);
        cer_pointwise_free(chain);
        free(mean);
        free(std);
        free(x);
        free(y);
    }
}

/* float16 rounds after each operation: 2049 is not a float16. */
static void
half_floats_round_after_each_operation(void)
{
    cer_pointwise *chain = new_chain(CER_F16, 1);
    double mean = -1, std = 1;
    uint16_t x = 0x6800 /* 2048 */, y;

    CHECK_EQ_INT(cer_pointwise_normalize(chain, &mean, &std, 1, NULL), CER_OK);
    finish(chain);
    CHECK_EQ_INT(cer_pointwise_dtype(chain), CER_F16);
    cer_pointwise_run(chain, &y, &x, 1);
    CHECK_EQ_HEX(y, 0x6800);
    cer_pointwise_free(chain);
}

static void
constants_pass_the_steps_after_them(void)
{
    cer_pointwise *chain = new_chain(CER_U8, 2);
    double mean[2] = {1, 2}, std[2] = {2, 4};
    float y[2];

    CHECK_EQ_INT(cer_pointwise_normalize(chain, mean, std, 2, NULL), CER_OK);
    finish(chain);
    cer_pointwise_constant(chain, 0, 0, y);
    CHECK(y[0] == -0.5f && y[1] == -0.5f);
    cer_pointwise_constant(chain, cer_pointwise_steps(chain), 0, y);
    CHECK(y[0] == 0 && y[1] == 0);
    CHECK_EQ_INT(cer_pointwise_dtype_at(chain, 0), CER_U8);
    cer_pointwise_free(chain);
}

static void
nonsense_is_refused(void)
{
    cer_pointwise *chain = new_chain(CER_C64, 1);
    double one = 1, three[3] = {1, 1, 1};

    CHECK_EQ_INT(cer_pointwise_scale(chain, 2, NULL), CER_INVALID);
    CHECK_EQ_INT(cer_pointwise_cast(chain, CER_F32, NULL), CER_INVALID);
    CHECK_EQ_INT(cer_pointwise_cast(chain, CER_C64, NULL), CER_OK);
    cer_pointwise_free(chain);
    chain = new_chain(CER_F32, 2);
    CHECK_EQ_INT(cer_pointwise_normalize(chain, three, three, 3, NULL),
                 CER_INVALID);
    CHECK_EQ_INT(cer_pointwise_normalize(chain, &one, &one, 1, NULL), CER_OK);
    cer_pointwise_free(chain);
    chain = new_chain(CER_F32, 1);
    while (cer_pointwise_scale(chain, 2, NULL) == CER_OK)
        ; /* ends because the steps are limited */
    cer_pointwise_free(chain);
}

CHECK_MAIN(scale_divides_by_whole_numbers,
           tables_have_the_bits_of_the_operations, channels_go_round,
           half_floats_round_after_each_operation,
           constants_pass_the_steps_after_them, nonsense_is_refused)
