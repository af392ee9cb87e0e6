/* On a device of host memory, the nth allocation fails in turn while a depot
 * and its loader are made, in passes, and while a tensor is copied. The error
 * says so, and nothing leaks. */
#include "check.h"
#include "device_loader.h"
#include "failing_alloc.h"
#include "loader_files.h"

static cer_part parts[LOADER_SHARDS];
static cer_residence residence;
static uint32_t threads;

static const cer_op image_ops[] = {
    {.kind = CER_OP_CROP, .size = {4, 4}, .padding = {1, 1}, .random = true},
    {.kind = CER_OP_TO_CHW},
    {.kind = CER_OP_SCALE, .value = 1.0 / 255}};
static const cer_load_column columns[] = {
    {.name = "img", .ops = image_ops, .n_ops = 3}, {.name = "t"}};

static cer_status
run_pass(cer_device_loader *loader, uint64_t epoch, cer_error *err)
{
    static const uint32_t all[] = {0, 1, 2};
    static const cer_mix mixes[] = {{all, 2}, {all + 2, 1}};
    cer_batch *b = NULL;
    cer_status status =
        cer_device_loader_begin(loader, mixes, 2, epoch, 0, SIZE_MAX, err);

    while (status == CER_OK) {
        status = cer_device_loader_next(loader, NULL, &b, err);
        if (b == NULL)
            break;
        cer_owner_release(&b->owner);
    }
    return status;
}

static cer_status
load(cer_error *err)
{
    const cer_load_options options = {
        .batch_size = 16, .shuffle = true, .threads = threads};
    cer_device *device = NULL;
    cer_depot *depot = NULL;
    cer_device_loader *loader = NULL;
    cer_status status = cer_device_host_new(&device, err);

    if (status == CER_OK)
        status = cer_depot_new(device, &depot, err);
    if (status == CER_OK)
        status = cer_device_loader_new(depot, residence, parts, LOADER_SHARDS,
                                       columns, 2, &options, &loader, err);
    for (uint64_t epoch = 0; status == CER_OK && epoch < 2; epoch++)
        status = run_pass(loader, epoch, err);
    cer_device_loader_free(loader);
    cer_depot_release(depot);
    cer_device_release(device);
    return status;
}

/* A resident shard without memory is streamed, without an error. */
static void
every_allocation_fails(void)
{
    static const cer_residence all[] = {CER_RESIDENT_AUTO, CER_STREAMED};

    for (int way = 0; way < 4; way++) {
        size_t n = 0, told = 0;

        residence = all[way % 2];
        threads = way < 2 ? 0 : 2;
        do {
            size_t live = failing_alloc_live();
            cer_error err = {0};
            cer_status status;

            failing_alloc_arm(++n);
            status = load(&err);
            CHECK_EQ_INT(failing_alloc_live(), live);
            CHECK(status == CER_OK || status == CER_NOMEM);
            told +=
                status == CER_NOMEM && strstr(err.message, "out of") != NULL;
        } while (failing_alloc_triggered() && n < 400);
        CHECK(n > 40 && n < 400 && told > 30);
    }
    failing_alloc_arm(0);
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

CHECK_MAIN(make_shards, every_allocation_fails, release_shards)
