/* lanes_run.c -- one lane's batches; see lanes.h. A group of batches is opened
 * when the one before it has ended: its places are taken from the loader into
 * the pinned memory of its slot, whose fence, GROUPS groups ago, is done. */
#include <string.h>

#include "lanes_impl.h"
#include "lanes_kernel.h"

enum { GROUP_BYTES = 1 << 18 }; /* of places, unless one batch needs more */

/* --- making ----------------------------------------------------------------
 */

static size_t
choose_group_rows(size_t max_rows)
{
    size_t rows = GROUP_BYTES / sizeof(cer_row_place);

    if (rows / CER_LANE_GROUP > max_rows)
        rows = max_rows * CER_LANE_GROUP;
    return rows < max_rows ? max_rows : rows;
}

static cer_status
make(cer_lane *l, cer_error *err)
{
    size_t max_rows, bytes;
    cer_status status = cer_device_loader_check_process(l->loader, err);

    (void)cer_loader_kinds(cer_device_loader_plan(l->loader), &max_rows);
    l->n_tensors = cer_loader_tensors(cer_device_loader_plan(l->loader));
    l->group_rows = choose_group_rows(max_rows);
    if (status == CER_OK &&
        !cer_mul_size(l->group_rows, CER_LANE_GROUPS * sizeof(cer_row_place),
                      &bytes))
        return cer_fail(err, CER_NOMEM, "batches of %zu rows are too large",
                        max_rows);
    for (int i = 0; status == CER_OK && i < CER_LANE_GROUPS; i++)
        status = cer_device_event_new(l->device, &l->fences[i], err);
    return status == CER_OK
               ? cer_device_alloc_pinned(l->device, bytes, CER_USE_BATCHES,
                                         &l->pinned, err)
               : status;
}

