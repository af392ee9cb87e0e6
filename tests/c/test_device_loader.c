/* The loader on a device that works as late and as oddly as allowed
 * (lazy_device.h). Batches have the same bits as the CPU loader's for every
 * chain, resident or streamed, on any stream; and memory is not rewritten
 * before its last use is done. */
#include "device_loader.h"

#include <pthread.h>
#include <sys/wait.h>

#include "check.h"
#include "kernels.h"
#include "lazy_device.h"
#include "loader_files.h"

enum { PLENTY = 64 << 20 };

static const double means[3] = {1, 2, 3}, stds[3] = {2, 3, 4};
static const uint32_t visits[] = {1, 2, 0};
static const uint32_t numbers[] = {0, 1, 2, 0, 2};

/* The mixes of a pass: each part alone; all parts; two and one; two that share
 * a part. */
enum { MIXINGS = 4 };
static const struct {
    cer_mix mixes[3];
    size_t n;
} mixings[MIXINGS] = {
    {{{visits, 1}, {visits + 1, 1}, {visits + 2, 1}}, 3},
    {{{numbers, 3}}, 1},
    {{{numbers + 1, 2}, {numbers, 1}}, 2},
    {{{numbers + 1, 2}, {numbers + 3, 2}}, 2},
};

/* --- chains --------------------------------------------------------------- */

static const cer_op scale = {.kind = CER_OP_SCALE, .value = 1.0 / 255};
static const cer_op normalize = {
    .kind = CER_OP_NORMALIZE, .mean = means, .std = stds, .n = 3};
static const cer_op to_chw = {.kind = CER_OP_TO_CHW};
static const cer_op crop = {
    .kind = CER_OP_CROP, .size = {3, 4}, .padding = {1, 1}, .random = true};
static const cer_op middle = {.kind = CER_OP_CROP, .size = {2, 2}};
static const cer_op flip = {.kind = CER_OP_FLIP, .value = 0.5};
static const cer_op pad = {
    .kind = CER_OP_PAD, .value = -1, .max_length = 3, .multiple_of = 4};

static cer_op
cast(cer_dtype dtype)
{
    return (cer_op){.kind = CER_OP_CAST, .dtype = dtype};
}

typedef struct chains {
    cer_op ops[4][40]; /* of id, v, img and t */
    size_t n[4];
    cer_load_column columns[4];
} chains;

static void
finish_chains(chains *c)
{
    static const char *const names[] = {"id", "v", "img", "t"};

    for (int i = 0; i < 4; i++)
        c->columns[i] = (cer_load_column){
            .name = names[i], .ops = c->ops[i], .n_ops = c->n[i]};
}

static void
add_op(chains *c, int column, cer_op op)
{
    c->ops[column][c->n[column]++] = op;
}

enum { CHAINS = 9 };

/* Several sets of chains, which together cover every operation, type and
 * layout. */
static void
make_chains(chains *c, int which)
{
    *c = (chains){.n = {0}};
    if (which == 1) {
        add_op(c, 0, cast(CER_F32));
        add_op(c, 1, normalize);
        add_op(c, 2, scale);
        add_op(c, 2, normalize);
        add_op(c, 2, to_chw);
        add_op(c, 3, pad);
    } else if (which == 2) {
        add_op(c, 0, cast(CER_I8));
        add_op(c, 1, cast(CER_F16));
        add_op(c, 1, scale);
        add_op(c, 2, crop);
        add_op(c, 2, flip);
        add_op(c, 3, cast(CER_F32));
        add_op(c, 3, pad);
        add_op(c, 3, scale);
    } else if (which == 3) {
        add_op(c, 0, cast(CER_F64));
        add_op(c, 0, scale);
        add_op(c, 1, cast(CER_BF16));
        add_op(c, 2, flip);
        add_op(c, 2, crop);
        add_op(c, 2, scale);
        add_op(c, 2, to_chw);
        add_op(c, 2, cast(CER_F16));
        add_op(c, 3, cast(CER_I64));
    } else if (which == 4) {
        add_op(c, 1, cast(CER_I32));
        add_op(c, 2, middle);
        add_op(c, 2, cast(CER_BF16));
        add_op(c, 2, normalize);
        add_op(c, 3, scale);
    } else if (which == 5) {
        add_op(c, 1, scale);
        add_op(c, 2, to_chw);
        add_op(c, 3, cast(CER_BOOL));
    } else if (which == 6) { /* longer than a kernel supports */
        for (int i = 0; i < 15; i++) {
            add_op(c, 1, cast(i % 2 ? CER_F32 : CER_F64));
            add_op(c, 1, scale);
        }
        add_op(c, 2, scale);
    } else if (which == 7) { /* only table lookups suit a kernel */
        for (int i = 0; i < 4; i++) {
            for (int k = 0; k < 15; k++) {
                add_op(c, i, cast(k % 2 ? CER_F64 : CER_F32));
                add_op(c, i, scale);
            }
        }
    } else if (which == 8) { /* typical training images */
        add_op(c, 2, crop);
        add_op(c, 2, flip);
        add_op(c, 2, scale);
        add_op(c, 2, normalize);
        add_op(c, 2, to_chw);
        add_op(c, 3, cast(CER_I64));
        add_op(c, 3, pad);
    }
    finish_chains(c);
}

/* --- running -------------------------------------------------------------- */

typedef struct setting {
    cer_load_options load;
    cer_residence residence;
    int chains;
    bool plain;  /* without the ragged column */
    int streams; /* of consumers; each batch is used on one or two */
    bool known;  /* kernels run on the consumer's stream */
    size_t limit;
    size_t start;
    uint64_t epochs;
    int mixing;
} setting;

