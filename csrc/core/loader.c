/* The steps of a pass with threads. The gatherer (the caller of next(), or a
 * thread):
 *
 *   claims, under the lock: the next batch's place in the pass, a buffer from
 *      the ring, and a copy of its row numbers out of the mix's order;
 *   fills, without the lock: sorts the rows by part, places the tensors in
 *      the buffer and runs every column's transform, once for each part;
 *   publishes, under the lock: marks the batch as ready.
 *
 * The window holds the batches claimed and not yet delivered, batch i at i %
 * MAX_WINDOW, so delivery is in order whichever thread finishes first. Row
 * numbers are copied at the claim, so an order is free once its mix's last
 * batch is claimed: two orders suffice, and mix i of the pass uses i % 2.
 *
 * Without threads, because none were requested or none could start, next() does
 * all three steps and nothing takes the lock: a fork at any moment leaves a
 * loader that can be freed and whose counts can be read. The lock is used once
 * one thread has started. */
#include "loader.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "cut.h"
#include "float_env.h"
#include "gather.h"
#include "thread.h"

#define NO_MEMORY "out of memory for the next batch"

enum { MAX_WINDOW = 64, WINDOW_BYTES = 1 << 18, SMALL_WINDOW = 8 };

typedef enum tensor_role { ROLE_VALUES, ROLE_MASK, ROLE_LENGTH } tensor_role;

typedef struct load_column {
    char *name;
    size_t index; /* in the shard */
    bool ragged;
    bool channels_last;
    size_t row_bytes; /* of a value if ragged */
    cer_transform *transform;
    size_t tensor; /* index of its first tensor */
} load_column;

typedef enum order_state { ORDER_MISSING, ORDER_BUSY, ORDER_READY } order_state;

/* The order of one of the pass's mixes. */
typedef struct held_order {
    order_state state;
    cer_order *order;
} held_order;

/* A mix of the pass. Its rows are numbered through its parts. */
typedef struct mix {
    const uint32_t *parts;
    const uint32_t *starts; /* n_parts + 1: the first row of each part */
    size_t n_parts;
    uint64_t parts_per_row; /* n_parts / rows, times 2**32 */
    cer_cut cut;
    size_t first, end; /* batches in the pass */
} mix;

/* Rows of a batch that are of one part. */
typedef struct run {
    uint32_t part;
    size_t first, n;
} run;

typedef struct worker {
    cer_loader *loader;
    void *scratch;   /* for transforms */
    uint32_t *found; /* max_rows row numbers, and as many parts */
    run *runs;       /* n_parts */
    size_t n_runs;   /* of the batch that is filled */
    pthread_t thread;
} worker;

struct cer_loader {
    /* Fixed when the loader is made. */
    cer_load_options options;
    cer_part *parts;
    size_t n_parts;
    size_t all_rows; /* of all parts */
    cer_orders *orders;
    bool draws; /* some part has weights */
    load_column *columns;
    size_t n_columns, n_tensors;
    size_t window; /* batches claimed ahead of delivery */
    size_t refill; /* threads are woken when at most this many are left */
    cer_batch_ring *ring;
    cer_tensor *kinds; /* n_tensors initial values of the ring */
    size_t max_rows;
    cer_part_way *ways; /* one per part */
    bool *late, *raw;   /* one per tensor: late in parts of that kind */
    bool raw_draws;     /* some raw column draws random numbers */
    size_t keep;        /* batches between passes, in use or not */
    worker *workers;    /* the threads, and at the end the one in next() */
    /* The caller's, one call at a time; no thread reads them, so the caller
     * needs no lock. */
    pid_t process; /* the process that started the threads */
    size_t n_started;
    bool closed;
    /* Of the pass; readable by any thread at any time, written under the
     * lock. */
    atomic_size_t n_batches, n_rows;
    /* The lock guards all fields below. */
    pthread_mutex_t lock;
    /* For threads: there may be work. Broadcast to all, because a different
     * thread may be able to do work that one thread leaves (an order that it
     * makes, a pause). */
    pthread_cond_t work;
    /* For the caller, in next() or begin(): a thread has finished a piece of
     * work. At most one waiter, so a signal suffices. */
    pthread_cond_t ready;
    bool stopping, paused;
    size_t active; /* threads that are working without the lock */
    /* The pass. */
    mix *mixes; /* those that have batches */
    size_t n_mixes, mix_room;
    uint32_t *mixed; /* the parts and starts of the mixes */
    size_t mixed_room;
    size_t at;    /* mix from which batches are claimed */
    size_t batch; /* next batch to claim of that mix */
    size_t claimed, delivered;
    uint64_t epoch;
    held_order held[2];
    cer_status failed; /* kept until the next pass */
    cer_batch *waiting[MAX_WINDOW];
};

/* --- filling: without the lock -------------------------------------------- */

/* The part of the mix, by its place there, that has a row: parts are nearly
 * equal, so the guess is nearly right. */
static size_t
part_of(const mix *m, uint32_t row)
{
    size_t i = (size_t)(row * m->parts_per_row >> 32);

    while (row < m->starts[i])
        i--;
    while (row >= m->starts[i + 1])
        i++;
    return i;
}

/* Sorts the batch's rows, numbered in the mix, by part. Afterwards they are
 * numbered in their shards, in runs. */
static void
sort_rows(const cer_loader *l, const mix *m, cer_batch *b, worker *w)
{
    uint32_t *row = w->found, *of = w->found + l->max_rows;
    size_t first = 0;

    for (size_t i = 0; i < m->n_parts; i++)
        w->runs[i] = (run){m->parts[i], 0, 0};
    for (size_t i = 0; i < b->n_rows; i++) {
        size_t part = m->n_parts == 1 ? 0 : part_of(m, b->rows[i]);

        row[i] = b->rows[i] - m->starts[part];
        of[i] = (uint32_t)part;
        w->runs[part].n++;
    }
    for (size_t i = 0; i < m->n_parts; i++) {
        w->runs[i].first = first;
        first += w->runs[i].n;
        w->runs[i].n = 0;
    }
    for (size_t i = 0; i < b->n_rows; i++) {
        run *r = &w->runs[of[i]];
        const cer_part *part = &l->parts[r->part];

        b->rows[r->first + r->n++] = part->rows != NULL
                                         ? part->rows[row[i]]
                                         : (uint32_t)part->start + row[i];
    }
    w->n_runs = 0;
    for (size_t i = 0; i < m->n_parts; i++) {
        if (w->runs[i].n != 0)
            w->runs[w->n_runs++] = w->runs[i];
    }
}

