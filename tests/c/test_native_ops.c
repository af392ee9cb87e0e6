/* The arithmetic of the native network against its definitions. */
#include "native_ops.h"

#include <math.h>

#include "check.h"
#include "random_values.h"

#define CHECK_NEAR(left, right, most)                                          \
    CHECK(fabs((double)(left) - (double)(right)) <= (most))

enum { M = 5, K = 37, N = 41 }; /* not multiples of the lanes */

static void
products_are_those_of_matrices(void)
{
    static float a[M * K], b[K * N], bt[N * K], c[M * N], inner[M * N];

    fill(a, M * K, 1);
    fill(b, K * N, 2);
    fill(c, M * N, 3);
    memcpy(inner, c, sizeof c);
    for (size_t k = 0; k < K; k++) {
        for (size_t n = 0; n < N; n++)
            bt[n * K + k] = b[k * N + n];
    }
    for (size_t m = 0; m < M; m++) {
        for (size_t n = 0; n < N; n++) {
            double sum = (double)c[m * N + n];
            float one[1] = {c[m * N + n]};

            for (size_t k = 0; k < K; k++)
                sum += (double)a[m * K + k] * (double)b[k * N + n];
            cer_native_add_product(1, K, 1, a + m * K, K, 1, bt + n * K, one);
            CHECK_NEAR(one[0], sum, 1e-5);
        }
    }
    static float made[M * N];
    memcpy(made, c, sizeof c);
    cer_native_add_product(M, K, N, a, K, 1, b, made);
    cer_native_add_inner(M, N, K, a, bt, inner);
    for (size_t i = 0; i < M * N; i++) {
        float one[1] = {c[i]};

        /* Every sum adds its terms in order, however it was tiled. */
        cer_native_add_product(1, K, 1, a + i / N * K, K, 1, bt + i % N * K,
                               one);
        CHECK(memcmp(one, made + i, sizeof *one) == 0);
        CHECK_NEAR(inner[i], made[i], 1e-5);
    }
}

static void
a_transposed_factor_needs_no_copy(void)
{
    static float a[M * K], at[K * M], b[K * N], c[M * N], d[M * N];

    fill(a, M * K, 4);
    fill(b, K * N, 5);
    for (size_t i = 0; i < M * K; i++)
        at[i % K * M + i / K] = a[i];
    cer_native_add_product(M, K, N, a, K, 1, b, c);
    cer_native_add_product(M, K, N, at, 1, M, b, d);
    CHECK(memcmp(c, d, sizeof c) == 0);
}

static const cer_native_conv conv = {2, 5, 6, 3};
enum { PLANE = 30, DEPTH = 18 };

/* The definition: output (y, x) of a filter sees (y - 1 .. y + 1, ...). */
static double
convolved(const float *picture, const float *weight, size_t filter, int y,
          int x)
{
    double sum = 0.0;

    for (int channel = 0; channel < 2; channel++) {
        for (int tap = 0; tap < CER_NATIVE_TAPS; tap++) {
            int down = y + tap / 3 - 1, right = x + tap % 3 - 1;

            if (down >= 0 && down < 5 && right >= 0 && right < 6)
                sum += (double)picture[channel * PLANE + down * 6 + right] *
                       (double)weight[filter * DEPTH + channel * 9 + tap];
        }
    }
    return sum;
}

static void
a_convolution_is_what_it_is_defined_to_be(void)
{
    static float picture[2 * PLANE], weight[3 * DEPTH], bias[3];
    static float columns[DEPTH * PLANE], out[3 * PLANE];

    fill(picture, 2 * PLANE, 6);
    fill(weight, 3 * DEPTH, 7);
    fill(bias, 3, 8);
    cer_native_unfold(&conv, picture, columns);
    cer_native_conv_forward(&conv, columns, weight, bias, out);
    for (size_t i = 0; i < 3 * PLANE; i++) {
        size_t filter = i / PLANE;
        int at = (int)(i % PLANE);
        double want = convolved(picture, weight, filter, at / 6, at % 6);

        CHECK_NEAR(out[i], want + (double)bias[filter], 1e-5);
    }
}

/* <unfold x, c> = <x, fold c>. A convolution is linear in its picture and its
 * filters, so each of its gradients gives the same number <conv x, d>. */
