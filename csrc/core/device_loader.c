/* The stages of a batch, with streams in brackets:
 *
 *   host      cer_loader gathers rows, and row numbers, into pinned memory
 *   stage     takes a device buffer; [copy] waits until its old uses are over,
 *             copies, and records an event for the pinned memory and one for
 *             the buffer
 *   ahead     up to AHEAD staged batches wait here while they are copied
 *   finish    [consumer] waits for the copy; kernels make the resident columns;
 *             records an event for other streams that join
 *   consumer  uses the tensors on any stream that joined, then releases them:
 *             the buffer returns to its ring, with its users' streams
 *
 * Pinned memory is held in `copies`, in order, until its event is done.
 *
 * The kernels find rows in a table of all parts, column after column. It keeps
 * the addresses of parts that were resident in an earlier pass, because only
 * those of the pass are read: so it stays the same while nothing is evicted.
 * When it changes it is uploaded to another block, because kernels of earlier
 * batches may still read the old one.
 *
 * What kernels read and a batch does not own -- resident columns, the table,
 * constants -- stays for the whole pass, so a stream joins it once in a pass.
 */
#include "device_loader.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

enum {
    AHEAD = 2,  /* staged batches if threads gather; otherwise 1 */
    COPIES = 4, /* batches whose pinned memory may still be copied */
    /* Buffers used in turn, so that a copy need not wait for the batch in use
     * now: that one, the one before it, and those ahead. */
    TURNS = AHEAD + 2,
    NOTE_BYTES = 512
};

/* Pinned memory of a batch on the host. */
typedef struct pinned {
    cer_device_block memory;
    void *event; /* after the copy out of it */
} pinned;

typedef struct device_column {
    cer_loaded_column is;
    cer_kernel_plan *plan;      /* NULL: made on the host */
    cer_depot_block *constants; /* NULL: not needed */
    bool raw; /* if not resident, its rows are copied unchanged */
} device_column;

typedef struct device_part {
    bool listed; /* in the pass */
    bool resident;
    bool needed;            /* by a mix whose parts are all resident */
    cer_resident **columns; /* one per column; NULL if made on the host */
} device_part;

struct cer_device_loader {
    cer_depot *depot;
    cer_device *device;
    cer_residence residence;
    cer_load_options options;
    pid_t process;
    bool closed;
    cer_loader *plan;
    cer_batch_ring *ring;
    void *copy_stream;
    size_t n_columns, n_parts;
    device_column *columns;
    device_part *parts;
    bool any_raw;                  /* some column can be copied raw */
    bool raw_draws;                /* and some of those draws random numbers */
    cer_kernel_part *kernel_parts; /* the table: n_parts for each column */
    cer_depot_block *table; /* the same on the device; NULL: not there yet */
    bool table_changed;     /* since it was uploaded */
    /* The pass. */
    uint32_t *order; /* parts in the pass */
    size_t n_order, n_resident;
    cer_use
        joined[CER_USES_STREAMS]; /* streams that joined what the pass keeps */
    size_t n_joined;
    uint64_t epoch;
    char note[NOTE_BYTES];   /* of the pass */
    char chains[NOTE_BYTES]; /* why columns are made on the host */
    bool staged_all;
    bool hold;        /* stage no batches ahead */
    cer_error failed; /* reported after the batches ahead */
    cer_batch *ahead[AHEAD];
    size_t n_ahead;
    cer_batch *copies[COPIES];
    size_t n_copies;
};

/* --- pinned memory -------------------------------------------------------- */

static void
free_pinned(cer_device *device, pinned *p)
{
    cer_device_free(device, &p->memory);
    cer_device_event_free(device, p->event);
    cer_free(p);
}

