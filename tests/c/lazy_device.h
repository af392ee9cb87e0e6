/* lazy_device.h -- a device that runs the work on its streams as late and in as
 * odd an order as the rules allow.
 *
 * Work stays in its stream until it is waited for or randomly run; a runnable
 * stream is chosen at random. Only CUDA's guarantees hold: the order within a
 * stream, and events. Memory used without them is read or written too early,
 * which gives wrong values, or is used after being freed, which ASan detects.
 * Freeing memory that pending copies use is also counted.
 *
 * Every call can be made to fail, the nth in turn, and leaks are counted. A
 * loader's threads may allocate and free pinned memory; everything else is for
 * one thread. */
#ifndef LAZY_DEVICE_H
#define LAZY_DEVICE_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "device_impl.h"

typedef enum lazy_kind {
    LAZY_COPY,
    LAZY_FILL,
    LAZY_RUN,
    LAZY_RECORD,
    LAZY_WAIT,
    LAZY_COMPARE, /* a consumer's read */
} lazy_kind;

/* One record of an event: a wait for the event waits for its last record at
 * that time. */
typedef struct lazy_record {
    struct lazy_record *next;
    bool done;
} lazy_record;

typedef struct lazy_event {
    struct lazy_event *next;
    bool freed;
    lazy_record *last; /* NULL: never recorded */
} lazy_event;

typedef struct lazy_op {
    struct lazy_op *next;
    lazy_kind kind;
    void *to;
    const void *from;
    size_t bytes;
    lazy_record *record; /* NULL: no wait */
    void (*reference)(const void *args);
    _Alignas(
        16) uint8_t args[]; /* a kernel's, or the values a consumer expects */
} lazy_op;

typedef struct lazy_stream {
    struct lazy_stream *next;
    lazy_op *first, **last;
    bool freed, capturing;
} lazy_stream;

typedef struct lazy_device {
    cer_device base;      /* first */
    pthread_mutex_t lock; /* recursive */
    lazy_stream legacy, *streams;
    lazy_event *events;
    lazy_record *records;
    uint32_t dice;
    unsigned eager;         /* of 16 calls, how many run work */
    size_t capacity, taken; /* of device memory */
    atomic_size_t live;     /* blocks, streams and events not freed */
    size_t calls, fail_at;  /* the call that fails; 0: no failure */
    bool failed;
    size_t compared, wrong, kernels, freed_in_use, on_captured, syncs;
    size_t brought;       /* bytes copied to the device */
    atomic_size_t pinned; /* allocations of pinned memory */
} lazy_device;

static inline lazy_device *
lazy(cer_device *device)
{
    return (lazy_device *)(void *)device;
}

static inline uint32_t
lazy_dice(lazy_device *d)
{
    d->dice = d->dice * 1664525u + 1013904223u;
    return d->dice >> 16;
}

/* --- running work ------------------------------------------------------- */

static inline bool
lazy_may_go_on(const lazy_stream *s)
{
    const lazy_op *op = s->first;

    return op != NULL &&
           (op->kind != LAZY_WAIT || op->record == NULL || op->record->done);
}

static inline void
lazy_do(lazy_device *d, lazy_op *op)
{
    switch (op->kind) {
    case LAZY_COPY:
        memcpy(op->to, op->from, op->bytes);
        break;
    case LAZY_FILL:
        memset(op->to, op->args[0], op->bytes);
        break;
    case LAZY_RUN:
        d->kernels++;
        op->reference(op->args);
        break;
    case LAZY_RECORD:
        op->record->done = true;
        break;
    case LAZY_WAIT:
        break;
    case LAZY_COMPARE:
        d->compared++;
        d->wrong +=
            op->bytes != 0 && memcmp(op->from, op->args, op->bytes) != 0;
        break;
    }
}

/* Runs one piece of work on one of the runnable streams. */
static inline bool
lazy_step(lazy_device *d)
{
    lazy_stream *ready[32];
    size_t n = 0;
    lazy_op *op = NULL;
    lazy_stream *s;

    pthread_mutex_lock(&d->lock);
    for (s = &d->legacy; s != NULL;
         s = s == &d->legacy ? d->streams : s->next) {
        if (lazy_may_go_on(s) && n < 32)
            ready[n++] = s;
    }
    if (n != 0) {
        s = ready[lazy_dice(d) % n];
        op = s->first;
        s->first = op->next;
        if (s->first == NULL)
            s->last = &s->first;
        lazy_do(d, op);
    }
    pthread_mutex_unlock(&d->lock);
    free(op);
    return n != 0;
}

