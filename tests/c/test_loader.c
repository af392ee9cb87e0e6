#include "loader.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "check.h"
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

static void
batches_are_counted(void)
{
    CHECK_EQ_INT(cer_loader_count(0, 4, false), 0);
    CHECK_EQ_INT(cer_loader_count(1, 4, false), 1);
    CHECK_EQ_INT(cer_loader_count(4, 4, false), 1);
    CHECK_EQ_INT(cer_loader_count(5, 4, false),
                 1); /* one row joins the batch */
    CHECK_EQ_INT(cer_loader_count(6, 4, false), 2);
    CHECK_EQ_INT(cer_loader_count(9, 4, false), 2);
    CHECK_EQ_INT(cer_loader_count(3, 1, false), 3);
    CHECK_EQ_INT(cer_loader_count(1, 4, true), 0);
    CHECK_EQ_INT(cer_loader_count(5, 4, true), 1);
    CHECK_EQ_INT(cer_loader_count(7, 4, true), 1);
}

/* The order of a pass follows its definition, with 0, 1, 2 and 5 threads. */
static void
check_pass(const cer_part *parts, cer_load_options options, uint64_t epoch,
           size_t start)
{
    static const uint32_t visits[] = {1, 2, 0};
    int64_t expected[LOADER_ROWS], ids[LOADER_ROWS];
    size_t sizes[64], n_batches, n = 0, skipped = 0, left = start;
    cer_loader *loader = new_loader(parts, options);

    for (int i = 0; i < LOADER_SHARDS; i++) {
        const cer_part *part = &parts[visits[i]];
        uint32_t order[64];
        size_t rows = part->count;
        size_t batches =
            cer_loader_count(rows, options.batch_size, options.drop_last);
        size_t skip = left < batches ? left : batches;
        cer_rng rng;

        cer_rng_seed(&rng, options.seed,
                     part->sums == NULL ? CER_RNG_ROWS : CER_RNG_DRAWS, epoch,
                     visits[i]);
        if (part->sums == NULL)
            cer_rng_permute(&rng, order, (uint32_t)rows);
        else
            cer_rng_draw(&rng, part->sums, order, (uint32_t)rows);
        if (options.drop_last)
            rows = batches * options.batch_size;
        left -= skip;
        skipped = skip == batches ? rows : skip * options.batch_size;
        for (size_t k = skipped; k < rows; k++)
            expected[n++] =
                (int64_t)(part->first_row + (options.shuffle ? order[k] : k));
    }
    CHECK_EQ_INT(
        cer_loader_begin(loader, visits, LOADER_SHARDS, epoch, start, NULL),
        CER_OK);
    CHECK_EQ_INT(collect(loader, ids, sizes, &n_batches), n);
    CHECK(memcmp(ids, expected, n * sizeof *ids) == 0);
    CHECK(next_batch(loader) == NULL);
    cer_loader_free(loader);
}

static void
passes_follow_their_definition(void)
{
    static const uint32_t threads[] = {0, 1, 2, 5};
    static const size_t starts[] = {0, 1, 9, 10, 11, 16, 17, 1000};
    static const size_t batch_sizes[] = {1, 2, 4, 11, 22, 100};
    cer_part parts[LOADER_SHARDS];
    uint64_t sums[40];

    make_parts(parts);
    for (uint64_t i = 0; i < 40; i++)
        sums[i] = i % 3 == 0 ? i + 1 : (i / 3 + 1) * 3;
    for (size_t i = 0; i < 4 * 8 * 6; i++) {
        /* rows of one or two parts are drawn by weight */
        parts[0].sums = i % 3 == 1 ? sums : NULL;
        parts[1].sums = i % 4 == 2 ? sums : NULL;
        cer_load_options options = {.batch_size = batch_sizes[i % 6],
                                    .seed = i % 5,
                                    .shuffle = i % 7 != 0,
                                    .drop_last = i % 5 == 0,
                                    .threads = threads[i / 6 % 4]};

        check_pass(parts, options, i % 3, starts[i / 24]);
    }
    release_parts(parts);
}

