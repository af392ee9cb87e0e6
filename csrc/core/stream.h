/* stream.h -- stores that bypass the caches.
 *
 * A large destination is not read before it is written, and the caches keep
 * their contents. Faster than memcpy only if a single write exceeds a core's
 * share of the caches. */
#ifndef CER_STREAM_H
#define CER_STREAM_H

#include <string.h>

#include "base.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define CER_STREAM_TOTAL ((size_t)8 << 20) /* written at once */
#define CER_STREAM_RUN ((size_t)1 << 12)   /* least run worth streaming */

#if defined(__SSE2__)
static inline void
cer_stream(uint8_t *to, const uint8_t *from, size_t n)
{
    size_t head = (size_t)(-(uintptr_t)to & 63);

    head = head < n ? head : n;
    memcpy(to, from, head);
    to += head;
    from += head;
    n -= head;
    for (; n >= 64; n -= 64, to += 64, from += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + 48));

        _mm_stream_si128((__m128i *)(void *)to, a);
        _mm_stream_si128((__m128i *)(void *)(to + 16), b);
        _mm_stream_si128((__m128i *)(void *)(to + 32), c);
        _mm_stream_si128((__m128i *)(void *)(to + 48), d);
    }
    memcpy(to, from, n);
}

/* Streamed stores are not ordered with other stores: call this before
 * publishing the written data. */
static inline void
cer_stream_done(void)
{
    _mm_sfence();
}
#else
static inline void
cer_stream(uint8_t *to, const uint8_t *from, size_t n)
{
    memcpy(to, from, n);
}

static inline void
cer_stream_done(void)
{
}
#endif

#endif
