#include "gather.h"

#include <stdlib.h>

#include "check.h"

/* Every length around the special cases, with guards on both sides. */
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
    free(src);
    free(dst);
}

CHECK_MAIN(rows_of_every_length)
