/* The device layer on host memory: accounting, out of memory, foreign
 * allocators.
 */
#include <stdlib.h>

#include "check.h"
#include "device.h"
#include "failing_alloc.h"

static void
blocks_are_counted_by_use(void)
{
    size_t live = failing_alloc_live();
    cer_device *device;
    cer_device_block shard, batch, pinned, empty;

    CHECK_EQ_INT(cer_device_host_new(&device, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_kind_of(device), CER_DEVICE_HOST);
    CHECK_EQ_INT(cer_device_index(device), 0);
    CHECK_EQ_STR(cer_device_name(device), "cpu");
    CHECK_EQ_INT(cer_device_alloc(device, 1000, CER_USE_SHARDS, &shard, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_alloc(device, 24, CER_USE_BATCHES, &batch, NULL),
                 CER_OK);
    CHECK_EQ_INT(
        cer_device_alloc_pinned(device, 50, CER_USE_STATES, &pinned, NULL),
        CER_OK);
    CHECK_EQ_INT(cer_device_alloc(device, 0, CER_USE_OTHER, &empty, NULL),
                 CER_OK);
    CHECK(empty.data == NULL && (uintptr_t)shard.data % CER_ALIGNMENT == 0);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_SHARDS), 1000);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_BATCHES), 24);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_STATES), 0);
    cer_device_free(device, &shard);
    cer_device_free(device, &shard);
    cer_device_free(device, &batch);
    cer_device_free(device, &pinned);
    cer_device_free(device, &empty);
    CHECK(shard.data == NULL);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_SHARDS), 0);
    cer_device_retain(device);
    cer_device_release(device);
    cer_device_release(device);
    cer_device_release(NULL);
    CHECK_EQ_INT(failing_alloc_live(), live);
}

static void
short_memory_says_what_is_held(void)
{
    cer_device *device;
    cer_device_block shard, other;
    cer_error err = {0};

    CHECK_EQ_INT(cer_device_host_new(&device, NULL), CER_OK);
    CHECK_EQ_INT(
        cer_device_alloc(device, 2000000, CER_USE_SHARDS, &shard, NULL),
        CER_OK);
    failing_alloc_arm(1);
    CHECK_EQ_INT(
        cer_device_alloc(device, 500000, CER_USE_BATCHES, &other, &err),
        CER_NOMEM);
    CHECK_EQ_STR(err.message,
                 "out of memory on cpu: 0.5 MB for batches; Cerebro holds in "
                 "this process: shards 2.0 MB. Use fewer workers per device, "
                 "smaller batches or a smaller model");
    CHECK(other.data == NULL);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_BATCHES), 0);
    failing_alloc_arm(1);
    CHECK_EQ_INT(
        cer_device_alloc_pinned(device, 500000, CER_USE_STATES, &other, &err),
        CER_NOMEM);
    CHECK_EQ_STR(err.message,
                 "out of pinned host memory for cpu: 0.5 MB for states");
    cer_device_free(device, &shard);
    cer_device_release(device);
}

typedef struct spare {
    cer_device *device;
    cer_device_block block;
    size_t asked;
} spare;

static bool
give_back(void *context, size_t bytes)
{
    spare *s = context;
    bool had = s->block.data != NULL;

    s->asked = bytes;
    cer_device_free(s->device, &s->block);
    return had;
}

static void
reclaimers_are_asked_until_one_gives(void)
{
    cer_device *device;
    spare full = {0}, none = {0};
    cer_device_reclaimer first = {give_back, &full, NULL};
    cer_device_reclaimer second = {give_back, &none, NULL};
    cer_device_block block;

    CHECK_EQ_INT(cer_device_host_new(&device, NULL), CER_OK);
    full.device = none.device = device;
    CHECK_EQ_INT(
        cer_device_alloc(device, 300, CER_USE_SHARDS, &full.block, NULL),
        CER_OK);
    cer_device_add_reclaimer(device, &first);
    cer_device_add_reclaimer(device, &second); /* called first: frees nothing */
    failing_alloc_arm(1);
    CHECK_EQ_INT(cer_device_alloc(device, 200, CER_USE_BATCHES, &block, NULL),
                 CER_OK);
    CHECK(full.block.data == NULL && full.asked == 200 && none.asked == 200);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_SHARDS), 0);
    cer_device_free(device, &block);

    full.asked = 0;
    cer_device_remove_reclaimer(device, &first);
    cer_device_remove_reclaimer(device, &first); /* already removed */
    failing_alloc_arm(1);
    CHECK_EQ_INT(cer_device_alloc(device, 200, CER_USE_BATCHES, &block, NULL),
                 CER_NOMEM);
    CHECK_EQ_INT(full.asked, 0);
    cer_device_remove_reclaimer(device, &second);
    cer_device_release(device);
}

typedef struct pool {
    int taken, device;
    bool empty;
} pool;

static cer_status
pool_alloc(void *context, int device, size_t bytes, void **out, void **ticket,
           cer_error *err)
{
    pool *p = context;

    if (p->empty || (*out = malloc(bytes)) == NULL)
        return cer_fail(err, CER_NOMEM, "empty");
    p->taken++;
    *ticket = &p->taken;
    p->device = device;
    return CER_OK;
}

static void
pool_free(void *context, int device, void *data, void *ticket)
{
    (void)device;
    CHECK(ticket == &((pool *)context)->taken);
    ((pool *)context)->taken--;
    free(data);
}