typedef struct scene {
    lazy_device device;
    cer_depot *depot;
    cer_device_loader *loader;
    cer_loader *expected;
    chains chains;
    void *streams[6];
    size_t resident, batches; /* of the last pass; of all passes */
} scene;

static cer_part parts[LOADER_SHARDS];

static cer_status
open_scene(scene *s, const setting *set, cer_error *err)
{
    size_t n = set->plain ? 3 : 4;
    cer_status status = cer_depot_new(&s->device.base, &s->depot, err);

    make_chains(&s->chains, set->chains);
    for (int i = 0; status == CER_OK && i < set->streams; i++)
        status = cer_device_stream_new(&s->device.base, &s->streams[i], err);
    if (status == CER_OK && set->limit != 0)
        cer_depot_set_limit(s->depot, set->limit);
    if (status == CER_OK)
        status = cer_device_loader_new(s->depot, set->residence, parts,
                                       LOADER_SHARDS, s->chains.columns, n,
                                       &set->load, &s->loader, err);
    if (status == CER_OK)
        status = cer_loader_new(parts, LOADER_SHARDS, s->chains.columns, n,
                                &set->load, &s->expected, err);
    return status;
}

/* Streams outlive the batches used on them. */
static void
close_scene(scene *s)
{
    cer_loader_free(s->expected);
    cer_device_loader_free(s->loader);
    cer_depot_release(s->depot);
    for (int i = 0; i < 6; i++)
        cer_device_stream_free(&s->device.base, s->streams[i]);
    lazy_finish(&s->device);
    lazy_end(&s->device);
}

/* A consumer: joins each tensor, reads it later, after releasing it. */
static cer_status
use_on(scene *s, const cer_batch *b, const cer_batch *expected, void *stream,
       cer_error *err)
{
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < b->n_tensors; i++) {
        const cer_tensor *t = &b->tensors[i], *e = &expected->tensors[i];

        CHECK_EQ_INT(t->dtype, e->dtype);
        CHECK_EQ_INT(t->ndim, e->ndim);
        CHECK(memcmp(t->shape, e->shape, sizeof t->shape) == 0);
        CHECK(memcmp(t->strides, e->strides, sizeof t->strides) == 0);
        CHECK_EQ_INT(cer_tensor_device(t).device_type, kDLCUDA);
        CHECK_EQ_INT((uintptr_t)t->data % CER_ALIGNMENT, 0);
        CHECK((t->data == NULL) == (cer_tensor_bytes(t) == 0));
        status = t->place->join(
            t->place, stream == NULL ? CER_STREAM_LEGACY : (intptr_t)stream,
            err);
        if (status == CER_OK)
            lazy_compare(&s->device, stream, t->data, e->data,
                         cer_tensor_bytes(t));
    }
    return status;
}

static cer_status
run_batch(scene *s, const setting *set, bool *more, cer_error *err)
{
    uint32_t dice = lazy_dice(&s->device);
    void *stream =
        set->streams == 0 ? NULL : s->streams[dice % (uint32_t)set->streams];
    void *on = set->known ? stream : cer_device_loader_stream(s->loader);
    cer_batch *b = NULL, *expected = NULL;
    cer_status status = cer_device_loader_next(s->loader, on, &b, err);

    *more = b != NULL;
    if (status != CER_OK)
        return status;
    status = cer_loader_next(s->expected, &expected, err);
    CHECK((status != CER_OK || expected != NULL) == *more || status != CER_OK);
    if (status == CER_OK && b != NULL && expected != NULL) {
        CHECK_EQ_INT(b->n_rows, expected->n_rows);
        status = use_on(s, b, expected, stream, err);
        if (status == CER_OK && dice % 3 == 0 && set->streams > 1)
            status = use_on(s, b, expected, s->streams[0], err);
        s->batches++;
    }
    if (b != NULL)
        cer_owner_release(&b->owner);
    if (expected != NULL)
        cer_owner_release(&expected->owner);
    return status;
}

static cer_status
begin_device(cer_device_loader *loader, const uint32_t *numbered, size_t n,
             uint64_t epoch, cer_error *err)
{
    cer_mix mixes[8];

    return cer_device_loader_begin(loader, mixes_of(numbered, n, mixes), n,
                                   epoch, 0, SIZE_MAX, err);
}

static cer_status
run_passes(scene *s, const setting *set, cer_error *err)
{
    const cer_mix *mixes = mixings[set->mixing].mixes;
    size_t n = mixings[set->mixing].n;
    cer_status status = CER_OK;

    for (uint64_t epoch = 0; status == CER_OK && epoch < set->epochs; epoch++) {
        bool more = true;

        status = cer_device_loader_begin(s->loader, mixes, n, epoch, set->start,
                                         SIZE_MAX, err);
        if (status == CER_OK)
            status = cer_loader_begin(s->expected, mixes, n, epoch, set->start,
                                      SIZE_MAX, err);
        if (status != CER_OK)
            break;
        CHECK_EQ_INT(cer_loader_batches(cer_device_loader_plan(s->loader)),
                     cer_loader_batches(s->expected));
        s->resident = cer_device_loader_resident(s->loader);
        while (status == CER_OK && more)
            status = run_batch(s, set, &more, err);
    }
    return status;
}

static void
check_setting(const setting *set, uint32_t seed, unsigned eager)
{
    scene s = {.depot = NULL};
    cer_error err = {0};

    lazy_init(&s.device, seed, eager, PLENTY);
    if (open_scene(&s, set, &err) != CER_OK ||
        run_passes(&s, set, &err) != CER_OK) {
        check_failures++;
        fprintf(stderr, "chains %d: %s\n", set->chains, err.message);
    }
    CHECK(s.batches != 0 || set->load.drop_last);
    if (set->limit != 0 &&
        set->mixing == 0) /* chain 7 has one column for a kernel, which fits */
        CHECK(s.resident > 0 &&
              (s.resident < LOADER_SHARDS || set->chains == 7));
    CHECK_EQ_INT(s.device.syncs, 0);
    lazy_finish(&s.device);
    CHECK_EQ_INT(s.device.compared == 0, s.batches == 0);
    close_scene(&s);
}

