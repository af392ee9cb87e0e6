/* shard.h -- a shard of a dataset, opened for reading.
 *
 * A shard is a folder of .npy files: <column>.npy, or for a ragged column
 * <column>.values.npy and <column>.offsets.npy. All are mapped, shared and
 * read-only, so all processes and trials use the same memory. Opening checks
 * that each file exists with the size, element type and shape given in the
 * manifest, and that offsets are in order; the hashes of the bytes are checked
 * on request. docs/design/data-format.md describes the format. */
#ifndef CER_SHARD_H
#define CER_SHARD_H

#include "base.h"
#include "dtype.h"

#define CER_COLUMN_MAX_DIMS 8 /* of a row */

/* A column's description in the manifest. */
typedef struct cer_column_spec {
    const char *name;
    cer_dtype dtype;
    bool ragged;
    uint32_t n_dims; /* of a row; of one value where ragged */
    size_t shape[CER_COLUMN_MAX_DIMS];
    const char *file; /* the .npy of the rows, or of the values */
    uint64_t file_bytes;
    const char *offsets_file; /* ragged only */
    uint64_t offsets_bytes;
} cer_column_spec;

/* A column of an open shard. Row r of a plain column is the `row_bytes` bytes
 * at data + r * row_bytes. Row r of a ragged one has the values offsets[r] to
 * offsets[r + 1] - 1, each of `row_bytes` bytes. */
typedef struct cer_column {
    const char *name;
    cer_dtype dtype; /* logical: bfloat16 is bfloat16 */
    bool ragged;
    uint32_t ndim;                     /* of a row; of one value where ragged */
    size_t shape[CER_COLUMN_MAX_DIMS]; /* without the rows */
    size_t row_bytes;                  /* of a row; of one value where ragged */
    const uint8_t *data;    /* aligned to at least 16 bytes; never NULL */
    const int64_t *offsets; /* rows + 1 of them; NULL unless ragged */
} cer_column;

typedef struct cer_shard cer_shard;

/* Opens the shard in `directory`; the strings are copied. *out has one
 * reference, owned by the caller; NULL on failure. Errors: CER_IO (a file
 * cannot be opened), CER_CORRUPT (a file does not match its spec), CER_INVALID
 * (the spec is impossible), CER_NOMEM. */
cer_status cer_shard_open(const char *directory, size_t rows,
                          const cer_column_spec *specs, size_t n_specs,
                          cer_shard **out, cer_error *err);

/* References may be taken and released on any thread; the last release unmaps.
 * Release accepts NULL. */
cer_shard *cer_shard_retain(cer_shard *shard);
void cer_shard_release(cer_shard *shard);

size_t cer_shard_rows(const cer_shard *shard);
const char *cer_shard_directory(const cer_shard *shard);

/* The columns, in the order of the specs; valid as long as the shard. */
const cer_column *cer_shard_columns(const cer_shard *shard, size_t *n);
const cer_column *cer_shard_find(const cer_shard *shard, const char *name);

/* Number of values in a ragged column, or of rows in a plain one. */
size_t cer_shard_values(const cer_shard *shard, const cer_column *column);

/* The files, by number, and a file's current XXH3-64, read from the file and
 * not the mapping, so that damage is an error and not a signal. CER_CORRUPT:
 * its size has changed. */
size_t cer_shard_n_files(const cer_shard *shard);
const char *cer_shard_file_name(const cer_shard *shard, size_t file);
cer_status cer_shard_hash_file(const cer_shard *shard, size_t file,
                               uint64_t *hash, cer_error *err);

#endif