cer_status
cer_lane_new(cer_device_loader *loader, cer_lane **out, cer_error *err)
{
    cer_lane *l = cer_calloc(1, sizeof *l);
    cer_status status;

    *out = NULL;
    if (l == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a lane");
    l->loader = loader;
    l->device = cer_device_loader_device(loader);
    status = make(l, err);
    if (status == CER_OK)
        *out = l;
    else
        cer_lane_free(l);
    return status;
}

void
cer_lane_free(cer_lane *l)
{
    if (l == NULL || cer_device_loader_check_process(l->loader, NULL) != CER_OK)
        return;
    for (int i = 0; i < CER_LANE_GROUPS; i++) {
        if (l->fences[i] != NULL)
            cer_device_event_free(l->device, l->fences[i]);
    }
    cer_device_free(l->device, &l->pinned);
    cer_free(l);
}

/* --- a batch ---------------------------------------------------------------
 */

void
cer_lane_fail(cer_lane *l)
{
    l->state = CER_LANE_FAILED;
}

/* The index of the graph for batches of this size; n_graphs: there is none. */
static size_t
find_graph(const cer_lane *l, size_t n_rows)
{
    size_t i = 0;

    while (i < l->run.n_graphs && l->run.graphs[i].n_rows != n_rows)
        i++;
    return i;
}

/* The next batch; false: the loader has none. */
static bool
look(const cer_lane *l, size_t *n_rows, bool *resident)
{
    cer_device_ahead ahead = l->ahead;

    if (l->left == 0)
        return cer_device_loader_look(l->loader, &ahead, n_rows, resident);
    *n_rows = l->n_rows[l->left - 1];
    *resident = l->resident;
    return true;
}

/* Who may take the next batch. */
static cer_lane_state
next_state(const cer_lane *l)
{
    size_t n_rows, graph;
    bool resident;

    if (l->done == l->run.n)
        return CER_LANE_QUEUED;
    if (!look(l, &n_rows, &resident))
        return CER_LANE_OWNERS; /* where it fails */
    graph = find_graph(l, n_rows);
    return resident && graph < l->run.n_graphs &&
                   l->run.graphs[graph].graph != NULL
               ? CER_LANE_GOING
               : CER_LANE_OWNERS;
}

static bool
is_cancelled(const cer_lane *l)
{
    return l->run.page != NULL &&
           atomic_load_explicit(&l->run.page->cancel, memory_order_relaxed) !=
               0;
}

/* The group whose pinned memory and fence are used now. */
static size_t
slot_of(const cer_lane *l)
{
    return l->n_groups % CER_LANE_GROUPS;
}

static cer_status
pass_fence(const cer_lane *l, bool may_wait, bool *done, cer_error *err)
{
    *done = true;
    if (l->n_groups < CER_LANE_GROUPS)
        return CER_OK;
    if (may_wait)
        return cer_device_event_sync(l->device, l->fences[slot_of(l)], err);
    return cer_device_event_query(l->device, l->fences[slot_of(l)], done, err);
}

/* Adds the loader's next batch to the group that is opened, which has *n
 * batches and *rows rows of resident ones. */
static cer_status
add_batch(cer_lane *l, cer_row_place *places, size_t *n, size_t *rows,
          bool may_wait, bool *more, cer_error *err)
{
    cer_device_ahead ahead = l->ahead;
    cer_status status = CER_OK;
    size_t n_rows;
    bool resident;

    *more = false;
    if (l->done + *n == l->run.n ||
        !cer_device_loader_look(l->loader, &ahead, &n_rows, &resident) ||
        (*n != 0 && (resident != l->resident ||
                     (resident && n_rows > l->group_rows - *rows))))
        return CER_OK;
    if (resident) {
        if (!(may_wait && *n == 0) && !cer_device_loader_has_places(l->loader))
            return CER_OK;
        status =
            cer_device_loader_places(l->loader, n_rows, places + *rows, err);
        if (status != CER_OK)
            return status;
        *rows += n_rows;
    }
    l->resident = resident;
    l->ahead = ahead;
    l->n_rows[(*n)++] = n_rows;
    *more = true;
    return CER_OK;
}

/* The batches of a group are taken from its end. */
static void
reverse(size_t *numbers, size_t n)
{
    for (size_t i = 0; i < n / 2; i++) {
        size_t number = numbers[i];

        numbers[i] = numbers[n - 1 - i];
        numbers[n - 1 - i] = number;
    }
}

/* Takes the next group's batches; none: the lane has to wait. */
static cer_status
open_group(cer_lane *l, bool may_wait, cer_error *err)
{
    cer_row_place *places =
        (cer_row_place *)l->pinned.data + slot_of(l) * l->group_rows;
    size_t n = 0, rows = 0;
    bool more;
    cer_status status = pass_fence(l, may_wait, &more, err);

    l->awaits_loader = more;
    while (status == CER_OK && more && n < CER_LANE_GROUP)
        status = add_batch(l, places, &n, &rows, may_wait, &more, err);
    if (status != CER_OK || n == 0)
        return status;
    reverse(l->n_rows, n);
    l->left = n;
    l->first_row = 0;
    return cer_device_copy(l->device, l->places, places, rows * sizeof *places,
                           CER_COPY_TO_DEVICE, l->run.stream, err);
}

/* Copies a batch that the loader makes. */
static cer_status
copy_batch(cer_lane *l, size_t n_rows, void *const *to, cer_error *err)
{
    const intptr_t stream = l->run.stream == NULL ? (intptr_t)CER_STREAM_LEGACY
                                                  : (intptr_t)l->run.stream;
    cer_batch *b = NULL;
    cer_status status =
        cer_device_loader_next(l->loader, l->run.stream, &b, err);

    if (status == CER_OK && (b == NULL || b->n_rows != n_rows))
        status = cer_fail(err, CER_INVALID, "the pass has changed");
    if (status == CER_OK && b->block.place != NULL)
        status = b->block.place->join(b->block.place, stream, err);
    for (size_t i = 0; status == CER_OK && i < l->n_tensors; i++)
        status = cer_device_copy(l->device, to[i], b->tensors[i].data,
                                 cer_tensor_bytes(&b->tensors[i]),
                                 CER_COPY_ON_DEVICE, l->run.stream, err);
    if (b != NULL)
        cer_owner_release(&b->owner);
    return status;
}

/* Puts the next batch into its graph's inputs. *graph is that graph's index,
 * or n_graphs if the lane has to wait. */
static cer_status
gather(cer_lane *l, bool may_wait, size_t *graph, cer_error *err)
{
    cer_status status = CER_OK;
    size_t n_rows;

    *graph = l->run.n_graphs;
    if (is_cancelled(l))
        return cer_fail(err, CER_CANCELLED, "the unit was cancelled");
    if (l->left == 0)
        status = open_group(l, may_wait, err);
    if (status != CER_OK || (l->left == 0 && !may_wait))
        return status;
    if (l->left == 0)
        return cer_fail(err, CER_INVALID, "the pass has fewer batches");
    n_rows = l->n_rows[l->left - 1];
    *graph = find_graph(l, n_rows);
    if (*graph == l->run.n_graphs)
        return cer_fail(err, CER_INVALID, "no graph for %zu rows", n_rows);
    if (!l->resident)
        return copy_batch(l, n_rows, l->run.graphs[*graph].inputs, err);
    return cer_device_loader_write(l->loader, l->places + l->first_row, n_rows,
                                   l->run.graphs[*graph].inputs, l->run.stream,
                                   err);
}

static void
count(const cer_lane *l, size_t n_rows)
{
    if (l->run.page == NULL)
        return;
    atomic_fetch_add_explicit(&l->run.page->rows, n_rows, memory_order_relaxed);
    atomic_fetch_add_explicit(&l->run.page->batches, 1, memory_order_relaxed);
}

/* Keeps the numbers of launch `n_done` (1, 2, ...), if any, and sets the rates
 * of the next. */
static cer_status
put_between(cer_lane *l, size_t n_done, cer_error *err)
{
    const cer_lane_run *run = &l->run;
    size_t n_rates =
        run->rate_values != NULL && n_done < run->n ? run->n_rates : 0;
    size_t n_values = n_done == 0 ? 0 : run->n_values;
    cer_lane_args args = {
        .values = l->values + l->graph * n_values,
        .kept = n_values == 0 ? NULL : l->kept + (n_done - 1) * n_values,
        .rates = l->rates,
        .next = n_rates == 0 ? NULL : l->rate_values + n_done * n_rates,
        .items = n_values + n_rates,
        .n_values = n_values,
    };

    return cer_lane_kernel_launch(l->device, &args, run->stream, err);
}

/* Ends the batch, after its launch. */
static cer_status
finish(cer_lane *l, cer_error *err)
{
    size_t n_rows = l->n_rows[--l->left];
    cer_status status;

    l->graph = find_graph(l, n_rows);
    status = put_between(l, ++l->done, err);

    l->gathered = false;
    l->first_row += n_rows;
    count(l, n_rows);
    if (status == CER_OK && l->left == 0)
        status = cer_device_event_record(l->device, l->fences[slot_of(l)],
                                         l->run.stream, err);
    l->n_groups += l->left == 0;
    return status;
}

static void
end_batch(cer_lane *l)
{
    if (finish(l, &l->error) != CER_OK)
        cer_lane_fail(l);
    else
        l->state = next_state(l);
}

/* Takes the batch, but for a launch that is the owner's. */
static void
take(cer_lane *l, bool may_wait, size_t *graph)
{
    cer_status status = gather(l, may_wait, graph, &l->error);

    if (status == CER_OK && *graph == l->run.n_graphs) {
        l->state = CER_LANE_WAITING;
        return;
    }
    if (status == CER_OK && l->run.graphs[*graph].graph == NULL) {
        l->gathered = true;
        return;
    }
    if (status == CER_OK)
        status = cer_device_launch_graph(l->device, l->run.graphs[*graph].graph,
                                         l->run.stream, &l->error);
    if (status != CER_OK)
        cer_lane_fail(l);
    else
        end_batch(l);
}

/* --- for owners and drivers ------------------------------------------------
 */

cer_lane_state
cer_lane_state_of(const cer_lane *l)
{
    return l->state;
}

cer_lane_state
cer_lane_step(cer_lane *l, bool may_wait)
{
    size_t graph;

    take(l, may_wait, &graph);
    return l->state;
}

void
cer_lane_sleep(cer_lane *l)
{
    (void)cer_device_event_sync(l->device, l->fences[slot_of(l)], NULL);
}

bool
cer_lane_take(cer_lane *l, size_t *launch)
{
    cer_device_visit visit;

    if (cer_device_enter(l->device, &visit, &l->error) != CER_OK) {
        cer_lane_fail(l);
        return true;
    }
    take(l, true, launch);
    cer_device_leave(l->device, &visit);
    return !l->gathered;
}

void
cer_lane_launched(cer_lane *l)
{
    cer_device_visit visit;

    if (cer_device_enter(l->device, &visit, &l->error) != CER_OK) {
        cer_lane_fail(l);
        return;
    }
    end_batch(l);
    cer_device_leave(l->device, &visit);
}

/* --- the run ---------------------------------------------------------------
 */

/* Bytes of the run's memory: places, and behind them what is uploaded once,
 * and the numbers. */
typedef struct layout {
    size_t places, values, rates, rate_values, kept;
    size_t tables; /* bytes of those in the middle */
    size_t all;
} layout;

static bool
lay_out(const cer_lane *l, const cer_lane_run *run, layout *out)
{
    size_t n_rate_values = run->rate_values == NULL ? 0 : run->n;

    if (!cer_mul_size(l->group_rows, sizeof(cer_row_place), &out->places) ||
        !cer_mul_size(run->n_graphs, run->n_values, &out->values) ||
        !cer_mul_size(out->values, sizeof(cer_lane_value), &out->values) ||
        !cer_mul_size(run->n_rates, sizeof(float *), &out->rates) ||
        !cer_mul_size(n_rate_values, run->n_rates, &out->rate_values) ||
        !cer_mul_size(out->rate_values, sizeof(float), &out->rate_values) ||
        !cer_add_size(out->rate_values, out->rate_values % sizeof(uint64_t),
                      &out->rate_values) ||
        !cer_mul_size(run->n, run->n_values, &out->kept) ||
        !cer_mul_size(out->kept, sizeof(uint64_t), &out->kept) ||
        !cer_add_size(out->values, out->rates, &out->tables) ||
        !cer_add_size(out->tables, out->rate_values, &out->tables) ||
        !cer_add_size(out->tables, out->places, &out->all))
        return false;
    return cer_add_size(out->all, out->kept, &out->all);
}

static void
copy_bytes(uint8_t *to, const void *from, size_t bytes)
{
    if (bytes != 0)
        memcpy(to, from, bytes);
}

/* Uploads what the kernel reads. */
static cer_status
upload(cer_lane *l, const layout *at, cer_error *err)
{
    const cer_lane_run *run = &l->run;
    uint8_t *tables, *there = l->memory->memory.data;

    if (at->tables == 0)
        return CER_OK;
    tables = l->tables = cer_calloc(1, at->tables);
    if (tables == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a lane");
    for (size_t i = 0; i < run->n_graphs; i++)
        copy_bytes(tables + i * run->n_values * sizeof(cer_lane_value),
                   run->graphs[i].values,
                   run->n_values * sizeof(cer_lane_value));
    copy_bytes(tables + at->values, run->rates, at->rates);
    if (run->rate_values != NULL)
        copy_bytes(tables + at->values + at->rates, run->rate_values,
                   run->n * run->n_rates * sizeof(float));
    return cer_device_copy(l->device, there + at->places, tables, at->tables,
                           CER_COPY_TO_DEVICE, run->stream, err);
}

static cer_status
get_memory(cer_lane *l, const layout *at, cer_error *err)
{
    cer_status status = cer_depot_get(cer_device_loader_depot(l->loader),
                                      at->all, &l->memory, err);
    uint8_t *there;

    if (status != CER_OK)
        return status;
    there = l->memory->memory.data;
    l->places = (void *)there;
    there += at->places;
    l->values = (void *)there;
    there += at->values;
    l->rates = (void *)there;
    there += at->rates;
    l->rate_values = (void *)there;
    there += at->rate_values;
    l->kept = (void *)there;
    return cer_uses_before(&l->memory->uses, l->run.stream, err);
}

/* Returns the run's memory, which nothing uses any more. */
static void
drop_memory(cer_lane *l)
{
    if (l->memory != NULL)
        cer_depot_give(l->memory);
    l->memory = NULL;
    cer_free(l->tables);
    l->tables = NULL;
}

static cer_status
begin(cer_lane *l, cer_error *err)
{
    layout at;
    cer_status status;

    if (!lay_out(l, &l->run, &at))
        return cer_fail(err, CER_NOMEM, "out of memory for a lane");
    status = cer_device_loader_join(l->loader, l->run.stream, err);
    if (status == CER_OK)
        status = get_memory(l, &at, err);
    if (status == CER_OK)
        status = upload(l, &at, err);
    if (status == CER_OK)
        status = put_between(l, 0, err);
    if (status != CER_OK && l->memory != NULL)
        cer_uses_end(&l->memory->uses);
    if (status != CER_OK)
        drop_memory(l);
    return status;
}

cer_status
cer_lane_begin(cer_lane *l, const cer_lane_run *run, cer_error *err)
{
    cer_device_visit visit;
    cer_status status = cer_device_enter(l->device, &visit, err);

    if (status != CER_OK)
        return status;
    l->run = *run;
    l->ahead = cer_device_loader_look_ahead(l->loader);
    l->n_groups = l->left = l->done = l->graph = 0;
    l->gathered = false;
    l->error = (cer_error){.status = CER_OK};
    status = begin(l, err);
    if (status == CER_OK) {
        cer_device_loader_hold(l->loader, true);
        l->state = next_state(l);
    }
    cer_device_leave(l->device, &visit);
    return status;
}

/* Waits for the run's work, and reads its numbers. */
static cer_status
read_kept(cer_lane *l, uint64_t *kept, cer_error *err)
{
    size_t bytes = l->run.n * l->run.n_values * sizeof *kept;
    cer_status status = cer_uses_wait(&l->memory->uses, err);

    if (status == CER_OK)
        status = cer_device_copy(l->device, kept, l->kept, bytes,
                                 CER_COPY_FROM_DEVICE, l->run.stream, err);
    return status == CER_OK && bytes != 0
               ? cer_device_stream_sync(l->device, l->run.stream, err)
               : status;
}

static cer_status
end(cer_lane *l, uint64_t *kept, cer_error *err)
{
    cer_status status = CER_OK;

    if (l->state == CER_LANE_QUEUED)
        status = read_kept(l, kept, err);
    else if (l->state == CER_LANE_FAILED)
        status = cer_fail(err, l->error.status, "%s", l->error.message);
    else
        status = cer_fail(err, CER_CANCELLED, "the run was given up");
    if (status != CER_OK)
        cer_uses_end(&l->memory->uses);
    return status;
}

cer_status
cer_lane_end(cer_lane *l, uint64_t *kept, size_t *done, cer_error *err)
{
    cer_device_visit visit;
    bool inside = cer_device_enter(l->device, &visit, NULL) == CER_OK;
    cer_status status = end(l, kept, err);

    drop_memory(l);
    cer_device_loader_hold(l->loader, false);
    *done = l->done;
    if (inside)
        cer_device_leave(l->device, &visit);
    return status;
}