static const cer_column *
source_of(const cer_loader *l, const run *r, const load_column *c)
{
    size_t n;

    return &cer_shard_columns(l->parts[r->part].shard, &n)[c->index];
}

/* The place of a run's first row, without arithmetic on NULL. */
static uint8_t *
place_of(void *data, const run *r, size_t row_bytes)
{
    return data == NULL ? NULL : (uint8_t *)data + r->first * row_bytes;
}

static cer_status
shape_ragged(const cer_loader *l, const load_column *c, cer_batch *b,
             const worker *w)
{
    cer_tensor *tensors = &b->tensors[c->tensor];
    const cer_row_type *type = cer_transform_output(c->transform);
    size_t length = 0, bytes;

    for (size_t i = 0; i < w->n_runs; i++) {
        const run *r = &w->runs[i];
        size_t longest =
            cer_transform_length(c->transform, source_of(l, r, c)->offsets,
                                 b->rows + r->first, r->n);

        length = longest > length ? longest : length;
    }
    /* One very long row makes every row of the batch that long. */
    if (!cer_mul_size(length, b->n_rows, &bytes) || bytes > SIZE_MAX / 32 ||
        !cer_mul_size(bytes, type->bytes, &bytes) || bytes > SIZE_MAX / 32)
        return CER_NOMEM;
    tensors[ROLE_VALUES].shape[1] = (int64_t)length;
    tensors[ROLE_MASK].shape[1] = (int64_t)length;
    return CER_OK;
}

/* Computes the bytes of raw rows. Without a worker's runs ragged ones count as
 * empty. */
static void
measure_raw(const cer_loader *l, cer_batch *b, const worker *w)
{
    for (size_t i = 0; i < l->n_columns; i++) {
        const load_column *c = &l->columns[i];
        cer_batch_raw *raw = &b->raw[c->tensor];

        if (!b->with_raw || !l->raw[c->tensor])
            continue;
        if (!c->ragged) {
            raw->bytes = b->n_rows * c->row_bytes;
            continue;
        }
        raw[ROLE_LENGTH].bytes = (b->n_rows + 1) * sizeof(int64_t);
        raw[ROLE_VALUES].bytes = 0;
        for (size_t k = 0; w != NULL && k < w->n_runs; k++) {
            const run *r = &w->runs[k];

            raw[ROLE_VALUES].bytes += cer_transform_ragged_bytes(
                c->transform, source_of(l, r, c)->offsets, b->rows + r->first,
                r->n);
        }
    }
}

static cer_status
shape_batch(const cer_loader *l, cer_batch *b, const worker *w)
{
    cer_status status = CER_OK;

    for (size_t i = 0; i < b->n_tensors; i++)
        b->tensors[i].shape[0] = (int64_t)b->n_rows;
    for (size_t i = 0; status == CER_OK && i < l->n_columns; i++) {
        const load_column *c = &l->columns[i];

        if (!c->ragged)
            continue;
        status = shape_ragged(l, c, b, w);
        cer_tensor_pack(&b->tensors[c->tensor + ROLE_VALUES]);
        cer_tensor_pack(&b->tensors[c->tensor + ROLE_MASK]);
    }
    if (status != CER_OK)
        return cer_fail(&b->error, status, NO_MEMORY);
    measure_raw(l, b, w);
    return cer_batch_place(b, &b->error);
}

static void
gather_raw(const load_column *c, const cer_column *source, cer_batch *b,
           const run *r)
{
    const cer_batch_raw *raw = &b->raw[c->tensor];
    const uint32_t *rows = b->rows + r->first;
    int64_t *starts;

    if (!c->ragged) {
        cer_gather_some(place_of(raw->data, r, c->row_bytes), source->data,
                        c->row_bytes, rows, r->n, b->n_rows);
        return;
    }
    /* The run's values follow those of the runs before it. */
    starts = (int64_t *)(void *)raw[ROLE_LENGTH].data + r->first;
    cer_transform_gather_ragged(c->transform, raw[ROLE_VALUES].data,
                                r->first == 0 ? 0 : (size_t)starts[0],
                                raw[ROLE_VALUES].bytes, starts, source->data,
                                source->offsets, rows, r->n);
}

static void
fill_column(const cer_loader *l, const load_column *c, cer_batch *b,
            const run *r, void *scratch)
{
    const cer_part *part = &l->parts[r->part];
    const cer_column *source = source_of(l, r, c);
    const uint32_t *rows = b->rows + r->first;
    cer_row_key key = {l->options.seed, l->epoch, part->first_row};
    cer_tensor *t = &b->tensors[c->tensor];
    size_t bytes = cer_transform_output(c->transform)->bytes, length;

    if (b->late != NULL && b->late[c->tensor]) {
        if (b->with_raw)
            gather_raw(c, source, b, r);
        return;
    }
    if (!c->ragged && cer_transform_copies(c->transform)) {
        cer_gather_some(place_of(t->data, r, bytes), source->data, bytes, rows,
                        r->n, b->n_rows);
        return;
    }
    if (!c->ragged) {
        cer_transform_rows(c->transform, place_of(t->data, r, bytes),
                           source->data, rows, r->n, &key, scratch);
        return;
    }
    length = (size_t)t[ROLE_VALUES].shape[1];
    cer_transform_ragged(c->transform,
                         place_of(t[ROLE_VALUES].data, r, length * bytes),
                         place_of(t[ROLE_MASK].data, r, length),
                         (int64_t *)t[ROLE_LENGTH].data + r->first, length,
                         source->data, source->offsets, rows, r->n);
}

/* Prefetches a run's first rows while the one before it is filled: a batch has
 * few rows of each part, so each run would begin with a wait for memory. */
static void
ask_for(const cer_loader *l, const load_column *c, const cer_batch *b,
        const run *r)
{
    bool late = b->late != NULL && b->late[c->tensor];

    if (!c->ragged && (!late || b->with_raw))
        cer_gather_ask_rows(source_of(l, r, c)->data, c->row_bytes,
                            b->rows + r->first, r->n);
}

