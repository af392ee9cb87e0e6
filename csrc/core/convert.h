/* convert.h -- element types into one another, as the frameworks do it.
 *
 * Between integers values wrap; a float becomes an integer by cutting off the
 * fraction, and what does not fit becomes the nearest value that does, NaN 0;
 * anything but 0 becomes true; a float becomes a narrower one by rounding to
 * nearest, ties to even. Into float16 and bfloat16 everything goes by way of
 * float32, as in PyTorch. complex64 converts only to itself. */
#ifndef CER_CONVERT_H
#define CER_CONVERT_H

#include "dtype.h"

/* dst and src do not overlap; both on their elements' size. */
void cer_convert(cer_dtype to, void *dst, cer_dtype from, const void *src,
                 size_t n);

/* uint8 to float32, the way of pictures into a network; `next` is what will be
 * converted after this, and is on its way into the cache meanwhile. */
void cer_convert_pixels(float *restrict dst, const uint8_t *restrict src,
                        const uint8_t *next, size_t n);

#endif
