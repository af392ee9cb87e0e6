/* pointwise.h -- a chain of operations on single values: Cast, Scale and
 * Normalize.
 *
 * A chain is built step by step, finished, and then run on many rows.
 * Arithmetic uses the current type of the values and rounds after each
 * operation, so the bits are PyTorch's: integers and bool become float32 first;
 * float16 and bfloat16 are computed in float32 and rounded back. For one-byte
 * values, which have only 256 cases, the whole chain becomes a table with the
 * same bits, per channel if channels differ.
 *
 * Channels are adjacent: value i belongs to channel i % channels. */
#ifndef CER_POINTWISE_H
#define CER_POINTWISE_H

#include "dtype.h"

typedef struct cer_pointwise cer_pointwise;

/* Makes an empty chain for values of type `from`. *out is the caller's. */
cer_status cer_pointwise_new(cer_dtype from, size_t channels,
                             cer_pointwise **out, cer_error *err);
void cer_pointwise_free(cer_pointwise *chain); /* NULL allowed */

/* Add a step. Errors: CER_INVALID (complex values, a number of means that is
 * neither 1 nor the channels), CER_NOMEM. */
cer_status cer_pointwise_cast(cer_pointwise *chain, cer_dtype to,
                              cer_error *err);
/* x * factor; or x / (1 / factor), if 1 / factor is an integer whose reciprocal
 * is factor: Scale(1/255) has the bits of x / 255. */
cer_status cer_pointwise_scale(cer_pointwise *chain, double factor,
                               cer_error *err);
/* (x - mean) / std; n is 1 or the channels. */
cer_status cer_pointwise_normalize(cer_pointwise *chain, const double *mean,
                                   const double *std, size_t n, cer_error *err);

/* Completes the chain. */
cer_status cer_pointwise_finish(cer_pointwise *chain, cer_error *err);

cer_dtype cer_pointwise_dtype(const cer_pointwise *chain); /* after the chain */
size_t cer_pointwise_steps(const cer_pointwise *chain);    /* so far */

/* After finish: runs the chain over n values, starting at channel 0. dst and
 * src must not overlap. */
void cer_pointwise_run(const cer_pointwise *chain, void *dst, const void *src,
                       size_t n);

/* Whether the chain only converts uint8 to float32: cer_convert_pixels then
 * converts its rows. */
bool cer_pointwise_makes_floats(const cer_pointwise *chain);

/* After finish: runs the chain on `value`, inserted after the first `step`
 * steps, and writes one result per channel. The type at that point must be able
 * to represent `value`. */
void cer_pointwise_constant(const cer_pointwise *chain, size_t step,
                            double value, void *dst);

/* The type of the values after the first `step` steps. */
cer_dtype cer_pointwise_dtype_at(const cer_pointwise *chain, size_t step);

/* After finish: the table (tables * 256 results; channel c uses table c %
 * tables), or NULL if the chain has no table. */
const void *cer_pointwise_table(const cer_pointwise *chain, size_t *tables);

/* dst[i * dst_step] = table[src[i * src_step]], n times, for results of
 * `bytes` bytes (a power of two up to 8). */
void cer_pointwise_lookup(size_t bytes, void *dst, ptrdiff_t dst_step,
                          const uint8_t *src, ptrdiff_t src_step, size_t n,
                          const void *table);

#endif