static cer_status
get_pinned(void *context, size_t bytes, cer_batch_block *out, cer_error *err)
{
    cer_device *device = context;
    pinned *p = cer_calloc(1, sizeof *p);
    cer_status status;

    if (p == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a batch");
    status = cer_device_event_new(device, &p->event, err);
    if (status == CER_OK)
        status = cer_device_alloc_pinned(device, bytes, CER_USE_BATCHES,
                                         &p->memory, err);
    if (status != CER_OK) {
        free_pinned(device, p);
        return status;
    }
    *out = (cer_batch_block){p->memory.data, bytes, NULL, p};
    return CER_OK;
}

static void
give_pinned(void *context, cer_batch_block *block)
{
    free_pinned(context, block->handle);
}

/* --- pending copies ------------------------------------------------------- */

static void
drop_copy(cer_device_loader *l)
{
    cer_owner_release(&l->copies[0]->owner);
    l->n_copies--;
    memmove(l->copies, l->copies + 1, l->n_copies * sizeof l->copies[0]);
}

/* Makes a place for one more copy: if all are taken, waits for the oldest,
 * which is usually done. */
static cer_status
settle_copies(cer_device_loader *l, cer_error *err)
{
    const pinned *p;
    cer_status status;

    if (l->n_copies < COPIES)
        return CER_OK;
    p = l->copies[0]->block.handle;
    status = cer_device_event_sync(l->device, p->event, err);
    if (status == CER_OK)
        drop_copy(l);
    return status;
}

/* Waits until nothing reads the pinned memory, and releases it. */
static void
end_copies(cer_device_loader *l)
{
    if (l->n_copies != 0)
        cer_uses_end_stream(l->device, l->copy_stream);
    while (l->n_copies != 0)
        drop_copy(l);
}

/* --- staging -------------------------------------------------------------- */

/* Gives a device batch the shapes of one on the host. */
static cer_status
place_like(cer_batch *b, const cer_batch *host, cer_error *err)
{
    b->mix = host->mix;
    b->n_rows = host->n_rows;
    b->with_rows = host->with_rows;
    b->late = host->late;
    b->with_raw = host->with_raw;
    b->only_head = false;
    for (size_t i = 0; i < b->n_tensors; i++) {
        cer_tensor *t = &b->tensors[i];

        memcpy(t->shape, host->tensors[i].shape, sizeof t->shape);
        memcpy(t->strides, host->tensors[i].strides, sizeof t->strides);
        b->raw[i].bytes = host->raw[i].bytes;
    }
    return cer_batch_place(b, err);
}

/* Enqueues the copy on its stream and adds the host's batch to the copies. */
static cer_status
put_copy(cer_device_loader *l, cer_batch *b, cer_batch *host, cer_error *err)
{
    cer_depot_block *to = b->block.handle;
    pinned *from = host->block.handle;
    cer_status status = cer_uses_before(&to->uses, l->copy_stream, err);

    if (status != CER_OK)
        return status;
    if (host->head_bytes != 0) {
        cer_owner_retain(&host->owner, 1);
        l->copies[l->n_copies++] = host;
        status = cer_device_copy(l->device, to->memory.data, from->memory.data,
                                 host->head_bytes, CER_COPY_TO_DEVICE,
                                 l->copy_stream, err);
        if (status == CER_OK)
            status = cer_device_event_record(l->device, from->event,
                                             l->copy_stream, err);
        if (status != CER_OK)
            end_copies(l); /* its event is not valid: wait for all */
    }
    if (status == CER_OK)
        status = cer_uses_filled(&to->uses, l->copy_stream, err);
    return status;
}

/* Takes the host's next batch and starts its copy to the device. */
static cer_status
stage(cer_device_loader *l, cer_error *err)
{
    cer_batch *host = NULL, *b = NULL;
    cer_status status = settle_copies(l, err);

    if (status == CER_OK)
        status = cer_loader_next(l->plan, &host, err);
    if (status != CER_OK || host == NULL) {
        l->staged_all = true;
        return status;
    }
    b = cer_batch_ring_take(l->ring);
    if (b == NULL)
        status = cer_fail(err, CER_NOMEM, "out of memory for the next batch");
    if (status == CER_OK)
        status = place_like(b, host, err);
    if (status == CER_OK)
        status = put_copy(l, b, host, err);
    cer_owner_release(&host->owner);
    if (status == CER_OK)
        l->ahead[l->n_ahead++] = b;
    else if (b != NULL)
        cer_owner_release(&b->owner);
    l->staged_all = status != CER_OK;
    return status;
}

/* --- finishing ------------------------------------------------------------ */

static cer_status
join_columns(cer_device_loader *l, const device_part *p, void *stream,
             cer_error *err)
{
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        if (p->columns[i] != NULL)
            status = cer_resident_join(p->columns[i], stream, err);
    }
    return status;
}

/* Announces the kernels of the pass on a stream. */
static cer_status
join_pass(cer_device_loader *l, void *stream, cer_error *err)
{
    const cer_use user = {stream, cer_device_thread(l->device)};
    cer_status status = CER_OK;

    for (size_t i = 0; user.thread != 0 && i < l->n_joined; i++) {
        if (l->joined[i].stream == stream && l->joined[i].thread == user.thread)
            return CER_OK;
    }
    for (size_t i = 0; status == CER_OK && i < l->n_order; i++)
        status = join_columns(l, &l->parts[l->order[i]], stream, err);
    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        if (l->columns[i].constants != NULL)
            status = cer_uses_join(&l->columns[i].constants->uses, stream, err);
    }
    if (status == CER_OK && l->table != NULL)
        status = cer_uses_join(&l->table->uses, stream, err);
    if (status == CER_OK && l->n_joined < CER_USES_STREAMS)
        l->joined[l->n_joined++] = user;
    return status;
}