static setting
plain_setting(int chain, cer_residence residence)
{
    return (setting){
        .load = {.batch_size = 6, .seed = 11, .shuffle = true},
        .residence = residence,
        .chains = chain,
        .streams = 2,
        .epochs = 2,
    };
}

/* --- tests ---------------------------------------------------------------- */

static size_t
bytes_of_shard(const cer_shard *shard)
{
    size_t n, bytes = 0;
    const cer_column *columns = cer_shard_columns(shard, &n);

    for (size_t i = 0; i < n; i++) {
        bytes += cer_shard_values(shard, &columns[i]) * columns[i].row_bytes;
        if (columns[i].ragged)
            bytes += (cer_shard_rows(shard) + 1) * sizeof(int64_t);
    }
    return bytes;
}

/* Resident, streamed, and partly resident: the first shard. */
static setting
any_setting(int chain, int residence)
{
    setting set =
        plain_setting(chain, residence == 1 ? CER_STREAMED : CER_RESIDENT_AUTO);

    set.limit = residence == 2 ? bytes_of_shard(parts[visits[0]].shard) : 0;
    return set;
}

/* Rows of zero bytes: their batches have memory, but nothing is copied. */
static void
batches_of_no_bytes(void)
{
    static const cer_column_spec spec = {.name = "x",
                                         .dtype = CER_F32,
                                         .n_dims = 1,
                                         .shape = {0},
                                         .file = "empty.npy"};
    static const cer_npy npy = {
        .dtype = CER_F32, .n_dims = 2, .shape = {10, 0}};
    static const cer_load_column column = {.name = "x"};
    static const uint32_t visit = 0;
    cer_column_spec specs[1] = {spec};
    cer_part part = {.count = 10};

    specs[0].file_bytes = write_npy("empty.npy", npy, "");
    CHECK_EQ_INT(
        cer_shard_open(scratch_folder, 10, specs, 1, &part.shard, NULL),
        CER_OK);
    for (int way = 0; way < 6; way++) {
        static const cer_residence ways[] = {CER_STREAMED, CER_RESIDENT_AUTO,
                                             CER_RESIDENT};
        cer_load_options options = {.batch_size = 4, .threads = way % 2 * 2};
        scene s = {.depot = NULL};
        cer_error err = {0};
        cer_batch *b = NULL;
        size_t rows = 0;

        lazy_init(&s.device, 5, 3, PLENTY);
        if (cer_depot_new(&s.device.base, &s.depot, &err) != CER_OK ||
            cer_device_loader_new(s.depot, ways[way / 2], &part, 1, &column, 1,
                                  &options, &s.loader, &err) != CER_OK ||
            begin_device(s.loader, &visit, 1, 0, &err) != CER_OK)
            CHECK_EQ_STR(err.message, "");
        while (cer_device_loader_next(s.loader, NULL, &b, &err) == CER_OK &&
               b != NULL) {
            CHECK(b->tensors[0].data == NULL && b->tensors[0].place != NULL);
            CHECK_EQ_INT(b->tensors[0].shape[0], b->n_rows);
            rows += b->n_rows;
            cer_owner_release(&b->owner);
        }
        CHECK_EQ_STR(err.message, "");
        CHECK_EQ_INT(rows, 10);
        close_scene(&s);
    }
    cer_shard_release(part.shard);
}

static void
bits_are_the_cpus(void)
{
    for (int chain = 0; chain < CHAINS; chain++) {
        for (int way = 0; way < 24; way++) {
            setting set = any_setting(chain, way / 8);

            set.known = (way & 1) != 0;
            set.load.threads = way & 2 ? 2 : 0;
            check_setting(&set, (uint32_t)(chain * 100 + way), way & 4 ? 4 : 0);
        }
    }
}

static void
every_option_of_a_pass(void)
{
    for (int way = 0; way < 16; way++) {
        setting set =
            plain_setting(2, way & 1 ? CER_STREAMED : CER_RESIDENT_AUTO);

        set.load.shuffle = (way & 2) != 0;
        set.load.drop_last = (way & 4) != 0;
        set.load.batch_size = way & 8 ? 1 : 64;
        set.start = way & 8 ? 5 : 0;
        set.streams = way % 3;
        check_setting(&set, (uint32_t)way, 1);
    }
}

/* Rows of several parts in a batch, resident or streamed. */
static void
rows_of_mixed_parts(void)
{
    for (int chain = 0; chain < CHAINS; chain++) {
        for (int way = 0; way < 3 * MIXINGS; way++) {
            setting set = any_setting(chain, way % 3);

            set.mixing = way / 3;
            set.known = way % 2 == 0;
            set.load.threads = way % 5 < 2 ? 0 : 2;
            set.load.batch_size = 3 + (size_t)way;
            set.start = (size_t)(way % 4);
            check_setting(&set, (uint32_t)(chain * 100 + way), 2);
        }
    }
}

/* Streamed rows are transformed by a kernel if that does not shrink them, else
 * on the host. */
