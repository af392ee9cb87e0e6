/* native_shared.h -- the native network on a device, except convolutions: the
 * arguments of its kernels, and the computation of each, one item at a time.
 * The kernels in csrc/cuda/kernels.cu and their references on the CPU
 * (native_kernels.c) call these same functions.
 *
 * One thread computes each sum, in term order: results do not depend on how a
 * device divides the items. */
#ifndef CER_NATIVE_SHARED_H
#define CER_NATIVE_SHARED_H

#include "base_shared.h"
#if !defined(__CUDACC_RTC__)
#include <math.h>
#endif

/* out[rows][planes][height/2][width/2] of in + bias: ReLU and the maximum of
 * every 2x2, as in native_ops.h. An item is a value of `out`. */
typedef struct cer_native_pool_args {
    const float *in, *bias;
    float *out;
    uint8_t *which;
    uint64_t items;
    uint32_t planes, height, width;
    uint32_t unused;
} cer_native_pool_args;

CER_SHARED void
cer_native_pool(const cer_native_pool_args *a, uint64_t i)
{
    const uint64_t columns = a->width / 2, rows = a->height / 2;
    const uint64_t plane = i / (columns * rows);
    const uint64_t top =
        (plane * a->height + i / columns % rows * 2) * a->width;
    const float bias = a->bias[plane % a->planes];
    const float *at = a->in + top + i % columns * 2;
    float best = at[0] + bias;
    uint8_t which = 0;

    for (uint8_t k = 1; k < 4; k++) {
        float value = at[k / 2 * a->width + k % 2] + bias;

        if (value > best || value != value) {
            best = value;
            which = k;
        }
    }
    a->which[i] = which;
    a->out[i] = best < 0.0f ? 0.0f : best;
}

/* The gradient before pooling; an item is a value of `d_in`. */
typedef struct cer_native_unpool_args {
    const float *out, *d_out;
    const uint8_t *which;
    float *d_in;
    uint64_t items;
    uint32_t height, width;
} cer_native_unpool_args;

CER_SHARED void
cer_native_unpool(const cer_native_unpool_args *a, uint64_t i)
{
    const uint64_t x = i % a->width, y = i / a->width % a->height;
    const uint64_t plane = i / a->width / a->height;
    const uint64_t columns = a->width / 2, rows = a->height / 2;
    const uint64_t from = (plane * rows + y / 2) * columns + x / 2;
    float gradient = 0.0f;

    if (y / 2 < rows && x / 2 < columns &&
        a->which[from] == y % 2 * 2 + x % 2 && !(a->out[from] <= 0.0f))
        gradient = a->d_out[from];
    a->d_in[i] = gradient;
}

/* out[i] = the sum of in[i * item_step + k * step], k from 0 to count - 1. */
typedef struct cer_native_sum_args {
    const float *in;
    float *out;
    uint64_t items, count, item_step, step;
} cer_native_sum_args;

CER_SHARED void
cer_native_sum(const cer_native_sum_args *a, uint64_t i)
{
    float sum = 0.0f;

    for (uint64_t k = 0; k < a->count; k++)
        sum += a->in[i * a->item_step + k * a->step];
    a->out[i] = sum;
}

/* c[m][n] = start[n] + a b with any strides; start may be NULL. An item is a
 * value of c. */
typedef struct cer_native_product_args {
    const float *a, *b, *start;
    float *c;
    uint64_t items, n, k;
    uint64_t a_row, a_column, b_row, b_column;
} cer_native_product_args;

CER_SHARED void
cer_native_product(const cer_native_product_args *p, uint64_t i)
{
    const float *a = p->a + i / p->n * p->a_row;
    const float *b = p->b + i % p->n * p->b_column;
    float sum = p->start == 0 ? 0.0f : p->start[i % p->n];

    for (uint64_t k = 0; k < p->k; k++)
        sum += a[k * p->a_column] * b[k * p->b_row];
    p->c[i] = sum;
}

/* The loss of every row, whether it is right (1), and its scores' gradients,
 * divided by `rows`. An item is a row. */
typedef struct cer_native_score_args {
    const float *scores;
    const int64_t *labels;
    float *d_scores;
    double *losses;
    uint8_t *right;
    uint64_t items, classes, rows;
} cer_native_score_args;

CER_SHARED void
cer_native_score(const cer_native_score_args *a, uint64_t i)
{
    const float *scores = a->scores + i * a->classes;
    const uint64_t label = (uint64_t)a->labels[i];
    uint64_t best = 0;
    double sum = 0.0;

    for (uint64_t k = 1; k < a->classes; k++) {
        if (scores[k] > scores[best])
            best = k;
    }
    for (uint64_t k = 0; k < a->classes; k++)
        sum += exp((double)scores[k] - (double)scores[best]);
    for (uint64_t k = 0; k < a->classes; k++) {
        double share = exp((double)scores[k] - (double)scores[best]) / sum;
        double wanted = k == label ? 1.0 : 0.0;

        a->d_scores[i * a->classes + k] =
            (float)((share - wanted) / (double)a->rows);
    }
    a->right[i] = best == label;
    a->losses[i] = log(sum) - ((double)scores[label] - (double)scores[best]);
}

/* momentum = mu * momentum + gradient; value -= rate * momentum. */
typedef struct cer_native_descend_args {
    float *values, *momenta;
    const float *gradients;
    uint64_t items;
    float rate, mu;
} cer_native_descend_args;

CER_SHARED void
cer_native_descend_one(const cer_native_descend_args *a, uint64_t i)
{
    a->momenta[i] = a->mu * a->momenta[i] + a->gradients[i];
    a->values[i] -= a->rate * a->momenta[i];
}

#endif