static void
write_places(cer_batch *b, const run *r)
{
    cer_row_place *places = b->block.data;

    for (size_t i = r->first; i < r->first + r->n; i++)
        places[i] = (cer_row_place){b->rows[i], r->part};
}

static void
fill_columns(const cer_loader *l, cer_batch *b, worker *w)
{
    sort_rows(l, &l->mixes[b->mix], b, w);
    if (shape_batch(l, b, w) != CER_OK)
        return;
    for (size_t i = 0; b->with_rows && i < w->n_runs; i++)
        write_places(b, &w->runs[i]);
    for (size_t i = 0; i < l->n_columns; i++) {
        for (size_t k = 0; k < w->n_runs; k++) {
            if (k + 1 < w->n_runs)
                ask_for(l, &l->columns[i], b, &w->runs[k + 1]);
            fill_column(l, &l->columns[i], b, &w->runs[k], w->scratch);
        }
    }
}

/* The caller's thread may have a different floating-point mode than the
 * loader's threads, and any of them may fill a batch. */
static void
fill_batch(const cer_loader *l, cer_batch *b, worker *w)
{
    fenv_t before;

    cer_float_enter(&before);
    fill_columns(l, b, w);
    cer_float_leave(&before);
}

static bool
is_drawn(const cer_loader *l, const mix *m)
{
    bool drawn = false;

    for (size_t i = 0; i < m->n_parts; i++)
        drawn = drawn || l->parts[m->parts[i]].sums != NULL;
    return drawn;
}

/* Takes a mix's order; the state of `held` excludes other threads. */
static cer_status
take_order(const cer_loader *l, held_order *held, const mix *m)
{
    cer_draw_part *draws = NULL;
    cer_order_key key = {.seed = l->options.seed,
                         .epoch = l->epoch,
                         .mix = m->parts[0],
                         .n = (uint32_t)m->cut.rows};
    cer_status status;

    if (is_drawn(l, m)) {
        draws = cer_calloc(m->n_parts, sizeof *draws);
        if (draws == NULL)
            return CER_NOMEM;
        for (size_t i = 0; i < m->n_parts; i++) {
            const cer_part *part = &l->parts[m->parts[i]];

            draws[i] = (cer_draw_part){part->sums, part->sum_before,
                                       m->parts[i], (uint32_t)part->count};
        }
        key.draws = draws;
        key.n_draws = l->options.draw_across ? 1 : m->n_parts;
        if (l->options.draw_across)
            draws[0].n = key.n;
    }
    status = cer_orders_take(l->orders, &key, &held->order, NULL);
    cer_free(draws);
    return status;
}

static void
let_go(held_order *held)
{
    cer_order_release(held->order);
    held->order = NULL;
    held->state = ORDER_MISSING;
}

/* --- claiming: under the lock --------------------------------------------- */

/* The mix of the pass with the next batch. */
static size_t
next_at(const cer_loader *l)
{
    return l->batch < l->mixes[l->at].end ? l->at : l->at + 1;
}

static bool
may_claim(const cer_loader *l)
{
    return l->failed == CER_OK && l->claimed < l->n_batches &&
           l->claimed - l->delivered < l->window;
}

static held_order *
held_at(cer_loader *l, size_t at)
{
    return &l->held[at & 1];
}

/* Copies the batch's row numbers in the mix. */
static void
copy_rows(cer_loader *l, cer_batch *b, const mix *m)
{
    size_t first = cer_cut_first(&m->cut, l->batch);

    b->n_rows = cer_cut_first(&m->cut, l->batch + 1) - first;
    if (l->options.shuffle) {
        memcpy(b->rows, held_at(l, l->at)->order->rows + first,
               b->n_rows * sizeof *b->rows);
        return;
    }
    for (size_t i = 0; i < b->n_rows; i++)
        b->rows[i] = (uint32_t)(first + i);
}

/* How a mix is loaded: as its parts are, if all are alike. */
static cer_part_way
way_of(const cer_loader *l, const mix *m)
{
    cer_part_way way = l->ways[m->parts[0]];

    for (size_t i = 1; way == CER_PART_LATE && i < m->n_parts; i++)
        way = l->ways[m->parts[i]];
    return way;
}

static void
go_way(const cer_loader *l, cer_batch *b, cer_part_way way)
{
    b->only_head = way != CER_PART_WHOLE;
    b->with_raw = way == CER_PART_RAW;
    b->with_rows = way == CER_PART_LATE || (b->with_raw && l->raw_draws);
    b->late = way == CER_PART_WHOLE ? NULL
              : way == CER_PART_RAW ? l->raw
                                    : l->late;
}

/* Takes the next batch with its row numbers, to be filled; its order is ready.
 * NULL: out of memory, and the pass has failed. */
static cer_batch *
claim(cer_loader *l)
{
    cer_batch *b = cer_batch_ring_take(l->ring);

    if (b == NULL) {
        l->failed = CER_NOMEM;
        return NULL;
    }
    if (next_at(l) != l->at) {
        let_go(held_at(l, l->at));
        l->at++;
        l->batch = l->mixes[l->at].first;
    }
    b->mix = l->at;
    go_way(l, b, way_of(l, &l->mixes[l->at]));
    copy_rows(l, b, &l->mixes[l->at]);
    l->batch++;
    l->waiting[l->claimed % MAX_WINDOW] = b;
    l->claimed++;
    return b;
}

static bool
order_missing(cer_loader *l, size_t at)
{
    return l->options.shuffle && at < l->n_mixes &&
           held_at(l, at)->state == ORDER_MISSING;
}

/* --- threads -------------------------------------------------------------- */

/* For the caller's changes of the pass. A worker always locks. */
static void
lock(cer_loader *l)
{
    if (l->n_started != 0)
        pthread_mutex_lock(&l->lock);
}

static void
unlock(cer_loader *l)
{
    if (l->n_started != 0)
        pthread_mutex_unlock(&l->lock);
}

/* Called and returns under the lock; in between the state BUSY keeps other
 * threads from the order, and `active` keeps begin() from changing the pass. */