static void
backward_is_the_adjoint_of_forward(void)
{
    static float picture[2 * PLANE], weight[3 * DEPTH], d_out[3 * PLANE];
    static float columns[DEPTH * PLANE], out[3 * PLANE], none[3];
    static float d_weight[3 * DEPTH], d_bias[3], d_picture[2 * PLANE];
    double forward = 0, filters = 0, data = 0, bias = 0, ones = 0;

    fill(picture, 2 * PLANE, 9);
    fill(weight, 3 * DEPTH, 10);
    fill(d_out, 3 * PLANE, 11);
    cer_native_unfold(&conv, picture, columns);
    cer_native_conv_forward(&conv, columns, weight, none, out);
    cer_native_conv_filters(&conv, columns, d_out, d_weight, d_bias);
    cer_native_conv_data(&conv, d_out, weight, columns, d_picture);
    for (size_t i = 0; i < 3 * PLANE; i++) {
        forward += (double)out[i] * (double)d_out[i];
        ones += (double)d_out[i];
    }
    for (size_t i = 0; i < 3 * DEPTH; i++)
        filters += (double)weight[i] * (double)d_weight[i];
    for (size_t i = 0; i < 2 * PLANE; i++)
        data += (double)picture[i] * (double)d_picture[i];
    for (size_t i = 0; i < 3; i++)
        bias += (double)d_bias[i];
    CHECK(fabs(forward) > 0.1);
    CHECK_NEAR(filters, forward, 1e-5);
    CHECK_NEAR(data, forward, 1e-5);
    CHECK_NEAR(bias, ones, 1e-5);
}

static void
pooling_takes_the_first_largest(void)
{
    /* 3 x 5: the last row and column are left out. */
    static const float in[15] = {1, 2,  -1, -2, 9, /**/
                                 2, -3, -4, -1, 9, 9, 9, 9, 9, 9};
    static const float d_out[2] = {7, 8};
    float out[2], d_in[15];
    uint8_t which[2];

    cer_native_pool_forward(1, 3, 5, in, out, which);
    CHECK(out[0] == 2.0f && which[0] == 1);
    CHECK(out[1] == 0.0f && which[1] == 0); /* ReLU */
    cer_native_pool_backward(1, 3, 5, out, which, d_out, d_in);
    for (size_t i = 0; i < 15; i++)
        CHECK(d_in[i] == (i == 1 ? 7.0f : 0.0f));
}

static void
pooling_hides_no_nan(void)
{
    for (size_t at = 0; at < 4; at++) {
        float in[4] = {1, 2, 3, 4}, out, d_out = 5, d_in[4];
        uint8_t which;

        in[at] = NAN;
        cer_native_pool_forward(1, 2, 2, in, &out, &which);
        CHECK(isnan(out) && which == at);
        cer_native_pool_backward(1, 2, 2, &out, &which, &d_out, d_in);
        CHECK(d_in[at] == 5.0f);
    }
}

static void
cross_entropy_and_its_gradient(void)
{
    static const float scores[3] = {1.0f, 3.0f, 3.0f}, large[2] = {0, 2000};
    static const float nan[2] = {0, NAN};
    double sum = exp(-2.0) + 2.0;
    float d[3];
    bool right;

    CHECK_NEAR(cer_native_cross_entropy(3, scores, 1, 4, d, &right), log(sum),
               1e-15);
    CHECK(right); /* the first of two equal ones */
    CHECK_NEAR(d[0], exp(-2.0) / sum / 4, 1e-8);
    CHECK_NEAR(d[1], (1 / sum - 1) / 4, 1e-8);
    CHECK_NEAR(d[2], 1 / sum / 4, 1e-8);
    CHECK_NEAR(cer_native_cross_entropy(3, scores, 2, 1, NULL, &right),
               log(sum), 1e-15);
    CHECK(!right);
    CHECK_NEAR(cer_native_cross_entropy(2, large, 0, 1, d, &right), 2000, 0);
    CHECK(isnan(cer_native_cross_entropy(2, nan, 0, 1, d, &right)));
}

static void
the_step_is_that_of_momentum(void)
{
    static const float gradients[2] = {2, -4};
    float momenta[2] = {1, 0}, values[2] = {10, 20};

    cer_native_descend(2, 0.5f, 0.25f, gradients, momenta, values);
    CHECK(momenta[0] == 2.25f && momenta[1] == -4.0f);
    CHECK(values[0] == 8.875f && values[1] == 22.0f);
}

CHECK_MAIN(products_are_those_of_matrices, a_transposed_factor_needs_no_copy,
           a_convolution_is_what_it_is_defined_to_be,
           backward_is_the_adjoint_of_forward, pooling_takes_the_first_largest,
           pooling_hides_no_nan, cross_entropy_and_its_gradient,
           the_step_is_that_of_momentum)
