/* loader.h -- batches of shuffled rows, gathered and transformed in advance.
 *
 * A loader is made once for a view of a dataset and used for many passes:
 * begin() names the mixes of the pass, next() returns the batches in turn. A
 * mix is some parts (shards of the view) whose rows are shuffled together, by
 * one permutation (order.h), and cut into batches of even sizes (cut.h). Within
 * a batch, rows are in the order of their parts, and within a part in the order
 * of the permutation: so each part's rows are gathered by one call. Neither
 * threads nor earlier passes change a batch. Rows of parts with weights are
 * drawn by them instead, as many as the mix has, with replacement.
 *
 * Without threads, or if none can be started, next() gathers by itself. Threads
 * gather ahead, in order, into a bounded window of batches, and prepare the
 * next mix's order when idle. They touch only the core's memory and locks,
 * never Python.
 *
 * A loader with threads does not survive a fork: in the child next() fails, and
 * freeing it there leaves alone the memory that the parent's threads were
 * using. Batches returned before the fork stay valid and may be released
 * there. */
#ifndef CER_LOADER_H
#define CER_LOADER_H

#include "batch.h"
#include "order.h"
#include "shard.h"
#include "transform.h"

#define CER_MAX_THREADS 64

typedef struct cer_part {
    cer_shard *shard;
    const uint32_t *rows; /* the view's rows of the shard; kept by the caller;
                             NULL: `count` rows from `start` */
    size_t start, count;
    uint64_t first_row; /* number of the shard's row 0 in the dataset */
    /* `count` running sums of the rows' weights, as for cer_rng_draw, and the
     * sum before the first; kept by the caller; NULL: each row once. */
    const uint64_t *sums;
    uint64_t sum_before;
} cer_part;

/* Parts whose rows are shuffled together, in ascending order. */
typedef struct cer_mix {
    const uint32_t *parts;
    size_t n;
} cer_mix;

typedef struct cer_load_column {
    const char *name;   /* in the batches */
    const char *source; /* in the shards; NULL: the same */
    const cer_op *ops;
    size_t n_ops;
    /* Rows (h, w, c) become a tensor (n, c, h, w) over the same memory. */
    bool channels_last;
} cer_load_column;

typedef struct cer_load_options {
    size_t batch_size;
    uint64_t seed;
    bool shuffle;
    bool drop_last; /* full batches only; the rest of a mix is left out */
    /* If any part has sums, all have, in one array, from which a mix of all
     * parts, or of one, is drawn as a whole; otherwise each part is drawn
     * within itself. */
    bool draw_across;
    uint32_t threads;
    cer_orders *orders; /* shared with other loaders; NULL: its own */
    const cer_batch_source *memory; /* copied; NULL: host memory */
} cer_load_options;

typedef struct cer_loader cer_loader;

/* Takes a reference to every shard; all shards have the same columns, of which
 * only those in `columns` are read. *out is the caller's. Errors: CER_INVALID,
 * CER_NOMEM. */
cer_status cer_loader_new(const cer_part *parts, size_t n_parts,
                          const cer_load_column *columns, size_t n_columns,
                          const cer_load_options *options, cer_loader **out,
                          cer_error *err);

/* The tensors of a batch, in order: one per plain column; for a ragged column c
 * c, c_mask and c_length. The name's suffix is "", "_mask" or "_length". */
size_t cer_loader_tensors(const cer_loader *loader);
const char *cer_loader_tensor_column(const cer_loader *loader, size_t tensor);
const char *cer_loader_tensor_suffix(const cer_loader *loader, size_t tensor);

/* How much of the late or raw columns a part's batches contain. Batches of a
 * mix with several kinds of parts are not late. */
typedef enum cer_part_way {
    CER_PART_WHOLE, /* everything */
    /* for raw columns, unchanged rows and shapes; row numbers if one of these
     * columns draws random numbers */
    CER_PART_RAW,
    CER_PART_LATE /* for late columns, the shapes; and row numbers */
} cer_part_way;

