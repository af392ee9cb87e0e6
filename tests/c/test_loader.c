#include "loader.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "check.h"
#include "cut.h"
#include "loader_files.h"
#include "rng.h"
#include "thread.h"

static const cer_load_column all_columns[] = {
    {.name = "id"}, {.name = "v"}, {.name = "img"}, {.name = "t"}};

static cer_loader *
new_loader(const cer_part *parts, cer_load_options options)
{
    cer_loader *loader;
    cer_error err = {0};

    if (cer_loader_new(parts, LOADER_SHARDS, all_columns, 4, &options, &loader,
                       &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return loader;
}

static cer_batch *
next_batch(cer_loader *loader)
{
    cer_batch *b;
    cer_error err = {0};

    if (cer_loader_next(loader, &b, &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return b;
}

/* Compares every column of every row with loader_files.h. */
static void
check_values(const cer_batch *b)
{
    const cer_tensor *t = b->tensors;
    const int64_t *ids = t[0].data, *lengths = t[5].data;
    const float *v = t[1].data;
    const uint8_t *img = t[2].data, *mask = t[4].data;
    const int32_t *values = t[3].data;
    int64_t length = t[3].shape[1], longest = 0;

    CHECK_EQ_INT(b->n_tensors, 6);
    CHECK_EQ_INT(t[4].shape[1], length);
    for (size_t i = 0; i < b->n_rows; i++) {
        int64_t r = ids[i];

        CHECK(v[3 * i] == (float)r && v[3 * i + 2] == -(float)r);
        for (size_t p = 0; p < IMG_BYTES; p++)
            CHECK_EQ_INT(img[i * IMG_BYTES + p], (uint8_t)(r * 7 + (int64_t)p));
        CHECK_EQ_INT(lengths[i], r % 5);
        longest = lengths[i] > longest ? lengths[i] : longest;
        for (int64_t k = 0; k < length; k++) {
            int64_t at = (int64_t)i * length + k;

            CHECK_EQ_INT(mask[at], k < lengths[i]);
            CHECK_EQ_INT(values[at], k < lengths[i] ? r * 10 + k : 0);
        }
    }
    CHECK_EQ_INT(length, longest);
    for (size_t i = 0; i < b->n_tensors; i++) {
        CHECK_EQ_INT(t[i].shape[0], b->n_rows);
        CHECK_EQ_INT((uintptr_t)t[i].data % CER_ALIGNMENT, 0);
    }
}

/* Runs a pass and stores the ids in order; returns their number. */
static size_t
collect(cer_loader *loader, int64_t ids[LOADER_ROWS], size_t sizes[64],
        size_t *n_batches)
{
    size_t n = 0;
    cer_batch *b;

    *n_batches = 0;
    while ((b = next_batch(loader)) != NULL) {
        check_values(b);
        memcpy(ids + n, b->tensors[0].data, b->n_rows * sizeof *ids);
        n += b->n_rows;
        sizes[(*n_batches)++] = b->n_rows;
        cer_owner_release(&b->owner);
    }
    CHECK_EQ_INT(*n_batches, cer_loader_batches(loader));
    CHECK_EQ_INT(n, cer_loader_rows(loader));
    return n;
}

/* --- the definition of a pass ----------------------------------------------
 */

/* What a pass should contain. */
typedef struct wanted_pass {
    int64_t ids[2 * LOADER_ROWS];
    size_t ends[2 * LOADER_ROWS]; /* of the batches */
    size_t n_rows, n_batches;
} wanted_pass;

/* The rows of a mix in the order of the pass, before batches sort them by
 * part. */
static void
order_of(const cer_part *parts, const cer_mix *m, const cer_load_options *o,
         uint64_t epoch, uint32_t *order)
{
    bool drawn = false;
    uint32_t n = 0;
    cer_rng rng;

    for (size_t i = 0; i < m->n; i++) {
        const cer_part *part = &parts[m->parts[i]];
        uint32_t count = (uint32_t)part->count;

        cer_rng_seed(&rng, o->seed, CER_RNG_DRAWS, epoch, m->parts[i]);
        for (uint32_t k = 0; k < count; k++)
            order[n + k] = k;
        if (part->sums != NULL)
            cer_rng_draw(&rng, 0, part->sums, order + n, count);
        for (uint32_t k = 0; k < count; k++)
            order[n + k] += n;
        n += count;
        drawn = drawn || part->sums != NULL;
    }
    if (m->n == 0 || (m->n == 1 && drawn))
        return;
    cer_rng_seed(&rng, o->seed, CER_RNG_ROWS, epoch, m->parts[0]);
    cer_rng_shuffle(&rng, order, n);
}

/* Row `row` of a mix, as its id, if it is in the mix's part `part`. */
static bool
is_in_part(const cer_part *parts, const cer_mix *m, size_t part, uint32_t row,
           int64_t *id)
{
    size_t first = 0;

    for (size_t i = 0; i < part; i++)
        first += parts[m->parts[i]].count;
    if (row < first || row >= first + parts[m->parts[part]].count)
        return false;
    *id = (int64_t)(parts[m->parts[part]].first_row + row - first);
    return true;
}

static void
expect_mix(const cer_part *parts, const cer_mix *m, const cer_load_options *o,
           uint64_t epoch, wanted_pass *e)
{
    uint32_t order[LOADER_ROWS];
    cer_cut cut = {0, o->batch_size, o->drop_last};

    for (size_t i = 0; i < m->n; i++)
        cut.rows += parts[m->parts[i]].count;
    for (uint32_t i = 0; i < cut.rows; i++)
        order[i] = i;
    if (o->shuffle)
        order_of(parts, m, o, epoch, order);
    for (size_t b = 0; b < cer_cut_count(&cut); b++) {
        for (size_t part = 0; part < m->n; part++) {
            for (size_t i = cer_cut_first(&cut, b);
                 i < cer_cut_first(&cut, b + 1); i++)
                e->n_rows +=
                    is_in_part(parts, m, part, order[i], &e->ids[e->n_rows]);
        }
        e->ends[e->n_batches++] = e->n_rows;
    }
}

static void
check_slice(cer_loader *loader, const cer_mix *mixes, size_t n_mixes,
            uint64_t epoch, size_t start, size_t count, const wanted_pass *e)
{
    size_t first = start < e->n_batches ? start : e->n_batches;
    size_t n_batches = e->n_batches - first, at, n, sizes[2 * LOADER_ROWS];
    int64_t ids[2 * LOADER_ROWS];

    n_batches = n_batches < count ? n_batches : count;
    at = first == 0 ? 0 : e->ends[first - 1];
    CHECK_EQ_INT(
        cer_loader_begin(loader, mixes, n_mixes, epoch, start, count, NULL),
        CER_OK);
    CHECK_EQ_INT(cer_loader_batches(loader), n_batches);
    CHECK_EQ_INT(cer_loader_rows(loader),
                 n_batches == 0 ? 0 : e->ends[first + n_batches - 1] - at);
    (void)collect(loader, ids, sizes, &n);
    CHECK_EQ_INT(n, n_batches);
    for (size_t i = 0; i < n; i++) {
        size_t end = e->ends[first + i];

        CHECK_EQ_INT(sizes[i], end - at);
        CHECK(memcmp(ids + (at - (first == 0 ? 0 : e->ends[first - 1])),
                     e->ids + at, (end - at) * sizeof *ids) == 0);
        at = end;
    }
    CHECK(next_batch(loader) == NULL);
}

/* The whole pass, and its slices. */
static void
check_pass(const cer_part *parts, cer_load_options options,
           const cer_mix *mixes, size_t n, uint64_t epoch)
{
    cer_loader *loader = new_loader(parts, options);
    wanted_pass e = {.n_rows = 0};

    for (size_t i = 0; i < n; i++)
        expect_mix(parts, &mixes[i], &options, epoch, &e);
    check_slice(loader, mixes, n, epoch, 0, SIZE_MAX, &e);
    for (size_t start = 0; start < e.n_batches + 2; start += 3) {
        check_slice(loader, mixes, n, epoch, start, 3, &e);
        check_slice(loader, mixes, n, epoch, start + 1, SIZE_MAX, &e);
    }
    check_slice(loader, mixes, n, epoch, 0, 0, &e);
    cer_loader_free(loader);
}

static const uint32_t numbers[] = {0, 1, 2, 0, 2};

/* Lists of mixes; the third has rows of part 1 twice. */
static const struct {
    cer_mix mixes[3];
    size_t n;
} passes[] = {
    {{{numbers + 1, 1}, {numbers + 2, 1}, {numbers, 1}}, 3},
    {{{numbers, 3}}, 1},
    {{{numbers, 2}, {numbers + 1, 2}}, 2},
    {{{numbers + 3, 2}, {numbers + 1, 1}}, 2},
    {{{numbers, 0}, {numbers + 1, 2}}, 2},
};

static void
passes_follow_their_definition(void)
{
    static const uint32_t threads[] = {0, 1, 2, 5};
    static const size_t batch_sizes[] = {1, 3, 4, 11, 22, 100};
    cer_part parts[LOADER_SHARDS];
    uint64_t sums[40];
    size_t turn = 0;

    make_parts(parts);
    for (uint64_t i = 0; i < 40; i++)
        sums[i] = i % 3 == 0 ? i + 1 : (i / 3 + 1) * 3;
    for (size_t pass = 0; pass < 5; pass++) {
        for (size_t i = 0; i < 4 * 6; i++, turn++) {
            cer_load_options options = {.batch_size = batch_sizes[i % 6],
                                        .seed = turn % 5,
                                        .shuffle = turn % 7 != 0,
                                        .drop_last = turn % 5 == 0,
                                        .threads = threads[i / 6]};

            /* rows of no, one or two parts are drawn by weight */
            parts[0].sums = turn % 3 == 1 ? sums : NULL;
            parts[1].sums = turn % 4 == 2 ? sums : NULL;
            check_pass(parts, options, passes[pass].mixes, passes[pass].n,
                       turn % 3);
        }
    }
    release_parts(parts);
}

static int
compare_ids(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

/* A mix of all parts has every row once, in batches that differ by one row, in
 * another order in each epoch. */
static void
a_mix_has_every_row_once(void)
{
    cer_load_options options = {.batch_size = 12, .seed = 4, .shuffle = true};
    int64_t ids[LOADER_ROWS], first[LOADER_ROWS];
    cer_part parts[LOADER_SHARDS];
    cer_loader *loader;
    size_t sizes[64], n;

    make_parts(parts);
    loader = new_loader(parts, options);
    for (uint64_t epoch = 0; epoch < 4; epoch++) {
        CHECK_EQ_INT(cer_loader_begin(loader, passes[1].mixes, 1, epoch, 0,
                                      SIZE_MAX, NULL),
                     CER_OK);
        CHECK_EQ_INT(collect(loader, ids, sizes, &n), LOADER_ROWS);
        CHECK_EQ_INT(n, 5);
        for (size_t i = 0; i < n; i++)
            CHECK_EQ_INT(sizes[i], i < 4 ? 13 : 12);
        if (epoch == 0)
            memcpy(first, ids, sizeof first);
        else
            CHECK(memcmp(first, ids, sizeof first) != 0);
        qsort(ids, LOADER_ROWS, sizeof *ids, compare_ids);
        for (int64_t i = 0; i < LOADER_ROWS; i++)
            CHECK_EQ_INT(ids[i], i);
    }
    cer_loader_free(loader);
    release_parts(parts);
}

/* Drawn from one array, every mix is drawn as a whole. */
static void
rows_are_drawn_across_parts(void)
{
    cer_load_options options = {
        .batch_size = 64, .shuffle = true, .draw_across = true};
    uint64_t sums[LOADER_ROWS], total = 0;
    int64_t ids[LOADER_ROWS];
    uint32_t order[LOADER_ROWS];
    cer_part parts[LOADER_SHARDS];
    cer_loader *loader;
    cer_error err = {0};
    size_t sizes[64], n, rows;

    make_parts(parts);
    for (size_t i = 0; i < LOADER_ROWS; i++) /* 23 rows get half */
        sums[i] = total += i < 23 ? 41 : i % 2 == 0 ? 46 : 0;
    for (int i = 0; i < LOADER_SHARDS; i++) {
        parts[i].sums = sums + parts[i].first_row;
        parts[i].sum_before =
            parts[i].first_row == 0 ? 0 : sums[parts[i].first_row - 1];
    }
    loader = new_loader(parts, options);
    for (uint32_t pass = 0; pass < 3; pass++) { /* all parts, part 0, part 1 */
        const cer_mix all = {numbers, 3}, one = {numbers + pass - 1, 1};
        const cer_mix *mix = pass == 0 ? &all : &one;
        size_t first = parts[mix->parts[0]].first_row;
        cer_rng rng;

        rows = pass == 0 ? LOADER_ROWS : parts[mix->parts[0]].count;
        cer_rng_seed(&rng, 0, CER_RNG_DRAWS, 5, mix->parts[0]);
        cer_rng_draw(&rng, first == 0 ? 0 : sums[first - 1], sums + first,
                     order, (uint32_t)rows);
        CHECK_EQ_INT(cer_loader_begin(loader, mix, 1, 5, 0, SIZE_MAX, &err),
                     CER_OK);
        CHECK_EQ_INT(collect(loader, ids, sizes, &n), rows);
        CHECK_EQ_INT(n, 1);
        qsort(ids, rows, sizeof *ids, compare_ids);
        for (size_t i = 0; i < rows; i++) {
            size_t same = 0, wanted = 0;

            for (size_t k = 0; k < rows; k++) {
                same += ids[k] == ids[i];
                wanted += (int64_t)(first + order[k]) == ids[i];
            }
            CHECK_EQ_INT(same, wanted);
            CHECK(ids[i] < 23 || ids[i] % 2 == 0); /* no weight of 0 */
        }
    }
    /* parts 0 and 2 are not next to each other */
    CHECK_EQ_INT(
        cer_loader_begin(loader, passes[3].mixes, 1, 0, 0, SIZE_MAX, &err),
        CER_INVALID);
    CHECK_EQ_STR(err.message, "rows are drawn from all shards, or from one");
    CHECK(next_batch(loader) == NULL);
    cer_loader_free(loader);

    parts[2].sums = NULL;
    CHECK_EQ_INT(cer_loader_new(parts, LOADER_SHARDS, all_columns, 4, &options,
                                &loader, &err),
                 CER_INVALID);
    CHECK_EQ_STR(err.message, "shard 2 has no weights, but others have");
    for (size_t i = 0; i < LOADER_ROWS; i++)
        sums[i] = 7;
    parts[2].sums = sums + parts[2].first_row;
    loader = new_loader(parts, options);
    CHECK_EQ_INT(
        cer_loader_begin(loader, &passes[0].mixes[0], 1, 0, 0, SIZE_MAX, &err),
        CER_INVALID);
    CHECK_EQ_STR(err.message, "all weights of the rows are 0");
    cer_loader_free(loader);
    release_parts(parts);
}

/* Loaders with other columns, batches and threads read one table. */
static void
loaders_share_orders(void)
{
    cer_load_options options = {.batch_size = 5, .seed = 1, .shuffle = true};
    int64_t ids[LOADER_ROWS], other[LOADER_ROWS];
    cer_part parts[LOADER_SHARDS];
    cer_order_key key = {.seed = 1, .epoch = 2, .mix = 0, .n = LOADER_ROWS};
    cer_loader *loader;
    cer_order *order;
    size_t sizes[64], n;

    make_parts(parts);
    CHECK_EQ_INT(cer_orders_new(&options.orders, NULL), CER_OK);
    CHECK_EQ_INT(cer_orders_take(options.orders, &key, &order, NULL), CER_OK);
    for (uint32_t threads = 0; threads < 3; threads++) {
        options.threads = threads;
        options.batch_size = 64; /* one batch, sorted by part */
        loader = new_loader(parts, options);
        CHECK_EQ_INT(
            cer_loader_begin(loader, passes[1].mixes, 1, 2, 0, SIZE_MAX, NULL),
            CER_OK);
        (void)collect(loader, ids, sizes, &n);
        for (uint32_t i = 0, at = 0; i < LOADER_ROWS; i++) {
            if (order->rows[i] < 23)
                CHECK_EQ_INT(ids[at++], order->rows[i]);
        }
        if (threads != 0)
            CHECK(memcmp(ids, other, sizeof ids) == 0);
        memcpy(other, ids, sizeof ids);
        CHECK(atomic_load(&order->users) >= 2); /* kept, and this one */
        cer_loader_free(loader);
    }
    CHECK_EQ_INT(atomic_load(&order->users), 2);
    cer_orders_release(options.orders);
    CHECK_EQ_INT(atomic_load(&order->users), 1);
    cer_order_release(order);
    release_parts(parts);
}

static void
batch_sizes_of_a_pass(void)
{
    static const uint32_t visits[] = {0, 2, 1};
    static const size_t expected_sizes[] = {12, 11, 1, 10, 10, 10, 10};
    cer_part parts[LOADER_SHARDS];
    int64_t ids[LOADER_ROWS];
    size_t sizes[64], n;
    cer_loader *loader;

    make_parts(parts);
    loader = new_loader(parts, (cer_load_options){.batch_size = 11});
    CHECK_EQ_INT(begin_parts(loader, visits, 3, 0, NULL), CER_OK);
    (void)collect(loader, ids, sizes, &n);
    CHECK_EQ_INT(n, 7);
    CHECK(memcmp(sizes, expected_sizes, sizeof expected_sizes) == 0);
    cer_loader_free(loader);
    release_parts(parts);
}

static void
row_lists_and_ranges(void)
{
    static const uint32_t list[] = {22, 3, 3, 0, 7};
    static const uint32_t visits[] = {0, 1};
    static const int64_t expected[] = {22, 3, 3, 0, 7, 33, 34, 35};
    cer_part all[LOADER_SHARDS], parts[LOADER_SHARDS];
    int64_t ids[LOADER_ROWS];
    size_t sizes[64], n;
    cer_loader *loader;
    cer_error err = {0};
    cer_load_options options = {.batch_size = 3};

    make_parts(all);
    memcpy(parts, all, sizeof parts);
    parts[0].rows = list;
    parts[0].count = 5;
    parts[1].start = 10;
    parts[1].count = 3;
    loader = new_loader(parts, options);
    CHECK_EQ_INT(begin_parts(loader, visits, 2, 0, NULL), CER_OK);
    CHECK_EQ_INT(collect(loader, ids, sizes, &n), 8);
    CHECK(memcmp(ids, expected, sizeof expected) == 0);
    cer_loader_free(loader);

    parts[1].count = 31;
    CHECK_EQ_INT(
        cer_loader_new(parts, 3, all_columns, 4, &options, &loader, &err),
        CER_INVALID);
    CHECK(loader == NULL);
    parts[1] = all[1];
    parts[2].rows = list;
    CHECK_EQ_INT(
        cer_loader_new(parts, 3, all_columns, 4, &options, &loader, &err),
        CER_INVALID);
    CHECK_EQ_STR(err.message, "shard 2: no row 22 of 1");
    release_parts(all);
}

/* Passes that are abandoned and restarted, over one part and over all: all
 * work, and buffers stay few. */
static void
a_loader_is_used_for_many_passes(void)
{
    cer_part parts[LOADER_SHARDS];

    make_parts(parts);
    for (uint32_t threads = 0; threads < 3; threads++) {
        cer_loader *loader = new_loader(
            parts, (cer_load_options){
                       .batch_size = 4, .shuffle = true, .threads = threads});

        for (size_t i = 0; i < 300; i++) {
            cer_batch *b;

            CHECK_EQ_INT(cer_loader_begin(loader, passes[i % 5].mixes,
                                          1 + i % 2, i % 4, i % 3, SIZE_MAX,
                                          NULL),
                         CER_OK);
            for (size_t k = 0; k < i % 13; k++) {
                if ((b = next_batch(loader)) == NULL)
                    break;
                check_values(b);
                cer_owner_release(&b->owner);
            }
        }
        CHECK(cer_loader_buffers(loader) <= (threads == 0 ? 1 : 12));
        cer_loader_free(loader);
    }
    release_parts(parts);
}

static void *
release_later(void *batch)
{
    check_values(batch);
    cer_owner_release(&((cer_batch *)batch)->owner);
    return NULL;
}

static void
batches_outlive_the_loader(void)
{
    static const uint32_t visits[] = {0, 1};
    cer_part parts[LOADER_SHARDS];

    make_parts(parts);
    for (uint32_t threads = 0; threads < 3; threads++) {
        pthread_t releasers[20];
        cer_batch *kept[20];
        cer_loader *loader = new_loader(
            parts, (cer_load_options){
                       .batch_size = 3, .shuffle = true, .threads = threads});

        CHECK_EQ_INT(begin_parts(loader, visits, 2, 0, NULL), CER_OK);
        for (int i = 0; i < 20; i++)
            kept[i] = next_batch(loader);
        for (int i = 0; i < 10; i++)
            pthread_create(&releasers[i], NULL, release_later, kept[i]);
        cer_loader_close(loader);
        cer_loader_close(loader);
        CHECK(next_batch(loader) == NULL);
        CHECK_EQ_INT(begin_parts(loader, visits, 2, 0, NULL), CER_INVALID);
        for (int i = 10; i < 20; i++)
            pthread_create(&releasers[i], NULL, release_later, kept[i]);
        cer_loader_free(loader);
        for (int i = 0; i < 20; i++)
            pthread_join(releasers[i], NULL);
    }
    release_parts(parts);
}

/* The loader keeps its shards alive. */
static void
shards_may_be_released_first(void)
{
    static const uint32_t visits[] = {0, 1, 2};
    cer_part parts[LOADER_SHARDS];
    int64_t ids[LOADER_ROWS];
    size_t sizes[64], n;
    cer_loader *loader;

    make_parts(parts);
    loader =
        new_loader(parts, (cer_load_options){.batch_size = 8, .threads = 1});
    release_parts(parts);
    CHECK_EQ_INT(begin_parts(loader, visits, 3, 0, NULL), CER_OK);
    CHECK_EQ_INT(collect(loader, ids, sizes, &n), LOADER_ROWS);
    cer_loader_free(loader);
}

static void
a_forked_child_is_told(void)
{
    static const uint32_t visits[] = {1};
    cer_part parts[LOADER_SHARDS];
    cer_loader *loader;
    cer_batch *b;
    int code = -1;
    pid_t child;

    make_parts(parts);
    loader =
        new_loader(parts, (cer_load_options){.batch_size = 4, .threads = 2});
    CHECK_EQ_INT(begin_parts(loader, visits, 1, 0, NULL), CER_OK);
    b = next_batch(loader);
    child = fork();
    if (child == 0) {
        cer_error err = {0};
        cer_batch *none;
        bool told = cer_loader_next(loader, &none, &err) == CER_INVALID &&
                    strstr(err.message, "after a fork") != NULL &&
                    begin_parts(loader, visits, 1, 0, &err) == CER_INVALID;

        cer_owner_release(&b->owner);
        cer_loader_free(loader);
        _exit(told ? 0 : 1);
    }
    CHECK(waitpid(child, &code, 0) == child && code == 0);
    cer_owner_release(&b->owner);
    CHECK((b = next_batch(loader)) != NULL);
    cer_owner_release(&b->owner);
    cer_loader_free(loader);
    release_parts(parts);
}

/* Allocates memory for batches while one is being filled. */
typedef struct asking {
    cer_loader *loader;
    bool fork; /* also allocate in a child forked meanwhile */
    size_t asked;
} asking;

static void
ask(cer_loader *loader)
{
    CHECK_EQ_INT(cer_loader_batches(loader), 10);
    CHECK_EQ_INT(cer_loader_rows(loader), 40);
}

static cer_status
get_and_ask(void *context, size_t bytes, cer_batch_block *out, cer_error *err)
{
    asking *a = context;
    pid_t child = a->fork ? fork() : -1;
    int code = -1;

    (void)err;
    if (child == 0) {
        (void)alarm(20); /* a wait here would last forever */
        ask(a->loader);
        cer_loader_close(a->loader);
        _exit(cer_loader_batches(a->loader) == 0 ? 0 : 1);
    }
    ask(a->loader);
    a->asked++;
    if (child > 0)
        CHECK(waitpid(child, &code, 0) == child && code == 0);
    *out = (cer_batch_block){cer_aligned_alloc(bytes), bytes, NULL, NULL};
    return CER_OK;
}

static void
give(void *context, cer_batch_block *block)
{
    (void)context;
    cer_aligned_free(block->data);
}

/* Also in a child forked at that moment. */
static void
counts_are_known_while_a_batch_is_filled(void)
{
    static const uint32_t visits[] = {1};
    asking asked = {.fork = true};
    cer_batch_source source = {
        .context = &asked, .get = get_and_ask, .give = give};
    cer_part parts[LOADER_SHARDS];
    cer_batch *b;

    make_parts(parts);
    asked.loader = new_loader(
        parts, (cer_load_options){.batch_size = 4, .memory = &source});
    (void)alarm(60);
    CHECK_EQ_INT(begin_parts(asked.loader, visits, 1, 0, NULL), CER_OK);
    while ((b = next_batch(asked.loader)) != NULL)
        cer_owner_release(&b->owner);
    (void)alarm(0);
    CHECK(asked.asked > 0);
    cer_loader_free(asked.loader);
    release_parts(parts);
}

/* Only the named columns are there, under the names of the batch. */
static void
a_column_may_have_another_source(void)
{
    const cer_load_column columns[] = {{.name = "t", .source = "v"},
                                       {.name = "id"}};
    cer_load_options options = {.batch_size = 4};
    cer_part parts[LOADER_SHARDS];
    const uint32_t visit = 1;
    cer_loader *loader = NULL;
    cer_batch *b;

    make_parts(parts);
    CHECK_EQ_INT(cer_loader_new(parts, LOADER_SHARDS, columns, 2, &options,
                                &loader, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_loader_tensors(loader), 2);
    CHECK_EQ_STR(cer_loader_tensor_column(loader, 0), "t");
    CHECK_EQ_INT(begin_parts(loader, &visit, 1, 0, NULL), CER_OK);
    b = next_batch(loader);
    for (size_t i = 0; i < b->n_rows; i++) {
        int64_t id = ((const int64_t *)b->tensors[1].data)[i];

        CHECK(((const float *)b->tensors[0].data)[3 * i] == (float)id);
    }
    cer_owner_release(&b->owner);
    cer_loader_free(loader);
    release_parts(parts);
}

/* Batches of scaled values, in row order, as bytes. */
static size_t
scaled(const cer_part *parts, int mode, int mode_of_making, uint32_t threads,
       uint8_t *out)
{
    static const uint32_t visits[] = {0, 1, 2};
    static const cer_op scale = {.kind = CER_OP_SCALE, .value = 0.013};
    static const double third = 1.0 / 3, seventh = 1.0 / 7;
    static const cer_op normalize = {
        .kind = CER_OP_NORMALIZE, .mean = &third, .std = &seventh, .n = 1};
    const cer_op ops[] = {scale, normalize};
    const cer_load_column columns[] = {{.name = "v", .ops = ops, .n_ops = 2},
                                       {.name = "img", .ops = ops, .n_ops = 2}};
    cer_load_options options = {.batch_size = 3, .threads = threads};
    cer_loader *loader = NULL;
    size_t n = 0;
    cer_batch *b;

    CHECK_EQ_INT(fesetround(mode_of_making), 0);
    CHECK_EQ_INT(cer_loader_new(parts, LOADER_SHARDS, columns, 2, &options,
                                &loader, NULL),
                 CER_OK);
    CHECK_EQ_INT(fegetround(), mode_of_making);
    CHECK_EQ_INT(fesetround(FE_TONEAREST), 0); /* inherited by new threads */
    CHECK_EQ_INT(begin_parts(loader, visits, 3, 0, NULL), CER_OK);
    CHECK_EQ_INT(fesetround(mode), 0);
    while ((b = next_batch(loader)) != NULL) {
        for (int i = 0; i < 2; i++) {
            size_t bytes = cer_tensor_bytes(&b->tensors[i]);

            memcpy(out + n, b->tensors[i].data, bytes);
            n += bytes;
        }
        cer_owner_release(&b->owner);
    }
    CHECK_EQ_INT(fegetround(), mode);
    CHECK_EQ_INT(fesetround(FE_TONEAREST), 0);
    cer_loader_free(loader);
    return n;
}

/* A thread's rounding mode, as an example of changed thread state. */
static void
bits_do_not_depend_on_the_mode_of_a_thread(void)
{
    static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD,
                                FE_TOWARDZERO};
    static uint8_t expected[1 << 16], found[1 << 16];
    cer_part parts[LOADER_SHARDS];
    size_t n;

    make_parts(parts);
    n = scaled(parts, FE_TONEAREST, FE_TONEAREST, 0, expected);
    CHECK(n > 1000 && n <= sizeof expected);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 4; k++) {
            CHECK_EQ_INT(scaled(parts, modes[i], modes[k], i == 3, found), n);
            CHECK(memcmp(expected, found, n) == 0);
        }
    }
    release_parts(parts);
}

#ifdef __GLIBC__
/* With a stack larger than the address space, no thread starts. */
static void
set_default_stack(size_t bytes)
{
    pthread_attr_t attributes;

    CHECK_EQ_INT(pthread_attr_init(&attributes), 0);
    CHECK_EQ_INT(pthread_attr_setstacksize(&attributes, bytes), 0);
    CHECK_EQ_INT(pthread_setattr_default_np(&attributes), 0);
    (void)pthread_attr_destroy(&attributes);
}

static void
without_threads_to_be_had_a_loader_goes_on(void)
{
    static const uint32_t visits[] = {1, 2, 0};
    cer_load_options options = {.batch_size = 4, .seed = 3, .shuffle = true};
    int64_t expected[LOADER_ROWS], ids[LOADER_ROWS];
    size_t sizes[64], n_batches, n;
    cer_part parts[LOADER_SHARDS];
    pthread_attr_t attributes;
    cer_loader *loader;
    size_t stack = 0;
    pthread_t thread;

    make_parts(parts);
    loader = new_loader(parts, options);
    CHECK_EQ_INT(begin_parts(loader, visits, 3, 5, NULL), CER_OK);
    n = collect(loader, expected, sizes, &n_batches);
    cer_loader_free(loader);
    options.threads = 3;
    loader = new_loader(parts, options);
    CHECK_EQ_INT(pthread_getattr_default_np(&attributes), 0);
    CHECK_EQ_INT(pthread_attr_getstacksize(&attributes, &stack), 0);
    (void)pthread_attr_destroy(&attributes);
    for (int i = 0; i < 3;
         i++) { /* no threads, then threads, then none again */
        set_default_stack(i == 1 ? stack : (size_t)1 << 50);
        if (i != 1)
            CHECK_EQ_INT(
                cer_thread_start(&thread, (void *(*)(void *))abort, NULL),
                EAGAIN);
        CHECK_EQ_INT(begin_parts(loader, visits, 3, 5, NULL), CER_OK);
        CHECK_EQ_INT(collect(loader, ids, sizes, &n_batches), n);
        CHECK(memcmp(ids, expected, n * sizeof *ids) == 0);
    }
    set_default_stack(stack);
    cer_loader_free(loader);
    release_parts(parts);
}
#else
static void
without_threads_to_be_had_a_loader_goes_on(void)
{
}
#endif

static void
check_refused(const cer_part *parts, size_t n_parts,
              const cer_load_column *columns, size_t n_columns,
              cer_load_options options, const char *what)
{
    cer_loader *loader = (cer_loader *)&options;
    cer_error err = {0};

    CHECK_EQ_INT(cer_loader_new(parts, n_parts, columns, n_columns, &options,
                                &loader, &err),
                 CER_INVALID);
    CHECK(loader == NULL);
    if (strstr(err.message, what) == NULL)
        CHECK_EQ_STR(err.message, what);
}

static void
nonsense_is_refused(void)
{
    const cer_op pad = {.kind = CER_OP_PAD, .multiple_of = 1};
    const cer_load_column unknown = {.name = "z"};
    const cer_load_column nowhere = {.name = "id", .source = "z"};
    const cer_load_column padded = {.name = "id", .ops = &pad, .n_ops = 1};
    const cer_load_column last = {.name = "v", .channels_last = true};
    static const uint64_t zeros[40];
    static const uint32_t pairs[] = {1, 0, 0};
    const cer_mix descending = {pairs, 2}, twice = {pairs + 1, 2};
    cer_load_options good = {.batch_size = 4};
    cer_part parts[LOADER_SHARDS];
    uint32_t visit = 3;
    cer_loader *loader;
    cer_error err = {0};

    make_parts(parts);
    check_refused(parts, 3, all_columns, 4, (cer_load_options){0},
                  "batch_size");
    check_refused(parts, 3, all_columns, 4,
                  (cer_load_options){.batch_size = 1, .threads = 65},
                  "threads must be from 0 to 64, not 65");
    check_refused(parts, 0, all_columns, 4, good, "shards");
    check_refused(parts, 3, all_columns, 0, good, "columns");
    check_refused(parts, 3, &unknown, 1, good, "no column z in shard");
    check_refused(parts, 3, &nowhere, 1, good, "no column z in shard");
    check_refused(parts, 3, &padded, 1, good, "column id: Pad is for ragged");
    check_refused(parts, 3, &last, 1, good,
                  "column 'v': only images can have channels last");
    parts[1].sums = zeros;
    check_refused(parts, 3, all_columns, 4, good, "shard 1: all weights are 0");
    parts[1].sums = NULL;
    loader = new_loader(parts, good);
    CHECK_EQ_INT(begin_parts(loader, &visit, 1, 0, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "no shard 3: there are 3");
    CHECK(next_batch(loader) == NULL);
    CHECK_EQ_INT(cer_loader_begin(loader, &descending, 1, 0, 0, SIZE_MAX, &err),
                 CER_INVALID);
    CHECK_EQ_STR(err.message, "the shards of a mix must be in ascending order");
    CHECK_EQ_INT(cer_loader_begin(loader, &twice, 1, 0, 0, SIZE_MAX, &err),
                 CER_INVALID);
    CHECK(next_batch(loader) == NULL);
    cer_loader_free(loader);
    cer_loader_free(NULL);
    release_parts(parts);
}

/* 2**32 rows are too many for one order, but not for two. The rows have no
 * bytes. */
static void
orders_have_a_limit(void)
{
    static const size_t half = (size_t)1 << 31;
    static const uint32_t visits[] = {0, 1};
    const cer_load_column column = {.name = "x"};
    cer_load_options options = {.batch_size = 1 << 16};
    cer_column_spec spec = {.name = "x",
                            .dtype = CER_F32,
                            .n_dims = 1,
                            .shape = {0},
                            .file = "none.npy"};
    cer_npy npy = {.dtype = CER_F32, .n_dims = 2, .shape = {half, 0}};
    const cer_mix mix = {visits, 2};
    cer_part parts[2] = {{.count = half}, {.count = half}};
    cer_loader *loader = NULL;
    cer_error err = {0};

    spec.file_bytes = write_npy(spec.file, npy, "");
    for (int i = 0; i < 2; i++)
        CHECK_EQ_INT(cer_shard_open(scratch_folder, half, &spec, 1,
                                    &parts[i].shard, NULL),
                     CER_OK);
    for (size_t less = 0; less < 2; less++) {
        parts[0].count = half - less;
        CHECK_EQ_INT(
            cer_loader_new(parts, 2, &column, 1, &options, &loader, &err),
            CER_OK);
        CHECK_EQ_INT(begin_parts(loader, visits, 2, 0, &err), CER_OK);
        CHECK_EQ_INT(cer_loader_rows(loader), 2 * half - less);
        CHECK_EQ_INT(cer_loader_batches(loader), 1 << 16);
        CHECK_EQ_INT(cer_loader_begin(loader, &mix, 1, 0, 0, SIZE_MAX, &err),
                     less == 0 ? CER_INVALID : CER_OK);
        CHECK_EQ_INT(cer_loader_rows(loader), less == 0 ? 0 : 2 * half - less);
        cer_loader_free(loader);
    }
    CHECK_EQ_STR(err.message,
                 "4294967296 rows are too many to be shuffled together: use "
                 "shuffle='shards'");
    cer_shard_release(parts[0].shard);
    cer_shard_release(parts[1].shard);
}

static void
tensors_have_names(void)
{
    static const char *const columns[] = {"id", "v", "img", "t", "t", "t"};
    static const char *const suffixes[] = {"", "", "", "", "_mask", "_length"};
    cer_part parts[LOADER_SHARDS];
    cer_loader *loader;

    make_parts(parts);
    loader = new_loader(parts, (cer_load_options){.batch_size = 4});
    CHECK_EQ_INT(cer_loader_tensors(loader), 6);
    for (size_t i = 0; i < 6; i++) {
        CHECK_EQ_STR(cer_loader_tensor_column(loader, i), columns[i]);
        CHECK_EQ_STR(cer_loader_tensor_suffix(loader, i), suffixes[i]);
    }
    cer_loader_free(loader);
    release_parts(parts);
}

CHECK_MAIN(passes_follow_their_definition, a_mix_has_every_row_once,
           rows_are_drawn_across_parts, loaders_share_orders,
           batch_sizes_of_a_pass, row_lists_and_ranges,
           a_loader_is_used_for_many_passes, batches_outlive_the_loader,
           shards_may_be_released_first, a_forked_child_is_told,
           counts_are_known_while_a_batch_is_filled,
           bits_do_not_depend_on_the_mode_of_a_thread,
           without_threads_to_be_had_a_loader_goes_on, nonsense_is_refused,
           orders_have_a_limit, a_column_may_have_another_source,
           tensors_have_names)