static inline void
lazy_finish(lazy_device *d)
{
    while (lazy_step(d))
        ;
}

/* --- queueing ----------------------------------------------------------- */

/* Counts a call; true if it is to fail. */
static inline bool
lazy_strikes(lazy_device *d)
{
    bool fails;

    pthread_mutex_lock(&d->lock);
    fails = ++d->calls == d->fail_at;
    d->failed = d->failed || fails;
    pthread_mutex_unlock(&d->lock);
    return fails;
}

/* Every call comes here first, except those of a loader's threads. */
static inline bool
lazy_fails(lazy_device *d)
{
    for (unsigned i = lazy_dice(d) % 16; i < d->eager; i++)
        (void)lazy_step(d);
    return lazy_strikes(d);
}

static inline cer_status
lazy_failure(cer_error *err, const char *call)
{
    return cer_fail(err, CER_DEVICE, "cuda:0: %s: made to fail", call);
}

static inline lazy_stream *
lazy_stream_of(lazy_device *d, void *stream)
{
    return (uintptr_t)stream <= 2 ? &d->legacy : stream;
}

/* Queues a copy of `like` on a stream, followed by `args_bytes` of `args`. */
static inline void
lazy_put(lazy_device *d, void *stream, const lazy_op *like, const void *args,
         size_t args_bytes)
{
    lazy_stream *s = lazy_stream_of(d, stream);
    lazy_op *op = calloc(1, sizeof *op + args_bytes + 1);

    CHECK(!s->freed);
    d->on_captured += s->capturing;
    *op = *like;
    if (args_bytes != 0)
        memcpy(op->args, args, args_bytes);
    pthread_mutex_lock(&d->lock);
    *s->last = op;
    s->last = &op->next;
    pthread_mutex_unlock(&d->lock);
}

/* A consumer's kernel, which reads memory and checks the values. */
static inline void
lazy_compare(lazy_device *d, void *stream, const void *memory,
             const void *expected, size_t bytes)
{
    lazy_put(d, stream,
             &(lazy_op){.kind = LAZY_COMPARE, .from = memory, .bytes = bytes},
             expected, bytes);
}

/* --- the table ------------------------------------------------------------ */

static inline void
lazy_drop(cer_device *device)
{
    cer_device_clear(device); /* the test owns the struct */
}