static void
streamed_rows_come_as_they_are(void)
{
    static const size_t kernels_a_batch[CHAINS] = {1, 3, 1, 3, 2, 2, 2, 1, 2};

    for (int chain = 0; chain < CHAINS; chain++) {
        setting set = plain_setting(chain, CER_STREAMED);
        scene s = {.depot = NULL};
        cer_error err = {0};

        lazy_init(&s.device, 1, 0, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(run_passes(&s, &set, &err), CER_OK);
        lazy_finish(&s.device);
        CHECK_EQ_INT(s.device.kernels, kernels_a_batch[chain] * s.batches);
        CHECK_EQ_STR(cer_device_loader_note(s.loader), "");
        CHECK_EQ_INT(cer_depot_resident_bytes(s.depot), 0);
        close_scene(&s);
    }
}

static size_t
on_alignment(size_t bytes)
{
    return (bytes + CER_ALIGNMENT - 1) / CER_ALIGNMENT * CER_ALIGNMENT;
}

/* For a batch of chain 8: columns that are moved or padded are uploaded as the
 * shard's bytes. */
static size_t
raw_bytes_of(const cer_batch *b)
{
    const int64_t *lengths = b->tensors[5].data;
    size_t n = b->n_rows, things = 0;

    for (size_t i = 0; i < n; i++)
        things += (size_t)lengths[i];
    return on_alignment(n * sizeof(cer_row_place)) +
           on_alignment(n * sizeof(int64_t)) + /* id */
           on_alignment(n * 3 * sizeof(float)) + on_alignment(n * IMG_BYTES) +
           on_alignment(things * sizeof(int32_t)) +
           on_alignment((n + 1) * sizeof(int64_t));
}

static void
bytes_that_cross(void)
{
    for (int way = 0; way < 4; way++) {
        setting set = plain_setting(8, CER_STREAMED);
        scene s = {.depot = NULL};
        cer_error err = {0};
        size_t before, expected = 0;
        cer_batch *b;

        set.load.threads = way & 1 ? 2 : 0;
        set.load.batch_size = way & 2 ? 9 : 64;
        lazy_init(&s.device, 1, 0, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        before = s.device.brought;
        /* the parts' first rows, for random crops, are uploaded once */
        expected = 4 * LOADER_SHARDS * sizeof(cer_kernel_part);
        CHECK_EQ_INT(run_passes(&s, &set, &err), CER_OK);
        for (uint64_t epoch = 0; epoch < set.epochs; epoch++) {
            CHECK_EQ_INT(begin_parts(s.expected, visits, 3, epoch, &err),
                         CER_OK);
            while (cer_loader_next(s.expected, &b, &err) == CER_OK &&
                   b != NULL) {
                expected += raw_bytes_of(b);
                cer_owner_release(&b->owner);
            }
        }
        CHECK_EQ_INT(s.device.brought - before, expected);
        close_scene(&s);
    }
}

/* One whole shard and its loader, for simple tests. */
static void
open_plain(scene *s, setting set)
{
    cer_error err = {0};

    lazy_init(&s->device, 7, 0, PLENTY);
    if (open_scene(s, &set, &err) != CER_OK ||
        begin_device(s->loader, visits, 3, 0, &err) != CER_OK ||
        begin_parts(s->expected, visits, 3, 0, &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
}

/* Buffers fit the largest batch of each kind in the pass; no thread allocates
 * later. */
static void
pinned_memory_is_made_when_a_pass_begins(void)
{
    for (int way = 0; way < 12; way++) {
        setting set = any_setting(way & 1 ? 8 : 1, way / 4);
        scene s = {.depot = NULL};
        cer_error err = {0};

        set.plain = true; /* ragged rows count as empty */
        set.load.threads = way & 2 ? 2 : 0;
        open_plain(&s, set);
        for (int epoch = 0; epoch < 2; epoch++) {
            size_t made = s.device.pinned;
            bool more = true;

            while (more)
                CHECK_EQ_INT(run_batch(&s, &set, &more, &err), CER_OK);
            CHECK_EQ_INT(s.device.pinned, made);
            CHECK_EQ_INT(begin_device(s.loader, visits, 3, 1, &err), CER_OK);
            CHECK_EQ_INT(begin_parts(s.expected, visits, 3, 1, &err), CER_OK);
        }
        close_scene(&s);
    }
}

static void
more_streams_than_are_remembered(void)
{
    for (int way = 0; way < 4; way++) {
        setting set =
            plain_setting(1, way & 1 ? CER_STREAMED : CER_RESIDENT_AUTO);
        scene s = {.depot = NULL};
        cer_error err = {0};
        cer_batch *b, *e;

        set.streams = 6;
        set.known = (way & 2) != 0;
        lazy_init(&s.device, 3, 0, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(begin_device(s.loader, visits, 3, 0, &err), CER_OK);
        CHECK_EQ_INT(begin_parts(s.expected, visits, 3, 0, &err), CER_OK);
        for (;;) {
            CHECK_EQ_INT(cer_device_loader_next(
                             s.loader,
                             set.known ? s.streams[0]
                                       : cer_device_loader_stream(s.loader),
                             &b, &err),
                         CER_OK);
            if (b == NULL)
                break;
            CHECK_EQ_INT(cer_loader_next(s.expected, &e, &err), CER_OK);
            for (int i = 0; i < 6; i++)
                CHECK_EQ_INT(use_on(&s, b, e, s.streams[i], &err), CER_OK);
            cer_owner_release(&b->owner);
            cer_owner_release(&e->owner);
        }
        CHECK(s.device.syncs != 0); /* the stream in question is unknown */
        close_scene(&s);
    }
}

static cer_batch *
take(scene *s, void *stream)
{
    cer_batch *b;
    cer_error err = {0};

    if (cer_device_loader_next(s->loader, stream, &b, &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return b;
}

static void
consumers_without_order(void)
{
    scene s = {.depot = NULL};
    cer_error err = {0};
    cer_batch *b, *e;

    open_plain(&s, plain_setting(1, CER_RESIDENT_AUTO));
    while ((b = take(&s, s.streams[0])) != NULL) {
        cer_place *place = b->tensors[0].place;

        CHECK_EQ_INT(cer_loader_next(s.expected, &e, &err), CER_OK);
        CHECK_EQ_INT(place->join(place, (intptr_t)s.streams[0], &err), CER_OK);
        CHECK_EQ_INT(place->join(place, CER_STREAM_NOBODY, &err), CER_OK);
        /* A consumer that asks for no ordering must order its own work. */
        CHECK_EQ_INT(cer_device_stream_sync(&s.device.base, s.streams[0], &err),
                     CER_OK);
        for (size_t i = 0; i < b->n_tensors; i++)
            lazy_compare(&s.device, s.streams[1], b->tensors[i].data,
                         e->tensors[i].data, cer_tensor_bytes(&e->tensors[i]));
        cer_owner_release(&b->owner);
        cer_owner_release(&e->owner);
    }
    CHECK(s.device.syncs != 0);
    close_scene(&s);
}

static void *
join_on_own_stream(void *argument)
{
    cer_place *place = argument;

    CHECK_EQ_INT(place->join(place, CER_STREAM_PER_THREAD, NULL), CER_OK);
    return NULL;
}

/* A different thread's default stream has no name here. */
static void
default_streams_of_threads(void)
{
    for (int elsewhere = 0; elsewhere < 2; elsewhere++) {
        scene s = {.depot = NULL};
        cer_batch *b;

        open_plain(&s, plain_setting(1, CER_STREAMED));
        while ((b = take(&s, s.streams[0])) != NULL) {
            pthread_t thread;

            if (elsewhere) {
                CHECK(pthread_create(&thread, NULL, join_on_own_stream,
                                     b->tensors[0].place) == 0);
                pthread_join(thread, NULL);
            } else {
                (void)join_on_own_stream(b->tensors[0].place);
            }
            cer_owner_release(&b->owner);
        }
        CHECK_EQ_INT(s.device.syncs != 0, elsewhere);
        close_scene(&s);
    }
}

static void
kept_batches_never_hang(void)
{
    for (int way = 0; way < 2; way++) {
        setting set = plain_setting(0, way ? CER_STREAMED : CER_RESIDENT_AUTO);
        scene s = {.depot = NULL};
        cer_error err = {0};
        cer_batch *kept[64], *e;
        size_t n = 0;

        set.load.batch_size = 2;
        open_plain(&s, set);
        while ((kept[n] = take(&s, s.streams[0])) != NULL)
            n++;
        CHECK(n > 30);
        CHECK_EQ_INT(cer_device_loader_buffers(s.loader), n);
        for (size_t i = 0; i < n; i++) {
            CHECK_EQ_INT(cer_loader_next(s.expected, &e, &err), CER_OK);
            CHECK_EQ_INT(use_on(&s, kept[i], e, s.streams[1], &err), CER_OK);
            cer_owner_release(&e->owner);
            if (i % 2 == 0)
                cer_owner_release(&kept[i]->owner);
        }
        CHECK_EQ_INT(begin_device(s.loader, visits, 3, 1, &err), CER_OK);
        CHECK(cer_device_loader_buffers(s.loader) <= n / 2 + 4);
        cer_device_loader_close(s.loader);
        lazy_finish(&s.device);
        for (size_t i = 1; i < n; i += 2) /* valid after the loader is freed */
            cer_owner_release(&kept[i]->owner);
        close_scene(&s);
    }
}

static void *
release_later(void *argument)
{
    cer_owner_release(argument);
    return NULL;
}

/* The last reference is a batch, freed on a separate thread. */
static void
a_batch_outlives_loader_and_depot(void)
{
    for (int way = 0; way < 2; way++) {
        scene s = {.depot = NULL};
        cer_batch *b;
        pthread_t thread;

        open_plain(&s,
                   plain_setting(2, way ? CER_STREAMED : CER_RESIDENT_AUTO));
        b = take(&s, s.streams[0]);
        cer_device_loader_free(s.loader);
        cer_depot_release(s.depot);
        s.loader = NULL;
        s.depot = NULL;
        CHECK(s.device.live != 0);
        CHECK(pthread_create(&thread, NULL, release_later, &b->owner) == 0);
        pthread_join(thread, NULL);
        close_scene(&s);
    }
}

static void
nothing_is_put_on_a_captured_stream(void)
{
    scene s = {.depot = NULL};
    cer_error err = {0};
    cer_batch *b, *none;
    lazy_stream *captured;

    open_plain(&s, plain_setting(1, CER_RESIDENT_AUTO));
    captured = s.streams[0];
    b = take(&s, captured);
    captured->capturing = true;
    CHECK_EQ_INT(cer_device_loader_next(s.loader, captured, &none, &err),
                 CER_DEVICE);
    CHECK(strstr(err.message, "captured") != NULL && none == NULL);
    CHECK_EQ_INT(b->block.place->join(b->block.place, (intptr_t)captured, &err),
                 CER_DEVICE);
    CHECK_EQ_INT(s.device.on_captured, 0);
    captured->capturing = false;
    cer_owner_release(&b->owner);
    for (size_t i = 1; i < cer_loader_batches(s.expected); i++) {
        b = take(&s, captured); /* the pass continues */
        CHECK(b != NULL);
        if (b != NULL)
            cer_owner_release(&b->owner);
    }
    close_scene(&s);
}

/* Batches were used on a stream that a different thread captures later: their
 * memory is not reused until the capture ends, and the pass continues. */
static void
a_stream_that_is_captured_later_ends_no_pass(void)
{
    for (int way = 0; way < 2; way++) {
        setting set = plain_setting(1, way ? CER_STREAMED : CER_RESIDENT_AUTO);
        scene s = {.depot = NULL};
        cer_error err = {0};
        lazy_stream *captured;
        bool more = true;

        set.streams = 1;
        set.known = true;
        set.load.batch_size = 2;
        open_plain(&s, set);
        for (int i = 0; i < 5; i++)
            CHECK_EQ_INT(run_batch(&s, &set, &more, &err), CER_OK);
        captured = s.streams[0];
        captured->capturing = true;
        s.streams[0] = NULL; /* the legacy default stream */
        while (more)
            CHECK_EQ_INT(run_batch(&s, &set, &more, &err), CER_OK);
        CHECK_EQ_INT(s.device.on_captured, 0);
        CHECK_EQ_INT(s.device.syncs, 0);
        CHECK_EQ_INT(cer_device_loader_buffers(s.loader), 5); /* not 4 */
        captured->capturing = false;
        s.streams[0] = captured;
        CHECK(s.batches > 15);
        close_scene(&s);
    }
}

/* --- memory --------------------------------------------------------------- */

/* Shards beyond the limit are streamed: the bits are the same, and the note
 * says why. */
static void
shards_that_do_not_fit_are_streamed(void)
{
    size_t first = bytes_of_shard(parts[0].shard);
    size_t second = bytes_of_shard(parts[1].shard);
    size_t last = bytes_of_shard(parts[2].shard);
    const struct {
        size_t limit, resident;
    } cases[] = {{1, 0},
                 {second + last, 2},
                 {first + second + last - 1, 2},
                 {first + second + last, 3}};

    for (size_t i = 0; i < 4; i++) {
        setting set = plain_setting(1, CER_RESIDENT_AUTO);
        scene s = {.depot = NULL};
        cer_error err = {0};

        set.limit = cases[i].limit;
        lazy_init(&s.device, 5, 2, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(run_passes(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(s.resident, cases[i].resident);
        CHECK(cer_depot_resident_bytes(s.depot) <= set.limit);
        CHECK_EQ_INT(
            strstr(cer_device_loader_note(s.loader), "may be resident") != NULL,
            cases[i].resident < 3);
        lazy_finish(&s.device);
        CHECK(s.device.compared != 0);
        close_scene(&s);
    }
}

/* All parts of a mix are resident, or none that another one does not need. */
static void
a_mix_is_resident_as_a_whole(void)
{
    size_t bytes[LOADER_SHARDS];
    struct {
        int mixing;
        size_t limit, resident;
    } cases[12];
    size_t n = 0;

    for (int i = 0; i < LOADER_SHARDS; i++)
        bytes[i] = bytes_of_shard(parts[i].shard);
    for (int mixing = 1; mixing < MIXINGS; mixing++) {
        size_t all = bytes[0] + bytes[1] + bytes[2];

        cases[n].mixing = mixing;
        cases[n].limit = all;
        cases[n++].resident = 3;
        cases[n].mixing = mixing;
        cases[n].limit = all - 1; /* the first mix is of parts 1 and 2 */
        cases[n++].resident = mixing == 1 ? 0 : 2;
        cases[n].mixing = mixing;
        cases[n].limit = bytes[1] + bytes[2] - 1;
        cases[n++].resident = 0;
    }
    for (size_t i = 0; i < n; i++) {
        setting set = plain_setting(8, CER_RESIDENT_AUTO);
        scene s = {.depot = NULL};
        cer_error err = {0};

        set.mixing = cases[i].mixing;
        set.limit = cases[i].limit;
        set.epochs = 3;
        lazy_init(&s.device, 5, 2, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(run_passes(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(s.resident, cases[i].resident);
        CHECK(cer_depot_resident_bytes(s.depot) <= set.limit);
        CHECK_EQ_INT(
            strstr(cer_device_loader_note(s.loader), "may be resident") != NULL,
            cases[i].resident < 3);
        lazy_finish(&s.device);
        CHECK(s.device.compared != 0);
        close_scene(&s);
    }
}

enum { TABLE_BYTES = 4 * LOADER_SHARDS * sizeof(cer_kernel_part) };

/* Overwrites a spare block of the depot, if there is one of this size. */
static void
spoil_spare(scene *s, size_t bytes)
{
    static uint8_t rubbish[1024];
    cer_depot_block *block;
    cer_error err = {0};

    memset(rubbish, 0xd5, sizeof rubbish);
    CHECK_EQ_INT(cer_depot_get(s->depot, bytes, &block, &err), CER_OK);
    CHECK_EQ_INT(cer_uses_before(&block->uses, s->streams[1], &err), CER_OK);
    CHECK_EQ_INT(cer_device_copy(&s->device.base, block->memory.data, rubbish,
                                 bytes, CER_COPY_TO_DEVICE, s->streams[1],
                                 &err),
                 CER_OK);
    CHECK_EQ_INT(cer_uses_filled(&block->uses, s->streams[1], &err), CER_OK);
    cer_depot_give(block);
}

/* The bytes that a pass over some parts brings, without those of its batches,
 * whose results are compared later. */
static size_t
brought_by(scene *s, const cer_mix *mix, uint64_t epoch)
{
    size_t before = s->device.brought, brought;
    setting set = plain_setting(8, CER_RESIDENT_AUTO);
    cer_error err = {0};
    bool more = true;

    CHECK_EQ_INT(
        cer_device_loader_begin(s->loader, mix, 1, epoch, 0, SIZE_MAX, &err),
        CER_OK);
    CHECK_EQ_INT(
        cer_loader_begin(s->expected, mix, 1, epoch, 0, SIZE_MAX, &err),
        CER_OK);
    brought = s->device.brought - before;
    spoil_spare(s, TABLE_BYTES); /* the old table, if this pass has a new one */
    while (more)
        CHECK_EQ_INT(run_batch(s, &set, &more, &err), CER_OK);
    return brought;
}

/* Kernels of earlier passes, which the device runs late, read the old table. */
static void
the_table_of_parts_is_brought_when_it_changes(void)
{
    const size_t table = TABLE_BYTES;
    const cer_mix first = {numbers, 2}, second = {numbers + 1, 2};
    size_t bytes[LOADER_SHARDS];

    for (int i = 0; i < LOADER_SHARDS; i++)
        bytes[i] = bytes_of_shard(parts[i].shard);
    for (uint32_t seed = 0; seed < 20; seed++) {
        setting set = plain_setting(8, CER_RESIDENT_AUTO);
        scene s = {.depot = NULL};
        cer_error err = {0};

        lazy_init(&s.device, seed, 0, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        CHECK_EQ_INT(brought_by(&s, &first, 0), bytes[0] + bytes[1] + table);
        CHECK_EQ_INT(brought_by(&s, &first, 1), 0);
        CHECK_EQ_INT(brought_by(&s, &second, 2), bytes[2] + table);
        CHECK_EQ_INT(brought_by(&s, &first, 3), 0);
        CHECK_EQ_INT(brought_by(&s, &second, 4), 0);
        CHECK_EQ_INT(brought_by(&s, &mixings[1].mixes[0], 5), 0);
        CHECK_EQ_INT(s.device.syncs, 0);
        lazy_finish(&s.device);
        CHECK(s.device.compared != 0);
        close_scene(&s);
    }
}

/* The device is short of memory: unused shards are freed for those a pass uses.
 */
static void
shards_make_way_for_each_other(void)
{
    setting set = plain_setting(0, CER_RESIDENT);
    scene s = {.depot = NULL};
    cer_error err = {0};
    size_t first = bytes_of_shard(parts[0].shard);
    size_t second = bytes_of_shard(parts[1].shard);

    lazy_init(&s.device, 5, 0, first + second - 1 + 8192);
    CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
    for (uint32_t turn = 0; turn < 6; turn++) {
        uint32_t part = turn % 2;
        cer_batch *b, *e;

        CHECK_EQ_INT(begin_device(s.loader, &part, 1, turn, &err), CER_OK);
        CHECK_EQ_INT(begin_parts(s.expected, &part, 1, turn, &err), CER_OK);
        CHECK_EQ_INT(cer_device_loader_resident(s.loader), 1);
        while ((b = take(&s, s.streams[0])) != NULL) {
            CHECK_EQ_INT(cer_loader_next(s.expected, &e, &err), CER_OK);
            CHECK_EQ_INT(use_on(&s, b, e, s.streams[0], &err), CER_OK);
            cer_owner_release(&b->owner);
            cer_owner_release(&e->owner);
        }
    }
    CHECK(cer_depot_drop(s.depot, parts[1].shard) == second);
    CHECK_EQ_INT(cer_depot_drop(s.depot, parts[1].shard), 0);
    close_scene(&s);
}

static void
a_column_is_there_once(void)
{
    scene s = {.depot = NULL};
    cer_device_loader *other;
    cer_error err = {0};
    setting set = plain_setting(1, CER_RESIDENT_AUTO);
    size_t bytes, live;

    open_plain(&s, set);
    bytes = cer_depot_resident_bytes(s.depot);
    live = cer_device_held(&s.device.base, CER_USE_SHARDS);
    CHECK_EQ_INT(bytes, live);
    set.load.batch_size = 3;
    CHECK_EQ_INT(cer_device_loader_new(s.depot, CER_RESIDENT_AUTO, parts,
                                       LOADER_SHARDS, s.chains.columns, 4,
                                       &set.load, &other, &err),
                 CER_OK);
    CHECK_EQ_INT(begin_device(other, visits, 3, 4, &err), CER_OK);
    CHECK_EQ_INT(cer_device_loader_resident(other), 3);
    CHECK_EQ_INT(cer_depot_resident_bytes(s.depot), bytes);
    CHECK_EQ_INT(cer_device_held(&s.device.base, CER_USE_SHARDS), live);
    CHECK_EQ_INT(cer_depot_drop(s.depot, NULL), 0); /* two passes use it */
    cer_device_loader_free(other);
    CHECK_EQ_INT(cer_depot_drop(s.depot, NULL), 0);
    cer_device_loader_close(s.loader);
    CHECK_EQ_INT(cer_depot_drop(s.depot, NULL), bytes);
    close_scene(&s);
}

/* No memory for batches: the error says what is resident. */
static void
out_of_memory_says_what_is_held(void)
{
    setting set = plain_setting(0, CER_RESIDENT);
    scene s = {.depot = NULL};
    cer_error err = {0};
    cer_batch *b, *kept[64];
    cer_status status;
    size_t n = 0;

    set.load.batch_size = 2;
    lazy_init(&s.device, 5, 0, 32768);
    CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
    CHECK_EQ_INT(begin_device(s.loader, visits, 3, 0, &err), CER_OK);
    while ((status = cer_device_loader_next(s.loader, NULL, &b, &err)) ==
               CER_OK &&
           b != NULL)
        kept[n++] = b;
    CHECK_EQ_INT(status, CER_NOMEM);
    CHECK(n > 4 && strstr(err.message, "shards") != NULL);
    CHECK_EQ_INT(cer_device_loader_next(s.loader, NULL, &b, &err), CER_OK);
    CHECK(b == NULL);
    while (n > 0)
        cer_owner_release(&kept[--n]->owner);
    close_scene(&s);
}

static void
copies_of_tensors(void)
{
    for (int way = 0; way < 3; way++) {
        scene s = {.depot = NULL};
        cer_error err = {0};
        cer_batch *b, *e;
        intptr_t stream;

        open_plain(&s, plain_setting(1, CER_RESIDENT_AUTO));
        stream = way == 1 ? (intptr_t)s.streams[1] : CER_STREAM_NOBODY;
        while ((b = take(&s, s.streams[0])) != NULL) {
            CHECK_EQ_INT(cer_loader_next(s.expected, &e, &err), CER_OK);
            for (size_t i = 0; i < b->n_tensors; i++) {
                const cer_tensor *t = &b->tensors[i];
                size_t bytes = cer_tensor_bytes(t);
                cer_tensor copy;

                CHECK_EQ_INT(t->place->copy(t, way == 0, stream, &copy, &err),
                             CER_OK);
                CHECK_EQ_INT(copy.place == NULL, way == 0);
                if (way == 1) /* queued on the consumer's stream */
                    lazy_compare(&s.device, s.streams[1], copy.data,
                                 e->tensors[i].data, bytes);
                else /* done */
                    CHECK(bytes == 0 ||
                          memcmp(copy.data, e->tensors[i].data, bytes) == 0);
                cer_owner_release(copy.owner);
            }
            cer_owner_release(&b->owner);
            cer_owner_release(&e->owner);
        }
        close_scene(&s);
    }
}

/* --- failures ------------------------------------------------------------- */

static void
every_call_fails_in_turn(void)
{
    for (int way = 0; way < 7; way++) {
        setting set = way < 3   ? any_setting(way == 2 ? 6 : 2, way % 2)
                      : way < 5 ? any_setting(8, way - 2)
                                : any_setting(8, way - 5);
        bool reached = true;

        set.mixing = way < 5 ? 0 : way - 4;

        set.epochs = 1;
        set.known = way == 0;
        for (size_t nth = 1; reached; nth++) {
            scene s = {.depot = NULL};
            cer_error err = {0};
            cer_status status;
            cer_batch *b = NULL;

            lazy_init(&s.device, (uint32_t)nth, (unsigned)(nth % 5), PLENTY);
            s.device.fail_at = nth;
            status = open_scene(&s, &set, &err);
            if (status == CER_OK)
                status = run_passes(&s, &set, &err);
            reached = s.device.failed;
            if (status != CER_OK)
                CHECK(reached && err.message[0] != '\0' &&
                      (status == CER_DEVICE || status == CER_NOMEM));
            while (s.loader != NULL &&
                   cer_device_loader_next(s.loader, NULL, &b, NULL) == CER_OK &&
                   b != NULL) /* the consumer's call failed */
                cer_owner_release(&b->owner);
            CHECK(b == NULL);
            s.device.fail_at = 0;
            close_scene(&s);
        }
    }
}

/* After a failure, the loader can run its next pass. */
static void
a_failure_ends_one_pass_only(void)
{
    setting set = plain_setting(1, CER_RESIDENT_AUTO);

    set.epochs = 1;
    for (size_t nth = 1; nth < 60; nth += 3) {
        scene s = {.depot = NULL};
        cer_error err = {0};

        lazy_init(&s.device, 1, 0, PLENTY);
        CHECK_EQ_INT(open_scene(&s, &set, &err), CER_OK);
        s.device.fail_at = s.device.calls + nth;
        (void)run_passes(&s, &set, &err);
        s.device.fail_at = 0;
        CHECK_EQ_INT(run_passes(&s, &set, &err), CER_OK);
        lazy_finish(&s.device);
        close_scene(&s);
    }
}

static void
a_forked_child_is_told(void)
{
    scene s = {.depot = NULL};
    pid_t child;
    int status = 0;

    open_plain(&s, plain_setting(0, CER_RESIDENT_AUTO));
    child = fork();
    if (child == 0) {
        cer_error err = {0};
        cer_batch *b;
        bool told =
            cer_device_loader_next(s.loader, NULL, &b, &err) == CER_INVALID &&
            strstr(err.message, "fork") != NULL &&
            begin_device(s.loader, visits, 1, 0, &err) == CER_INVALID;

        cer_device_loader_free(s.loader);
        _exit(told ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    close_scene(&s);
}

static void
bad_arguments_are_told(void)
{
    static const uint32_t none[] = {0, 9};
    scene s = {.depot = NULL};
    cer_error err = {0};
    cer_batch *b;

    open_plain(&s, plain_setting(0, CER_RESIDENT_AUTO));
    CHECK_EQ_INT(begin_device(s.loader, none, 2, 0, &err), CER_INVALID);
    CHECK(strstr(err.message, "no shard 9") != NULL);
    CHECK_EQ_INT(cer_device_loader_next(s.loader, NULL, &b, &err), CER_OK);
    CHECK(b == NULL);
    cer_device_loader_close(s.loader);
    cer_device_loader_close(s.loader);
    CHECK_EQ_INT(begin_device(s.loader, visits, 3, 0, &err), CER_INVALID);
    CHECK_EQ_INT(cer_device_loader_next(s.loader, NULL, &b, &err), CER_OK);
    CHECK(b == NULL);
    close_scene(&s);
}

static void
prepare(void)
{
    make_parts(parts);
}

static void
clean_up(void)
{
    release_parts(parts);
}

CHECK_MAIN(prepare, batches_of_no_bytes, bits_are_the_cpus,
           every_option_of_a_pass, rows_of_mixed_parts,
           streamed_rows_come_as_they_are, bytes_that_cross,
           pinned_memory_is_made_when_a_pass_begins,
           more_streams_than_are_remembered, consumers_without_order,
           default_streams_of_threads, kept_batches_never_hang,
           a_batch_outlives_loader_and_depot,
           nothing_is_put_on_a_captured_stream,
           a_stream_that_is_captured_later_ends_no_pass,
           shards_that_do_not_fit_are_streamed, a_mix_is_resident_as_a_whole,
           the_table_of_parts_is_brought_when_it_changes,
           shards_make_way_for_each_other, a_column_is_there_once,
           out_of_memory_says_what_is_held, copies_of_tensors,
           every_call_fails_in_turn, a_failure_ends_one_pass_only,
           a_forked_child_is_told, bad_arguments_are_told, clean_up)
