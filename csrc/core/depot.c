#include "depot.h"

#include <string.h>

enum {
    PIECE_BYTES = 4 << 20, /* per piece of an upload; two are pinned */
    SPARE_BLOCKS = 8,      /* more returned blocks are freed */
};

typedef enum resident_state { COMING, HERE } resident_state;

struct cer_resident {
    cer_shard *shard;
    size_t column;
    resident_state state;
    size_t bytes;
    cer_device_block data, offsets;
    cer_uses uses;
    size_t users;       /* passes */
    uint64_t last_used; /* by the depot's count */
    struct cer_resident *next;
};

/* One of the two staging buffers of uploads. */
typedef struct piece {
    cer_device_block memory;
    void *event; /* after the copy out of it */
} piece;

struct cer_depot {
    cer_device *device;
    cer_device_reclaimer reclaimer;
    atomic_size_t count; /* users, and blocks in use */
    atomic_size_t limit;
    /* Returned blocks: pushed by any thread, emptied as a whole. */
    _Atomic(cer_depot_block *) returned;
    pthread_mutex_t lock; /* guards the fields below; never held while
                             allocating, which may call reclaim() */
    pthread_cond_t arrived;
    cer_resident *residents;
    uint64_t n_uses;
    cer_depot_block *spare, **spare_end; /* oldest first */
    size_t n_spare;
    void *streams[CER_DEPOT_STREAMS];
    /* Uploads, one at a time. */
    pthread_mutex_t uploading;
    piece pieces[2];
};

/* --- uploads -------------------------------------------------------------- */

static cer_status
make_pieces(cer_depot *d, cer_error *err)
{
    cer_status status = CER_OK;

    for (int i = 0; status == CER_OK && i < 2; i++) {
        piece *p = &d->pieces[i];

        if (p->event == NULL)
            status = cer_device_event_new(d->device, &p->event, err);
        if (status == CER_OK && p->memory.data == NULL)
            status = cer_device_alloc_pinned(d->device, PIECE_BYTES,
                                             CER_USE_BATCHES, &p->memory, err);
    }
    return status;
}

static void
free_pieces(cer_depot *d)
{
    for (int i = 0; i < 2; i++) {
        cer_device_free(d->device, &d->pieces[i].memory);
        cer_device_event_free(d->device, d->pieces[i].event);
    }
}

static cer_status
upload_piece(cer_depot *d, piece *p, uint8_t *to, const uint8_t *from,
             size_t bytes, cer_error *err)
{
    cer_status status = cer_device_event_sync(d->device, p->event, err);

    if (status != CER_OK)
        return status;
    memcpy(p->memory.data, from, bytes);
    status =
        cer_device_copy(d->device, to, p->memory.data, bytes,
                        CER_COPY_TO_DEVICE, d->streams[CER_DEPOT_UPLOADS], err);
    if (status == CER_OK)
        status = cer_device_event_record(d->device, p->event,
                                         d->streams[CER_DEPOT_UPLOADS], err);
    return status;
}

cer_status
cer_depot_upload(cer_depot *d, void *to, const void *from, size_t bytes,
                 cer_error *err)
{
    void *stream = d->streams[CER_DEPOT_UPLOADS];
    cer_status status;

    pthread_mutex_lock(&d->uploading);
    status = make_pieces(d, err);
    for (size_t at = 0, turn = 0; status == CER_OK && at < bytes; turn++) {
        size_t n = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;

        status = upload_piece(d, &d->pieces[turn % 2], (uint8_t *)to + at,
                              (const uint8_t *)from + at, n, err);
        at += n;
    }
    if (status == CER_OK)
        status = cer_device_stream_sync(d->device, stream, err);
    if (status != CER_OK) /* its work uses memory that is freed next */
        cer_uses_end_stream(d->device, stream);
    pthread_mutex_unlock(&d->uploading);
    return status;
}

/* --- eviction ------------------------------------------------------------- */

static void
free_resident(cer_depot *d, cer_resident *r)
{
    cer_uses_end(&r->uses);
    cer_device_free(d->device, &r->data);
    cer_device_free(d->device, &r->offsets);
    cer_uses_clear(&r->uses);
    cer_shard_release(r->shard);
    cer_free(r);
}