static inline cer_status
lazy_alloc_pinned(cer_device *device, size_t bytes, void **out, cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_strikes(d) || (*out = cer_aligned_alloc(bytes)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory");
    d->live++;
    d->pinned++;
    return CER_OK;
}

/* Device memory records its size. */
static inline cer_status
lazy_alloc(cer_device *device, size_t bytes, void **out, cer_error *err)
{
    lazy_device *d = lazy(device);
    uint8_t *block;

    if (lazy_fails(d) || bytes > d->capacity - d->taken ||
        (block = cer_aligned_alloc(bytes + CER_ALIGNMENT)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory");
    memcpy(block, &bytes, sizeof bytes);
    memset(block + CER_ALIGNMENT, 0xa5, bytes);
    d->taken += bytes;
    d->live++;
    *out = block + CER_ALIGNMENT;
    return CER_OK;
}

static inline bool
lazy_overlaps(const void *start, size_t bytes, const void *from, size_t size)
{
    uintptr_t a = (uintptr_t)start, b = (uintptr_t)from;

    return from != NULL && a < b + size && b < a + bytes;
}

/* Counts pending work that uses a block being freed. */
static inline void
lazy_check_free(lazy_device *d, const void *block, size_t bytes)
{
    pthread_mutex_lock(&d->lock);
    for (lazy_stream *s = &d->legacy; s != NULL;
         s = s == &d->legacy ? d->streams : s->next) {
        for (const lazy_op *op = s->first; op != NULL; op = op->next)
            d->freed_in_use += lazy_overlaps(block, bytes, op->to, op->bytes) ||
                               lazy_overlaps(block, bytes, op->from, op->bytes);
    }
    pthread_mutex_unlock(&d->lock);
}

static inline void
lazy_give_back(cer_device *device, void *data)
{
    lazy_device *d = lazy(device);
    uint8_t *block = (uint8_t *)data - CER_ALIGNMENT;
    size_t bytes;

    memcpy(&bytes, block, sizeof bytes);
    lazy_check_free(d, data, bytes);
    d->taken -= bytes;
    d->live--;
    cer_aligned_free(block);
}

static inline void
lazy_free_pinned(cer_device *device, void *data)
{
    lazy_device *d = lazy(device);

    lazy_check_free(d, data, 1);
    d->live--;
    cer_aligned_free(data);
}

static inline cer_status
lazy_memory(cer_device *device, size_t *free_bytes, size_t *total,
            cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_fails(d))
        return lazy_failure(err, "cudaMemGetInfo");
    *free_bytes = d->capacity - d->taken;
    *total = d->capacity;
    return CER_OK;
}

static inline cer_status
lazy_stream_new(cer_device *device, void **out, cer_error *err)
{
    lazy_device *d = lazy(device);
    lazy_stream *s;

    if (lazy_fails(d))
        return lazy_failure(err, "cudaStreamCreate");
    s = calloc(1, sizeof *s);
    s->last = &s->first;
    s->next = d->streams;
    d->streams = s;
    d->live++;
    *out = s;
    return CER_OK;
}

static inline void
lazy_stream_free(cer_device *device, void *stream)
{
    lazy(device)->live--;
    ((lazy_stream *)stream)->freed = true; /* its work continues */
}

static inline cer_status
lazy_stream_sync(cer_device *device, void *stream, cer_error *err)
{
    lazy_device *d = lazy(device);
    lazy_stream *s = lazy_stream_of(d, stream);

    if (lazy_fails(d))
        return lazy_failure(err, "cudaStreamSynchronize");
    while (s->first != NULL && lazy_step(d))
        ;
    CHECK(s->first == NULL); /* else it would wait for ever */
    return CER_OK;
}

static inline cer_status
lazy_stream_wait(cer_device *device, void *stream, void *event, cer_error *err)
{
    lazy_device *d = lazy(device);
    const lazy_event *e = event;

    if (lazy_fails(d))
        return lazy_failure(err, "cudaStreamWaitEvent");
    lazy_put(d, stream, &(lazy_op){.kind = LAZY_WAIT, .record = e->last}, NULL,
             0);
    return CER_OK;
}

static inline cer_status
lazy_stream_capturing(cer_device *device, void *stream, bool *out,
                      cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_fails(d))
        return lazy_failure(err, "cudaStreamIsCapturing");
    *out = lazy_stream_of(d, stream)->capturing;
    return CER_OK;
}

static inline cer_status
lazy_event_new(cer_device *device, void **out, cer_error *err)
{
    lazy_device *d = lazy(device);
    lazy_event *e;

    if (lazy_strikes(d))
        return lazy_failure(err, "cudaEventCreate");
    e = calloc(1, sizeof *e);
    pthread_mutex_lock(&d->lock);
    e->next = d->events;
    d->events = e;
    pthread_mutex_unlock(&d->lock);
    d->live++;
    *out = e;
    return CER_OK;
}

static inline void
lazy_event_free(cer_device *device, void *event)
{
    lazy(device)->live--;
    ((lazy_event *)event)->freed = true;
}

static inline cer_status
lazy_event_record(cer_device *device, void *event, void *stream, cer_error *err)
{
    lazy_device *d = lazy(device);
    lazy_event *e = event;
    lazy_record *record;

    CHECK(!e->freed);
    if (lazy_fails(d))
        return lazy_failure(err, "cudaEventRecord");
    record = calloc(1, sizeof *record);
    record->next = d->records;
    d->records = record;
    lazy_put(d, stream, &(lazy_op){.kind = LAZY_RECORD, .record = record}, NULL,
             0);
    e->last = record;
    return CER_OK;
}

static inline bool
lazy_is_done(const lazy_event *e)
{
    return e->last == NULL || e->last->done;
}

static inline cer_status
lazy_event_query(cer_device *device, void *event, bool *done, cer_error *err)
{
    lazy_device *d = lazy(device);
    lazy_event *e = event;

    if (lazy_fails(d))
        return lazy_failure(err, "cudaEventQuery");
    *done = lazy_is_done(e);
    return CER_OK;
}

static inline cer_status
lazy_event_sync(cer_device *device, void *event, cer_error *err)
{
    lazy_device *d = lazy(device);
    lazy_event *e = event;

    if (lazy_fails(d))
        return lazy_failure(err, "cudaEventSynchronize");
    while (!lazy_is_done(e) && lazy_step(d))
        ;
    CHECK(lazy_is_done(e)); /* else it would wait for ever */
    return CER_OK;
}

static inline cer_status
lazy_sync(cer_device *device, cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_fails(d))
        return lazy_failure(err, "cudaDeviceSynchronize");
    d->syncs++;
    lazy_finish(d);
    return CER_OK;
}