static void
blocks_go_back_where_they_came_from(void)
{
    static pool p = {.device = -1};
    static const cer_device_allocator allocator = {&p, pool_alloc, pool_free};
    size_t live = failing_alloc_live();
    cer_device *device;
    cer_device_block theirs, ours;
    cer_error err = {0};

    CHECK_EQ_INT(cer_device_host_new(&device, NULL), CER_OK);
    cer_device_set_allocator(device, &allocator);
    CHECK_EQ_INT(cer_device_alloc(device, 10, CER_USE_SHARDS, &theirs, NULL),
                 CER_OK);
    CHECK(p.taken == 1 && p.device == 0);
    CHECK_EQ_INT(
        cer_device_alloc_pinned(device, 10, CER_USE_STATES, &ours, NULL),
        CER_OK); /* not for host memory */
    CHECK_EQ_INT(p.taken, 1);
    cer_device_free(device, &ours);
    cer_device_set_allocator(device, NULL);
    CHECK_EQ_INT(cer_device_alloc(device, 10, CER_USE_SHARDS, &ours, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_held(device, CER_USE_SHARDS), 20);
    cer_device_free(device, &theirs);
    CHECK_EQ_INT(p.taken, 0);
    cer_device_free(device, &ours);
    cer_device_set_allocator(device, &allocator);
    p.empty = true;
    CHECK_EQ_INT(cer_device_alloc(device, 10, CER_USE_SHARDS, &theirs, &err),
                 CER_NOMEM);
    CHECK(strncmp(err.message, "out of memory on cpu:", 21) == 0);
    cer_device_release(device);
    CHECK_EQ_INT(failing_alloc_live(), live);
}

typedef struct add_args {
    int32_t *to;
    int32_t n, by;
} add_args;

static void
add(const void *args)
{
    const add_args *a = args;

    for (int32_t i = 0; i < a->n; i++)
        a->to[i] += a->by;
}

static cer_status
work_in_order(cer_error *err)
{
    cer_device *device = NULL;
    cer_device_block block = {0}, staging = {0};
    void *stream = NULL, *event = NULL;
    bool done = false, capturing = true;
    cer_device_launch launch = {.name = "add",
                                .grid = {1, 1, 1},
                                .block = {32, 1, 1},
                                .reference = add};
    add_args args;
    int32_t *host;
    cer_status status;

    if ((status = cer_device_host_new(&device, err)) != CER_OK ||
        (status = cer_device_stream_new(device, &stream, err)) != CER_OK ||
        (status = cer_device_event_new(device, &event, err)) != CER_OK ||
        (status = cer_device_alloc(device, 16, CER_USE_OTHER, &block, err)) !=
            CER_OK ||
        (status = cer_device_alloc_pinned(device, 16, CER_USE_OTHER, &staging,
                                          err)) != CER_OK)
        goto done;
    host = staging.data;
    for (int32_t i = 0; i < 4; i++)
        host[i] = i;
    args = (add_args){block.data, 4, 10};
    launch.args = &args;
    launch.args_bytes = sizeof args;
    CHECK_EQ_INT(cer_device_copy(device, block.data, host, 16,
                                 CER_COPY_TO_DEVICE, stream, err),
                 CER_OK);
    CHECK_EQ_INT(cer_device_run(device, &launch, stream, err), CER_OK);
    launch.grid[1] = 0; /* nothing to do */
    CHECK_EQ_INT(cer_device_run(device, &launch, stream, err), CER_OK);
    CHECK_EQ_INT(cer_device_fill(device, block.data, 1, 4, stream, err),
                 CER_OK);
    CHECK_EQ_INT(cer_device_copy(device, host, block.data, 16,
                                 CER_COPY_FROM_DEVICE, stream, err),
                 CER_OK);
    CHECK_EQ_INT(cer_device_event_record(device, event, stream, err), CER_OK);
    CHECK_EQ_INT(cer_device_stream_wait(device, NULL, event, err), CER_OK);
    CHECK_EQ_INT(cer_device_event_query(device, event, &done, err), CER_OK);
    CHECK_EQ_INT(cer_device_event_sync(device, event, err), CER_OK);
    CHECK_EQ_INT(cer_device_stream_sync(device, stream, err), CER_OK);
    CHECK_EQ_INT(cer_device_stream_capturing(device, stream, &capturing, err),
                 CER_OK);
    CHECK(done && !capturing);
    CHECK(host[0] == 0x01010101 && host[1] == 11 && host[3] == 13);

done:
    if (device != NULL) {
        cer_device_free(device, &staging);
        cer_device_free(device, &block);
        cer_device_event_free(device, event);
        cer_device_stream_free(device, stream);
    }
    cer_device_release(device);
    return status;
}

static void
every_allocation_fails_in_turn(void)
{
    for (size_t n = 1;; n++) {
        size_t live = failing_alloc_live();
        cer_error err = {0};
        cer_status status;

        failing_alloc_arm(n);
        status = work_in_order(&err);
        CHECK_EQ_INT(failing_alloc_live(), live);
        if (!failing_alloc_triggered()) {
            CHECK_EQ_INT(status, CER_OK);
            CHECK_EQ_INT(n, 6);
            break;
        }
        CHECK_EQ_INT(status, CER_NOMEM);
        CHECK(strncmp(err.message, "out of ", 7) == 0);
    }
    failing_alloc_arm(0);
}

CHECK_MAIN(blocks_are_counted_by_use, short_memory_says_what_is_held,
           reclaimers_are_asked_until_one_gives,
           blocks_go_back_where_they_came_from, every_allocation_fails_in_turn)
