/* batch.h -- batch buffers, reused when their tensors have been freed.
 *
 * A batch is one block of memory on CER_ALIGNMENT that holds all its tensors,
 * each on CER_ALIGNMENT. Batches come from a ring. Each user holds a reference
 * to the batch's owner. The last release, on any thread, puts the batch on the
 * ring's list of returned batches with one compare-and-swap. It takes no lock,
 * so neither Python nor a fork can block it. Taking a batch never waits: if
 * none has been returned, the ring allocates a new one, so keeping all batches
 * in a list never hangs.
 *
 * The memory is the host's or comes from a source, as pinned or device memory.
 * The source decides when a device batch may be overwritten; the ring only
 * provides the time, by using the batches in turn.
 *
 * The ring lives until it is closed and its last batch has been returned. */
#ifndef CER_BATCH_H
#define CER_BATCH_H

#include "gather_place.h"
#include "tensor.h"

typedef struct cer_batch_ring cer_batch_ring;

/* The memory of batches. */
typedef struct cer_batch_block {
    void *data; /* on CER_ALIGNMENT */
    size_t bytes;
    cer_place *place; /* of the tensors in it; NULL: main memory */
    void *handle;     /* private to the source */
} cer_batch_block;

typedef struct cer_batch_source {
    void *context; /* lives until `leave` */
    cer_status (*get)(void *context, size_t bytes, cer_batch_block *out,
                      cer_error *err);
    /* Called by the last release, on any thread; must not wait. */
    void (*give)(void *context, cer_batch_block *block);
    /* Whether memory may be overwritten now, after its users. If not, a
     * different batch is taken. NULL: always. */
    bool (*is_usable)(void *context, const cer_batch_block *block);
    void (*leave)(void *context); /* the ring is gone */
    /* Batches to make before one is reused; then the first one returned is
     * reused. 0: reuse the one returned last. */
    size_t turns;
} cer_batch_source;

/* Rows as in the shard, from which a tensor is made later. For a ragged column,
 * the concatenated values belong to the values' tensor and the n_rows + 1
 * offsets to the lengths' tensor. */
typedef struct cer_batch_raw {
    uint8_t *data;
    size_t bytes; /* 0: none; set by the placer of the batch */
} cer_batch_raw;

typedef struct cer_batch {
    cer_owner owner;
    cer_batch_ring *ring;
    struct cer_batch *next; /* in one of the ring's lists */
    cer_batch_block block;
    /* n_rows cer_row_place of the loader's parts come first in its memory. */
    bool with_rows;
    /* One per tensor: it comes after the others and, if `only_head` is set, has
     * no memory here. NULL: no tensor is late. */
    const bool *late;
    bool only_head;
    /* One per tensor; if `with_raw` is set they precede the late ones. */
    bool with_raw;
    cer_batch_raw *raw;
    size_t head_bytes; /* up to the first late tensor; set by place */
    size_t n_tensors;
    cer_tensor *tensors;
    cer_export *exports; /* one per tensor, for cer_export_embed */
    uint32_t *rows;      /* n_rows numbers of rows, the loader's */
    size_t n_rows;
    /* The loader's: the mix it comes from, and how filling ended. */
    size_t mix;
    bool ready;
    cer_error error;
} cer_batch;

/* Makes a ring of batches of up to `max_rows` rows with one tensor per element
 * of `tensors`, whose dtype, ndim and shape are the initial values. */
cer_status cer_batch_ring_new(const cer_tensor *tensors, size_t n_tensors,
                              size_t max_rows, cer_batch_ring **out,
                              cer_error *err);
/* The same with memory from a source, which is copied; NULL: host memory.
 * `leave` is not called on failure. */
cer_status cer_batch_ring_from(const cer_batch_source *source,
                               const cer_tensor *tensors, size_t n_tensors,
                               size_t max_rows, cer_batch_ring **out,
                               cer_error *err);

/* Returns a batch with one reference, owned by the caller; NULL if out of
 * memory. Calls must not overlap. */
cer_batch *cer_batch_ring_take(cer_batch_ring *ring);

/* Sets each tensor's data to its place in the batch's memory, from the shapes,
 * n_rows and the late tensors, and enlarges the memory if needed. A source
 * always provides some, even for 0 bytes. */
cer_status cer_batch_place(cer_batch *batch, cer_error *err);

/* Bytes that cer_batch_place needs, and sets, for these shapes. */
size_t cer_batch_bytes(const cer_batch *batch);

/* Frees all but `keep` unused batches. Must not overlap take. */
void cer_batch_ring_trim(cer_batch_ring *ring, size_t keep);

/* Batches in existence, in use or not. From any thread. */
size_t cer_batch_ring_size(const cer_batch_ring *ring);

/* Frees unused batches now and the others when they are returned. No batch can
 * be taken afterwards; the size stays available until close. NULL allowed. */
void cer_batch_ring_end(cer_batch_ring *ring);
/* The same, and releases the ring. NULL allowed. */
void cer_batch_ring_close(cer_batch_ring *ring);

#endif
