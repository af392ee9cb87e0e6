/* npy_writer.h -- streams rows into a new .npy file and hashes it.
 *
 * The number of rows is known up front, so the header is written once, and the
 * size shows whether a file is truncated. A file is complete only after
 * cer_npy_writer_close returns CER_OK; otherwise the writer removes the file it
 * created, and nothing else. One thread at a time. */
#ifndef CER_NPY_WRITER_H
#define CER_NPY_WRITER_H

#include "base.h"
#include "dtype.h"

typedef struct cer_npy_writer cer_npy_writer;

/* Creates `path`, which must not exist (CER_IO, EEXIST). `dtype` is the logical
 * type: bfloat16 is stored as uint16. *out is the caller's to free; NULL on
 * failure. CER_INVALID: the shape is impossible. */
cer_status cer_npy_writer_open(const char *path, cer_dtype dtype,
                               uint32_t n_dims, const size_t *row_shape,
                               size_t rows, cer_npy_writer **out,
                               cer_error *err);

/* Appends `n_rows` rows, C order and little-endian. CER_INVALID: more rows than
 * announced (nothing is written). After CER_IO, call only free. */
cer_status cer_npy_writer_write(cer_npy_writer *writer, const void *data,
                                size_t n_rows, cer_error *err);

/* Makes the file durable; the caller syncs its folder. Returns its size and the
 * XXH3-64 of all its bytes. CER_INVALID: rows are missing (the file stays open
 * for more). */
cer_status cer_npy_writer_close(cer_npy_writer *writer, uint64_t *file_bytes,
                                uint64_t *hash, cer_error *err);

/* NULL allowed. Removes the file unless it was closed; a forked child leaves it
 * to its parent. */
void cer_npy_writer_free(cer_npy_writer *writer);

#endif
