/* loader_files.h -- shards on disk for the loader tests. Row r of the dataset,
 * counted over all shards, has id int64 r v float32 r, r + 0.5, -r img uint8 4
 * x 5 x 3, pixel p is r * 7 + p t int32 ragged: r % 5 values, r * 10, r * 10 +
 * 1, ... */
#ifndef LOADER_FILES_H
#define LOADER_FILES_H

#include "loader.h"
#include "shard_files.h"

enum { IMG_BYTES = 4 * 5 * 3 };

static inline const char *
shard_file(int shard, const char *column)
{
    static char names[8][64];
    static int turn;

    turn = (turn + 1) % 8;
    (void)snprintf(names[turn], sizeof names[turn], "%d.%s.npy", shard, column);
    return names[turn];
}

/* Opens shard `number`, whose first row is `first`. */
static inline cer_shard *
make_shard(int number, size_t first, size_t rows)
{
    int64_t *ids = calloc(rows + 1, sizeof *ids);
    float *v = calloc(rows * 3 + 1, sizeof *v);
    uint8_t *img = calloc(rows + 1, IMG_BYTES);
    int32_t *t = calloc(rows * 5 + 1, sizeof *t);
    int64_t *ends = calloc(rows + 1, sizeof *ends);
    size_t n = 0;
    cer_shard *shard;
    cer_error err = {0};

    for (size_t i = 0; i < rows; i++) {
        size_t r = first + i;

        ids[i] = (int64_t)r;
        v[3 * i] = (float)r;
        v[3 * i + 1] = (float)r + 0.5f;
        v[3 * i + 2] = -(float)r;
        for (size_t p = 0; p < IMG_BYTES; p++)
            img[i * IMG_BYTES + p] = (uint8_t)(r * 7 + p);
        for (size_t k = 0; k < r % 5; k++)
            t[n++] = (int32_t)(r * 10 + k);
        ends[i + 1] = (int64_t)n;
    }
    cer_npy of_id = {.dtype = CER_I64, .n_dims = 1, .shape = {rows}};
    cer_npy of_v = {.dtype = CER_F32, .n_dims = 2, .shape = {rows, 3}};
    cer_npy of_img = {.dtype = CER_U8, .n_dims = 4, .shape = {rows, 4, 5, 3}};
    cer_npy of_t = {.dtype = CER_I32, .n_dims = 1, .shape = {n}};
    cer_npy of_ends = {.dtype = CER_I64, .n_dims = 1, .shape = {rows + 1}};
    cer_column_spec specs[4] = {
        {.name = "id", .dtype = CER_I64, .file = shard_file(number, "id")},
        {.name = "v",
         .dtype = CER_F32,
         .n_dims = 1,
         .shape = {3},
         .file = shard_file(number, "v")},
        {.name = "img",
         .dtype = CER_U8,
         .n_dims = 3,
         .shape = {4, 5, 3},
         .file = shard_file(number, "img")},
        {.name = "t",
         .dtype = CER_I32,
         .ragged = true,
         .file = shard_file(number, "t.values"),
         .offsets_file = shard_file(number, "t.offsets")}};

    specs[0].file_bytes = write_npy(specs[0].file, of_id, ids);
    specs[1].file_bytes = write_npy(specs[1].file, of_v, v);
    specs[2].file_bytes = write_npy(specs[2].file, of_img, img);
    specs[3].file_bytes = write_npy(specs[3].file, of_t, t);
    specs[3].offsets_bytes = write_npy(specs[3].offsets_file, of_ends, ends);
    if (cer_shard_open(scratch_folder, rows, specs, 4, &shard, &err) !=
        CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    free(ids);
    free(v);
    free(img);
    free(t);
    free(ends);
    return shard;
}

enum { LOADER_SHARDS = 3, LOADER_ROWS = 23 + 40 + 1 };

/* Three shards of 23, 40 and 1 rows, as parts with all rows. */
static inline void
make_parts(cer_part parts[LOADER_SHARDS])
{
    static const size_t rows[LOADER_SHARDS] = {23, 40, 1};
    size_t first = 0;

    for (int i = 0; i < LOADER_SHARDS; i++) {
        parts[i] = (cer_part){.shard = make_shard(i, first, rows[i]),
                              .count = rows[i],
                              .first_row = first};
        first += rows[i];
    }
}

static inline void
release_parts(const cer_part parts[LOADER_SHARDS])
{
    for (int i = 0; i < LOADER_SHARDS; i++)
        cer_shard_release(parts[i].shard);
}

/* One mix for each of these parts. */
static inline const cer_mix *
mixes_of(const uint32_t *visits, size_t n, cer_mix mixes[8])
{
    for (size_t i = 0; i < n; i++)
        mixes[i] = (cer_mix){&visits[i], 1};
    return mixes;
}

/* Begins a pass over parts one after the other. */
static inline cer_status
begin_parts(cer_loader *loader, const uint32_t *visits, size_t n,
            uint64_t epoch, cer_error *err)
{
    cer_mix mixes[8];

    return cer_loader_begin(loader, mixes_of(visits, n, mixes), n, epoch, 0,
                            SIZE_MAX, err);
}

#endif
