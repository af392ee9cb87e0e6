/* copy.c -- see copy.h. The copies form one long line of bytes. Threads take
 * grains of it from a shared counter until it is used up, so a delayed thread
 * does not delay the others. */
#include "copy.h"

#include <stdatomic.h>
#include <string.h>

#include "stream.h"
#include "thread.h"

#define GRAIN_BYTES ((size_t)1 << 21) /* taken by a thread at a time */
#define MAX_THREADS 8

bool
cer_copy_is_dense(size_t item, uint32_t ndim, const int64_t *shape,
                  const int64_t *strides)
{
    int64_t expected = (int64_t)item;

    for (uint32_t i = ndim; i-- > 0;) {
        if (shape[i] == 0)
            return true; /* no elements: any strides are valid */
        if (shape[i] != 1 && strides[i] != expected)
            return false;
        expected *= shape[i];
    }
    return true;
}

/* --- dense runs ---------------------------------------------------------- */
static void
copy_run(uint8_t *to, const uint8_t *from, size_t n, bool large)
{
    if (n == 0)
        return; /* the addresses may be NULL */
    if (large && n >= CER_STREAM_RUN)
        cer_stream(to, from, n);
    else
        memcpy(to, from, n);
}

/* --- strided tensors ----------------------------------------------------- */
#define MAX_DIMS 64

/* The same elements with as few dimensions as possible, outermost first. */
typedef struct folded {
    uint32_t ndim;
    int64_t shape[MAX_DIMS], strides[MAX_DIMS];
} folded;

static void
fold(const cer_copy *copy, folded *out)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < copy->ndim; i++) {
        if (copy->shape[i] == 1)
            continue;
        if (n > 0 && out->strides[n - 1] == copy->strides[i] * copy->shape[i]) {
            out->shape[n - 1] *= copy->shape[i];
            out->strides[n - 1] = copy->strides[i];
        } else {
            out->shape[n] = copy->shape[i];
            out->strides[n] = copy->strides[i];
            n++;
        }
    }
    out->ndim = n;
}

/* One row of `count` elements; the constant sizes become single moves. */
static void
copy_row(uint8_t *dense, uint8_t *strided, int64_t count, int64_t stride,
         size_t item, cer_copy_direction direction)
{
#define COPY_ROW(size)                                                         \
    for (int64_t i = 0; i < count; i++, dense += (size), strided += stride) {  \
        if (direction == CER_COPY_TO_DENSE)                                    \
            memcpy(dense, strided, (size));                                    \
        else                                                                   \
            memcpy(strided, dense, (size));                                    \
    }
    if (item == 1)
        COPY_ROW(1)
    else if (item == 2)
        COPY_ROW(2)
    else if (item == 4)
        COPY_ROW(4)
    else
        COPY_ROW(8)
#undef COPY_ROW
}

/* Iterates over the outer dimensions like an odometer, row by row. */
static void
copy_strided(const cer_copy *copy, cer_copy_direction direction)
{
    folded f;
    int64_t index[MAX_DIMS] = {0};
    uint8_t *dense = copy->dense, *strided = copy->strided;
    size_t row_bytes;
    uint32_t inner;

    fold(copy, &f);
    if (f.ndim == 0) { /* one element */
        copy_row(dense, strided, 1, 0, copy->item, direction);
        return;
    }
    inner = f.ndim - 1;
    row_bytes = (size_t)f.shape[inner] * copy->item;
    for (size_t done = 0; done < copy->nbytes; done += row_bytes) {
        uint32_t i = inner;

        copy_row(dense + done, strided, f.shape[inner], f.strides[inner],
                 copy->item, direction);
        while (i-- > 0) {
            strided += f.strides[i];
            if (++index[i] < f.shape[i])
                break;
            strided -= f.strides[i] * f.shape[i];
            index[i] = 0;
        }
    }
}

/* --- division among threads ---------------------------------------------- */
typedef struct work {
    const cer_copy *copies;
    size_t n, total_bytes;
    cer_copy_direction direction;
    bool large;
    atomic_size_t next; /* first byte of the line not yet taken */
} work;

/* Does the part [from, to) of a copy's bytes. The thread that has the first
 * byte does all of a strided copy. */
static void
copy_part(const work *w, const cer_copy *copy, size_t from, size_t to)
{
    if (!cer_copy_is_dense(copy->item, copy->ndim, copy->shape,
                           copy->strides)) {
        if (from == 0)
            copy_strided(copy, w->direction);
    } else if (w->direction == CER_COPY_TO_DENSE) {
        copy_run(copy->dense + from, copy->strided + from, to - from, w->large);
    } else {
        copy_run(copy->strided + from, copy->dense + from, to - from, w->large);
    }
}

static void *
work_on(void *argument)
{
    work *w = argument;
    size_t i = 0, begin = 0; /* the current copy and where it begins */
    size_t from;

    while ((from = atomic_fetch_add(&w->next, GRAIN_BYTES)) < w->total_bytes) {
        size_t to = w->total_bytes - from < GRAIN_BYTES ? w->total_bytes
                                                        : from + GRAIN_BYTES;

        while (from < to) {
            size_t end = begin + w->copies[i].nbytes;

            if (from < end) {
                size_t stop = end < to ? end : to;

                copy_part(w, &w->copies[i], from - begin, stop - begin);
                from = stop;
            }
            if (from >= end) {
                begin = end;
                i++;
            }
        }
    }
    if (w->large)
        cer_stream_done();
    return NULL;
}

void
cer_copy_all(const cer_copy *copies, size_t n, cer_copy_direction direction,
             unsigned threads)
{
    work w = {.copies = copies, .n = n, .direction = direction};
    pthread_t helpers[MAX_THREADS];
    unsigned started = 0;

    for (size_t i = 0; i < n; i++)
        w.total_bytes += copies[i].nbytes;
    w.large = w.total_bytes >= CER_STREAM_TOTAL;
    if (threads == 0)
        threads = w.large ? 2 : 1;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    for (unsigned i = 1; i < threads; i++) {
        if (cer_thread_start(&helpers[started], work_on, &w) == 0)
            started++;
    }
    work_on(&w);
    for (unsigned i = 0; i < started; i++)
        (void)pthread_join(helpers[i], NULL);
}
