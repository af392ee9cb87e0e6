#include "copy.h"

#include <stdlib.h>

#include "check.h"

/* Fills memory with bytes that encode their position. */
static void
number(uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(i * 7 + (i >> 8) * 13);
}

static void
dense_strides_are_recognised(void)
{
    static const int64_t shape[3] = {2, 3, 4};

    CHECK(cer_copy_is_dense(4, 3, shape, (int64_t[]){48, 16, 4}));
    CHECK(!cer_copy_is_dense(4, 3, shape, (int64_t[]){48, 4, 12}));
    CHECK(!cer_copy_is_dense(4, 3, shape, (int64_t[]){48, 16, -4}));
    CHECK(!cer_copy_is_dense(2, 3, shape, (int64_t[]){48, 16, 4}));
    CHECK(cer_copy_is_dense(4, 2, (int64_t[]){1, 5}, (int64_t[]){999, 4}));
    CHECK(cer_copy_is_dense(4, 2, (int64_t[]){7, 0}, (int64_t[]){1, 999}));
    CHECK(cer_copy_is_dense(8, 0, NULL, NULL));
}

/* The byte offset of element `i` in C order. */
static int64_t
offset_of(size_t i, uint32_t ndim, const int64_t *shape, const int64_t *strides)
{
    int64_t offset = 0;

    for (uint32_t d = ndim; d-- > 0;) {
        offset += (int64_t)(i % (size_t)shape[d]) * strides[d];
        i /= (size_t)shape[d];
    }
    return offset;
}

/* Copies both ways and compares with the definition. */
static void
check_strided(size_t item, uint32_t ndim, const int64_t *shape,
              const int64_t *strides)
{
    enum { ROOM = 1 << 16 };
    uint8_t *memory = malloc(ROOM), *dense = malloc(ROOM),
            *target = calloc(1, ROOM);
    size_t n = 1;
    cer_copy copy = {.dense = dense,
                     .strided = memory + ROOM / 2,
                     .item = item,
                     .ndim = ndim,
                     .shape = shape,
                     .strides = strides};

    number(memory, ROOM);
    for (uint32_t d = 0; d < ndim; d++)
        n *= (size_t)shape[d];
    copy.nbytes = n * item;
    memset(dense, 0xee, ROOM);
    cer_copy_all(&copy, 1, CER_COPY_TO_DENSE, 1);
    for (size_t i = 0; i < n; i++)
        CHECK(memcmp(dense + i * item,
                     copy.strided + offset_of(i, ndim, shape, strides),
                     item) == 0);
    CHECK_EQ_INT(dense[n * item], 0xee);
    copy.strided = target + ROOM / 2;
    cer_copy_all(&copy, 1, CER_COPY_FROM_DENSE, 1);
    for (size_t i = 0; i < n; i++)
        CHECK(memcmp(dense + i * item,
                     copy.strided + offset_of(i, ndim, shape, strides),
                     item) == 0);
    free(memory);
    free(dense);
    free(target);
}

static void
strided_tensors_are_copied(void)
{
    for (size_t item = 1; item <= 8; item *= 2) {
        int64_t s = (int64_t)item;

        check_strided(item, 0, NULL, NULL);
        check_strided(item, 1, (int64_t[]){9}, (int64_t[]){3 * s});
        check_strided(item, 1, (int64_t[]){9}, (int64_t[]){-s});
        check_strided(item, 1, (int64_t[]){0}, (int64_t[]){5 * s});
        check_strided(item, 2, (int64_t[]){5, 7}, (int64_t[]){s, 5 * s});
        check_strided(item, 2, (int64_t[]){5, 7}, (int64_t[]){9 * s, s});
        check_strided(item, 3, (int64_t[]){4, 1, 6},
                      (int64_t[]){-6 * s, 99, s});
        check_strided(item, 4, (int64_t[]){2, 3, 4, 5},
                      (int64_t[]){60 * s, s, 15 * s, 3 * s});
        check_strided(item, 3, (int64_t[]){2, 3, 4},
                      (int64_t[]){12 * s, 4 * s, s});
        check_strided(item, 2, (int64_t[]){1, 1}, (int64_t[]){77, -5});
    }
    check_strided(4, 2, (int64_t[]){3, 4}, (int64_t[]){0, 0}); /* expanded */
}

#define BIG ((size_t)10 << 20)

/* Large totals take a different path: streamed and split between threads. The
 * sizes are odd, and some copies are strided or empty. */
static void
check_large(unsigned threads)
{
    static const size_t sizes[] = {1,    0,    4095,    3 << 20, 64 * 1024 + 3,
                                   4096, 5000, 5242889, 12,      900000};
    enum { N = sizeof sizes / sizeof sizes[0] };
    cer_copy copies[N];
    int64_t shapes[N][1], strides[N][1];
    uint8_t *from = malloc(2 * BIG), *to = calloc(1, 2 * BIG),
            *back = calloc(1, 2 * BIG);
    size_t total = 0, at = 0;

    number(from, 2 * BIG);
    for (size_t i = 0; i < N; i++) {
        int64_t stride = i == 7 ? 2 : 1;

        shapes[i][0] = (int64_t)sizes[i];
        strides[i][0] = stride;
        copies[i] = (cer_copy){.dense = to + total,
                               .strided = from + at,
                               .nbytes = sizes[i],
                               .item = 1,
                               .ndim = 1,
                               .shape = shapes[i],
                               .strides = strides[i]};
        total += sizes[i];
        at += sizes[i] * (size_t)stride;
    }
    CHECK(total > (size_t)8 << 20 && at <= 2 * BIG);
    cer_copy_all(copies, N, CER_COPY_TO_DENSE, threads);
    for (size_t i = 0; i < N; i++) {
        for (size_t j = 0; j < sizes[i]; j++) {
            if (copies[i].dense[j] !=
                copies[i].strided[j * (size_t)strides[i][0]]) {
                CHECK_EQ_INT(j, sizes[i]);
                break;
            }
        }
        copies[i].strided = back + (copies[i].strided - from);
    }
    CHECK_EQ_INT(to[total], 0);
    cer_copy_all(copies, N, CER_COPY_FROM_DENSE, threads);
    for (size_t i = 0; i < N; i++) {
        if (i != 7)
            CHECK(memcmp(copies[i].strided, from + (copies[i].strided - back),
                         sizes[i]) == 0);
    }
    free(from);
    free(to);
    free(back);
}

static void
large_totals_are_shared_out(void)
{
    check_large(0);
    check_large(1);
    check_large(3);
    check_large(100);
}

CHECK_MAIN(dense_strides_are_recognised, strided_tensors_are_copied,
           large_totals_are_shared_out)