static void
free_block(cer_depot *d, cer_depot_block *b)
{
    cer_uses_end(&b->uses);
    cer_device_free(d->device, &b->memory);
    cer_uses_clear(&b->uses);
    cer_free(b);
}

static void
free_blocks(cer_depot *d, cer_depot_block *list)
{
    while (list != NULL) {
        cer_depot_block *next = list->next;

        free_block(d, list);
        list = next;
    }
}

/* Under the lock: unlinks the least recently used resident column that is not
 * in use; only of `shard`, if given. */
static cer_resident *
unlink_oldest(cer_depot *d, const cer_shard *shard)
{
    cer_resident **found = NULL, *r;

    for (cer_resident **at = &d->residents; *at != NULL; at = &(*at)->next) {
        if ((*at)->users == 0 && (*at)->state == HERE &&
            (shard == NULL || (*at)->shard == shard) &&
            (found == NULL || (*at)->last_used < (*found)->last_used))
            found = at;
    }
    if (found == NULL)
        return NULL;
    r = *found;
    *found = r->next;
    return r;
}

/* Frees the least recently used resident column and adds its bytes; false if
 * there was none. */
static bool
drop_oldest(cer_depot *d, const cer_shard *shard, size_t *bytes)
{
    cer_resident *r;

    pthread_mutex_lock(&d->lock);
    r = unlink_oldest(d, shard);
    pthread_mutex_unlock(&d->lock);
    if (r == NULL)
        return false;
    *bytes += r->bytes;
    free_resident(d, r);
    return true;
}

size_t
cer_depot_drop(cer_depot *d, const cer_shard *shard)
{
    size_t bytes = 0;

    while (drop_oldest(d, shard, &bytes))
        ;
    return bytes;
}

