#include "batch.h"

#include <string.h>

struct cer_batch_ring {
    /* Returned batches, in a stack to which any thread pushes. Only take, trim
     * and the end of the ring pop, and always the whole stack, which avoids the
     * ABA problem. */
    _Atomic(cer_batch *) returned;
    atomic_size_t users; /* batches in use, and 1 until the ring is closed */
    atomic_size_t size;
    atomic_bool closed;
    cer_batch *spare;        /* taken from `returned`; only take uses it */
    cer_batch_source source; /* without `get`: host memory */
    size_t max_rows;
    size_t n_tensors;
    cer_tensor tensors[];
};

static void batch_is_back(cer_owner *owner);

cer_status
cer_batch_ring_new(const cer_tensor *tensors, size_t n_tensors, size_t max_rows,
                   cer_batch_ring **out, cer_error *err)
{
    return cer_batch_ring_from(NULL, tensors, n_tensors, max_rows, out, err);
}

cer_status
cer_batch_ring_from(const cer_batch_source *source, const cer_tensor *tensors,
                    size_t n_tensors, size_t max_rows, cer_batch_ring **out,
                    cer_error *err)
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
    if (source != NULL)
        ring->source = *source;
    ring->max_rows = max_rows;
    ring->n_tensors = n_tensors;
    memcpy(ring->tensors, tensors, n_tensors * sizeof *tensors);
    return CER_OK;
}

static void
free_memory(cer_batch *batch)
{
    const cer_batch_source *source = &batch->ring->source;

    if (source->get == NULL)
        cer_aligned_free(batch->block.data);
    else if (batch->block.data != NULL)
        source->give(source->context, &batch->block);
    batch->block = (cer_batch_block){0};
}