static const cer_kernel_part *
table_of(const cer_device_loader *l, size_t column)
{
    return (cer_kernel_part *)l->table->memory.data + column * l->n_parts;
}

/* Where a batch's rows of a column are: contiguous in the batch's own memory if
 * they are raw, otherwise in the parts. */
static cer_kernel_source
source_of(const cer_device_loader *l, size_t column, const cer_batch *b)
{
    const cer_loaded_column *c = &l->columns[column].is;
    cer_kernel_source from = {.contiguous = b->with_raw};

    if (b->with_rows) {
        from.places = b->block.data;
        from.parts = table_of(l, column);
    }
    if (b->with_raw)
        from.src = b->raw[c->tensor].data;
    if (b->with_raw && c->ragged) /* its offsets are with the lengths */
        from.offsets = (int64_t *)(void *)b->raw[c->tensor + 2].data;
    return from;
}

/* Completes a batch of a column with what is the same for the pass. */
static cer_status
launch_kernel(cer_device_loader *l, const device_column *c,
              cer_kernel_batch *batch, void *stream, cer_error *err)
{
    cer_kernel_call call;
    cer_status status;

    batch->constants = c->constants == NULL ? NULL : c->constants->memory.data;
    batch->seed = l->options.seed;
    batch->epoch = l->epoch;
    status = cer_kernel_plan_batch(c->plan, batch, &call, err);
    return status == CER_OK ? cer_kernel_launch(l->device, &call, stream, err)
                            : status;
}

static cer_status
run_kernel(cer_device_loader *l, size_t column, cer_batch *b, void *stream,
           cer_error *err)
{
    const device_column *c = &l->columns[column];
    cer_tensor *t = &b->tensors[c->is.tensor];
    cer_kernel_batch batch = {
        .from = source_of(l, column, b), .dst = t[0].data, .n_rows = b->n_rows};

    if (c->is.ragged) {
        batch.mask = t[1].data;
        batch.lengths = t[2].data;
        batch.length = (size_t)t[0].shape[1];
    }
    return launch_kernel(l, c, &batch, stream, err);
}

/* Runs the kernels for a staged batch's columns. */
static cer_status
finish(cer_device_loader *l, cer_batch *b, void *stream, cer_error *err)
{
    cer_depot_block *block = b->block.handle;
    cer_status status;

    if (b->late == NULL)
        return CER_OK;
    status = cer_uses_join(&block->uses, stream, err);
    if (status == CER_OK)
        status = join_pass(l, stream, err);
    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        if (b->late[l->columns[i].is.tensor])
            status = run_kernel(l, i, b, stream, err);
    }
    return status == CER_OK ? cer_uses_filled(&block->uses, stream, err)
                            : status;
}

/* --- the pass ------------------------------------------------------------- */

cer_status
cer_device_loader_check_process(const cer_device_loader *l, cer_error *err)
{
    if (l->process == getpid())
        return CER_OK;
    return cer_fail(err, CER_INVALID,
                    "the loader's device stayed in the parent process: make a "
                    "new loader in a process that was not forked");
}

static void
drop_ahead(cer_device_loader *l)
{
    while (l->n_ahead != 0)
        cer_owner_release(&l->ahead[--l->n_ahead]->owner);
}

static void
put_back_part(cer_device_loader *l, uint32_t part)
{
    device_part *p = &l->parts[part];

    for (size_t i = 0; i < l->n_columns; i++) {
        if (p->columns[i] != NULL)
            cer_depot_put_back(l->depot, p->columns[i]);
        p->columns[i] = NULL;
    }
    p->resident = p->needed = false;
}

/* Drops the rest of the pass and releases its parts. */
static void
end_pass(cer_device_loader *l)
{
    drop_ahead(l);
    for (size_t i = 0; i < l->n_order; i++) {
        put_back_part(l, l->order[i]);
        l->parts[l->order[i]].listed = false;
    }
    l->n_order = 0;
    l->n_joined = 0;
    l->staged_all = true;
    l->failed.status = CER_OK;
}

/* Uploads the columns of a part that have kernels. */
static cer_status
bring_part(cer_device_loader *l, uint32_t part, cer_error *err)
{
    cer_shard *shard = cer_loader_part(l->plan, part)->shard;
    device_part *p = &l->parts[part];
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        if (l->columns[i].plan != NULL)
            status = cer_depot_bring(l->depot, shard, l->columns[i].is.index,
                                     l->residence == CER_RESIDENT_AUTO,
                                     &p->columns[i], err);
    }
    if (status != CER_OK) {
        put_back_part(l, part);
        return status;
    }
    p->resident = true;
    return CER_OK;
}