static void
prepare_order(cer_loader *l, size_t at)
{
    held_order *held = held_at(l, at);
    cer_status status;

    held->state = ORDER_BUSY;
    l->active++;
    pthread_mutex_unlock(&l->lock);
    status = take_order(l, held, &l->mixes[at]);
    pthread_mutex_lock(&l->lock);
    l->active--;
    held->state = status == CER_OK ? ORDER_READY : ORDER_MISSING;
    if (status != CER_OK)
        l->failed = status;
    pthread_cond_broadcast(&l->work);
    pthread_cond_signal(&l->ready);
}

/* Called and returns under the lock. In between only this thread uses the
 * batch: it is in the window, but not read before it is ready. */
static void
gather_one(cer_loader *l, worker *w)
{
    cer_batch *b = claim(l);

    if (b == NULL) {
        pthread_cond_signal(&l->ready);
        return;
    }
    l->active++;
    pthread_mutex_unlock(&l->lock);
    fill_batch(l, b, w);
    pthread_mutex_lock(&l->lock);
    l->active--;
    b->ready = true;
    pthread_cond_signal(&l->ready);
}

/* Does the next piece of work, if one is left to begin; called under the
 * lock. */
static bool
do_some_work(cer_loader *l, worker *w)
{
    size_t at;

    if (l->paused || !may_claim(l))
        return false;
    at = next_at(l);
    if (order_missing(l, at))
        prepare_order(l, at);
    else if (!l->options.shuffle || held_at(l, at)->state == ORDER_READY)
        gather_one(l, w);
    else
        return false;
    return true;
}

