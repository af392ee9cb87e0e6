/* The nth allocation fails in turn while a loader is made, in a pass and in an
 * export: the error says so, and nothing leaks. */
#include <string.h>

#include "check.h"
#include "failing_alloc.h"
#include "loader.h"
#include "loader_files.h"

static cer_part parts[LOADER_SHARDS];
static uint32_t threads;

static const cer_op image_ops[] = {
    {.kind = CER_OP_CROP, .size = {4, 4}, .padding = {1, 1}, .random = true},
    {.kind = CER_OP_TO_CHW},
    {.kind = CER_OP_NORMALIZE,
     .mean = (const double[]){1, 2, 3},
     .std = (const double[]){1, 2, 3},
     .n = 3}};
static const cer_op value_ops[] = {{.kind = CER_OP_SCALE, .value = 3}};
static const cer_op ragged_ops[] = {
    {.kind = CER_OP_PAD, .value = 1, .multiple_of = 4}};
static const cer_load_column columns[] = {
    {.name = "img", .ops = image_ops, .n_ops = 3},
    {.name = "v", .ops = value_ops, .n_ops = 1},
    {.name = "t", .ops = ragged_ops, .n_ops = 1}};

static cer_status
load(cer_error *err)
{
    static const uint32_t all[] = {0, 1, 2};
    static const cer_mix mixes[] = {{all, 2}, {all, 1}, {all + 1, 2}};
    const cer_load_options options = {
        .batch_size = 16, .shuffle = true, .threads = threads};
    cer_loader *loader = NULL;
    cer_batch *b = NULL, *kept = NULL;
    cer_status status = cer_loader_new(parts, LOADER_SHARDS, columns, 3,
                                       &options, &loader, err);

    if (status == CER_OK)
        status = cer_loader_begin(loader, mixes, 3, 1, 0, SIZE_MAX, err);
    while (status == CER_OK) {
        status = cer_loader_next(loader, &b, err);
        if (b == NULL)
            break;
        if (kept != NULL)
            cer_owner_release(&kept->owner);
        kept = b;
    }
    if (status != CER_OK && loader != NULL) {
        CHECK_EQ_INT(cer_loader_next(loader, &b, NULL), CER_OK);
        CHECK(b == NULL); /* the pass is over */
    }
    cer_loader_free(loader);
    if (kept != NULL)
        cer_owner_release(&kept->owner);
    return status;
}

static cer_status export(cer_error *err)
{
    static float values[2];
    cer_tensor tensor = {.data = values,
                         .dtype = CER_F32,
                         .ndim = 1,
                         .shape = {2}},
               copy;
    cer_export *block;
    cer_status status = cer_tensor_copy(&tensor, &copy, err);

    if (status != CER_OK)
        return status;
    block = cer_export_new(&copy, 0);
    if (block != NULL)
        cer_export_capsule_gone(block, false);
    else
        status = cer_fail(err, CER_NOMEM, "out of memory");
    cer_owner_release(copy.owner);
    return status;
}

static void
fail_every_allocation(cer_status (*action)(cer_error *err), size_t at_least)
{
    size_t n = 0;

    for (;;) {
        size_t live = failing_alloc_live();
        cer_error err = {0};
        cer_status status;

        failing_alloc_arm(++n);
        status = action(&err);
        CHECK_EQ_INT(failing_alloc_live(), live);
        if (!failing_alloc_triggered()) {
            CHECK_EQ_INT(status, CER_OK);
            break;
        }
        CHECK_EQ_INT(status, CER_NOMEM);
        CHECK(strncmp(err.message, "out of memory", 13) == 0);
    }
    failing_alloc_arm(0);
    CHECK(n > at_least);
}

static void
a_pass_without_threads(void)
{
    threads = 0;
    fail_every_allocation(load, 30);
}

/* A thread may fail on a batch that is never requested, so the pass does not
 * always report it. Only checks that nothing leaks or hangs. */
static void
a_pass_with_threads(void)
{
    threads = 2;
    for (size_t n = 1; n < 60; n++) {
        size_t live = failing_alloc_live();
        cer_error err = {0};
        cer_status status;

        failing_alloc_arm(n);
        status = load(&err);
        CHECK_EQ_INT(failing_alloc_live(), live);
        CHECK(status == CER_OK || status == CER_NOMEM);
    }
    failing_alloc_arm(0);
}

static void
exports(void)
{
    fail_every_allocation(export, 3);
}

static void
make_shards(void)
{
    make_parts(parts);
}

static void
release_shards(void)
{
    release_parts(parts);
}

CHECK_MAIN(make_shards, a_pass_without_threads, a_pass_with_threads, exports,
           release_shards)
