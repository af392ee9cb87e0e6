/* gather.h -- copies scattered rows of a column into one block. */
#ifndef CER_GATHER_H
#define CER_GATHER_H

#include "base.h"

/* Copies row rows[i], the row_bytes bytes at src + rows[i] * row_bytes, to dst
 * + i * row_bytes, for i below n. dst and src must not overlap. */
void cer_gather_rows(void *dst, const void *src, size_t row_bytes,
                     const uint32_t *rows, size_t n);

/* The same for some of the `all` rows of a block, which decide whether the
 * stores bypass the caches. */
void cer_gather_some(void *dst, const void *src, size_t row_bytes,
                     const uint32_t *rows, size_t n, size_t all);

/* Prefetches the first of the rows that are gathered, or read, next. */
void cer_gather_ask_rows(const void *src, size_t row_bytes,
                         const uint32_t *rows, size_t n);

/* Prefetches memory into the second-level cache: the first level accepts few
 * requests at a time. */
static inline void
cer_gather_ask(const uint8_t *row, size_t bytes)
{
    enum { CACHE_LINE = 64 };

    for (size_t k = 0; k < bytes; k += CACHE_LINE)
        __builtin_prefetch(row + k, 0, 2);
    if (bytes != 0)
        __builtin_prefetch(row + bytes - 1, 0, 2);
}

#endif
