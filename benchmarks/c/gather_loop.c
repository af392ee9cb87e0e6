/* gather_loop.c -- the plain C loops that bench_loader compares with.
 *
 * Each thread gathers every n-th batch into a private, reused buffer by memcpy
 * per row, and nothing else. A loader cannot be much faster; the batches are
 * not delivered. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_COLUMNS = 4, MAX_THREADS = 64 };

typedef struct job {
    const uint8_t *const *columns; /* one address per shard and column */
    const size_t *row_bytes;
    size_t n_columns, n_batches, batch_size, thread, n_threads;
    const uint32_t *shard; /* of each batch */
    const uint32_t *rows;  /* batch_size of each batch */
} job;

static void *
run(void *argument)
{
    const job *j = argument;
    uint8_t *buffers[MAX_COLUMNS];

    for (size_t c = 0; c < j->n_columns; c++)
        buffers[c] = malloc(j->batch_size * j->row_bytes[c]);
    for (size_t b = j->thread; b < j->n_batches; b += j->n_threads) {
        const uint32_t *rows = j->rows + b * j->batch_size;

        for (size_t c = 0; c < j->n_columns; c++) {
            size_t bytes = j->row_bytes[c];
            const uint8_t *from = j->columns[j->shard[b] * j->n_columns + c];

            for (size_t i = 0; i < j->batch_size; i++)
                memcpy(buffers[c] + i * bytes, from + rows[i] * bytes, bytes);
        }
    }
    for (size_t c = 0; c < j->n_columns; c++)
        free(buffers[c]);
    return NULL;
}

void gather_loop(const uint8_t *const *columns, const size_t *row_bytes,
                 size_t n_columns, const uint32_t *shard, const uint32_t *rows,
                 size_t n_batches, size_t batch_size, size_t n_threads);

void
gather_loop(const uint8_t *const *columns, const size_t *row_bytes,
            size_t n_columns, const uint32_t *shard, const uint32_t *rows,
            size_t n_batches, size_t batch_size, size_t n_threads)
{
    pthread_t threads[MAX_THREADS];
    job jobs[MAX_THREADS];

    if (n_columns > MAX_COLUMNS || n_threads > MAX_THREADS)
        abort();
    for (size_t i = 0; i < n_threads; i++) {
        jobs[i] = (job){columns, row_bytes, n_columns, n_batches, batch_size,
                        i,       n_threads, shard,     rows};
        if (i + 1 < n_threads &&
            pthread_create(&threads[i], NULL, run, &jobs[i]) != 0)
            abort();
    }
    run(&jobs[n_threads - 1]);
    for (size_t i = 0; i + 1 < n_threads; i++)
        pthread_join(threads[i], NULL);
}

/* Pads ragged int32 rows to the longest of each batch, with a mask. */
void pad_loop(const int32_t *values, const int64_t *offsets,
              const uint32_t *rows, size_t n_batches, size_t batch_size,
              size_t longest);

void
pad_loop(const int32_t *values, const int64_t *offsets, const uint32_t *rows,
         size_t n_batches, size_t batch_size, size_t longest)
{
    int32_t *out = malloc(batch_size * longest * sizeof *out);
    uint8_t *mask = malloc(batch_size * longest);

    for (size_t b = 0; b < n_batches; b++, rows += batch_size) {
        size_t width = 0;

        for (size_t i = 0; i < batch_size; i++) {
            size_t n = (size_t)(offsets[rows[i] + 1] - offsets[rows[i]]);

            width = n > width ? n : width;
        }
        for (size_t i = 0; i < batch_size; i++) {
            size_t n = (size_t)(offsets[rows[i] + 1] - offsets[rows[i]]);

            memcpy(out + i * width, values + offsets[rows[i]], n * sizeof *out);
            memset(out + i * width + n, 0, (width - n) * sizeof *out);
            memset(mask + i * width, 1, n);
            memset(mask + i * width + n, 0, width - n);
        }
    }
    free(out);
    free(mask);
}
