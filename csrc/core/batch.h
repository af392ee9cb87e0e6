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
 * The ring lives until it is closed and its last batch is back. */
#ifndef CER_BATCH_H
#define CER_BATCH_H

#include "tensor.h"

typedef struct cer_batch_ring cer_batch_ring;

typedef struct cer_batch {
    cer_owner owner;
    cer_batch_ring *ring;
    struct cer_batch *next; /* in a list of the ring's */
    uint8_t *memory;
    size_t memory_bytes;
    size_t n_tensors;
    cer_tensor *tensors;
    cer_export *exports; /* one a tensor, for cer_export_embed */
    uint32_t *rows;      /* n_rows numbers of rows in the shard */
    size_t n_rows;
    /* The loader's own: which part it comes from, and how filling it ended. */
    uint32_t part;
    bool ready;
    cer_status status;
} cer_batch;

/* Batches of up to `max_rows` rows with one tensor per element of `tensors`;
 * dtype, ndim and shape of each are the batches' start values. */
cer_status cer_batch_ring_new(const cer_tensor *tensors, size_t n_tensors,
                              size_t max_rows, cer_batch_ring **out,
                              cer_error *err);

/* A batch with one reference, the caller's. Calls must not overlap. NULL: out
 * of memory. */
cer_batch *cer_batch_ring_take(cer_batch_ring *ring);

/* Sets each tensor's data to its place in the batch's memory, from the shapes
 * as they are, and makes the memory larger where it has to be. */
cer_status cer_batch_place(cer_batch *batch, cer_error *err);

/* Frees batches that are not in use, all but `keep`. Must not overlap take. */
void cer_batch_ring_trim(cer_batch_ring *ring, size_t keep);

/* Batches in existence, in use or not. */
size_t cer_batch_ring_size(const cer_batch_ring *ring);

/* Frees what is not in use now, and the rest as it comes back. NULL allowed. */
void cer_batch_ring_close(cer_batch_ring *ring);

#endif
