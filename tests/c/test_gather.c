#include "gather.h"

#include <stdlib.h>

#include "check.h"

/* All lengths around the special cases, with guards on both sides. */
static void
rows_of_every_length(void)
{
    enum { ROWS = 9, LONGEST = 600, GUARD = 16 };
    static const uint32_t rows[] = {8, 0, 3, 3, 7};
    uint8_t *src = malloc(ROWS * LONGEST);
    uint8_t *dst = malloc(5 * LONGEST + 2 * GUARD);

    for (size_t bytes = 0; bytes <= LONGEST; bytes++) {
        for (size_t i = 0; i < ROWS * bytes; i++)
            src[i] = (uint8_t)(i * 31 + (i >> 8));
        memset(dst, 0xab, 5 * LONGEST + 2 * GUARD);
        cer_gather_rows(dst + GUARD, src, bytes, rows, 5);
        for (size_t i = 0; i < 5; i++)
            CHECK(memcmp(dst + GUARD + i * bytes, src + rows[i] * bytes,
                         bytes) == 0);
        for (size_t i = 0; i < GUARD; i++)
            CHECK(dst[i] == 0xab && dst[GUARD + 5 * bytes + i] == 0xab);
    }
    cer_gather_rows(dst, src, 4, rows, 0);
    cer_gather_ask_rows(src, 4, rows, 0);
    cer_gather_ask_rows(src, 0, rows, 5);
    free(src);
    free(dst);
}

/* Long rows at odd addresses; n or more rows exceed the caches and are
 * streamed. */
static void
check_long_rows(size_t n)
{
    enum { ROWS = 3, BYTES = 40001, N = 256, GUARD = 1 };
    uint32_t rows[N];
    uint8_t *src = malloc(ROWS * BYTES + GUARD);
    uint8_t *dst = malloc((size_t)N * BYTES + 2 * GUARD);

    for (size_t i = 0; i < ROWS * BYTES + GUARD; i++)
        src[i] = (uint8_t)(i * 31 + (i >> 8));
    for (uint32_t i = 0; i < N; i++)
        rows[i] = i * i % ROWS;
    memset(dst, 0xab, (size_t)N * BYTES + 2 * GUARD);
    cer_gather_rows(dst + GUARD, src + GUARD, BYTES, rows, n);
    for (size_t i = 0; i < n; i++)
        CHECK(memcmp(dst + GUARD + i * BYTES,
                     src + GUARD + (size_t)rows[i] * BYTES, BYTES) == 0);
    memset(dst, 0xab, (size_t)N * BYTES + 2 * GUARD);
    cer_gather_ask_rows(src + GUARD, BYTES, rows, n);
    for (size_t i = 0; i < n; i += n / 2 + 1) { /* in two pieces */
        size_t m = i == 0 && n > 1 ? n / 2 + 1 : n - i;

        cer_gather_some(dst + GUARD + i * BYTES, src + GUARD, BYTES, rows + i,
                        m, n);
    }
    for (size_t i = 0; i < n; i++)
        CHECK(memcmp(dst + GUARD + i * BYTES,
                     src + GUARD + (size_t)rows[i] * BYTES, BYTES) == 0);
    CHECK(dst[0] == 0xab && dst[n * BYTES + GUARD] == 0xab);
    free(src);
    free(dst);
}

static void
long_rows(void)
{
    check_long_rows(1);
    check_long_rows(5);
    check_long_rows(256);
}

CHECK_MAIN(rows_of_every_length, long_rows)