static bool
is_here(cer_device_loader *l, uint32_t part)
{
    const cer_shard *shard = cer_loader_part(l->plan, part)->shard;
    bool here = true;

    for (size_t i = 0; here && i < l->n_columns; i++) {
        if (l->columns[i].plan != NULL)
            here = cer_depot_has(l->depot, shard, l->columns[i].is.index);
    }
    return here;
}

static bool
all_resident(const cer_device_loader *l, const cer_mix *mix)
{
    bool all = true;

    for (size_t i = 0; i < mix->n; i++)
        all = all && l->parts[mix->parts[i]].resident;
    return all;
}

static cer_status
bring_mix(cer_device_loader *l, const cer_mix *mix, cer_error *err)
{
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < mix->n; i++) {
        if (!l->parts[mix->parts[i]].resident)
            status = bring_part(l, mix->parts[i], err);
    }
    for (size_t i = 0; status == CER_OK && i < mix->n; i++)
        l->parts[mix->parts[i]].needed = true;
    return status;
}

/* Puts back the parts that no mix needs, and counts the others. */
static void
keep_needed(cer_device_loader *l)
{
    for (size_t i = 0; i < l->n_order; i++) {
        if (!l->parts[l->order[i]].needed)
            put_back_part(l, l->order[i]);
        l->n_resident += l->parts[l->order[i]].resident;
    }
}

/* Takes the parts that are resident first, so that none is evicted for a
 * missing one, then completes the mixes in turn. If one does not fit, it and
 * the rest are streamed: kernels read all rows of a batch in one way. */
static cer_status
bring_parts(cer_device_loader *l, const cer_mix *mixes, size_t n,
            cer_error *err)
{
    cer_error why = {0};
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < l->n_order; i++) {
        if (is_here(l, l->order[i]))
            status = bring_part(l, l->order[i], &why);
    }
    for (int missing = 0; missing < 2; missing++) {
        for (size_t i = 0; status == CER_OK && i < n; i++) {
            if (missing || all_resident(l, &mixes[i]))
                status = bring_mix(l, &mixes[i], &why);
        }
    }
    keep_needed(l);
    if (status == CER_NOMEM) {
        (void)snprintf(l->note, sizeof l->note,
                       "%zu of %zu shards are resident, the others are "
                       "streamed: %.400s",
                       l->n_resident, l->n_order, why.message);
        return CER_OK;
    }
    return status == CER_OK ? CER_OK : cer_fail(err, status, "%s", why.message);
}

static cer_status
check_parts(const cer_device_loader *l, const cer_mix *mix, cer_error *err)
{
    for (size_t i = 0; i < mix->n; i++) {
        if (mix->parts[i] >= l->n_parts)
            return cer_fail(err, CER_INVALID, "no shard %u: there are %zu",
                            (unsigned)mix->parts[i], l->n_parts);
    }
    return CER_OK;
}

/* Keeps each part of the pass once. */
static void
list_parts(cer_device_loader *l, const cer_mix *mix)
{
    for (size_t i = 0; i < mix->n; i++) {
        uint32_t part = mix->parts[i];

        if (!l->parts[part].listed)
            l->order[l->n_order++] = part;
        l->parts[part].listed = true;
    }
}

/* Leaves out the mixes before and behind the pass's batches: their parts need
 * not be resident. */
static void
trim_mixes(const cer_device_loader *l, const cer_mix **mixes, size_t *n,
           size_t *start, size_t count)
{
    size_t batches = 0, used = 0;

    while (*n != 0 && cer_loader_count(l->plan, *mixes) <= *start) {
        *start -= cer_loader_count(l->plan, *mixes);
        (*mixes)++;
        (*n)--;
    }
    while (used < *n && (batches <= *start || batches - *start < count))
        batches += cer_loader_count(l->plan, &(*mixes)[used++]);
    *n = used;
}

static bool
has_kernels(const cer_device_loader *l)
{
    bool any = false;

    for (size_t i = 0; i < l->n_columns; i++)
        any = any || l->columns[i].plan != NULL;
    return any;
}

/* How parts that are not resident are loaded. */
static cer_part_way
streamed_way(const cer_device_loader *l)
{
    return l->any_raw ? CER_PART_RAW : CER_PART_WHOLE;
}

