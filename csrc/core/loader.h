/* loader.h -- batches of shuffled rows, gathered and transformed ahead of need.
 *
 * A loader is made once for a view of a data set and then used for many
 * passes: begin() says which parts (shards of the view) come next, next() gives
 * one batch after the other. Batches never cross parts. The order of a part's
 * rows is a Fisher-Yates table keyed by (seed, epoch, part), so it depends
 * neither on threads nor on what was loaded before.
 *
 * Without threads next() gathers by itself, and so it does where no thread is
 * to be had. With threads they gather ahead, in order, into a bounded window of
 * batches, and prepare the row order of the next part while they have nothing
 * else to do. They only ever touch memory of the core: no lock of anyone else,
 * no Python.
 *
 * A loader with threads does not survive a fork: in the child next() says so,
 * and freeing it there leaves alone what the parent's threads were using.
 * Batches that were handed out before stay valid and may be released there. */
#ifndef CER_LOADER_H
#define CER_LOADER_H

#include "batch.h"
#include "shard.h"
#include "transform.h"

#define CER_MAX_THREADS 64

typedef struct cer_part {
    cer_shard *shard;
    const uint32_t *rows; /* the view's rows of the shard; the caller keeps
                             them; NULL: count rows from start on */
    size_t start, count;
    uint64_t first_row; /* number of the shard's row 0 in the data set */
} cer_part;

typedef struct cer_load_column {
    const char *name;
    const cer_op *ops;
    size_t n_ops;
} cer_load_column;

typedef struct cer_load_options {
    size_t batch_size;
    uint64_t seed;
    bool shuffle;
    bool drop_last; /* an incomplete last batch of a part is left out */
    uint32_t threads;
    const cer_batch_source *memory; /* copied; NULL: the host's */
} cer_load_options;

typedef struct cer_loader cer_loader;

/* Takes a reference to every shard; all shards have the same columns. *out is
 * the caller's. Errors: CER_INVALID, CER_NOMEM. */
cer_status cer_loader_new(const cer_part *parts, size_t n_parts,
                          const cer_load_column *columns, size_t n_columns,
                          const cer_load_options *options, cer_loader **out,
                          cer_error *err);

/* The tensors of a batch, in order: one per plain column; for a ragged column c
 * c, c_mask and c_length. The name's suffix is "", "_mask" or "_length". */
size_t cer_loader_tensors(const cer_loader *loader);
const char *cer_loader_tensor_column(const cer_loader *loader, size_t tensor);
const char *cer_loader_tensor_suffix(const cer_loader *loader, size_t tensor);

/* What the batches of a part have of the columns that somebody else makes. */
typedef enum cer_part_way {
    CER_PART_WHOLE, /* all: nobody else makes anything */
    /* of columns that are raw the rows as they are, and shapes; row numbers
     * where one of these columns draws random numbers */
    CER_PART_RAW,
    CER_PART_LATE /* of columns that are late the shapes, and row numbers */
} cer_part_way;

/* Which columns somebody else makes: one bool a column, copied, before the
 * first pass. Ragged ones that are raw come out no smaller than they were: then
 * what is checked of the padded rows holds for them. Errors: CER_NOMEM. */
cer_status cer_loader_set_late(cer_loader *loader, const bool *late,
                               const bool *raw, cer_error *err);
/* Not during a pass that has the part. */
void cer_loader_set_way(cer_loader *loader, uint32_t part, cer_part_way way);

/* Makes memory for `n` batches in advance, on this thread and for the largest
 * batch of a part that goes this way, so that threads need not; ragged rows
 * count as empty. Between passes. Errors: CER_NOMEM and the source's. */
cer_status cer_loader_reserve(cer_loader *loader, size_t n, cer_part_way way,
                              cer_error *err);
size_t cer_loader_window(const cer_loader *loader); /* batches ahead */

/* What it was made of. */
size_t cer_loader_columns(const cer_loader *loader);
typedef struct cer_loaded_column {
    size_t index; /* in the shard */
    bool ragged;
    size_t tensor; /* number of its first tensor */
    const cer_transform *transform;
} cer_loaded_column;
cer_loaded_column cer_loader_column(const cer_loader *loader, size_t column);
size_t cer_loader_parts(const cer_loader *loader);
const cer_part *cer_loader_part(const cer_loader *loader, uint32_t part);

/* The batches' tensors as they are before the first, and the most rows that a
 * batch has. */
const cer_tensor *cer_loader_kinds(const cer_loader *loader, size_t *max_rows);

/* Starts a pass over these parts in this order, without the first `start`
 * batches. What was left of the pass before is dropped. Errors: CER_INVALID (no
 * such part; closed; forked), CER_NOMEM. */
cer_status cer_loader_begin(cer_loader *loader, const uint32_t *parts, size_t n,
                            uint64_t epoch, size_t start, cer_error *err);

/* The next batch with one reference, the caller's; NULL at the end of the
 * pass. After an error the pass is over. One call at a time. */
cer_status cer_loader_next(cer_loader *loader, cer_batch **out, cer_error *err);

/* Whether next() need not wait for a thread, nor gather by itself. */
bool cer_loader_is_ready(cer_loader *loader);

/* Of the pass, with what `start` left out not counted. These two and
 * cer_loader_buffers take no lock: they may be called while another thread is
 * in any function but cer_loader_free, and in a process that was forked
 * meanwhile.
 */
size_t cer_loader_batches(const cer_loader *loader);
size_t cer_loader_rows(const cer_loader *loader);

/* Batches of a part of `rows` rows: a last batch of one row joins the one
 * before it. */
size_t cer_loader_count(size_t rows, size_t batch_size, bool drop_last);

/* Batch buffers in existence. */
size_t cer_loader_buffers(const cer_loader *loader);

/* Stops and joins the threads and releases the shards; batches handed out stay
 * valid. Closing twice is fine. */
void cer_loader_close(cer_loader *loader);
void cer_loader_free(cer_loader *loader); /* closes; NULL allowed */

#endif
