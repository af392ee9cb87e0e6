/* transform.h -- from the rows of a column to the rows of a batch.
 *
 * A transform is the whole chain of one column, in the user's order. It has one
 * of four kinds: a plain copy; a chain of pointwise steps; an image, which may
 * also be cropped, flipped or put channels first; or ragged rows, padded to one
 * length.
 *
 * Moves (crops and flips) and pointwise steps may come in any order, because
 * moving commutes with pointwise steps. Only the padding of a crop or a ragged
 * row depends on its position in the chain; its value is computed once, when
 * the transform is made.
 *
 * Random moves are drawn from a stream keyed by (seed, epoch, row in the whole
 * dataset), in the order of the chain, and the stream has no other use: the
 * batch, the thread and the shard's position do not matter, and two columns
 * with equal chains (an image and its mask) move alike. */
#ifndef CER_TRANSFORM_H
#define CER_TRANSFORM_H

#include "dtype.h"
#include "shard.h"

typedef enum cer_op_kind {
    CER_OP_CAST,
    CER_OP_SCALE,
    CER_OP_NORMALIZE,
    CER_OP_TO_CHW,
    CER_OP_CROP,
    CER_OP_FLIP,
    CER_OP_PAD,
} cer_op_kind;

#define CER_MAX_OPS 64 /* in a chain */

typedef struct cer_op {
    cer_op_kind kind;
    cer_dtype dtype;          /* CAST */
    double value;             /* SCALE factor, FLIP probability, PAD value */
    const double *mean, *std; /* NORMALIZE: n of each, 1 or the channels */
    size_t n;
    size_t size[2], padding[2]; /* CROP: height and width */
    bool random;                /* CROP: anywhere; otherwise centered */
    size_t max_length;          /* PAD; 0: the longest row's */
    size_t multiple_of;         /* PAD; at least 1 */
} cer_op;

/* The output type, without the batch's rows (and the length, if ragged). */
typedef struct cer_row_type {
    cer_dtype dtype;
    uint32_t ndim;
    size_t shape[CER_COLUMN_MAX_DIMS];
    size_t n_elements;
    size_t bytes;
} cer_row_type;

typedef struct cer_transform cer_transform;

/* Makes the transform of `column`; a ragged one without CER_OP_PAD is padded at
 * the end with 0. *out is the caller's. The messages begin with the column's
 * name. Errors: CER_INVALID (the chain does not fit the column), CER_NOMEM. */
cer_status cer_transform_new(const cer_column *column, const cer_op *ops,
                             size_t n_ops, cer_transform **out, cer_error *err);
void cer_transform_free(cer_transform *transform); /* NULL allowed */

const cer_row_type *cer_transform_output(const cer_transform *transform);

/* Whether rows stay unchanged; whether random numbers are drawn. */
bool cer_transform_copies(const cer_transform *transform);
bool cer_transform_draws(const cer_transform *transform);

/* Bytes of scratch memory that a call needs, on CER_ALIGNMENT; may be 0. */
size_t cer_transform_scratch_bytes(const cer_transform *transform);

/* The key of a row's random moves: row r of the shard is row first_row + r of
 * the dataset. */
typedef struct cer_row_key {
    uint64_t seed, epoch, first_row;
} cer_row_key;

/* Writes rows rows[0..n) of a plain column of the transform's type, with data
 * at `src`, to consecutive rows of dst. */
void cer_transform_rows(const cer_transform *transform, void *dst,
                        const uint8_t *src, const uint32_t *rows, size_t n,
                        const cer_row_key *key, void *scratch);

/* The padded length of a batch of these rows. */
size_t cer_transform_length(const cer_transform *transform,
                            const int64_t *offsets, const uint32_t *rows,
                            size_t n);

/* Writes ragged rows: values (n x length x output), mask (n x length, 1 where
 * there is a value), lengths (n, after the cut). Rows longer than `length`,
 * because the offsets have changed since, are cut there. */
void cer_transform_ragged(const cer_transform *transform, void *dst,
                          uint8_t *mask, int64_t *lengths, size_t length,
                          const uint8_t *src, const int64_t *offsets,
                          const uint32_t *rows, size_t n);

/* For padding later: gathers ragged rows after the cut, otherwise unchanged,
 * without gaps, into dst from place `start` on. cer_transform_ragged_bytes
 * returns the bytes that they take; dst has `bytes` in all. starts gets n + 1
 * places in dst. */
size_t cer_transform_ragged_bytes(const cer_transform *transform,
                                  const int64_t *offsets, const uint32_t *rows,
                                  size_t n);
void cer_transform_gather_ragged(const cer_transform *transform, uint8_t *dst,
                                 size_t start, size_t bytes, int64_t *starts,
                                 const uint8_t *src, const int64_t *offsets,
                                 const uint32_t *rows, size_t n);

#endif
