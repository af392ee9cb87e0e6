/* npy_writer.h -- streams rows into one new .npy file and hashes on the way.
 *
 * The number of rows is known up front, so the header is final from the first
 * byte, and a file that was cut short is told by its size. A file counts only
 * once cer_npy_writer_close gave CER_OK; in every other case the writer removes
 * the file it made, and nothing else. One thread at a time. */
#ifndef CER_NPY_WRITER_H
#define CER_NPY_WRITER_H

#include "base.h"
#include "dtype.h"

typedef struct cer_npy_writer cer_npy_writer;

/* Creates `path`, which must not be there yet (CER_IO, EEXIST). `dtype` is the
 * logical type: bfloat16 is stored as uint16. *out is the caller's to free;
 * NULL on failure. CER_INVALID: the shape is impossible. */
cer_status cer_npy_writer_open(const char *path, cer_dtype dtype,
                               uint32_t n_dims, const size_t *row_shape,
                               size_t rows, cer_npy_writer **out,
                               cer_error *err);

/* Appends `n_rows` rows, C order and little-endian. CER_INVALID: more rows than
 * were announced (nothing is written). After CER_IO only free is of use. */
cer_status cer_npy_writer_write(cer_npy_writer *writer, const void *data,
                                size_t n_rows, cer_error *err);

/* Makes the file durable; its folder is the caller's to sync. Gives its size
 * and the XXH3-64 of all its bytes. CER_INVALID: rows are missing (the file
 * stays open, more may be written). */
cer_status cer_npy_writer_close(cer_npy_writer *writer, uint64_t *file_bytes,
                                uint64_t *hash, cer_error *err);

/* NULL allowed. Removes the file unless it was closed. */
void cer_npy_writer_free(cer_npy_writer *writer);

#endif
