/* pointwise.h -- a chain of operations that treats every value by itself:
 * Cast, Scale and Normalize.
 *
 * A chain is built step by step, ended, and then run on many rows. Arithmetic
 * is done in the type that the values have at that point, one operation at a
 * time and rounded after each, so the bits are PyTorch's: integers and bool
 * become float32 first, float16 and bfloat16 are computed in float32 and
 * rounded back. Values of one byte have only 256 cases: there the whole chain
 * becomes a table, per channel where channels differ, with the same bits.
 *
 * Channels lie next to each other: value i belongs to channel i % channels. */
#ifndef CER_POINTWISE_H
#define CER_POINTWISE_H

#include "dtype.h"

typedef struct cer_pointwise cer_pointwise;

/* A chain without steps for values of type `from`. *out is the caller's. */
cer_status cer_pointwise_new(cer_dtype from, size_t channels,
                             cer_pointwise **out, cer_error *err);
void cer_pointwise_free(cer_pointwise *chain); /* NULL allowed */

/* Add a step. Errors: CER_INVALID (complex values, a number of means that is
 * neither 1 nor the channels), CER_NOMEM. */
cer_status cer_pointwise_cast(cer_pointwise *chain, cer_dtype to,
                              cer_error *err);
/* x * factor; or, where 1 / factor is a whole number that gives factor again,
 * x / (1 / factor): Scale(1/255) has the bits of x / 255. */
cer_status cer_pointwise_scale(cer_pointwise *chain, double factor,
                               cer_error *err);
/* (x - mean) / std; n is 1 or the channels. */
cer_status cer_pointwise_normalize(cer_pointwise *chain, const double *mean,
                                   const double *std, size_t n, cer_error *err);

/* Ends the building. */
cer_status cer_pointwise_finish(cer_pointwise *chain, cer_error *err);

cer_dtype cer_pointwise_dtype(const cer_pointwise *chain); /* after the chain */
size_t cer_pointwise_steps(const cer_pointwise *chain);    /* so far */

/* After finish: runs the chain over n values, the first of channel 0. dst and
 * src do not overlap. */
void cer_pointwise_run(const cer_pointwise *chain, void *dst, const void *src,
                       size_t n);

/* Whether the chain does nothing but to make float32 of uint8: rows of that
 * kind are converted by cer_convert_pixels. */
bool cer_pointwise_makes_floats(const cer_pointwise *chain);

/* After finish: what `value`, appearing after the first `step` steps, becomes:
 * one result per channel. `value` must be one that the type there has. */
void cer_pointwise_constant(const cer_pointwise *chain, size_t step,
                            double value, void *dst);

/* The type of the values after the first `step` steps. */
cer_dtype cer_pointwise_dtype_at(const cer_pointwise *chain, size_t step);

/* After finish: the table (tables * 256 results; of channel c the table
 * c % tables), or NULL where there is none. */
const void *cer_pointwise_table(const cer_pointwise *chain, size_t *tables);

/* dst[i * dst_step] = table[src[i * src_step]], n times, for results of
 * `bytes` bytes (a power of two up to 8). */
void cer_pointwise_lookup(size_t bytes, void *dst, ptrdiff_t dst_step,
                          const uint8_t *src, ptrdiff_t src_step, size_t n,
                          const void *table);

#endif
