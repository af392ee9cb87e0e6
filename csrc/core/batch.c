#include "batch.h"

#include <string.h>

struct cer_batch_ring {
    /* Batches that came back, in a stack that any thread pushes to. Only take,
     * trim and the end of the ring empty it, and always the whole of it: a
     * stack used like this has no ABA problem. */
    _Atomic(cer_batch *) returned;
    atomic_size_t users; /* batches in use, and 1 until the ring is closed */
    atomic_size_t size;
    atomic_bool closed;
    cer_batch *spare; /* taken from `returned`; the one that takes owns it */
    size_t max_rows;
    size_t n_tensors;
    cer_tensor tensors[];
};

static void batch_is_back(cer_owner *owner);

cer_status
cer_batch_ring_new(const cer_tensor *tensors, size_t n_tensors, size_t max_rows,
                   cer_batch_ring **out, cer_error *err)
{
    cer_batch_ring *ring =
        cer_calloc(1, sizeof *ring + n_tensors * sizeof *tensors);

    *out = ring;
    if (ring == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the batches");
    atomic_init(&ring->returned, NULL);
    atomic_init(&ring->users, 1);
    atomic_init(&ring->size, 0);
    atomic_init(&ring->closed, false);
    ring->max_rows = max_rows;
    ring->n_tensors = n_tensors;
    memcpy(ring->tensors, tensors, n_tensors * sizeof *tensors);
    return CER_OK;
}

static void
free_batch(cer_batch *batch)
{
    atomic_fetch_sub_explicit(&batch->ring->size, 1, memory_order_relaxed);
    cer_aligned_free(batch->memory);
    cer_free(batch->tensors);
    cer_free(batch->exports);
    cer_free(batch->rows);
    cer_free(batch);
}

static cer_batch *
new_batch(cer_batch_ring *ring)
{
    size_t n = ring->n_tensors;
    cer_batch *batch = cer_calloc(1, sizeof *batch);

    if (batch == NULL)
        return NULL;
    atomic_fetch_add_explicit(&ring->size, 1, memory_order_relaxed);
    batch->ring = ring;
    batch->n_tensors = n;
    batch->tensors = cer_alloc(n * sizeof *batch->tensors);
    batch->exports = cer_calloc(n, sizeof *batch->exports);
    batch->rows = cer_calloc(ring->max_rows, sizeof *batch->rows);
    if (batch->tensors == NULL || batch->exports == NULL ||
        batch->rows == NULL) {
        free_batch(batch);
        return NULL;
    }
    memcpy(batch->tensors, ring->tensors, n * sizeof *batch->tensors);
    for (size_t i = 0; i < n; i++) {
        batch->tensors[i].owner = &batch->owner;
        cer_tensor_pack(&batch->tensors[i]);
    }
    return batch;
}

static void
free_list(cer_batch *batch)
{
    while (batch != NULL) {
        cer_batch *next = batch->next;

        free_batch(batch);
        batch = next;
    }
}

static cer_batch *
collect(cer_batch_ring *ring)
{
    return atomic_exchange_explicit(&ring->returned, NULL,
                                    memory_order_acquire);
}

/* Puts what came back before the spare ones: the newest is the likeliest to be
 * in a cache still. */
static void
gather_spare(cer_batch_ring *ring)
{
    cer_batch *newest = collect(ring), *oldest = newest;

    if (newest == NULL)
        return;
    while (oldest->next != NULL)
        oldest = oldest->next;
    oldest->next = ring->spare;
    ring->spare = newest;
}

static void
leave(cer_batch_ring *ring)
{
    if (atomic_fetch_sub_explicit(&ring->users, 1, memory_order_acq_rel) != 1)
        return;
    free_list(collect(ring));
    free_list(ring->spare);
    cer_free(ring);
}

static void
batch_is_back(cer_owner *owner)
{
    cer_batch *batch = (cer_batch *)(void *)owner; /* its first member */
    cer_batch_ring *ring = batch->ring;

    if (atomic_load_explicit(&ring->closed, memory_order_acquire)) {
        free_batch(batch);
    } else {
        batch->next =
            atomic_load_explicit(&ring->returned, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(
            &ring->returned, &batch->next, batch, memory_order_release,
            memory_order_relaxed))
            ;
    }
    leave(ring);
}

cer_batch *
cer_batch_ring_take(cer_batch_ring *ring)
{
    cer_batch *batch;

    gather_spare(ring);
    batch = ring->spare;
    if (batch != NULL)
        ring->spare = batch->next;
    else if ((batch = new_batch(ring)) == NULL)
        return NULL;
    atomic_fetch_add_explicit(&ring->users, 1, memory_order_relaxed);
    cer_owner_init(&batch->owner, 1, batch_is_back);
    batch->status = CER_OK;
    batch->ready = false;
    return batch;
}

static cer_status
grow(cer_batch *batch, size_t bytes, cer_error *err)
{
    /* Ragged batches differ in size: a quarter more spares most of the steps
     * up to the largest one. */
    size_t wanted = batch->memory == NULL ? bytes : bytes + bytes / 4;

    cer_aligned_free(batch->memory);
    batch->memory_bytes = 0;
    batch->memory = cer_aligned_alloc(wanted);
    if (batch->memory == NULL)
        return cer_fail(err, CER_NOMEM,
                        "out of memory for a batch of %zu bytes", bytes);
    batch->memory_bytes = wanted;
    return CER_OK;
}

cer_status
cer_batch_place(cer_batch *batch, cer_error *err)
{
    cer_status status = CER_OK;
    size_t at = 0;

    for (size_t i = 0; i < batch->n_tensors; i++) {
        at += cer_tensor_bytes(&batch->tensors[i]);
        at = (at + CER_ALIGNMENT - 1) & ~(size_t)(CER_ALIGNMENT - 1);
    }
    if (at > batch->memory_bytes && (status = grow(batch, at, err)) != CER_OK)
        return status;
    at = 0;
    for (size_t i = 0; i < batch->n_tensors; i++) {
        size_t bytes = cer_tensor_bytes(&batch->tensors[i]);

        batch->tensors[i].data = bytes == 0 ? NULL : batch->memory + at;
        at += bytes;
        at = (at + CER_ALIGNMENT - 1) & ~(size_t)(CER_ALIGNMENT - 1);
    }
    return status;
}

void
cer_batch_ring_trim(cer_batch_ring *ring, size_t keep)
{
    cer_batch **at = &ring->spare;

    gather_spare(ring);
    for (; *at != NULL && keep > 0; keep--)
        at = &(*at)->next;
    free_list(*at);
    *at = NULL;
}

size_t
cer_batch_ring_size(const cer_batch_ring *ring)
{
    return atomic_load_explicit(&ring->size, memory_order_relaxed);
}

void
cer_batch_ring_close(cer_batch_ring *ring)
{
    if (ring == NULL)
        return;
    atomic_store_explicit(&ring->closed, true, memory_order_release);
    cer_batch_ring_trim(ring, 0);
    leave(ring);
}
