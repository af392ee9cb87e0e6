/* device.c -- code common to all devices: the reference count, the accounting
 * of memory, and the calls of the kind's table. */
#include "device_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { NOT_WRITTEN, BEING_WRITTEN, WRITTEN }; /* cer_device.unpinned_is */

/* --- the device ----------------------------------------------------------- */

cer_status
cer_device_init(cer_device *device, const cer_device_ops *ops,
                cer_device_kind kind, int index, cer_error *err)
{
    device->ops = ops;
    device->kind = kind;
    device->index = index;
    if (kind == CER_DEVICE_HOST)
        (void)snprintf(device->name, sizeof device->name, "cpu");
    else
        (void)snprintf(device->name, sizeof device->name, "cuda:%d", index);
    atomic_init(&device->count, 1);
    for (int use = 0; use < CER_USE_COUNT; use++)
        atomic_init(&device->held[use], 0);
    atomic_init(&device->allocator, NULL);
    device->reclaimers = NULL;
    atomic_init(&device->unpinned_is, NOT_WRITTEN);
    atomic_init(&device->threads, 0);
    if (pthread_mutex_init(&device->reclaim_lock, NULL) != 0)
        return cer_fail(err, CER_NOMEM, "out of memory for a device's lock");
    if (pthread_key_create(&device->thread_key, NULL) != 0) {
        (void)pthread_mutex_destroy(&device->reclaim_lock);
        return cer_fail(err, CER_NOMEM, "out of memory for a device's threads");
    }
    return CER_OK;
}

void
cer_device_clear(cer_device *device)
{
    (void)pthread_key_delete(device->thread_key);
    (void)pthread_mutex_destroy(&device->reclaim_lock);
}

uintptr_t
cer_device_thread(cer_device *device)
{
    uintptr_t number = (uintptr_t)pthread_getspecific(device->thread_key);

    if (number != 0)
        return number;
    number =
        atomic_fetch_add_explicit(&device->threads, 1, memory_order_relaxed) +
        1;
    return pthread_setspecific(device->thread_key, (void *)number) == 0 ? number
                                                                        : 0;
}

void
cer_device_retain(cer_device *device)
{
    atomic_fetch_add_explicit(&device->count, 1, memory_order_relaxed);
}

void
cer_device_release(cer_device *device)
{
    if (device != NULL &&
        atomic_fetch_sub_explicit(&device->count, 1, memory_order_acq_rel) == 1)
        device->ops->drop(device);
}

cer_device_kind
cer_device_kind_of(const cer_device *device)
{
    return device->kind;
}

int
cer_device_index(const cer_device *device)
{
    return device->index;
}

const char *
cer_device_name(const cer_device *device)
{
    return device->name;
}

cer_status
cer_device_enter(cer_device *device, cer_device_visit *visit, cer_error *err)
{
    return device->ops->enter == NULL ? CER_OK
                                      : device->ops->enter(device, visit, err);
}

void
cer_device_leave(cer_device *device, cer_device_visit *visit)
{
    if (device->ops->leave != NULL)
        device->ops->leave(device, visit);
}

/* --- memory --------------------------------------------------------------- */

static const char *const use_names[CER_USE_COUNT] = {"shards", "batches",
                                                     "states", "other"};

/* Calls reclaimers until one has freed memory. */
static bool
reclaim(cer_device *device, size_t bytes)
{
    bool freed = false;

    (void)pthread_mutex_lock(&device->reclaim_lock);
    for (cer_device_reclaimer *r = device->reclaimers; r != NULL && !freed;
         r = r->next)
        freed = r->reclaim(r->context, bytes);
    (void)pthread_mutex_unlock(&device->reclaim_lock);
    return freed;
}

void
cer_device_add_reclaimer(cer_device *device, cer_device_reclaimer *reclaimer)
{
    (void)pthread_mutex_lock(&device->reclaim_lock);
    reclaimer->next = device->reclaimers;
    device->reclaimers = reclaimer;
    (void)pthread_mutex_unlock(&device->reclaim_lock);
}

void
cer_device_remove_reclaimer(cer_device *device, cer_device_reclaimer *reclaimer)
{
    cer_device_reclaimer **link = &device->reclaimers;

    (void)pthread_mutex_lock(&device->reclaim_lock);
    while (*link != NULL && *link != reclaimer)
        link = &(*link)->next;
    if (*link != NULL)
        *link = reclaimer->next;
    (void)pthread_mutex_unlock(&device->reclaim_lock);
}

