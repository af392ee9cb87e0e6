#include "reductions.h"

#include <string.h>

#include "check.h"

enum { ROWS = 100, COLUMNS = 70 };

/* Whole numbers have one sum in any order. */
static void
every_number_is_added_once(void)
{
    static float in[ROWS * COLUMNS];
    float out[COLUMNS];

    for (size_t i = 0; i < ROWS * COLUMNS; i++)
        in[i] = (float)(i % 97);
    for (size_t block = 32; block <= 64; block += 32) {
        for (size_t rows = 1; rows <= ROWS; rows += 3) {
            cer_sum_columns(in, rows, COLUMNS, block, out);
            for (size_t j = 0; j < COLUMNS; j++) {
                float sum = 0;

                for (size_t i = 0; i < rows; i++)
                    sum += in[i * COLUMNS + j];
                CHECK(out[j] == sum);
            }
        }
    }
}

/* Ones vanish beside 2^26 one by one, but not as a sum of their own. */
static void
sums_are_made_of_sixteen_rows(void)
{
    float in[32 * 32], out[32], apart[31];

    for (size_t i = 0; i < 32 * 32; i++)
        in[i] = 1;
    in[0] = 67108864;
    cer_sum_columns(in, 32, 32, 32, out);
    CHECK(out[0] == 67108864 + 16.0F && out[1] == 32);
    in[0] = 1;
    in[16 * 32] = 67108864;
    cer_sum_columns(in, 32, 32, 32, out);
    CHECK(out[0] == 67108864 + 16.0F);
    /* In columns that fill no block, every fourth row makes a sum. */
    memset(in, 0, sizeof in);
    for (size_t i = 0; i < 32; i++)
        in[i * 31] = i == 1 ? 67108864 : 1;
    cer_sum_columns(in, 32, 31, 32, apart);
    CHECK(apart[0] == 67108864 + 24.0F);
}

static void
losses_and_gradients(void)
{
    static const float likelihoods[] = {-1, -2, -4, -8, -16, -32, -64, -128};
    static const int64_t target[] = {1, 0, -5, 1};
    cer_nll nll = {
        .rows = 4, .classes = 2, .target = target, .ignored = -5, .mean = true};
    float loss, count, gradient[8], of_loss = 6;
    static const float expected[] = {0, -2, -2, 0, 0, 0, 0, -2};

    CHECK_EQ_INT(cer_nll_loss(&nll, likelihoods, &loss, &count, NULL), CER_OK);
    CHECK(count == 3 && loss == (2 + 4 + 128) / 3.0F);
    CHECK_EQ_INT(cer_nll_gradient(&nll, &of_loss, &count, gradient, NULL),
                 CER_OK);
    CHECK(memcmp(gradient, expected, sizeof expected) == 0);
    nll.mean = false;
    CHECK_EQ_INT(cer_nll_loss(&nll, likelihoods, &loss, &count, NULL), CER_OK);
    CHECK(count == 3 && loss == 134);
    CHECK_EQ_INT(cer_nll_gradient(&nll, &of_loss, &count, gradient, NULL),
                 CER_OK);
    CHECK(gradient[1] == -6);
}

static void
targets_that_are_no_class_are_refused(void)
{
    static const float likelihoods[] = {-1, -2, -4, -8};
    int64_t target[] = {1, 2};
    cer_nll nll = {
        .rows = 2, .classes = 2, .target = target, .ignored = -5, .mean = true};
    float loss, count = 2, gradient[4], of_loss = 1;
    static const int64_t wrong[] = {2, -1, INT64_MAX, INT64_MIN};
    cer_error err = {0};

    for (size_t i = 0; i < 4; i++) {
        target[1] = wrong[i];
        CHECK_EQ_INT(cer_nll_loss(&nll, likelihoods, &loss, &count, &err),
                     CER_INVALID);
        CHECK_EQ_INT(cer_nll_gradient(&nll, &of_loss, &count, gradient, &err),
                     CER_INVALID);
        CHECK(strstr(err.message, "is out of bounds.") != NULL);
    }
}

CHECK_MAIN(every_number_is_added_once, sums_are_made_of_sixteen_rows,
           losses_and_gradients, targets_that_are_no_class_are_refused)