static void
collect(cer_depot *d)
{
    cer_depot_block *newest =
        atomic_exchange_explicit(&d->returned, NULL, memory_order_acquire);
    cer_depot_block *oldest = NULL;

    while (newest != NULL) {
        cer_depot_block *next = newest->next;

        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    *d->spare_end = oldest;
    for (; *d->spare_end != NULL; d->spare_end = &(*d->spare_end)->next)
        d->n_spare++;
}

/* Unlinks the first `n` spare blocks. */
static cer_depot_block *
unlink_spare(cer_depot *d, size_t n)
{
    cer_depot_block *first, **at = &d->spare;

    pthread_mutex_lock(&d->lock);
    collect(d);
    first = d->spare;
    for (; n > 0 && *at != NULL; n--, d->n_spare--)
        at = &(*at)->next;
    if (at == &d->spare) {
        first = NULL;
    } else {
        d->spare = *at;
        *at = NULL;
        if (d->spare == NULL)
            d->spare_end = &d->spare;
    }
    pthread_mutex_unlock(&d->lock);
    return first;
}

/* Called when device memory is short. */
static bool
reclaim(void *context, size_t bytes)
{
    cer_depot *d = context;
    cer_depot_block *spare = unlink_spare(d, SIZE_MAX);
    size_t freed = 0;

    /* Little by little: the allocation is retried in between. */
    free_blocks(d, spare);
    return spare != NULL || (drop_oldest(d, NULL, &freed) && bytes != 0);
}

/* --- resident columns ----------------------------------------------------- */

static cer_resident *
find(const cer_depot *d, const cer_shard *shard, size_t column)
{
    cer_resident *r = d->residents;

    while (r != NULL && (r->shard != shard || r->column != column))
        r = r->next;
    return r;
}

bool
cer_depot_has(cer_depot *d, const cer_shard *shard, size_t column)
{
    cer_resident *r;
    bool here;

    pthread_mutex_lock(&d->lock);
    r = find(d, shard, column);
    here = r != NULL && r->state == HERE;
    pthread_mutex_unlock(&d->lock);
    return here;
}

static size_t
sum_of(const cer_depot *d)
{
    size_t bytes = 0;

    for (const cer_resident *r = d->residents; r != NULL; r = r->next)
        bytes += r->bytes;
    return bytes;
}

size_t
cer_depot_resident_bytes(cer_depot *d)
{
    size_t bytes;

    pthread_mutex_lock(&d->lock);
    bytes = sum_of(d);
    pthread_mutex_unlock(&d->lock);
    return bytes;
}

static size_t
data_bytes(const cer_shard *shard, const cer_column *c)
{
    return cer_shard_values(shard, c) * c->row_bytes;
}

static size_t
offsets_bytes(const cer_shard *shard, const cer_column *c)
{
    return c->ragged ? (cer_shard_rows(shard) + 1) * sizeof *c->offsets : 0;
}

static cer_status
new_resident(cer_depot *d, cer_shard *shard, size_t column, cer_resident **out,
             cer_error *err)
{
    size_t n;
    const cer_column *c = &cer_shard_columns(shard, &n)[column];
    cer_resident *r = cer_calloc(1, sizeof *r);
    cer_status status;

    *out = NULL;
    if (r == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a resident column");
    status = cer_uses_init(&r->uses, d->device, err);
    if (status != CER_OK) {
        cer_free(r);
        return status;
    }
    r->shard = cer_shard_retain(shard);
    r->column = column;
    r->bytes = data_bytes(shard, c) + offsets_bytes(shard, c);
    r->users = 1;
    *out = r;
    return CER_OK;
}

static cer_status
fill_resident(cer_depot *d, cer_resident *r, cer_error *err)
{
    size_t n;
    const cer_column *c = &cer_shard_columns(r->shard, &n)[r->column];
    size_t values = data_bytes(r->shard, c);
    size_t offsets = offsets_bytes(r->shard, c);
    cer_status status =
        cer_device_alloc_idle(d->device, values, CER_USE_SHARDS, &r->data, err);

    if (status == CER_OK)
        status = cer_device_alloc_idle(d->device, offsets, CER_USE_SHARDS,
                                       &r->offsets, err);
    if (status == CER_OK)
        status = cer_depot_upload(d, r->data.data, c->data, values, err);
    if (status == CER_OK)
        status = cer_depot_upload(d, r->offsets.data, c->offsets, offsets, err);
    return status;
}

/* Makes room within the limit; the column itself is already in the list. */
static cer_status
make_room(cer_depot *d, const cer_resident *r, cer_error *err)
{
    size_t limit = cer_depot_limit(d), bytes = cer_depot_resident_bytes(d);
    size_t dropped = 0;

    while (bytes > limit && drop_oldest(d, NULL, &dropped))
        bytes = cer_depot_resident_bytes(d);
    if (bytes <= limit)
        return CER_OK;
    return cer_fail(err, CER_NOMEM,
                    "%s: column %zu of %s has %zu bytes, and %zu of the %zu "
                    "bytes that may be resident are in use: stream it, write "
                    "smaller shards, or raise the limit",
                    cer_device_name(d->device), r->column,
                    cer_shard_directory(r->shard), r->bytes, bytes - r->bytes,
                    limit);
}

static void
forget(cer_depot *d, cer_resident *r)
{
    cer_resident **at = &d->residents;

    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
}

/* Under the lock, released meanwhile: `r` is in the list, so others can wait
 * for it. */
static cer_status
fetch(cer_depot *d, cer_resident *r, bool limited, cer_error *err)
{
    cer_status status = CER_OK;

    r->next = d->residents;
    d->residents = r;
    pthread_mutex_unlock(&d->lock);
    if (limited)
        status = make_room(d, r, err);
    if (status == CER_OK)
        status = fill_resident(d, r, err);
    pthread_mutex_lock(&d->lock);
    r->state = HERE;
    r->last_used = ++d->n_uses;
    if (status != CER_OK)
        forget(d, r);
    pthread_cond_broadcast(&d->arrived);
    return status;
}

/* Under the lock. */
static cer_resident *
find_or_wait(cer_depot *d, const cer_shard *shard, size_t column)
{
    cer_resident *r;

    while ((r = find(d, shard, column)) != NULL && r->state == COMING)
        pthread_cond_wait(&d->arrived, &d->lock);
    if (r != NULL) {
        r->users++;
        r->last_used = ++d->n_uses;
    }
    return r;
}

cer_status
cer_depot_bring(cer_depot *d, cer_shard *shard, size_t column, bool limited,
                cer_resident **out, cer_error *err)
{
    cer_resident *made;
    cer_status status;

    pthread_mutex_lock(&d->lock);
    *out = find_or_wait(d, shard, column);
    pthread_mutex_unlock(&d->lock);
    if (*out != NULL)
        return CER_OK;
    status = new_resident(d, shard, column, &made, err);
    if (status != CER_OK)
        return status;
    pthread_mutex_lock(&d->lock);
    *out = find_or_wait(d, shard, column); /* a different thread was faster */
    if (*out == NULL)
        status = fetch(d, made, limited, err);
    if (*out == NULL && status == CER_OK) {
        *out = made;
        made = NULL;
    }
    pthread_mutex_unlock(&d->lock);
    if (made != NULL)
        free_resident(d, made);
    return status;
}

void
cer_depot_put_back(cer_depot *d, cer_resident *r)
{
    pthread_mutex_lock(&d->lock);
    r->users--;
    r->last_used = ++d->n_uses;
    pthread_mutex_unlock(&d->lock);
}

const uint8_t *
cer_resident_data(const cer_resident *r)
{
    return r->data.data;
}

const int64_t *
cer_resident_offsets(const cer_resident *r)
{
    return r->offsets.data;
}

cer_status
cer_resident_join(cer_resident *r, void *stream, cer_error *err)
{
    return cer_uses_join(&r->uses, stream, err);
}

/* --- tensors of blocks ---------------------------------------------------- */

static cer_status
join(cer_place *place, intptr_t stream, cer_error *err)
{
    cer_depot_block *b = (cer_depot_block *)(void *)place; /* first member */
    void *pointer = (void *)stream;
    cer_status status;

    if (stream == CER_STREAM_NOBODY) {
        cer_uses_anywhere(&b->uses);
        return CER_OK;
    }
    status = cer_uses_check_stream(b->uses.device, pointer, err);
    return status == CER_OK ? cer_uses_join(&b->uses, pointer, err) : status;
}

/* A block owned by one tensor. */
typedef struct own_block {
    cer_owner owner; /* first */
    cer_depot_block *block;
} own_block;

static void
give_own_block(cer_owner *owner)
{
    own_block *own = (own_block *)(void *)owner;

    if (own->block != NULL)
        cer_depot_give(own->block);
    cer_free(own);
}

static cer_status
new_tensor(cer_depot *d, const cer_tensor *like, cer_tensor *out,
           cer_error *err)
{
    own_block *own = cer_calloc(1, sizeof *own);
    size_t bytes = cer_tensor_bytes(like);
    cer_status status;

    if (own == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a copy of a tensor");
    cer_owner_init(&own->owner, 1, give_own_block);
    status = cer_depot_get(d, bytes == 0 ? 1 : bytes, &own->block, err);
    if (status != CER_OK) {
        cer_owner_release(&own->owner);
        return status;
    }
    *out = *like;
    out->owner = &own->owner;
    out->place = &own->block->place;
    out->data = bytes == 0 ? NULL : own->block->memory.data;
    out->read_only = false;
    return CER_OK;
}

/* `from` and `to` are blocks of the depot, or one of them is main memory. */
static cer_status
put_copy(const cer_tensor *from, const cer_tensor *to, cer_uses *read,
         cer_uses *written, void *stream, cer_error *err)
{
    cer_status status = cer_uses_check_stream(read->device, stream, err);

    if (status == CER_OK)
        status = cer_uses_join(read, stream, err);
    if (status == CER_OK && written != NULL)
        status = cer_uses_before(written, stream, err);
    if (status == CER_OK && cer_tensor_bytes(from) != 0)
        status = cer_device_copy(
            read->device, to->data, from->data, cer_tensor_bytes(from),
            written == NULL ? CER_COPY_FROM_DEVICE : CER_COPY_ON_DEVICE, stream,
            err);
    if (status == CER_OK && written != NULL)
        status = cer_uses_filled(written, stream, err);
    return status;
}

/* If the consumer's stream is unknown, or the copy goes to the host, the copy
 * is enqueued on a stream of the depot, and the host waits. */
static cer_status
copy_and_wait(cer_depot *d, const cer_tensor *from, const cer_tensor *to,
              cer_uses *read, cer_uses *written, cer_error *err)
{
    void *stream = d->streams[CER_DEPOT_UPLOADS];
    cer_status status = put_copy(from, to, read, written, stream, err);

    if (status == CER_OK)
        status = cer_device_stream_sync(d->device, stream, err);
    if (status != CER_OK)
        cer_uses_end_stream(d->device, stream);
    return status;
}

static cer_status
copy(const cer_tensor *from, bool to_host, intptr_t stream, cer_tensor *out,
     cer_error *err)
{
    cer_depot_block *b = (cer_depot_block *)(void *)from->place;
    cer_depot *d = b->depot;
    cer_uses *written = NULL;
    cer_status status = to_host ? cer_tensor_new(from, out, err)
                                : new_tensor(d, from, out, err);

    if (status != CER_OK)
        return status;
    if (!to_host)
        written = &((cer_depot_block *)(void *)out->place)->uses;
    if (to_host || stream == CER_STREAM_NOBODY)
        status = copy_and_wait(d, from, out, &b->uses, written, err);
    else
        status = put_copy(from, out, &b->uses, written, (void *)stream, err);
    if (status != CER_OK)
        cer_owner_release(out->owner);
    return status;
}

/* --- blocks --------------------------------------------------------------- */

/* Takes a spare block that is large enough but not much too large; *too_many is
 * the number of excess spare blocks. */
static cer_depot_block *
take_spare(cer_depot *d, size_t bytes, size_t *too_many)
{
    cer_depot_block **at = &d->spare, *b;

    pthread_mutex_lock(&d->lock);
    collect(d);
    while (*at != NULL &&
           ((*at)->memory.bytes < bytes || (*at)->memory.bytes / 2 > bytes ||
            cer_uses_captured(&(*at)->uses)))
        at = &(*at)->next;
    b = *at;
    if (b != NULL) {
        *at = b->next;
        if (*at == NULL)
            d->spare_end = at;
        d->n_spare--;
    }
    *too_many = d->n_spare > SPARE_BLOCKS ? d->n_spare - SPARE_BLOCKS : 0;
    pthread_mutex_unlock(&d->lock);
    return b;
}

static cer_status
new_block(cer_depot *d, size_t bytes, cer_depot_block **out, cer_error *err)
{
    cer_depot_block *b = cer_calloc(1, sizeof *b);
    bool is_host = cer_device_kind_of(d->device) == CER_DEVICE_HOST;
    cer_status status;

    if (b == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a batch");
    b->place = (cer_place){
        {is_host ? kDLCPU : kDLCUDA, cer_device_index(d->device)}, join, copy};
    b->depot = d;
    status = cer_uses_init(&b->uses, d->device, err);
    if (status != CER_OK) {
        cer_free(b);
        return status;
    }
    status =
        cer_device_alloc(d->device, bytes, CER_USE_BATCHES, &b->memory, err);
    if (status != CER_OK) {
        free_block(d, b);
        return status;
    }
    /* From a framework's pool: see cer_device_allocator. Nothing is filled yet,
     * so there is nothing to wait for and this cannot fail. */
    if (b->memory.from != NULL)
        (void)cer_uses_join(&b->uses, NULL, NULL);
    *out = b;
    return CER_OK;
}

cer_status
cer_depot_get(cer_depot *d, size_t bytes, cer_depot_block **out, cer_error *err)
{
    cer_status status = CER_OK;
    size_t too_many;

    *out = take_spare(d, bytes, &too_many);
    if (*out == NULL)
        status = new_block(d, bytes, out, err);
    if (too_many != 0)
        free_blocks(d, unlink_spare(d, too_many));
    if (status == CER_OK)
        cer_depot_retain(d);
    return status;
}

void
cer_depot_give(cer_depot_block *b)
{
    cer_depot *d = b->depot;

    b->next = atomic_load_explicit(&d->returned, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(
        &d->returned, &b->next, b, memory_order_release, memory_order_relaxed))
        ;
    cer_depot_release(d);
}

static cer_status
get_for_batch(void *context, size_t bytes, cer_batch_block *out, cer_error *err)
{
    cer_depot_block *b;
    cer_status status = cer_depot_get(context, bytes, &b, err);

    if (status == CER_OK)
        *out = (cer_batch_block){
            b->memory.data, b->memory.bytes,
            b->place.device.device_type == kDLCPU ? NULL : &b->place, b};
    return status;
}

static void
give_of_batch(void *context, cer_batch_block *block)
{
    (void)context;
    cer_depot_give(block->handle);
}

static bool
is_usable_for_batch(void *context, const cer_batch_block *block)
{
    cer_depot_block *b = block->handle;

    (void)context;
    return b == NULL || !cer_uses_captured(&b->uses);
}

static void
leave(void *context)
{
    cer_depot_release(context);
}

cer_batch_source
cer_depot_batches(cer_depot *d, size_t turns)
{
    cer_depot_retain(d);
    return (cer_batch_source){.context = d,
                              .get = get_for_batch,
                              .give = give_of_batch,
                              .is_usable = is_usable_for_batch,
                              .leave = leave,
                              .turns = turns};
}

/* --- the depot ------------------------------------------------------------ */

static cer_status
make_streams(cer_depot *d, cer_error *err)
{
    cer_status status = CER_OK;

    for (int i = 0; status == CER_OK && i < CER_DEPOT_STREAMS; i++)
        status = cer_device_stream_new(d->device, &d->streams[i], err);
    return status;
}

/* All three or none. */
static cer_status
make_locks(cer_depot *d, cer_error *err)
{
    if (pthread_mutex_init(&d->lock, NULL) != 0)
        goto no_lock;
    if (pthread_mutex_init(&d->uploading, NULL) != 0)
        goto no_uploading;
    if (pthread_cond_init(&d->arrived, NULL) != 0)
        goto no_arrived;
    return CER_OK;

no_arrived:
    pthread_mutex_destroy(&d->uploading);
no_uploading:
    pthread_mutex_destroy(&d->lock);
no_lock:
    return cer_fail(err, CER_NOMEM, "out of memory for a lock");
}

cer_status
cer_depot_new(cer_device *device, cer_depot **out, cer_error *err)
{
    size_t free_bytes, total = SIZE_MAX;
    cer_status status = CER_OK;
    cer_depot *d;

    *out = NULL;
    if (cer_device_kind_of(device) != CER_DEVICE_HOST)
        status = cer_device_memory(device, &free_bytes, &total, err);
    if (status != CER_OK)
        return status;
    d = cer_calloc(1, sizeof *d);
    if (d == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a depot");
    status = make_locks(d, err);
    if (status != CER_OK) {
        cer_free(d);
        return status;
    }
    cer_device_retain(device);
    d->device = device;
    atomic_init(&d->count, 1);
    atomic_init(&d->limit, total / 2);
    atomic_init(&d->returned, NULL);
    d->spare_end = &d->spare;
    d->reclaimer = (cer_device_reclaimer){.reclaim = reclaim, .context = d};
    cer_device_add_reclaimer(device, &d->reclaimer);
    status = make_streams(d, err);
    if (status == CER_OK)
        *out = d;
    else
        cer_depot_release(d);
    return status;
}

void
cer_depot_retain(cer_depot *d)
{
    atomic_fetch_add_explicit(&d->count, 1, memory_order_relaxed);
}

void
cer_depot_release(cer_depot *d)
{
    if (d == NULL ||
        atomic_fetch_sub_explicit(&d->count, 1, memory_order_acq_rel) != 1)
        return;
    cer_device_remove_reclaimer(d->device, &d->reclaimer);
    free_blocks(d, unlink_spare(d, SIZE_MAX));
    (void)cer_depot_drop(d, NULL);
    free_pieces(d);
    for (int i = 0; i < CER_DEPOT_STREAMS; i++)
        cer_device_stream_free(d->device, d->streams[i]);
    pthread_cond_destroy(&d->arrived);
    pthread_mutex_destroy(&d->uploading);
    pthread_mutex_destroy(&d->lock);
    cer_device_release(d->device);
    cer_free(d);
}

void *
cer_depot_stream(const cer_depot *d, cer_depot_stream_use use)
{
    return d->streams[use];
}

cer_device *
cer_depot_device(const cer_depot *d)
{
    return d->device;
}

void
cer_depot_set_limit(cer_depot *d, size_t bytes)
{
    atomic_store_explicit(&d->limit, bytes, memory_order_relaxed);
}

size_t
cer_depot_limit(const cer_depot *d)
{
    return atomic_load_explicit(&d->limit, memory_order_relaxed);
}
