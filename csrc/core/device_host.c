/* device_host.c -- host memory as a device: all work is done when a function
 * returns. Streams and events are small blocks, so one that is not freed shows
 * as a leak. */
#include "device_impl.h"

#include <string.h>

static void
drop(cer_device *device)
{
    cer_device_clear(device);
    cer_free(device);
}

static cer_status
host_alloc(cer_device *device, size_t bytes, void **out, cer_error *err)
{
    (void)device;
    if ((*out = cer_aligned_alloc(bytes)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory");
    return CER_OK;
}

static void
host_free(cer_device *device, void *data)
{
    (void)device;
    cer_aligned_free(data);
}

/* Only the operating system knows the free memory, and no decision needs it. */
static cer_status
host_memory(cer_device *device, size_t *free_bytes, size_t *total_bytes,
            cer_error *err)
{
    (void)device;
    *free_bytes = *total_bytes = 0;
    return cer_fail(err, CER_INVALID,
                    "a host device does not report its free memory");
}

/* A name for a stream or an event. */
static cer_status
new_name(cer_device *device, void **out, cer_error *err)
{
    (void)device;
    if ((*out = cer_alloc(1)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a stream or event");
    return CER_OK;
}

static void
free_name(cer_device *device, void *name)
{
    (void)device;
    cer_free(name);
}

static cer_status
at_once(cer_device *device, void *name, cer_error *err)
{
    (void)device, (void)name, (void)err;
    return CER_OK;
}

static cer_status
all_at_once(cer_device *device, cer_error *err)
{
    (void)device, (void)err;
    return CER_OK;
}

static cer_status
both_at_once(cer_device *device, void *name, void *other, cer_error *err)
{
    (void)device, (void)name, (void)other, (void)err;
    return CER_OK;
}

static cer_status
not_capturing(cer_device *device, void *stream, bool *out, cer_error *err)
{
    (void)device, (void)stream, (void)err;
    *out = false;
    return CER_OK;
}

static cer_status
is_done(cer_device *device, void *event, bool *done, cer_error *err)
{
    (void)device, (void)event, (void)err;
    *done = true;
    return CER_OK;
}

static cer_status
host_copy(cer_device *device, void *to, const void *from, size_t bytes,
          cer_device_copy_kind kind, void *stream, cer_error *err)
{
    (void)device, (void)kind, (void)stream, (void)err;
    memmove(to, from, bytes);
    return CER_OK;
}

static cer_status
host_fill(cer_device *device, void *to, uint8_t value, size_t bytes,
          void *stream, cer_error *err)
{
    (void)device, (void)stream, (void)err;
    memset(to, value, bytes);
    return CER_OK;
}

static cer_status
host_run(cer_device *device, const cer_device_launch *launch, void *stream,
         cer_error *err)
{
    (void)device, (void)stream, (void)err;
    launch->reference(launch->args);
    return CER_OK;
}

static const cer_device_ops host_ops = {
    .drop = drop,
    .alloc = host_alloc,
    .give_back = host_free,
    .alloc_pinned = host_alloc,
    .free_pinned = host_free,
    .memory = host_memory,
    .stream_new = new_name,
    .stream_free = free_name,
    .stream_sync = at_once,
    .stream_wait = both_at_once,
    .stream_capturing = not_capturing,
    .event_new = new_name,
    .event_free = free_name,
    .event_record = both_at_once,
    .event_query = is_done,
    .event_sync = at_once,
    .sync = all_at_once,
    .copy = host_copy,
    .fill = host_fill,
    .run = host_run,
};

cer_status
cer_device_host_new(cer_device **out, cer_error *err)
{
    cer_device *device = cer_calloc(1, sizeof *device);
    cer_status status;

    *out = NULL;
    if (device == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a device");
    status = cer_device_init(device, &host_ops, CER_DEVICE_HOST, 0, err);
    if (status != CER_OK)
        cer_free(device);
    else
        *out = device;
    return status;
}