static void
free_batch(cer_batch *batch)
{
    free_memory(batch);
    atomic_fetch_sub_explicit(&batch->ring->size, 1, memory_order_relaxed);
    cer_free(batch->tensors);
    cer_free(batch->exports);
    cer_free(batch->raw);
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
    batch->raw = cer_calloc(n, sizeof *batch->raw);
    batch->rows = cer_calloc(ring->max_rows, sizeof *batch->rows);
    if (batch->tensors == NULL || batch->exports == NULL ||
        batch->raw == NULL || batch->rows == NULL) {
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

static cer_batch **
end_of(cer_batch **list)
{
    while (*list != NULL)
        list = &(*list)->next;
    return list;
}

static cer_batch *
reversed(cer_batch *list)
{
    cer_batch *out = NULL;

    while (list != NULL) {
        cer_batch *next = list->next;

        list->next = out;
        out = list;
        list = next;
    }
    return out;
}

/* Puts returned batches before the spare ones, because the newest is the most
 * likely to be in a cache. If batches take turns, appends them instead, because
 * the device is most likely to be done with the oldest. */
static void
gather_spare(cer_batch_ring *ring)
{
    cer_batch *newest = collect(ring);

    if (newest == NULL)
        return;
    if (ring->source.turns != 0) {
        *end_of(&ring->spare) = reversed(newest);
    } else {
        *end_of(&newest) = ring->spare;
        ring->spare = newest;
    }
}

static void
leave(cer_batch_ring *ring)
{
    if (atomic_fetch_sub_explicit(&ring->users, 1, memory_order_acq_rel) != 1)
        return;
    free_list(collect(ring));
    free_list(ring->spare);
    if (ring->source.leave != NULL)
        ring->source.leave(ring->source.context);
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

/* Takes the first usable spare batch; NULL if there is none. */
static cer_batch *
take_spare(cer_batch_ring *ring)
{
    const cer_batch_source *source = &ring->source;
    cer_batch **at = &ring->spare, *batch;

    while (*at != NULL && source->is_usable != NULL &&
           !source->is_usable(source->context, &(*at)->block))
        at = &(*at)->next;
    if ((batch = *at) != NULL)
        *at = batch->next;
    return batch;
}

cer_batch *
cer_batch_ring_take(cer_batch_ring *ring)
{
    cer_batch *batch = NULL;

    gather_spare(ring);
    if (cer_batch_ring_size(ring) >= ring->source.turns)
        batch = take_spare(ring);
    if (batch == NULL && (batch = new_batch(ring)) == NULL)
        return NULL;
    atomic_fetch_add_explicit(&ring->users, 1, memory_order_relaxed);
    cer_owner_init(&batch->owner, 1, batch_is_back);
    batch->error.status = CER_OK;
    batch->ready = false;
    return batch;
}

static cer_status
get_memory(cer_batch *batch, size_t bytes, cer_error *err)
{
    const cer_batch_source *source = &batch->ring->source;

    if (source->get != NULL)
        return source->get(source->context, bytes, &batch->block, err);
    batch->block.data = cer_aligned_alloc(bytes);
    batch->block.bytes = bytes;
    return batch->block.data != NULL
               ? CER_OK
               : cer_fail(err, CER_NOMEM,
                          "out of memory for a batch of %zu bytes", bytes);
}

/* The smallest power of two not below `bytes`, if it fits. */
static size_t
power_of_two(size_t bytes)
{
    size_t power = 1;

    while (power < bytes && power <= SIZE_MAX / 2)
        power *= 2;
    return power < bytes ? bytes : power;
}

static cer_status
grow(cer_batch *batch, size_t bytes, cer_error *err)
{
    /* Ragged batches differ in size, and a source may be slow to allocate (a
     * driver that pins memory waits for the device), so batches grow to the
     * largest size in few steps. */
    size_t wanted = batch->block.data == NULL ? bytes : power_of_two(bytes);
    cer_status status;

    free_memory(batch);
    status = get_memory(batch, wanted, err);
    if (status != CER_OK)
        batch->block = (cer_batch_block){0};
    return status;
}

static size_t
aligned(size_t bytes)
{
    return (bytes + CER_ALIGNMENT - 1) & ~(size_t)(CER_ALIGNMENT - 1);
}

static bool
is_late(const cer_batch *batch, size_t tensor)
{
    return batch->late != NULL && batch->late[tensor];
}

/* Bytes of the tensors that are late, or of those that are not. */
static size_t
bytes_of(const cer_batch *batch, bool late)
{
    size_t bytes = 0;

    for (size_t i = 0; i < batch->n_tensors; i++) {
        if (is_late(batch, i) == late)
            bytes += aligned(cer_tensor_bytes(&batch->tensors[i]));
    }
    return bytes;
}

static size_t
rows_bytes(const cer_batch *batch)
{
    return batch->with_rows ? aligned(batch->n_rows * sizeof(cer_row_place))
                            : 0;
}

static size_t
raw_bytes(const cer_batch *batch, size_t tensor)
{
    return batch->with_raw ? aligned(batch->raw[tensor].bytes) : 0;
}

size_t
cer_batch_bytes(const cer_batch *batch)
{
    size_t bytes = rows_bytes(batch) + bytes_of(batch, false);

    for (size_t i = 0; i < batch->n_tensors; i++)
        bytes += raw_bytes(batch, i);
    return bytes + (batch->only_head ? 0 : bytes_of(batch, true));
}

/* Places the late tensors, or the others, starting at `at`. */
static size_t
place_tensors(cer_batch *batch, bool late, size_t at)
{
    for (size_t i = 0; i < batch->n_tensors; i++) {
        cer_tensor *t = &batch->tensors[i];
        size_t bytes = cer_tensor_bytes(t);

        if (is_late(batch, i) != late)
            continue;
        t->place = batch->block.place;
        t->data = NULL;
        if (bytes == 0 || (late && batch->only_head))
            continue;
        t->data = (uint8_t *)batch->block.data + at;
        at += aligned(bytes);
    }
    return at;
}

static size_t
place_raw(cer_batch *batch, size_t at)
{
    for (size_t i = 0; i < batch->n_tensors; i++) {
        batch->raw[i].data = (uint8_t *)batch->block.data + at;
        at += raw_bytes(batch, i);
    }
    return at;
}

cer_status
cer_batch_place(cer_batch *batch, cer_error *err)
{
    size_t bytes = cer_batch_bytes(batch);
    cer_status status = CER_OK;

    /* A batch from a source has a block even if its rows have no bytes: copies
     * and uses on a stream need the block's handle. */
    if (bytes == 0 && batch->ring->source.get != NULL)
        bytes = 1;
    if (bytes > batch->block.bytes)
        status = grow(batch, bytes, err);
    if (status != CER_OK)
        return status;
    batch->head_bytes =
        place_raw(batch, place_tensors(batch, false, rows_bytes(batch)));
    (void)place_tensors(batch, true, batch->head_bytes);
    return CER_OK;
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
cer_batch_ring_end(cer_batch_ring *ring)
{
    if (ring == NULL)
        return;
    atomic_store_explicit(&ring->closed, true, memory_order_release);
    cer_batch_ring_trim(ring, 0);
}

void
cer_batch_ring_close(cer_batch_ring *ring)
{
    if (ring == NULL)
        return;
    cer_batch_ring_end(ring); /* again, for batches just returned */
    leave(ring);
}
