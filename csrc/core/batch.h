/* batch.h -- batch buffers that are used again when their tensors are gone.
 *
 * A batch is one block of memory on CER_ALIGNMENT that holds all its tensors,
 * each on CER_ALIGNMENT. Batches come from a ring. Whoever uses one counts in
 * its owner; when the last one lets go, on any thread, the batch goes onto the
 * ring's list of returned ones with one compare-and-swap: no lock, so neither
 * Python nor a fork can get in its way. Nobody ever waits for a batch: when
 * none has come back, the ring makes another, so that keeping batches (a list
 * of them all) never hangs.
 *
 * The memory is the host's, or comes from a source: pinned memory, or that of a
 * device. A source has to say when a batch of a device may be written again;
 * the ring only gives it the time, by using the batches in turn.
 *
 * The ring lives until it is closed and its last batch is back. */
#ifndef CER_BATCH_H
#define CER_BATCH_H

#include "tensor.h"

typedef struct cer_batch_ring cer_batch_ring;

/* Where batches have their memory from. */
typedef struct cer_batch_block {
    void *data; /* on CER_ALIGNMENT */
    size_t bytes;
    cer_place *place; /* of the tensors in it; NULL: main memory */
    void *handle;     /* the source's own */
} cer_batch_block;

typedef struct cer_batch_source {
    void *context; /* lives until `leave` */
    cer_status (*get)(void *context, size_t bytes, cer_batch_block *out,
                      cer_error *err);
    /* Called by whoever lets go last, on any thread: may not wait. */
    void (*give)(void *context, cer_batch_block *block);
    /* Whether memory may be written again now, behind its users. Where it may
     * not, another batch is taken. NULL: always. */
    bool (*is_usable)(void *context, const cer_batch_block *block);
    void (*leave)(void *context); /* the ring is gone */
    /* Batches that are made before the first is used again; then the one that
     * came back first is. 0: the one that came back last. */
    size_t turns;
} cer_batch_source;

/* Rows as they are in the shard, for whoever makes a tensor of them. Those of a
 * ragged column have their values, one after the other, with the tensor of the
 * values, and their n_rows + 1 offsets with that of the lengths. */
typedef struct cer_batch_raw {
    uint8_t *data;
    size_t bytes; /* 0: none; whoever places the batch sets it */
} cer_batch_raw;

typedef struct cer_batch {
    cer_owner owner;
    cer_batch_ring *ring;
    struct cer_batch *next; /* in a list of the ring's */
    cer_batch_block block;
    /* The numbers of the batch's rows come first in its memory. */
    bool with_rows;
    /* One a tensor: it comes after the others, and where `only_head` is set it
     * has no memory here. NULL: none does. */
    const bool *late;
    bool only_head;
    /* One a tensor; where `with_raw` is set they come before the late ones. */
    bool with_raw;
    cer_batch_raw *raw;
    size_t head_bytes; /* up to the first late tensor; set by place */
    size_t n_tensors;
    cer_tensor *tensors;
    cer_export *exports; /* one a tensor, for cer_export_embed */
    uint32_t *rows;      /* n_rows numbers of rows in the shard */
    size_t n_rows;
    /* The loader's own: which part it comes from, and how filling it ended. */
    uint32_t part;
    bool ready;
    cer_error error;
} cer_batch;

/* Batches of up to `max_rows` rows with one tensor per element of `tensors`;
 * dtype, ndim and shape of each are the batches' start values. */
cer_status cer_batch_ring_new(const cer_tensor *tensors, size_t n_tensors,
                              size_t max_rows, cer_batch_ring **out,
                              cer_error *err);
/* The same with memory from a source, which is copied; NULL: the host's. On
 * failure the source is not left. */
cer_status cer_batch_ring_from(const cer_batch_source *source,
                               const cer_tensor *tensors, size_t n_tensors,
                               size_t max_rows, cer_batch_ring **out,
                               cer_error *err);

/* A batch with one reference, the caller's. Calls must not overlap. NULL: out
 * of memory. */
cer_batch *cer_batch_ring_take(cer_batch_ring *ring);

/* Sets each tensor's data to its place in the batch's memory, from the shapes,
 * n_rows and what comes late as they are, and makes the memory larger where it
 * has to be. From a source there is always some, also for no bytes. */
cer_status cer_batch_place(cer_batch *batch, cer_error *err);

/* Bytes that place needs, and sets, for these shapes. */
size_t cer_batch_bytes(const cer_batch *batch);

/* Frees batches that are not in use, all but `keep`. Must not overlap take. */
void cer_batch_ring_trim(cer_batch_ring *ring, size_t keep);

/* Batches in existence, in use or not. From any thread. */
size_t cer_batch_ring_size(const cer_batch_ring *ring);

/* Frees what is not in use now, and the rest as it comes back. Takes nothing
 * any more; its size can be asked for until it is closed. NULL allowed. */
void cer_batch_ring_end(cer_batch_ring *ring);
/* The same, and lets go of the ring. NULL allowed. */
void cer_batch_ring_close(cer_batch_ring *ring);

#endif
