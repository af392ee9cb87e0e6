/* shard_files.h -- a small shard on disk, for the tests of shards: three rows,
 * x (float32, rows of 2), y (bfloat16, no dimensions) and the ragged column
 * t (int32). */
#ifndef SHARD_FILES_H
#define SHARD_FILES_H

#include "hash.h"
#include "npy.h"
#include "scratch.h"
#include "shard.h"

enum { SHARD_ROWS = 3, SHARD_COLUMNS = 3, SHARD_FILES = 4 };

static const float shard_x[6] = {0, 1, 2, 3, 4, 5};
static const uint16_t shard_y[3] = {0x3f80, 0x4000, 0x4040}; /* 1, 2, 3 */
static const int32_t shard_t[5] = {10, 11, 12, 13, 14};
static const int64_t shard_t_offsets[4] = {0, 2, 2, 5};

/* Writes one .npy file and returns its size. */
static inline uint64_t
write_npy(const char *name, cer_npy npy, const void *data)
{
    char header[CER_NPY_MAX_HEADER_BYTES];
    FILE *file = fopen(scratch(name), "wb");

    if (file == NULL || cer_npy_format(&npy, header, NULL) != CER_OK ||
        fwrite(header, 1, npy.data_offset, file) != npy.data_offset ||
        fwrite(data, 1, npy.data_bytes, file) != npy.data_bytes ||
        fclose(file) != 0)
        abort();
    return npy.data_offset + npy.data_bytes;
}

/* Writes the files and fills the specs. */
static inline void
write_shard(cer_column_spec specs[SHARD_COLUMNS])
{
    memset(specs, 0, SHARD_COLUMNS * sizeof *specs);
    specs[0] = (cer_column_spec){
        .name = "x",
        .dtype = CER_F32,
        .n_dims = 1,
        .shape = {2},
        .file = "x.npy",
        .file_bytes = write_npy(
            "x.npy", (cer_npy){.dtype = CER_F32, .n_dims = 2, .shape = {3, 2}},
            shard_x)};
    specs[1] = (cer_column_spec){
        .name = "y",
        .dtype = CER_BF16,
        .file = "y.npy",
        .file_bytes = write_npy(
            "y.npy", (cer_npy){.dtype = CER_BF16, .n_dims = 1, .shape = {3}},
            shard_y)};
    specs[2] = (cer_column_spec){
        .name = "t",
        .dtype = CER_I32,
        .ragged = true,
        .file = "t.values.npy",
        .file_bytes = write_npy(
            "t.values.npy",
            (cer_npy){.dtype = CER_I32, .n_dims = 1, .shape = {5}}, shard_t),
        .offsets_file = "t.offsets.npy",
        .offsets_bytes =
            write_npy("t.offsets.npy",
                      (cer_npy){.dtype = CER_I64, .n_dims = 1, .shape = {4}},
                      shard_t_offsets)};
}

#endif