/* Enters a resident column's address. The kernels rely on its alignment. */
static cer_status
set_entry(cer_device_loader *l, size_t column, uint32_t part, cer_error *err)
{
    cer_kernel_part *entry = &l->kernel_parts[column * l->n_parts + part];
    const cer_resident *r = l->parts[part].columns[column];
    const uint8_t *src = cer_resident_data(r);
    const int64_t *offsets = cer_resident_offsets(r);

    if ((uintptr_t)src % CER_ALIGNMENT != 0)
        return cer_fail(err, CER_DEVICE,
                        "%s: memory for a shard is not aligned to %d bytes",
                        cer_device_name(l->device), CER_ALIGNMENT);
    l->table_changed =
        l->table_changed || entry->src != src || entry->offsets != offsets;
    entry->src = src;
    entry->offsets = offsets;
    return CER_OK;
}

/* Gets a block with these bytes; no block for 0 bytes. */
static cer_status
upload(cer_device_loader *l, const void *bytes, size_t n, cer_depot_block **out,
       cer_error *err)
{
    cer_status status;

    if (n == 0)
        return CER_OK;
    status = cer_depot_get(l->depot, n, out, err);
    if (status == CER_OK)
        status = cer_uses_wait(&(*out)->uses, err);
    return status == CER_OK
               ? cer_depot_upload(l->depot, (*out)->memory.data, bytes, n, err)
               : status;
}

/* Makes the table on the device current, if the pass reads it. */
static cer_status
update_table(cer_device_loader *l, cer_error *err)
{
    cer_depot_block *old = l->table;
    cer_status status = CER_OK;

    for (size_t i = 0; i < l->n_order; i++) {
        for (size_t k = 0; status == CER_OK && k < l->n_columns; k++) {
            if (l->parts[l->order[i]].columns[k] != NULL)
                status = set_entry(l, k, l->order[i], err);
        }
    }
    if (status != CER_OK || (l->n_resident == 0 && !l->raw_draws) ||
        (l->table != NULL && !l->table_changed))
        return status;
    l->table = NULL;
    status = upload(l, l->kernel_parts,
                    l->n_columns * l->n_parts * sizeof *l->kernel_parts,
                    &l->table, err);
    l->table_changed = status != CER_OK;
    if (old != NULL)
        cer_depot_give(old);
    return status;
}

/* Allocates pinned memory for all batches that may be pending at a time. Done
 * here, because an allocation by a loader thread would break a graph capture in
 * a different thread. */
static cer_status
reserve(cer_device_loader *l, cer_error *err)
{
    size_t n = cer_loader_window(l->plan) + COPIES;
    cer_status status = CER_OK;

    if (l->n_resident < l->n_order)
        status = cer_loader_reserve(l->plan, n, streamed_way(l), err);
    if (status == CER_OK && l->n_resident != 0)
        status = cer_loader_reserve(l->plan, n, CER_PART_LATE, err);
    return status;
}

cer_status
cer_device_loader_begin(cer_device_loader *l, const cer_mix *mixes, size_t n,
                        uint64_t epoch, size_t start, size_t count,
                        cer_error *err)
{
    cer_status status = cer_device_loader_check_process(l, err);

    if (status != CER_OK)
        return status;
    if (l->closed)
        return cer_fail(err, CER_INVALID, "the loader is closed");
    status =
        cer_loader_begin(l->plan, NULL, 0, 0, 0, 0, err); /* stops threads */
    end_pass(l);
    l->n_resident = 0;
    l->note[0] = '\0';
    cer_batch_ring_trim(l->ring, TURNS);
    for (size_t i = 0; status == CER_OK && i < n; i++)
        status = check_parts(l, &mixes[i], err);
    if (status == CER_OK)
        trim_mixes(l, &mixes, &n, &start, count);
    for (size_t i = 0; status == CER_OK && i < n; i++)
        list_parts(l, &mixes[i]);
    if (status == CER_OK && l->residence != CER_STREAMED && has_kernels(l))
        status = bring_parts(l, mixes, n, err);
    if (status == CER_OK)
        status = update_table(l, err);
    if (status != CER_OK)
        goto done;
    for (size_t i = 0; i < l->n_order; i++)
        cer_loader_set_way(l->plan, l->order[i],
                           l->parts[l->order[i]].resident ? CER_PART_LATE
                                                          : streamed_way(l));
    status = reserve(l, err);
    if (status != CER_OK)
        goto done;
    l->epoch = epoch;
    status = cer_loader_begin(l->plan, mixes, n, epoch, start, count, err);
    l->staged_all = status != CER_OK;

done:
    if (status != CER_OK)
        end_pass(l);
    return status;
}

/* Stages as much as possible without waiting; an error is reported after the
 * batches before it are delivered. */