/* Sets the columns that the caller makes: one bool per column, copied. Call
 * before the first pass. The transform must not shrink raw ragged columns: then
 * the checks of the padded rows hold for them. Errors: CER_NOMEM. */
cer_status cer_loader_set_late(cer_loader *loader, const bool *late,
                               const bool *raw, cer_error *err);
/* Do not call during a pass that contains the part. */
void cer_loader_set_way(cer_loader *loader, uint32_t part, cer_part_way way);

/* Allocates memory for `n` batches in advance, on this thread, for the largest
 * batch of a part loaded this way, so threads need not; ragged rows count as
 * empty. Call between passes. Errors: CER_NOMEM and the source's. */
cer_status cer_loader_reserve(cer_loader *loader, size_t n, cer_part_way way,
                              cer_error *err);
size_t cer_loader_window(const cer_loader *loader); /* batches ahead */

/* The columns and parts passed to cer_loader_new. */
size_t cer_loader_columns(const cer_loader *loader);
typedef struct cer_loaded_column {
    size_t index; /* in the shard */
    bool ragged;
    size_t tensor; /* index of its first tensor */
    const cer_transform *transform;
} cer_loaded_column;
cer_loaded_column cer_loader_column(const cer_loader *loader, size_t column);
size_t cer_loader_parts(const cer_loader *loader);
const cer_part *cer_loader_part(const cer_loader *loader, uint32_t part);

/* The number of batches of a mix whose parts are valid. */
size_t cer_loader_count(const cer_loader *loader, const cer_mix *mix);

/* The initial values of the batches' tensors, and the most rows in a batch. */
const cer_tensor *cer_loader_kinds(const cer_loader *loader, size_t *max_rows);

/* Starts a pass over these mixes in this order: without the first `start`
 * batches, and with at most `count`. Drops the rest of the previous pass.
 * Errors: CER_INVALID (unknown part; parts not ascending; too many rows; no
 * weights; closed; forked), CER_NOMEM. */
cer_status cer_loader_begin(cer_loader *loader, const cer_mix *mixes, size_t n,
                            uint64_t epoch, size_t start, size_t count,
                            cer_error *err);

/* Gets the next batch with one reference, owned by the caller; NULL at the end
 * of the pass. An error ends the pass. Calls must not overlap. */
cer_status cer_loader_next(cer_loader *loader, cer_batch **out, cer_error *err);

/* Whether next() neither waits for a thread nor gathers by itself. */
bool cer_loader_is_ready(cer_loader *loader);

/* A look at the batches that next() has not given yet, in their order. It ends
 * with the next call of begin(), and stays where it is while next() is called.
 * For the caller of next(). */
typedef struct cer_loader_ahead {
    size_t left;  /* batches */
    size_t mix;   /* of the pass; the next batch is in it */
    size_t batch; /* of the mix */
} cer_loader_ahead;

cer_loader_ahead cer_loader_look_ahead(const cer_loader *loader);
/* The rows of the next batch and how it is loaded; false: there is none. */
bool cer_loader_look(const cer_loader *loader, cer_loader_ahead *ahead,
                     size_t *n_rows, cer_part_way *way);

/* Counts of the pass, without the batches that `start` skipped. These two and
 * cer_loader_buffers take no lock: they may be called while another thread is
 * in any function but cer_loader_free, and in a forked child. */
size_t cer_loader_batches(const cer_loader *loader);
size_t cer_loader_rows(const cer_loader *loader);

/* Batch buffers in existence. */
size_t cer_loader_buffers(const cer_loader *loader);

/* Stops and joins the threads and releases the shards; batches already returned
 * stay valid. Closing twice is allowed. */
void cer_loader_close(cer_loader *loader);
void cer_loader_free(cer_loader *loader); /* closes; NULL allowed */

#endif
