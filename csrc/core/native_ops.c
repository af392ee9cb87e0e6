#include "native_ops.h"

#include <math.h>
#include <string.h>

enum { LANES = CER_NATIVE_LANES };

void
cer_native_add_product(size_t m, size_t k, size_t n, const float *a, size_t row,
                       size_t column, const float *b, float *c)
{
    size_t whole = n - n % LANES;

    for (size_t i = 0; i < m; i++) {
        const float *ai = a + i * row;
        float *ci = c + i * n;

        /* A strip of the row stays in registers for all of k. */
        for (size_t j = 0; j < whole; j += LANES) {
            float sums[LANES];

            memcpy(sums, ci + j, sizeof sums);
            for (size_t l = 0; l < k; l++) {
                const float *bl = b + l * n + j;
                float factor = ai[l * column];

                for (size_t lane = 0; lane < LANES; lane++)
                    sums[lane] += factor * bl[lane];
            }
            memcpy(ci + j, sums, sizeof sums);
        }
        for (size_t l = 0; l < k && whole < n; l++) {
            float factor = ai[l * column];

            for (size_t j = whole; j < n; j++)
                ci[j] += factor * b[l * n + j];
        }
    }
}

static float
total(const float *sums)
{
    float sum = 0.0f;

    for (size_t lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

/* Term i goes into sum i mod LANES. */
static float
inner(size_t n, const float *a, const float *b)
{
    float sums[LANES] = {0};
    size_t whole = n - n % LANES;

    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t lane = 0; lane < LANES; lane++)
            sums[lane] += a[i + lane] * b[i + lane];
    }
    for (size_t i = whole; i < n; i++)
        sums[i - whole] += a[i] * b[i];
    return total(sums);
}

static float
sum_of(size_t n, const float *a)
{
    float sums[LANES] = {0};
    size_t whole = n - n % LANES;

    for (size_t i = 0; i < whole; i += LANES) {
        for (size_t lane = 0; lane < LANES; lane++)
            sums[lane] += a[i + lane];
    }
    for (size_t i = whole; i < n; i++)
        sums[i - whole] += a[i];
    return total(sums);
}

void
cer_native_add_inner(size_t m, size_t n, size_t k, const float *a,
                     const float *b, float *c)
{
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++)
            c[i * n + j] += inner(k, a + i * k, b + j * k);
    }
}

/* --- convolution ---------------------------------------------------------- */

/* Returns how many values of row y the tap (down, right), each from 0 to 2,
 * covers: they start at *from and go to *to. Returns 0 if the row is
 * outside. */
static size_t
seen(const cer_native_conv *conv, size_t y, size_t down, size_t right,
     size_t *from, size_t *to)
{
    size_t width = conv->width;

    if (y + down < 1 || y + down > conv->height)
        return 0;
    *from = (y + down - 1) * width + (right == 2);
    *to = y * width + (right == 0);
    return right == 1 ? width : width - 1;
}

void
cer_native_unfold(const cer_native_conv *conv, const float *picture,
                  float *columns)
{
    size_t plane = conv->height * conv->width;
    size_t rows = conv->channels * CER_NATIVE_TAPS;

    memset(columns, 0, rows * plane * sizeof *columns);
    for (size_t row = 0; row < rows; row++) {
        size_t tap = row % CER_NATIVE_TAPS, from, to;
        const float *channel = picture + row / CER_NATIVE_TAPS * plane;

        for (size_t y = 0; y < conv->height; y++) {
            size_t count = seen(conv, y, tap / 3, tap % 3, &from, &to);

            if (count != 0)
                memcpy(columns + row * plane + to, channel + from,
                       count * sizeof *columns);
        }
    }
}

void
cer_native_fold(const cer_native_conv *conv, const float *columns,
                float *picture)
{
    size_t plane = conv->height * conv->width;
    size_t rows = conv->channels * CER_NATIVE_TAPS;

    for (size_t row = 0; row < rows; row++) {
        size_t tap = row % CER_NATIVE_TAPS, from = 0, to = 0;
        float *channel = picture + row / CER_NATIVE_TAPS * plane;

        for (size_t y = 0; y < conv->height; y++) {
            size_t count = seen(conv, y, tap / 3, tap % 3, &from, &to);

            for (size_t x = 0; x < count; x++)
                channel[from + x] += columns[row * plane + to + x];
        }
    }
}

