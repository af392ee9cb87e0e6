/* npy.h -- reads strictly, and writes, the header of NumPy's .npy files.
 *
 *     bytes 0-5   \x93NUMPY
 *     byte 6, 7   version: 1.0, 2.0 or 3.0
 *     then        length of the text: 2 bytes little-endian (1.0) or 4
 *     then        {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
 *                 padded with spaces and ended by a newline
 *     then        the elements, row after row
 *
 * Only Cerebro's own data files are accepted: an element type of dtype.h,
 * little-endian, C order, and no bytes after the last element. The text is
 * parsed, never evaluated, and nothing is unpickled. */
#ifndef CER_NPY_H
#define CER_NPY_H

#include "base.h"
#include "dtype.h"

#define CER_NPY_MAX_DIMS 9 /* rows and the 8 of cer_column */

/* Large enough for every header written. */
#define CER_NPY_MAX_HEADER_BYTES 384

typedef struct cer_npy {
    cer_dtype dtype; /* as stored: never bfloat16, which NumPy lacks */
    uint32_t n_dims;
    size_t shape[CER_NPY_MAX_DIMS];
    size_t data_offset; /* bytes from the file's beginning; a multiple of 16 */
    size_t data_bytes;
} cer_npy;

/* The type of a column's elements in a file: uint16 for bfloat16, otherwise the
 * type itself. */
cer_dtype cer_npy_stored(cer_dtype dtype);

/* Reads the header of a file whose `file_bytes` bytes are at `file`. `path` is
 * for errors. CER_CORRUPT: damaged, truncated, too long, or unsupported. */
cer_status cer_npy_parse(const void *file, size_t file_bytes, const char *path,
                         cer_npy *out, cer_error *err);

/* Fills out->data_offset and out->data_bytes from dtype, n_dims and shape and
 * writes the header of that file into `header`: the same bytes as numpy.save,
 * with elements at a multiple of 64. CER_INVALID: too many dimensions, or too
 * many bytes for a file. bfloat16 is written as cer_npy_stored. */
cer_status cer_npy_format(cer_npy *out, char header[CER_NPY_MAX_HEADER_BYTES],
                          cer_error *err);

#endif