static inline cer_status
lazy_copy(cer_device *device, void *to, const void *from, size_t bytes,
          cer_device_copy_kind kind, void *stream, cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_fails(d))
        return lazy_failure(err, "cudaMemcpyAsync");
    d->brought += kind == CER_COPY_TO_DEVICE ? bytes : 0;
    lazy_put(
        d, stream,
        &(lazy_op){.kind = LAZY_COPY, .to = to, .from = from, .bytes = bytes},
        NULL, 0);
    return CER_OK;
}

static inline cer_status
lazy_fill(cer_device *device, void *to, uint8_t value, size_t bytes,
          void *stream, cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_fails(d))
        return lazy_failure(err, "cudaMemsetAsync");
    lazy_put(d, stream, &(lazy_op){.kind = LAZY_FILL, .to = to, .bytes = bytes},
             &value, 1);
    return CER_OK;
}

static inline cer_status
lazy_run(cer_device *device, const cer_device_launch *launch, void *stream,
         cer_error *err)
{
    lazy_device *d = lazy(device);

    if (lazy_fails(d))
        return lazy_failure(err, launch->name);
    lazy_put(d, stream,
             &(lazy_op){.kind = LAZY_RUN, .reference = launch->reference},
             launch->args, launch->args_bytes);
    return CER_OK;
}

/* Sets up the device with this much memory; `eager` of 16 calls run work. */
static inline void
lazy_init(lazy_device *d, uint32_t seed, unsigned eager, size_t capacity)
{
    static const cer_device_ops ops = {
        .drop = lazy_drop,
        .alloc = lazy_alloc,
        .give_back = lazy_give_back,
        .alloc_pinned = lazy_alloc_pinned,
        .free_pinned = lazy_free_pinned,
        .memory = lazy_memory,
        .stream_new = lazy_stream_new,
        .stream_free = lazy_stream_free,
        .stream_sync = lazy_stream_sync,
        .stream_wait = lazy_stream_wait,
        .stream_capturing = lazy_stream_capturing,
        .event_new = lazy_event_new,
        .event_free = lazy_event_free,
        .event_record = lazy_event_record,
        .event_query = lazy_event_query,
        .event_sync = lazy_event_sync,
        .sync = lazy_sync,
        .copy = lazy_copy,
        .fill = lazy_fill,
        .run = lazy_run,
    };

    pthread_mutexattr_t recursive;

    *d = (lazy_device){.dice = seed, .eager = eager, .capacity = capacity};
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&d->lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
    d->legacy.last = &d->legacy.first;
    if (cer_device_init(&d->base, &ops, CER_DEVICE_CUDA, 0, NULL) != CER_OK)
        abort();
}

/* Releases the test's reference, which must be the last, and checks for leaks.
 * All work must be done. */
static inline void
lazy_end(lazy_device *d)
{
    CHECK_EQ_INT(atomic_load(&d->base.count), 1);
    cer_device_release(&d->base);
    pthread_mutex_destroy(&d->lock);
    CHECK_EQ_INT(d->live, 0);
    CHECK_EQ_INT(d->wrong, 0);
    CHECK_EQ_INT(d->freed_in_use, 0);
    CHECK_EQ_INT(d->on_captured, 0);
    while (d->streams != NULL) {
        lazy_stream *next = d->streams->next;

        CHECK(d->streams->first == NULL);
        free(d->streams);
        d->streams = next;
    }
    while (d->events != NULL) {
        lazy_event *next = d->events->next;

        free(d->events);
        d->events = next;
    }
    while (d->records != NULL) {
        lazy_record *next = d->records->next;

        free(d->records);
        d->records = next;
    }
}

#endif