static void
stage_ahead(cer_device_loader *l)
{
    bool threads = l->options.threads != 0;
    size_t most = threads ? AHEAD : 1;

    while (l->n_ahead < most && !l->staged_all && !l->hold &&
           (!threads || cer_loader_is_ready(l->plan)))
        (void)stage(l, &l->failed);
}

static cer_batch *
pop_ahead(cer_device_loader *l)
{
    cer_batch *b = l->ahead[0];

    l->n_ahead--;
    memmove(l->ahead, l->ahead + 1, l->n_ahead * sizeof l->ahead[0]);
    return b;
}

static cer_status
next_batch(cer_device_loader *l, void *stream, cer_batch **out, cer_error *err)
{
    cer_status status = CER_OK;
    cer_batch *b;

    if (l->n_ahead == 0 && !l->staged_all)
        (void)stage(l, &l->failed);
    if (l->n_ahead == 0) {
        status = l->failed.status;
        return status == CER_OK
                   ? CER_OK
                   : cer_fail(err, status, "%s", l->failed.message);
    }
    b = pop_ahead(l);
    status = finish(l, b, stream, err);
    if (status != CER_OK) {
        cer_owner_release(&b->owner);
        return status;
    }
    stage_ahead(l);
    *out = b;
    return CER_OK;
}

static cer_status
check_and_take(cer_device_loader *l, void *stream, cer_batch **out,
               cer_error *err)
{
    cer_status status = cer_uses_check_stream(l->device, stream, err);

    if (status != CER_OK)
        return status;
    status = next_batch(l, stream, out, err);
    if (*out == NULL) /* the end or an error */
        end_pass(l);
    return status;
}

cer_status
cer_device_loader_next(cer_device_loader *l, void *stream, cer_batch **out,
                       cer_error *err)
{
    cer_device_visit visit;
    cer_status status = cer_device_loader_check_process(l, err);

    *out = NULL;
    if (status != CER_OK || l->closed)
        return status;
    status = cer_device_enter(l->device, &visit, err);
    if (status != CER_OK)
        return status;
    status = check_and_take(l, stream, out, err);
    cer_device_leave(l->device, &visit);
    return status;
}

/* --- batches written elsewhere ---------------------------------------------
 */

cer_device_ahead
cer_device_loader_look_ahead(const cer_device_loader *l)
{
    if (l->closed || l->process != getpid() || l->failed.status != CER_OK)
        return (cer_device_ahead){.staged = 0};
    return (cer_device_ahead){l->n_ahead, cer_loader_look_ahead(l->plan)};
}

bool
cer_device_loader_look(const cer_device_loader *l, cer_device_ahead *ahead,
                       size_t *n_rows, bool *resident)
{
    cer_part_way way;

    if (ahead->staged != 0) {
        *n_rows = l->ahead[l->n_ahead - ahead->staged]->n_rows;
        *resident = false;
        ahead->staged--;
        return true;
    }
    if (!cer_loader_look(l->plan, &ahead->plan, n_rows, &way))
        return false;
    *resident = way == CER_PART_LATE;
    for (size_t i = 0; *resident && i < l->n_columns; i++)
        *resident = l->columns[i].plan != NULL;
    return true;
}

bool
cer_device_loader_shapes(const cer_device_loader *l, size_t n_rows,
                         cer_tensor *tensors)
{
    size_t most;
    const cer_tensor *kinds = cer_loader_kinds(l->plan, &most);

    for (size_t i = 0; i < l->n_columns; i++) {
        if (l->columns[i].is.ragged)
            return false;
        tensors[i] = kinds[i];
        tensors[i].shape[0] = (int64_t)n_rows;
        cer_tensor_pack(&tensors[i]);
    }
    return true;
}

void
cer_device_loader_hold(cer_device_loader *l, bool hold)
{
    l->hold = hold;
}

bool
cer_device_loader_has_places(cer_device_loader *l)
{
    return l->options.threads == 0 || cer_loader_is_ready(l->plan);
}

cer_status
cer_device_loader_places(cer_device_loader *l, size_t n_rows, cer_row_place *to,
                         cer_error *err)
{
    cer_batch *host = NULL;
    cer_status status = cer_loader_next(l->plan, &host, err);

    if (status == CER_OK && (host == NULL || host->n_rows != n_rows))
        status = cer_fail(err, CER_INVALID, "the pass has changed");
    if (status == CER_OK)
        memcpy(to, host->block.data, n_rows * sizeof *to);
    if (host != NULL)
        cer_owner_release(&host->owner);
    if (status != CER_OK)
        end_pass(l);
    return status;
}