static cer_status
alloc_once(cer_device *device, const cer_device_allocator *from, size_t bytes,
           void **out, void **ticket, cer_error *err)
{
    cer_status status;

    if (from == NULL)
        return device->ops->alloc(device, bytes, out, err);
    if (device->ops->step_out != NULL)
        device->ops->step_out(device);
    status = from->alloc(from->context, device->index, bytes, out, ticket, err);
    if (device->ops->step_in != NULL)
        device->ops->step_in(device);
    return status;
}

/* Appends to a text, truncated to its size. */
static void append(char *text, size_t size, const char *format, ...)
    CER_PRINTF(3, 4);

static void
append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text + used, size - used, format, args);
    va_end(args);
}

static cer_status
short_of_memory(cer_device *device, size_t bytes, cer_device_use use,
                cer_error *err)
{
    char held[200] = "";
    size_t free_bytes, total;

    for (int i = 0; i < CER_USE_COUNT; i++) {
        size_t n = cer_device_held(device, (cer_device_use)i);

        if (n != 0)
            append(held, sizeof held, "%s%s %.1f MB",
                   held[0] == '\0' ? "" : ", ", use_names[i], (double)n / 1e6);
    }
    if (held[0] == '\0')
        append(held, sizeof held, "nothing");
    if (device->ops->memory(device, &free_bytes, &total, NULL) == CER_OK)
        append(held, sizeof held, "; %.1f of %.1f MB are free",
               (double)free_bytes / 1e6, (double)total / 1e6);
    return cer_fail(err, CER_NOMEM,
                    "out of memory on %s: %.1f MB for %s; Cerebro holds in "
                    "this process: %s. Use fewer workers per device, smaller "
                    "batches or a smaller model",
                    device->name, (double)bytes / 1e6, use_names[use], held);
}

static cer_status
alloc_block(cer_device *device, size_t bytes, cer_device_use use,
            cer_device_block *out, cer_error *err)
{
    const cer_device_allocator *from =
        atomic_load_explicit(&device->allocator, memory_order_acquire);
    void *data = NULL, *ticket = NULL;
    cer_status status;

    do
        status = alloc_once(device, from, bytes, &data, &ticket, err);
    while (status == CER_NOMEM && reclaim(device, bytes));
    if (status == CER_NOMEM)
        return short_of_memory(device, bytes, use, err);
    if (status != CER_OK)
        return status;
    *out = (cer_device_block){.data = data,
                              .bytes = bytes,
                              .use = use,
                              .from = from,
                              .ticket = ticket};
    atomic_fetch_add_explicit(&device->held[use], bytes, memory_order_relaxed);
    return CER_OK;
}

cer_status
cer_device_alloc(cer_device *device, size_t bytes, cer_device_use use,
                 cer_device_block *out, cer_error *err)
{
    *out = (cer_device_block){0};
    return bytes == 0 ? CER_OK : alloc_block(device, bytes, use, out, err);
}

cer_status
cer_device_alloc_idle(cer_device *device, size_t bytes, cer_device_use use,
                      cer_device_block *out, cer_error *err)
{
    cer_status status = cer_device_alloc(device, bytes, use, out, err);

    if (status == CER_OK && out->from != NULL)
        status = cer_device_stream_sync(device, NULL, err);
    if (status != CER_OK)
        cer_device_free(device, out);
    return status;
}

/* Keeps the first reason; may be called on several threads. */
static void
note_unpinned(cer_device *device, const char *why)
{
    int is = NOT_WRITTEN;

    if (!atomic_compare_exchange_strong_explicit(
            &device->unpinned_is, &is, BEING_WRITTEN, memory_order_relaxed,
            memory_order_relaxed))
        return;
    (void)snprintf(device->unpinned, sizeof device->unpinned, "%s", why);
    atomic_store_explicit(&device->unpinned_is, WRITTEN, memory_order_release);
}

const char *
cer_device_unpinned(cer_device *device)
{
    return atomic_load_explicit(&device->unpinned_is, memory_order_acquire) ==
                   WRITTEN
               ? device->unpinned
               : NULL;
}

/* The host device pins nothing: if it has no memory, there is none. */
static bool
takes_pageable(const cer_device *device, cer_status status)
{
    return status == CER_NOMEM && device->kind != CER_DEVICE_HOST;
}

cer_status
cer_device_alloc_pinned(cer_device *device, size_t bytes, cer_device_use use,
                        cer_device_block *out, cer_error *err)
{
    cer_error why = {0};
    bool pageable;
    void *data = NULL;
    cer_status status;

    *out = (cer_device_block){0};
    if (bytes == 0)
        return CER_OK;
    status = device->ops->alloc_pinned(device, bytes, &data, &why);
    pageable = takes_pageable(device, status);
    if (pageable && (data = cer_aligned_alloc(bytes)) != NULL) {
        note_unpinned(device, why.message);
        status = CER_OK;
    }
    if (status == CER_NOMEM)
        return cer_fail(err, CER_NOMEM,
                        "out of pinned host memory for %s: %.1f MB for %s",
                        device->name, (double)bytes / 1e6, use_names[use]);
    if (status != CER_OK)
        return cer_fail(err, status, "%s", why.message);
    *out = (cer_device_block){.data = data,
                              .bytes = bytes,
                              .use = use,
                              .pinned = true,
                              .pageable = pageable};
    return CER_OK;
}

