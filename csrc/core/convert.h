/* convert.h -- conversion between element types, as the frameworks do it.
 *
 * Integers wrap. A float is truncated to an integer and clamped to its range;
 * NaN becomes 0. Nonzero values become true. A float is narrowed by rounding to
 * nearest, ties to even. Conversion to float16 and bfloat16 goes through
 * float32, as in PyTorch. complex64 converts only to itself. */
#ifndef CER_CONVERT_H
#define CER_CONVERT_H

#include "dtype.h"

/* dst and src must not overlap; each is aligned to its element size. */
void cer_convert(cer_dtype to, void *dst, cer_dtype from, const void *src,
                 size_t n);

/* Converts uint8 to float32, as for images. Prefetches `next`, the values to be
 * converted after these. */
void cer_convert_pixels(float *restrict dst, const uint8_t *restrict src,
                        const uint8_t *next, size_t n);

#endif