cer_status
cer_device_loader_join(cer_device_loader *l, void *stream, cer_error *err)
{
    cer_status status = cer_uses_check_stream(l->device, stream, err);

    return status == CER_OK ? join_pass(l, stream, err) : status;
}

cer_status
cer_device_loader_write(cer_device_loader *l, const cer_row_place *places,
                        size_t n_rows, void *const *to, void *stream,
                        cer_error *err)
{
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        cer_kernel_batch batch = {
            .from = {.places = places, .parts = table_of(l, i)},
            .dst = to[l->columns[i].is.tensor],
            .n_rows = n_rows};

        status = launch_kernel(l, &l->columns[i], &batch, stream, err);
    }
    return status;
}

cer_depot *
cer_device_loader_depot(const cer_device_loader *l)
{
    return l->depot;
}

/* --- making and closing --------------------------------------------------- */

/* Whether a column that is not resident should be copied raw and transformed by
 * a kernel: if the kernel does more than copy, and does not shrink a row, or a
 * value of a ragged one. */
static bool
comes_raw(const cer_device_loader *l, const device_column *c)
{
    size_t n;
    const cer_column *source =
        &cer_shard_columns(cer_loader_part(l->plan, 0)->shard, &n)[c->is.index];
    const cer_row_type *out = cer_transform_output(c->is.transform);

    return !cer_transform_copies(c->is.transform) &&
           out->bytes >= source->row_bytes;
}

static cer_status
take_constants(cer_device_loader *l, device_column *c, cer_error *err)
{
    size_t bytes;
    const void *constants = cer_kernel_plan_constants(c->plan, &bytes);

    return upload(l, constants, bytes, &c->constants, err);
}

/* Without a plan a column is made on the host. */
static cer_status
take_plan(cer_device_loader *l, device_column *c, cer_error *err)
{
    cer_error why = {0};
    cer_status status = cer_kernel_plan_new(c->is.transform, &c->plan, &why);

    if (status == CER_OK) {
        c->raw = comes_raw(l, c);
        return take_constants(l, c, err);
    }
    if (status != CER_INVALID)
        return cer_fail(err, status, "%s", why.message);
    if (l->chains[0] == '\0' && l->residence != CER_STREAMED)
        (void)snprintf(l->chains, sizeof l->chains,
                       "column %s is made on the CPU and streamed: %.400s",
                       cer_loader_tensor_column(l->plan, c->is.tensor),
                       why.message);
    return CER_OK;
}

static cer_status
make_columns(cer_device_loader *l, cer_error *err)
{
    cer_status status = CER_OK;

    l->n_columns = cer_loader_columns(l->plan);
    l->columns = cer_calloc(l->n_columns, sizeof *l->columns);
    if (l->columns == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        l->columns[i].is = cer_loader_column(l->plan, i);
        status = take_plan(l, &l->columns[i], err);
    }
    return status;
}