static void
batch_sizes_of_a_pass(void)
{
    static const uint32_t visits[] = {0, 2, 1};
    static const size_t expected[] = {11, 12, 1, 11, 11, 11, 7};
    cer_part parts[LOADER_SHARDS];
    int64_t ids[LOADER_ROWS];
    size_t sizes[64], n;
    cer_loader *loader;

    make_parts(parts);
    loader = new_loader(parts, (cer_load_options){.batch_size = 11});
    CHECK_EQ_INT(cer_loader_begin(loader, visits, 3, 0, 0, NULL), CER_OK);
    (void)collect(loader, ids, sizes, &n);
    CHECK_EQ_INT(n, 7);
    CHECK(memcmp(sizes, expected, sizeof expected) == 0);
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
    CHECK_EQ_INT(cer_loader_begin(loader, visits, 2, 0, 0, NULL), CER_OK);
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
    static const uint32_t visits[] = {0, 1, 2, 1};
    cer_part parts[LOADER_SHARDS];

    make_parts(parts);
    for (uint32_t threads = 0; threads < 3; threads++) {
        cer_loader *loader = new_loader(
            parts, (cer_load_options){
                       .batch_size = 4, .shuffle = true, .threads = threads});

        for (size_t i = 0; i < 300; i++) {
            cer_batch *b;

            CHECK_EQ_INT(cer_loader_begin(loader, visits + i % 3, 1 + i % 2,
                                          i % 4, 0, NULL),
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

        CHECK_EQ_INT(cer_loader_begin(loader, visits, 2, 0, 0, NULL), CER_OK);
        for (int i = 0; i < 20; i++)
            kept[i] = next_batch(loader);
        for (int i = 0; i < 10; i++)
            pthread_create(&releasers[i], NULL, release_later, kept[i]);
        cer_loader_close(loader);
        cer_loader_close(loader);
        CHECK(next_batch(loader) == NULL);
        CHECK_EQ_INT(cer_loader_begin(loader, visits, 2, 0, 0, NULL),
                     CER_INVALID);
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
    CHECK_EQ_INT(cer_loader_begin(loader, visits, 3, 0, 0, NULL), CER_OK);
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
    CHECK_EQ_INT(cer_loader_begin(loader, visits, 1, 0, 0, NULL), CER_OK);
    b = next_batch(loader);
    child = fork();
    if (child == 0) {
        cer_error err = {0};
        cer_batch *none;
        bool told =
            cer_loader_next(loader, &none, &err) == CER_INVALID &&
            strstr(err.message, "after a fork") != NULL &&
            cer_loader_begin(loader, visits, 1, 0, 0, &err) == CER_INVALID;

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
    CHECK_EQ_INT(cer_loader_begin(asked.loader, visits, 1, 0, 0, NULL), CER_OK);
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
    CHECK_EQ_INT(cer_loader_begin(loader, &visit, 1, 0, 0, NULL), CER_OK);
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
    CHECK_EQ_INT(cer_loader_begin(loader, visits, 3, 0, 0, NULL), CER_OK);
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
    CHECK_EQ_INT(cer_loader_begin(loader, visits, 3, 5, 0, NULL), CER_OK);
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
        CHECK_EQ_INT(cer_loader_begin(loader, visits, 3, 5, 0, NULL), CER_OK);
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
    CHECK_EQ_INT(cer_loader_begin(loader, &visit, 1, 0, 0, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "no shard 3: there are 3");
    CHECK(next_batch(loader) == NULL);
    cer_loader_free(loader);
    cer_loader_free(NULL);
    release_parts(parts);
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

CHECK_MAIN(batches_are_counted, passes_follow_their_definition,
           batch_sizes_of_a_pass, row_lists_and_ranges,
           a_loader_is_used_for_many_passes, batches_outlive_the_loader,
           shards_may_be_released_first, a_forked_child_is_told,
           counts_are_known_while_a_batch_is_filled,
           bits_do_not_depend_on_the_mode_of_a_thread,
           without_threads_to_be_had_a_loader_goes_on, nonsense_is_refused,
           a_column_may_have_another_source, tensors_have_names)