void
cer_native_conv_forward(const cer_native_conv *conv, const float *columns,
                        const float *weight, const float *bias, float *out)
{
    size_t plane = conv->height * conv->width;
    size_t depth = conv->channels * CER_NATIVE_TAPS;

    for (size_t filter = 0; filter < conv->filters; filter++) {
        for (size_t at = 0; at < plane; at++)
            out[filter * plane + at] = bias[filter];
    }
    cer_native_add_product(conv->filters, depth, plane, weight, depth, 1,
                           columns, out);
}

void
cer_native_conv_filters(const cer_native_conv *conv, const float *columns,
                        const float *d_out, float *d_weight, float *d_bias)
{
    size_t plane = conv->height * conv->width;

    cer_native_add_inner(conv->filters, conv->channels * CER_NATIVE_TAPS, plane,
                         d_out, columns, d_weight);
    for (size_t filter = 0; filter < conv->filters; filter++)
        d_bias[filter] += sum_of(plane, d_out + filter * plane);
}

void
cer_native_conv_data(const cer_native_conv *conv, const float *d_out,
                     const float *weight, float *columns, float *d_picture)
{
    size_t plane = conv->height * conv->width;
    size_t depth = conv->channels * CER_NATIVE_TAPS;

    memset(columns, 0, depth * plane * sizeof *columns);
    cer_native_add_product(depth, conv->filters, plane, weight, 1, depth, d_out,
                           columns);
    memset(d_picture, 0, conv->channels * plane * sizeof *d_picture);
    cer_native_fold(conv, columns, d_picture);
}

/* --- ReLU and pooling ----------------------------------------------------- */

void
cer_native_pool_forward(size_t planes, size_t height, size_t width,
                        const float *in, float *out, uint8_t *which)
{
    size_t rows = height / 2, columns = width / 2, to = 0;

    for (size_t plane = 0; plane < planes; plane++) {
        for (size_t y = 0; y < rows; y++) {
            const float *top = in + (plane * height + 2 * y) * width;

            for (size_t x = 0; x < columns; x++, to++) {
                const float *at = top + 2 * x;
                float square[4] = {at[0], at[1], at[width], at[width + 1]};
                uint8_t best = 0;

                for (uint8_t i = 1; i < 4; i++) {
                    if (square[i] > square[best] || isnan(square[i]))
                        best = i;
                }
                which[to] = best;
                out[to] = square[best] < 0.0f ? 0.0f : square[best];
            }
        }
    }
}

void
cer_native_pool_backward(size_t planes, size_t height, size_t width,
                         const float *out, const uint8_t *which,
                         const float *d_out, float *d_in)
{
    size_t rows = height / 2, columns = width / 2, from = 0;

    memset(d_in, 0, planes * height * width * sizeof *d_in);
    for (size_t plane = 0; plane < planes; plane++) {
        for (size_t y = 0; y < rows; y++) {
            float *top = d_in + (plane * height + 2 * y) * width;

            for (size_t x = 0; x < columns; x++, from++) {
                size_t at = 2 * x + which[from] % 2 + which[from] / 2 * width;

                if (!(out[from] <= 0.0f)) /* NaN propagates */
                    top[at] = d_out[from];
            }
        }
    }
}

/* --- the loss and the step ------------------------------------------------ */

double
cer_native_cross_entropy(size_t classes, const float *scores, size_t label,
                         size_t rows, float *d_scores, bool *right)
{
    size_t best = 0;
    double sum = 0.0;

    for (size_t i = 1; i < classes; i++) {
        if (scores[i] > scores[best])
            best = i;
    }
    for (size_t i = 0; i < classes; i++)
        sum += exp((double)scores[i] - (double)scores[best]);
    for (size_t i = 0; i < classes && d_scores != NULL; i++) {
        double share = exp((double)scores[i] - (double)scores[best]) / sum;

        d_scores[i] = (float)((share - (i == label)) / (double)rows);
    }
    *right = best == label;
    return log(sum) - ((double)scores[label] - (double)scores[best]);
}

void
cer_native_descend(size_t n, float rate, float mu, const float *gradients,
                   float *momenta, float *values)
{
    for (size_t i = 0; i < n; i++) {
        momenta[i] = mu * momenta[i] + gradients[i];
        values[i] -= rate * momenta[i];
    }
}