/* Marks the columns that have kernels as late. */
static cer_status
mark_late(cer_device_loader *l, cer_error *err)
{
    bool *late = cer_calloc(2 * l->n_columns, sizeof *late);
    bool *raw = late + l->n_columns;
    cer_status status;

    if (late == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    for (size_t i = 0; i < l->n_columns; i++) {
        late[i] = l->columns[i].plan != NULL;
        raw[i] = l->columns[i].raw;
        l->any_raw = l->any_raw || raw[i];
        l->raw_draws =
            l->raw_draws ||
            (raw[i] && cer_transform_draws(l->columns[i].is.transform));
    }
    status = cer_loader_set_late(l->plan, late, raw, err);
    cer_free(late);
    return status;
}

static cer_status
make_table(cer_device_loader *l, cer_error *err)
{
    size_t n, bytes;

    if (!cer_mul_size(l->n_parts, l->n_columns, &n) ||
        !cer_mul_size(n, sizeof *l->kernel_parts, &bytes) ||
        (l->kernel_parts = cer_calloc(n, sizeof *l->kernel_parts)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    for (size_t i = 0; i < n; i++)
        l->kernel_parts[i].first_row =
            cer_loader_part(l->plan, (uint32_t)(i % l->n_parts))->first_row;
    return CER_OK;
}

static cer_status
make_parts(cer_device_loader *l, cer_error *err)
{
    l->n_parts = cer_loader_parts(l->plan);
    l->order = cer_calloc(l->n_parts, sizeof *l->order);
    l->parts = cer_calloc(l->n_parts, sizeof *l->parts);
    if (l->order == NULL || l->parts == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    for (size_t i = 0; i < l->n_parts; i++) {
        l->parts[i].columns =
            cer_calloc(l->n_columns, sizeof *l->parts[i].columns);
        if (l->parts[i].columns == NULL)
            return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    }
    return make_table(l, err);
}

static cer_status
make_ring(cer_device_loader *l, cer_error *err)
{
    size_t max_rows;
    const cer_tensor *kinds = cer_loader_kinds(l->plan, &max_rows);
    cer_batch_source source = cer_depot_batches(l->depot, TURNS);
    cer_status status = cer_batch_ring_from(
        &source, kinds, cer_loader_tensors(l->plan), max_rows, &l->ring, err);

    if (status != CER_OK)
        source.leave(source.context);
    return status;
}

static cer_status
make_plan(cer_device_loader *l, const cer_part *parts, size_t n_parts,
          const cer_load_column *columns, size_t n_columns, cer_error *err)
{
    /* Only this loader ever holds its batches. */
    cer_batch_source source = {
        .context = l->device, .get = get_pinned, .give = give_pinned};
    cer_load_options options = l->options;

    options.memory = &source;
    return cer_loader_new(parts, n_parts, columns, n_columns, &options,
                          &l->plan, err);
}

static cer_status
make(cer_device_loader *l, const cer_part *parts, size_t n_parts,
     const cer_load_column *columns, size_t n_columns, cer_error *err)
{
    cer_status status = make_plan(l, parts, n_parts, columns, n_columns, err);

    if (status == CER_OK)
        status = make_columns(l, err);
    if (status == CER_OK)
        status = mark_late(l, err);
    if (status == CER_OK)
        status = make_parts(l, err);
    return status == CER_OK ? make_ring(l, err) : status;
}

cer_status
cer_device_loader_new(cer_depot *depot, cer_residence residence,
                      const cer_part *parts, size_t n_parts,
                      const cer_load_column *columns, size_t n_columns,
                      const cer_load_options *options, cer_device_loader **out,
                      cer_error *err)
{
    cer_device_loader *l = cer_calloc(1, sizeof *l);
    cer_status status;

    *out = NULL;
    if (l == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    l->depot = depot;
    cer_depot_retain(depot);
    l->device = cer_depot_device(depot);
    l->copy_stream = cer_depot_stream(depot, CER_DEPOT_COPIES);
    l->residence = residence;
    l->options = *options;
    l->process = getpid();
    l->staged_all = true;
    status = make(l, parts, n_parts, columns, n_columns, err);
    if (status == CER_OK)
        *out = l;
    else
        cer_device_loader_free(l);
    return status;
}

cer_loader *
cer_device_loader_plan(cer_device_loader *l)
{
    return l->plan;
}

cer_device *
cer_device_loader_device(const cer_device_loader *l)
{
    return l->device;
}

size_t
cer_device_loader_resident(const cer_device_loader *l)
{
    return l->n_resident;
}

const char *
cer_device_loader_note(const cer_device_loader *l)
{
    return l->note[0] != '\0' ? l->note : l->chains;
}

void *
cer_device_loader_stream(const cer_device_loader *l)
{
    return cer_depot_stream(l->depot, CER_DEPOT_KERNELS);
}

size_t
cer_device_loader_buffers(const cer_device_loader *l)
{
    return l->ring == NULL ? 0 : cer_batch_ring_size(l->ring);
}

void
cer_device_loader_close(cer_device_loader *l)
{
    if (l->closed)
        return;
    l->closed = true;
    if (l->process != getpid())
        return; /* a copy of memory that the parent process uses */
    end_pass(l);
    end_copies(l);
    if (l->plan != NULL)
        cer_loader_close(l->plan);
    cer_batch_ring_end(l->ring); /* freed later: its size is still available */
    for (size_t i = 0; l->columns != NULL && i < l->n_columns; i++) {
        cer_kernel_plan_free(l->columns[i].plan);
        l->columns[i].plan = NULL;
        if (l->columns[i].constants != NULL)
            cer_depot_give(l->columns[i].constants);
        l->columns[i].constants = NULL;
    }
    if (l->table != NULL)
        cer_depot_give(l->table);
    l->table = NULL;
}

void
cer_device_loader_free(cer_device_loader *l)
{
    if (l == NULL)
        return;
    cer_device_loader_close(l);
    if (l->process != getpid())
        return;
    cer_loader_free(l->plan);
    cer_batch_ring_close(l->ring);
    for (size_t i = 0; l->parts != NULL && i < l->n_parts; i++)
        cer_free(l->parts[i].columns);
    cer_free(l->parts);
    cer_free(l->kernel_parts);
    cer_free(l->order);
    cer_free(l->columns);
    cer_depot_release(l->depot);
    cer_free(l);
}