void
cer_device_free(cer_device *device, cer_device_block *block)
{
    cer_device_block old = *block;

    *block = (cer_device_block){0};
    if (old.data == NULL)
        return;
    if (old.pageable) {
        cer_aligned_free(old.data);
        return;
    }
    if (old.pinned) {
        device->ops->free_pinned(device, old.data);
        return;
    }
    if (old.from != NULL)
        old.from->give_back(old.from->context, device->index, old.data,
                            old.ticket);
    else
        device->ops->give_back(device, old.data);
    atomic_fetch_sub_explicit(&device->held[old.use], old.bytes,
                              memory_order_relaxed);
}

cer_status
cer_device_memory(cer_device *device, size_t *free_bytes, size_t *total_bytes,
                  cer_error *err)
{
    return device->ops->memory(device, free_bytes, total_bytes, err);
}

size_t
cer_device_held(const cer_device *device, cer_device_use use)
{
    return atomic_load_explicit(&device->held[use], memory_order_relaxed);
}

void
cer_device_set_allocator(cer_device *device,
                         const cer_device_allocator *allocator)
{
    atomic_store_explicit(&device->allocator, allocator, memory_order_release);
}

/* --- streams and events --------------------------------------------------- */

cer_status
cer_device_stream_new(cer_device *device, void **out, cer_error *err)
{
    *out = NULL;
    return device->ops->stream_new(device, out, err);
}

void
cer_device_stream_free(cer_device *device, void *stream)
{
    if (stream != NULL)
        device->ops->stream_free(device, stream);
}

cer_status
cer_device_stream_sync(cer_device *device, void *stream, cer_error *err)
{
    return device->ops->stream_sync(device, stream, err);
}

cer_status
cer_device_stream_wait(cer_device *device, void *stream, void *event,
                       cer_error *err)
{
    return device->ops->stream_wait(device, stream, event, err);
}

cer_status
cer_device_stream_capturing(cer_device *device, void *stream, bool *out,
                            cer_error *err)
{
    *out = false;
    return device->ops->stream_capturing(device, stream, out, err);
}

cer_status
cer_device_event_new(cer_device *device, void **out, cer_error *err)
{
    *out = NULL;
    return device->ops->event_new(device, out, err);
}

void
cer_device_event_free(cer_device *device, void *event)
{
    if (event != NULL)
        device->ops->event_free(device, event);
}

cer_status
cer_device_event_record(cer_device *device, void *event, void *stream,
                        cer_error *err)
{
    return device->ops->event_record(device, event, stream, err);
}

cer_status
cer_device_event_query(cer_device *device, void *event, bool *done,
                       cer_error *err)
{
    *done = false;
    return device->ops->event_query(device, event, done, err);
}

cer_status
cer_device_event_sync(cer_device *device, void *event, cer_error *err)
{
    return device->ops->event_sync(device, event, err);
}

cer_status
cer_device_sync(cer_device *device, cer_error *err)
{
    return device->ops->sync(device, err);
}

/* --- work ----------------------------------------------------------------- */

cer_status
cer_device_copy(cer_device *device, void *to, const void *from, size_t bytes,
                cer_device_copy_kind kind, void *stream, cer_error *err)
{
    if (bytes == 0)
        return CER_OK;
    return device->ops->copy(device, to, from, bytes, kind, stream, err);
}

cer_status
cer_device_fill(cer_device *device, void *to, uint8_t value, size_t bytes,
                void *stream, cer_error *err)
{
    if (bytes == 0)
        return CER_OK;
    return device->ops->fill(device, to, value, bytes, stream, err);
}

cer_status
cer_device_run(cer_device *device, const cer_device_launch *launch,
               void *stream, cer_error *err)
{
    for (int i = 0; i < 3; i++) {
        if (launch->grid[i] == 0)
            return CER_OK;
    }
    return device->ops->run(device, launch, stream, err);
}

cer_status
cer_device_launch_graph(cer_device *device, void *graph, void *stream,
                        cer_error *err)
{
    if (device->ops->launch_graph == NULL)
        return cer_fail(err, CER_DEVICE, "%s has no graphs", device->name);
    return device->ops->launch_graph(device, graph, stream, err);
}