static void *
run_worker(void *argument)
{
    worker *w = argument;
    cer_loader *l = w->loader;

    pthread_mutex_lock(&l->lock); /* released in do_some_work and waits */
    while (!l->stopping) {
        if (do_some_work(l, w))
            continue;
        if (!l->paused && l->failed == CER_OK && order_missing(l, l->at + 1))
            prepare_order(l, l->at + 1); /* nothing else to do */
        else
            pthread_cond_wait(&l->work, &l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* Starts the missing threads. If one cannot start (a limit on processes, no
 * memory), the loader continues with those it has, or without any: batches are
 * the same. The next pass retries. */
static void
start_threads(cer_loader *l)
{
    l->process = getpid();
    while (l->n_started < l->options.threads) {
        worker *w = &l->workers[l->n_started];

        if (cer_thread_start(&w->thread, run_worker, w) != 0)
            break;
        l->n_started++;
    }
}

/* Whether the threads belong to a different process. Here their lock may be
 * held forever, and the fields it guards may be half changed. */
static bool
forked(const cer_loader *l)
{
    return l->n_started != 0 && l->process != getpid();
}

/* --- the pass ------------------------------------------------------------- */

static void
drop_waiting(cer_loader *l)
{
    for (; l->delivered < l->claimed; l->delivered++)
        cer_owner_release(&l->waiting[l->delivered % MAX_WINDOW]->owner);
}

/* Checks the parts of a mix; adds its rows and its parts to the totals. */
static cer_status
check_mix(const cer_loader *l, const cer_mix *m, size_t *parts, cer_error *err)
{
    size_t rows = 0;

    for (size_t i = 0; i < m->n; i++) {
        if (m->parts[i] >= l->n_parts)
            return cer_fail(err, CER_INVALID, "no shard %u: there are %zu",
                            (unsigned)m->parts[i], l->n_parts);
        if (i != 0 && m->parts[i] <= m->parts[i - 1])
            return cer_fail(err, CER_INVALID,
                            "the shards of a mix must be in ascending order");
        rows += l->parts[m->parts[i]].count;
    }
    if (rows > UINT32_MAX)
        return cer_fail(err, CER_INVALID,
                        "%zu rows are too many to be shuffled together: use "
                        "shuffle='shards'",
                        rows);
    *parts += m->n;
    return CER_OK;
}

/* Checks that a mix is drawn from one array, and that it has some weight. */
static cer_status
check_draws(const cer_loader *l, const mix *m, cer_error *err)
{
    const cer_part *first = &l->parts[m->parts[0]], *last = first;

    if (!l->options.shuffle || !l->draws || !l->options.draw_across)
        return CER_OK;
    for (size_t i = 1; i < m->n_parts; i++) {
        const cer_part *next = &l->parts[m->parts[i]];

        if (next->sums != last->sums + last->count)
            return cer_fail(err, CER_INVALID,
                            "rows are drawn from all shards, or from one");
        last = next;
    }
    if (last->sums[last->count - 1] <= first->sum_before)
        return cer_fail(err, CER_INVALID, "all weights of the rows are 0");
    return CER_OK;
}

static cer_status
make_room(cer_loader *l, size_t n_mixes, size_t n_parts, cer_error *err)
{
    size_t numbers = 2 * n_parts + n_mixes;

    if (n_mixes > l->mix_room) {
        mix *mixes = cer_realloc(l->mixes, n_mixes * sizeof *mixes);

        if (mixes == NULL)
            return cer_fail(err, CER_NOMEM, NO_MEMORY);
        l->mixes = mixes;
        l->mix_room = n_mixes;
    }
    if (numbers > l->mixed_room) {
        uint32_t *mixed = cer_realloc(l->mixed, numbers * sizeof *mixed);

        if (mixed == NULL)
            return cer_fail(err, CER_NOMEM, NO_MEMORY);
        l->mixed = mixed;
        l->mixed_room = numbers;
    }
    return CER_OK;
}

/* Copies a mix's parts that have rows to `numbers`, and counts its rows;
 * returns the end of what it has written. */
static uint32_t *
lay_out_mix(const cer_loader *l, const cer_mix *given, mix *m,
            uint32_t *numbers)
{
    uint32_t *starts;

    *m = (mix){.parts = numbers,
               .cut = {.batch_size = l->options.batch_size,
                       .drop_last = l->options.drop_last}};
    for (size_t i = 0; i < given->n; i++) {
        if (l->parts[given->parts[i]].count != 0)
            numbers[m->n_parts++] = given->parts[i];
    }
    starts = numbers + m->n_parts;
    m->starts = starts;
    for (size_t i = 0; i < m->n_parts; i++) {
        starts[i] = (uint32_t)m->cut.rows;
        m->cut.rows += l->parts[m->parts[i]].count;
    }
    starts[m->n_parts] = (uint32_t)m->cut.rows;
    if (m->cut.rows != 0)
        m->parts_per_row = ((uint64_t)m->n_parts << 32) / m->cut.rows;
    return starts + m->n_parts + 1;
}

static void
clear_pass(cer_loader *l)
{
    drop_waiting(l);
    let_go(&l->held[0]);
    let_go(&l->held[1]);
    l->n_mixes = 0;
    l->n_batches = 0;
    l->n_rows = 0;
    l->at = l->batch = 0;
    l->claimed = l->delivered = 0;
    l->failed = CER_OK;
}

/* Takes the mixes that have batches after the first `start`, up to `count` of
 * them. */
static cer_status
set_pass(cer_loader *l, const cer_mix *mixes, size_t n, size_t start,
         size_t count, cer_error *err)
{
    size_t n_parts = 0, skip = start;
    cer_status status = CER_OK;
    uint32_t *numbers;

    for (size_t i = 0; status == CER_OK && i < n; i++)
        status = check_mix(l, &mixes[i], &n_parts, err);
    if (status == CER_OK)
        status = make_room(l, n, n_parts, err);
    if (status != CER_OK)
        return status;
    numbers = l->mixed;
    for (size_t i = 0; i < n && count != 0; i++) {
        mix *m = &l->mixes[l->n_mixes];
        size_t batches;

        numbers = lay_out_mix(l, &mixes[i], m, numbers);
        batches = cer_cut_count(&m->cut);
        if (skip >= batches) {
            skip -= batches;
            continue;
        }
        status = check_draws(l, m, err);
        if (status != CER_OK)
            break;
        m->first = skip;
        m->end = batches - skip < count ? batches : skip + count;
        skip = 0;
        count -= m->end - m->first;
        l->n_batches += m->end - m->first;
        l->n_rows +=
            cer_cut_first(&m->cut, m->end) - cer_cut_first(&m->cut, m->first);
        l->n_mixes++;
    }
    if (l->n_mixes != 0)
        l->batch = l->mixes[0].first;
    if (status != CER_OK)
        clear_pass(l);
    return status;
}

cer_status
cer_loader_begin(cer_loader *l, const cer_mix *mixes, size_t n, uint64_t epoch,
                 size_t start, size_t count, cer_error *err)
{
    cer_status status;

    if (l->closed)
        return cer_fail(err, CER_INVALID, "the loader is closed");
    if (forked(l))
        return cer_fail(err, CER_INVALID,
                        "the loader's threads stayed in the parent process: "
                        "make a new loader after a fork");
    lock(l);
    l->paused = true; /* no thread starts work before the broadcast below */
    while (l->active != 0)
        pthread_cond_wait(&l->ready, &l->lock);
    clear_pass(l);
    cer_batch_ring_trim(l->ring, l->keep);
    l->epoch = epoch;
    status = set_pass(l, mixes, n, start, count, err);
    l->paused = false;
    pthread_cond_broadcast(&l->work);
    unlock(l);
    if (status == CER_OK && l->n_started < l->options.threads)
        start_threads(l);
    return status;
}

/* Gathers the next batch on this thread: without threads and lock. */
static cer_batch *
next_inline(cer_loader *l)
{
    size_t at = next_at(l);
    cer_batch *b;

    if (order_missing(l, at)) {
        l->failed = take_order(l, held_at(l, at), &l->mixes[at]);
        if (l->failed != CER_OK)
            return NULL;
        held_at(l, at)->state = ORDER_READY;
    }
    b = claim(l);
    if (b != NULL)
        fill_batch(l, b, &l->workers[l->options.threads]);
    return b;
}

/* Waits only for work that a thread has begun: if the threads do not keep up,
 * this one gathers too. Under the lock, except for the work and the wait. */
static cer_batch *
next_prefetched(cer_loader *l)
{
    while (l->failed == CER_OK || l->delivered < l->claimed) {
        if (l->delivered < l->claimed) {
            cer_batch *b = l->waiting[l->delivered % MAX_WINDOW];

            if (b->ready)
                return b;
        }
        if (!do_some_work(l, &l->workers[l->options.threads]))
            pthread_cond_wait(&l->ready, &l->lock);
    }
    return NULL;
}

static cer_status
deliver(cer_loader *l, cer_batch *b, cer_error *err)
{
    cer_status status = b == NULL ? l->failed : b->error.status;

    if (b != NULL)
        l->delivered++;
    if (status != CER_OK) {
        (void)cer_fail(err, status, "%s",
                       b == NULL ? NO_MEMORY : b->error.message);
        if (b != NULL)
            cer_owner_release(&b->owner);
        l->failed = status;
        l->n_batches = l->delivered; /* the pass ends here */
    }
    if (l->n_started != 0 && l->claimed < l->n_batches &&
        l->claimed - l->delivered <= l->refill)
        pthread_cond_broadcast(&l->work);
    return status;
}

cer_status
cer_loader_next(cer_loader *l, cer_batch **out, cer_error *err)
{
    cer_status status = CER_OK;
    cer_batch *b = NULL;

    *out = NULL;
    if (forked(l))
        return cer_fail(err, CER_INVALID,
                        "the loader's threads stayed in the parent process: "
                        "make a new loader after a fork");
    lock(l);
    if (!l->closed && l->delivered < l->n_batches) {
        b = l->n_started == 0 ? next_inline(l) : next_prefetched(l);
        status = deliver(l, b, err);
    }
    unlock(l);
    if (status == CER_OK)
        *out = b;
    return status;
}

bool
cer_loader_is_ready(cer_loader *l)
{
    bool ready;

    if (forked(l))
        return false;
    lock(l);
    ready = l->delivered < l->claimed &&
            l->waiting[l->delivered % MAX_WINDOW]->ready;
    unlock(l);
    return ready;
}

/* The mixes do not change during a pass, and only the caller's next() counts
 * what is delivered: no lock is needed. */
cer_loader_ahead
cer_loader_look_ahead(const cer_loader *l)
{
    cer_loader_ahead ahead = {.left = cer_loader_batches(l) - l->delivered};
    size_t skip = l->delivered;

    if (ahead.left == 0)
        return ahead;
    while (skip >= l->mixes[ahead.mix].end - l->mixes[ahead.mix].first) {
        skip -= l->mixes[ahead.mix].end - l->mixes[ahead.mix].first;
        ahead.mix++;
    }
    ahead.batch = l->mixes[ahead.mix].first + skip;
    return ahead;
}

bool
cer_loader_look(const cer_loader *l, cer_loader_ahead *ahead, size_t *n_rows,
                cer_part_way *way)
{
    const mix *m;

    if (ahead->left == 0)
        return false;
    m = &l->mixes[ahead->mix];
    *n_rows = cer_cut_first(&m->cut, ahead->batch + 1) -
              cer_cut_first(&m->cut, ahead->batch);
    *way = way_of(l, m);
    ahead->left--;
    ahead->batch++;
    if (ahead->batch == m->end && ahead->left != 0) {
        ahead->mix++;
        ahead->batch = l->mixes[ahead->mix].first;
    }
    return true;
}

size_t
cer_loader_batches(const cer_loader *l)
{
    return atomic_load_explicit(&l->n_batches, memory_order_relaxed);
}

size_t
cer_loader_rows(const cer_loader *l)
{
    return atomic_load_explicit(&l->n_rows, memory_order_relaxed);
}

size_t
cer_loader_buffers(const cer_loader *l)
{
    return l->ring == NULL ? 0 : cer_batch_ring_size(l->ring);
}

size_t
cer_loader_tensors(const cer_loader *l)
{
    return l->n_tensors;
}

cer_status
cer_loader_set_late(cer_loader *l, const bool *late, const bool *raw,
                    cer_error *err)
{
    l->late = cer_calloc(l->n_tensors, sizeof *l->late);
    l->raw = cer_calloc(l->n_tensors, sizeof *l->raw);
    if (l->late == NULL || l->raw == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    for (size_t i = 0; i < l->n_columns; i++) {
        const load_column *c = &l->columns[i];

        for (size_t k = 0; k < (c->ragged ? 3 : 1); k++) {
            l->late[c->tensor + k] = late[i];
            l->raw[c->tensor + k] = raw[i];
        }
        l->raw_draws =
            l->raw_draws || (raw[i] && cer_transform_draws(c->transform));
    }
    return CER_OK;
}

void
cer_loader_set_way(cer_loader *l, uint32_t part, cer_part_way way)
{
    l->ways[part] = way;
}

size_t
cer_loader_parts(const cer_loader *l)
{
    return l->n_parts;
}

/* Makes a batch of the largest size. */
static cer_batch *
reserve_one(cer_loader *l, cer_part_way way, cer_error *err)
{
    cer_batch *b = cer_batch_ring_take(l->ring);

    if (b == NULL) {
        (void)cer_fail(err, CER_NOMEM, NO_MEMORY);
        return NULL;
    }
    go_way(l, b, way);
    b->n_rows = l->max_rows;
    for (size_t i = 0; i < b->n_tensors; i++)
        b->tensors[i].shape[0] = (int64_t)b->n_rows;
    measure_raw(l, b, NULL);
    if (cer_batch_place(b, err) == CER_OK)
        return b;
    cer_owner_release(&b->owner);
    return NULL;
}

cer_status
cer_loader_reserve(cer_loader *l, size_t n, cer_part_way way, cer_error *err)
{
    cer_batch *taken = NULL, *b = NULL;
    cer_error why = {0};

    lock(l);
    l->keep = n > l->keep ? n : l->keep;
    for (size_t i = 0; i < n; i++) {
        if ((b = reserve_one(l, way, &why)) == NULL)
            break;
        b->next = taken;
        taken = b;
    }
    while (taken != NULL) {
        b = taken;
        taken = b->next;
        cer_owner_release(&b->owner);
    }
    unlock(l);
    return why.status == CER_OK ? CER_OK
                                : cer_fail(err, why.status, "%s", why.message);
}

size_t
cer_loader_window(const cer_loader *l)
{
    return l->window;
}

size_t
cer_loader_columns(const cer_loader *l)
{
    return l->n_columns;
}

cer_loaded_column
cer_loader_column(const cer_loader *l, size_t column)
{
    const load_column *c = &l->columns[column];

    return (cer_loaded_column){c->index, c->ragged, c->tensor, c->transform};
}

const cer_part *
cer_loader_part(const cer_loader *l, uint32_t part)
{
    return &l->parts[part];
}

size_t
cer_loader_count(const cer_loader *l, const cer_mix *given)
{
    cer_cut cut = {.batch_size = l->options.batch_size,
                   .drop_last = l->options.drop_last};

    for (size_t i = 0; i < given->n; i++)
        cut.rows += l->parts[given->parts[i]].count;
    return cer_cut_count(&cut);
}

const cer_tensor *
cer_loader_kinds(const cer_loader *l, size_t *max_rows)
{
    *max_rows = l->max_rows;
    return l->kinds;
}

static const load_column *
column_of(const cer_loader *l, size_t tensor)
{
    size_t i = l->n_columns - 1;

    while (l->columns[i].tensor > tensor)
        i--;
    return &l->columns[i];
}

const char *
cer_loader_tensor_column(const cer_loader *l, size_t tensor)
{
    return column_of(l, tensor)->name;
}

const char *
cer_loader_tensor_suffix(const cer_loader *l, size_t tensor)
{
    static const char *const suffixes[] = {"", "_mask", "_length"};

    return suffixes[tensor - column_of(l, tensor)->tensor];
}

/* --- making and closing --------------------------------------------------- */

static cer_status
check_part(const cer_part *part, size_t number, bool across, cer_error *err)
{
    size_t rows = cer_shard_rows(part->shard);

    if (rows > UINT32_MAX || part->count > UINT32_MAX)
        return cer_fail(err, CER_INVALID, "shard %zu has more than 2**32 rows",
                        number);
    if (part->rows == NULL &&
        (part->start > rows || part->count > rows - part->start))
        return cer_fail(err, CER_INVALID, "shard %zu: rows %zu to %zu of %zu",
                        number, part->start, part->start + part->count, rows);
    for (size_t i = 0; part->rows != NULL && i < part->count; i++) {
        if (part->rows[i] >= rows)
            return cer_fail(err, CER_INVALID, "shard %zu: no row %u of %zu",
                            number, (unsigned)part->rows[i], rows);
    }
    if (!across && part->sums != NULL && part->count != 0 &&
        part->sums[part->count - 1] == 0)
        return cer_fail(err, CER_INVALID, "shard %zu: all weights are 0",
                        number);
    return CER_OK;
}

static cer_status
take_parts(cer_loader *l, const cer_part *parts, size_t n, cer_error *err)
{
    cer_status status = CER_OK;

    l->parts = cer_calloc(n, sizeof *l->parts);
    l->ways = cer_calloc(n, sizeof *l->ways);
    if (l->parts == NULL || l->ways == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for %zu shards", n);
    for (size_t i = 0; status == CER_OK && i < n; i++) {
        status = check_part(&parts[i], i, l->options.draw_across, err);
        if (status == CER_OK &&
            !cer_add_size(l->all_rows, parts[i].count, &l->all_rows))
            status =
                cer_fail(err, CER_INVALID, "the shards have too many rows");
        if (status != CER_OK)
            break;
        l->parts[i] = parts[i];
        cer_shard_retain(parts[i].shard);
        l->n_parts++;
        l->draws = l->draws || parts[i].sums != NULL;
    }
    for (size_t i = 0; status == CER_OK && l->draws && i < n; i++) {
        if (l->options.draw_across && l->parts[i].sums == NULL &&
            l->parts[i].count != 0)
            status = cer_fail(err, CER_INVALID,
                              "shard %zu has no weights, but others have", i);
    }
    return status;
}

/* All shards must have the column `source`, at the same index and of the same
 * kind, so a column can be found by index. */
static cer_status
find_column(const cer_loader *l, load_column *c, const char *source,
            cer_error *err)
{
    const cer_column *first = NULL;
    size_t n;

    for (size_t i = 0; i < l->n_parts; i++) {
        const cer_column *all = cer_shard_columns(l->parts[i].shard, &n);
        const cer_column *here = cer_shard_find(l->parts[i].shard, source);

        if (here == NULL)
            return cer_fail(err, CER_INVALID, "no column %s in shard %s",
                            source, cer_shard_directory(l->parts[i].shard));
        if (first == NULL) {
            first = here;
            c->index = (size_t)(here - all);
        }
        if ((size_t)(here - all) != c->index || here->dtype != first->dtype ||
            here->ragged != first->ragged || here->ndim != first->ndim ||
            memcmp(here->shape, first->shape,
                   first->ndim * sizeof first->shape[0]) != 0)
            return cer_fail(err, CER_INVALID,
                            "column %s differs between shards %s and %s",
                            source, cer_shard_directory(l->parts[0].shard),
                            cer_shard_directory(l->parts[i].shard));
    }
    c->ragged = first->ragged;
    c->row_bytes = first->row_bytes;
    return CER_OK;
}

static cer_status
take_columns(cer_loader *l, const cer_load_column *columns, size_t n,
             cer_error *err)
{
    cer_status status = CER_OK;

    l->columns = cer_calloc(n, sizeof *l->columns);
    if (l->columns == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for %zu columns", n);
    for (size_t i = 0; status == CER_OK && i < n; i++) {
        load_column *c = &l->columns[i];
        size_t bytes = strlen(columns[i].name) + 1;
        const char *source =
            columns[i].source != NULL ? columns[i].source : columns[i].name;

        c->name = cer_alloc(bytes);
        if (c->name == NULL)
            return cer_fail(err, CER_NOMEM, "out of memory for %zu columns", n);
        l->n_columns++;
        memcpy(c->name, columns[i].name, bytes);
        c->tensor = l->n_tensors;
        status = find_column(l, c, source, err);
        if (status == CER_OK)
            status = cer_transform_new(
                cer_shard_find(l->parts[0].shard, source), columns[i].ops,
                columns[i].n_ops, &c->transform, err);
        c->channels_last = columns[i].channels_last;
        if (status == CER_OK && c->channels_last &&
            (c->ragged || cer_transform_output(c->transform)->ndim != 3))
            status = cer_fail(err, CER_INVALID,
                              "column '%s': only images can have channels "
                              "last",
                              c->name);
        l->n_tensors += c->ragged ? 3 : 1;
    }
    return status;
}

static void
describe(const load_column *c, cer_tensor *tensors)
{
    const cer_row_type *type = cer_transform_output(c->transform);
    cer_tensor *values = &tensors[c->tensor];
    int32_t before = c->ragged ? 2 : 1; /* dimensions: rows, length */

    values->dtype = type->dtype;
    values->ndim = (int32_t)type->ndim + before;
    for (uint32_t i = 0; i < type->ndim; i++)
        values->shape[before + (int32_t)i] = (int64_t)type->shape[i];
    values->channels_last = c->channels_last;
    if (c->channels_last) {
        values->shape[1] = (int64_t)type->shape[2];
        values->shape[2] = (int64_t)type->shape[0];
        values->shape[3] = (int64_t)type->shape[1];
    }
    if (c->ragged) {
        values[ROLE_MASK].dtype = CER_BOOL;
        values[ROLE_MASK].ndim = 2;
        values[ROLE_LENGTH].dtype = CER_I64;
        values[ROLE_LENGTH].ndim = 1;
    }
}

/* Enough batches ahead to keep every thread busy; more if batches are small, so
 * that a thread need not be woken for each. Even more would only evict each
 * other from the cache. */
static size_t
choose_window(const cer_loader *l, size_t batch_bytes)
{
    size_t least = l->options.threads + 1; /* without threads: 1 */
    size_t window = WINDOW_BYTES / (batch_bytes == 0 ? 1 : batch_bytes);

    if (l->options.threads == 0)
        return least;
    window = window < SMALL_WINDOW ? window : SMALL_WINDOW;
    window = window < least ? least : window;
    return window < MAX_WINDOW ? window : MAX_WINDOW;
}

static cer_status
make_ring(cer_loader *l, cer_error *err)
{
    cer_cut all = {l->all_rows, l->options.batch_size, l->options.drop_last};
    size_t max_rows = cer_cut_most(&all), bytes = 0;
    cer_tensor *tensors = cer_calloc(l->n_tensors, sizeof *tensors);

    l->kinds = tensors;
    if (tensors == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the batches");
    max_rows = max_rows == 0 ? 1 : max_rows;
    for (size_t i = 0; i < l->n_columns; i++) {
        const cer_row_type *type =
            cer_transform_output(l->columns[i].transform);
        size_t of_column;

        describe(&l->columns[i], tensors);
        if (!cer_mul_size(type->bytes, max_rows, &of_column) ||
            !cer_add_size(bytes, of_column, &bytes) || bytes > SIZE_MAX / 32)
            return cer_fail(err, CER_INVALID,
                            "batches of %zu rows are too large", max_rows);
    }
    l->max_rows = max_rows;
    l->window = choose_window(l, bytes);
    l->keep = l->window + 2;
    /* Waking a thread costs a system call: small batches are made in bulk. */
    l->refill =
        l->window <= l->options.threads + 1 ? l->window - 1 : l->window / 2;
    return cer_batch_ring_from(l->options.memory, tensors, l->n_tensors,
                               max_rows, &l->ring, err);
}

static cer_status
make_workers(cer_loader *l, cer_error *err)
{
    size_t n = l->options.threads + 1, scratch = 0;

    for (size_t i = 0; i < l->n_columns; i++) {
        size_t bytes = cer_transform_scratch_bytes(l->columns[i].transform);

        scratch = bytes > scratch ? bytes : scratch;
    }
    l->workers = cer_calloc(n, sizeof *l->workers);
    if (l->workers == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    for (size_t i = 0; i < n; i++) {
        l->workers[i].loader = l;
        l->workers[i].found = cer_calloc(l->max_rows, 2 * sizeof(uint32_t));
        l->workers[i].runs = cer_calloc(l->n_parts, sizeof(run));
        if (l->workers[i].found == NULL || l->workers[i].runs == NULL)
            return cer_fail(err, CER_NOMEM, "out of memory for the loader");
        if (scratch == 0)
            continue;
        l->workers[i].scratch = cer_aligned_alloc(scratch);
        if (l->workers[i].scratch == NULL)
            return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    }
    return CER_OK;
}

static cer_status
check_options(const cer_load_options *o, size_t n_parts, size_t n_columns,
              cer_error *err)
{
    if (o->batch_size < 1 || o->batch_size >= UINT32_MAX)
        return cer_fail(err, CER_INVALID,
                        "batch_size must be 1 or more, not %zu", o->batch_size);
    if (o->threads > CER_MAX_THREADS)
        return cer_fail(err, CER_INVALID,
                        "threads must be from 0 to %d, not %u", CER_MAX_THREADS,
                        (unsigned)o->threads);
    if (n_parts == 0 || n_columns == 0)
        return cer_fail(err, CER_INVALID, "a loader needs %s",
                        n_parts == 0 ? "shards" : "columns");
    return CER_OK;
}

/* Orders of drawn rows depend on the weights, so they are not shared. */
static cer_status
take_orders(cer_loader *l, cer_error *err)
{
    if (l->options.orders == NULL || l->draws)
        return cer_orders_new(&l->orders, err);
    cer_orders_retain(l->options.orders);
    l->orders = l->options.orders;
    return CER_OK;
}

/* All three or none. */
static cer_status
make_locks(cer_loader *l, cer_error *err)
{
    if (pthread_mutex_init(&l->lock, NULL) != 0)
        goto no_lock;
    if (pthread_cond_init(&l->work, NULL) != 0)
        goto no_work;
    if (pthread_cond_init(&l->ready, NULL) != 0)
        goto no_ready;
    return CER_OK;

no_ready:
    pthread_cond_destroy(&l->work);
no_work:
    pthread_mutex_destroy(&l->lock);
no_lock:
    return cer_fail(err, CER_NOMEM, "out of memory for the loader's lock");
}

cer_status
cer_loader_new(const cer_part *parts, size_t n_parts,
               const cer_load_column *columns, size_t n_columns,
               const cer_load_options *options, cer_loader **out,
               cer_error *err)
{
    cer_status status = check_options(options, n_parts, n_columns, err);
    cer_loader *l;

    *out = NULL;
    if (status != CER_OK)
        return status;
    l = cer_calloc(1, sizeof *l);
    if (l == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the loader");
    status = make_locks(l, err);
    if (status != CER_OK) {
        cer_free(l);
        return status;
    }
    l->options = *options;
    status = take_parts(l, parts, n_parts, err);
    if (status == CER_OK)
        status = take_orders(l, err);
    if (status == CER_OK)
        status = take_columns(l, columns, n_columns, err);
    if (status == CER_OK)
        status = make_ring(l, err);
    if (status == CER_OK)
        status = make_workers(l, err);
    if (status == CER_OK)
        *out = l;
    else
        cer_loader_free(l);
    return status;
}

void
cer_loader_close(cer_loader *l)
{
    if (l->closed)
        return;
    l->closed = true;
    if (forked(l))
        return;
    lock(l);
    l->stopping = true;
    pthread_cond_broadcast(&l->work);
    unlock(l);
    for (size_t i = 0; i < l->n_started; i++)
        pthread_join(l->workers[i].thread, NULL);
    l->n_started = 0; /* no thread is left to lock out */
    clear_pass(l);
    cer_batch_ring_end(l->ring); /* freed later: its size is still available */
    for (size_t i = 0; i < l->n_parts; i++)
        cer_shard_release(l->parts[i].shard);
}

static void
free_worker_memory(cer_loader *l)
{
    size_t n = l->options.threads + 1;

    for (size_t i = 0; l->workers != NULL && i < n; i++) {
        cer_aligned_free(l->workers[i].scratch);
        cer_free(l->workers[i].found);
        cer_free(l->workers[i].runs);
    }
    cer_free(l->workers);
}

void
cer_loader_free(cer_loader *l)
{
    if (l == NULL)
        return;
    cer_loader_close(l);
    if (forked(l))
        return; /* a copy of memory that the parent's threads were using */
    for (size_t i = 0; i < l->n_columns; i++) {
        cer_free(l->columns[i].name);
        cer_transform_free(l->columns[i].transform);
    }
    free_worker_memory(l);
    cer_batch_ring_close(l->ring);
    cer_free(l->columns);
    cer_free(l->parts);
    cer_free(l->ways);
    cer_free(l->late);
    cer_free(l->raw);
    cer_free(l->kinds);
    cer_free(l->mixes);
    cer_free(l->mixed);
    cer_orders_release(l->orders);
    pthread_cond_destroy(&l->ready);
    pthread_cond_destroy(&l->work);
    pthread_mutex_destroy(&l->lock);
    cer_free(l);
}
