/* native_ops.h -- the arithmetic of a small convolutional network, in float32.
 *
 * Plain loops that sum in a fixed order. Sums that run side by side add in term
 * order; a single sum uses CER_NATIVE_LANES partial sums, added in order.
 * Compilers vectorize both without changing a bit, so results depend on neither
 * the compiler nor the processor. Multiplications and additions are not fused
 * (-ffp-contract=off). exp and log are the C library's, in double.
 *
 * Images are channels x height x width; all arrays are dense and row-major. */
#ifndef CER_NATIVE_OPS_H
#define CER_NATIVE_OPS_H

#include "base.h"

#define CER_NATIVE_LANES 16
#define CER_NATIVE_TAPS 9 /* of a 3x3 filter */

/* --- sums of products -----------------------------------------------------*/

/* c[m][n] += a b with b[k][n]; element (i, l) of a is a[i * row + l * column],
 * so a transposed matrix needs no copy. */
void cer_native_add_product(size_t m, size_t k, size_t n, const float *a,
                            size_t row, size_t column, const float *b,
                            float *c);

/* c[m][n] += a b^T with a[m][k] and b[n][k]. */
void cer_native_add_inner(size_t m, size_t n, size_t k, const float *a,
                          const float *b, float *c);

/* --- the 3x3 convolution of one image, padded with zeros by 1 ------------- */

typedef struct cer_native_conv {
    size_t channels, height, width, filters;
} cer_native_conv;

/* Gathers the image values that each output depends on into
 * columns[channels * TAPS][height * width]. */
void cer_native_unfold(const cer_native_conv *conv, const float *picture,
                       float *columns);

/* The reverse, a sum: adds to each value of `picture` its copies in
 * `columns`. */
void cer_native_fold(const cer_native_conv *conv, const float *columns,
                     float *picture);

/* Computes out[filters][height * width] from unfolded columns;
 * weight[filters][channels * TAPS], bias[filters]. */
void cer_native_conv_forward(const cer_native_conv *conv, const float *columns,
                             const float *weight, const float *bias,
                             float *out);

/* Adds the gradients of weight and bias, given that of the output. */
void cer_native_conv_filters(const cer_native_conv *conv, const float *columns,
                             const float *d_out, float *d_weight,
                             float *d_bias);

/* Writes the gradient of the image; `columns` is scratch memory. */
void cer_native_conv_data(const cer_native_conv *conv, const float *d_out,
                          const float *weight, float *columns,
                          float *d_picture);

/* --- ReLU and the maximum of every 2x2 ------------------------------------
 * Of in[planes][height][width]; an odd last row or column is omitted, as in
 * PyTorch. NaN propagates. which[] is the position, 0 to 3, of the first
 * largest value in its square. */
void cer_native_pool_forward(size_t planes, size_t height, size_t width,
                             const float *in, float *out, uint8_t *which);

/* Writes d_in; `out` is the forward result: where it is 0, ReLU blocks the
 * gradient. */
void cer_native_pool_backward(size_t planes, size_t height, size_t width,
                              const float *out, const uint8_t *which,
                              const float *d_out, float *d_in);

/* --- the loss and the step ------------------------------------------------*/

/* Returns the cross-entropy of one row of scores. Writes its gradient, divided
 * by `rows`, to d_scores (may be NULL); *right is whether the first highest
 * score is the label's. */
double cer_native_cross_entropy(size_t classes, const float *scores,
                                size_t label, size_t rows, float *d_scores,
                                bool *right);

/* momentum = mu * momentum + gradient; values -= rate * momentum. */
void cer_native_descend(size_t n, float rate, float mu, const float *gradients,
                        float *momenta, float *values);

#endif
