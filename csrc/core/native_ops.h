/* native_ops.h -- the arithmetic of a small convolutional network, in float32.
 *
 * Plain loops whose sums have one order: that of the terms where many sums run
 * side by side, and CER_NATIVE_LANES partial sums, added up in order, where one
 * sum runs alone. Compilers make vectors of both without changing a bit, so
 * results depend on neither the compiler nor the processor. Multiplications are
 * not fused with additions (-ffp-contract=off). exp and log are the C
 * library's, in double.
 *
 * Pictures are channels x height x width, everything is dense and row-major. */
#ifndef CER_NATIVE_OPS_H
#define CER_NATIVE_OPS_H

#include "base.h"

#define CER_NATIVE_LANES 16
#define CER_NATIVE_TAPS 9 /* of a 3x3 filter */

/* --- sums of products -----------------------------------------------------*/

/* c[m][n] += a b with b[k][n]; a's element (i, l) is a[i * row + l * column],
 * so that a transposed matrix needs no copy. */
void cer_native_add_product(size_t m, size_t k, size_t n, const float *a,
                            size_t row, size_t column, const float *b,
                            float *c);

/* c[m][n] += a b^T with a[m][k] and b[n][k]. */
void cer_native_add_inner(size_t m, size_t n, size_t k, const float *a,
                          const float *b, float *c);

/* --- one picture through a convolution, 3x3, padded with zeros by 1 ------- */

typedef struct cer_native_conv {
    size_t channels, height, width, filters;
} cer_native_conv;

/* Which values of the picture each output sees:
 * columns[channels * TAPS][height * width]. */
void cer_native_unfold(const cer_native_conv *conv, const float *picture,
                       float *columns);

/* The reverse, added up: picture += what columns hold of each value. */
void cer_native_fold(const cer_native_conv *conv, const float *columns,
                     float *picture);

/* out[filters][height * width] of unfolded columns; weight[filters][channels *
 * TAPS], bias[filters]. */
void cer_native_conv_forward(const cer_native_conv *conv, const float *columns,
                             const float *weight, const float *bias,
                             float *out);

/* Adds the gradients of weight and bias, from that of the output. */
void cer_native_conv_filters(const cer_native_conv *conv, const float *columns,
                             const float *d_out, float *d_weight,
                             float *d_bias);

/* Writes the gradient of the picture; `columns` is room, and overwritten. */
void cer_native_conv_data(const cer_native_conv *conv, const float *d_out,
                          const float *weight, float *columns,
                          float *d_picture);

/* --- ReLU and the maximum of every 2x2 ------------------------------------
 * Of in[planes][height][width]; an odd last row or column is left out, as
 * PyTorch does. NaN goes through. which[] says where in its square the first
 * largest value stood, from 0 to 3. */
void cer_native_pool_forward(size_t planes, size_t height, size_t width,
                             const float *in, float *out, uint8_t *which);

/* Writes d_in; `out` is what came forward: where it is 0, ReLU stops. */
void cer_native_pool_backward(size_t planes, size_t height, size_t width,
                              const float *out, const uint8_t *which,
                              const float *d_out, float *d_in);

/* --- the end of the network, and the step ---------------------------------*/

/* The cross-entropy of one row of scores. d_scores (NULL: not wanted) becomes
 * its gradient, divided by `rows`; *right whether the first highest score is
 * the label's. */
double cer_native_cross_entropy(size_t classes, const float *scores,
                                size_t label, size_t rows, float *d_scores,
                                bool *right);

/* momentum = mu * momentum + gradient; values -= rate * momentum. */
void cer_native_descend(size_t n, float rate, float mu, const float *gradients,
                        float *momenta, float *values);

#endif
