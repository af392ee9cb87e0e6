/* state.h -- a model's state as one flat buffer in the safetensors layout.
 *
 *     8 bytes    length of the header, little-endian
 *     header     JSON: {"__metadata__": {"cerebro": STRUCTURE},
 *                       PATH: {"dtype", "shape", "data_offsets"}, ...}
 *                entries sorted by path; padded with spaces
 *     data       the tensors, C order, little-endian, no holes
 *
 * Data begins on a multiple of 64 bytes (of 4096 if the header is longer than
 * that, so a state's length rarely changes). Holes are not allowed, so the
 * order ensures alignment: tensors are sorted by element size, largest first,
 * then by path. PATH is a JSON pointer (RFC 6901); STRUCTURE is a string that
 * is stored here and not interpreted. Nothing in a buffer depends on time,
 * place or version, so equal states have equal bytes.
 *
 * See also docs/design/states.md. */
#ifndef CER_STATE_H
#define CER_STATE_H

#include "base.h"
#include "dtype.h"

#define CER_STATE_MAX_DIMS 64
#define CER_STATE_MAX_HEADER 100000000 /* the limit of other readers */
#define CER_STATE_ALIGNMENT 64

/* --- writing -------------------------------------------------------------
 * add() every tensor, finish(), then write() any number of times. */
typedef struct cer_state_writer cer_state_writer;

cer_state_writer *cer_state_writer_new(void);         /* NULL: out of memory */
void cer_state_writer_free(cer_state_writer *writer); /* NULL allowed */

/* Adds a tensor; path, shape and strides are copied; only write() reads `data`.
 * Strides are in bytes. Tensors are numbered from 0 in the order of addition.
 * Errors: CER_STATE (too many dimensions, too large), CER_NOMEM. */
cer_status cer_state_writer_add(cer_state_writer *writer, const char *path,
                                size_t path_len, cer_dtype dtype, uint32_t ndim,
                                const int64_t *shape, const int64_t *strides,
                                const void *data, cer_error *err);

/* Checks that tensor `i` is as it was added; strides and data, too. Errors:
 * CER_STATE naming its path. */
cer_status cer_state_writer_check(const cer_state_writer *writer, size_t i,
                                  cer_dtype dtype, uint32_t ndim,
                                  const int64_t *shape, const int64_t *strides,
                                  const void *data, cer_error *err);

/* Lays out the buffer; *nbytes is its length. Errors: CER_STATE (two tensors
 * have the same path, the header is too long), CER_NOMEM. */
cer_status cer_state_writer_finish(cer_state_writer *writer,
                                   const char *structure, size_t structure_len,
                                   size_t *nbytes, cer_error *err);

/* Writes the whole buffer to `to`, which has room for nbytes. */
void cer_state_writer_write(cer_state_writer *writer, uint8_t *to);

/* --- reading ------------------------------------------------------------- */
typedef struct cer_state_tensor {
    const char *path; /* UTF-8, not terminated */
    size_t path_len;
    cer_dtype dtype;
    uint32_t ndim;
    const int64_t *shape;
    const uint8_t *data; /* in the buffer */
    size_t nbytes;
} cer_state_tensor;

typedef struct cer_state {
    const cer_state_tensor *tensors; /* sorted by path, byte by byte */
    size_t n_tensors;
    const char *structure; /* as passed to finish(); not terminated */
    size_t structure_len;
    void *memory; /* private */
} cer_state;

/* Checks the layout of a whole buffer to the last byte and lists its contents.
 * The buffer must outlive *out; nothing is copied. `name` is for errors: the
 * file, or "the state". Errors: CER_CORRUPT, CER_NOMEM. */
cer_status cer_state_open(const uint8_t *bytes, size_t len_bytes,
                          const char *name, cer_state *out, cer_error *err);
void cer_state_close(cer_state *state);

/* The tensor with that path, or NULL. */
const cer_state_tensor *cer_state_find(const cer_state *state, const char *path,
                                       size_t path_len);

/* --- writing back --------------------------------------------------------
 * Copies a state's tensors in place into those added to a finished writer. */

/* Whether both hold the same paths with the same types and shapes, and no added
 * tensor overlaps itself. */
bool cer_state_fits(const cer_state *state, const cer_state_writer *writer);

/* Copies all of them; the two must fit. */
void cer_state_copy_into(const cer_state *state, cer_state_writer *writer);

/* The number of the added tensor with this path, or SIZE_MAX. */
size_t cer_state_writer_find(const cer_state_writer *writer, const char *path,
                             size_t path_len);

#endif
