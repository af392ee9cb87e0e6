/* device.h -- memory, streams, events, copies and launches of one device. It
 * contains no CUDA: the functions call a table (device_impl.h) that
 * device_host.c fills for host memory and csrc/cuda/device_cuda.c for a GPU.
 * Users of a device work with either and are tested with both.
 *
 * Streams and events are opaque pointers (a cudaStream_t, a cudaEvent_t). NULL
 * and (void *)1 are the legacy default stream, (void *)2 is the calling
 * thread's default stream; any other pointer may be a framework's. Events
 * record no times.
 *
 * On the host device all work is done when a function returns, streams and
 * events are only names, and a launch runs the kernel's reference.
 *
 * All functions may be called from any thread, without the GIL, and preserve
 * the thread's current CUDA device. An error names the failed call and leaves
 * the process usable: other devices and the CPU keep working. Freeing never
 * fails; NULL and empty blocks are allowed. */
#ifndef CER_DEVICE_H
#define CER_DEVICE_H

#include "base.h"

typedef enum cer_device_kind {
    CER_DEVICE_HOST,
    CER_DEVICE_CUDA
} cer_device_kind;

typedef struct cer_device cer_device;

/* --- the device ----------------------------------------------------------
 * Reference-counted: a holder (a loader, a ring, a tensor's owner) retains it
 * and releases it after freeing its last block, stream and event. The last
 * release may happen on any thread. csrc/cuda/device_cuda.h opens GPUs. */
cer_status cer_device_host_new(cer_device **out, cer_error *err);
void cer_device_retain(cer_device *device);
void cer_device_release(cer_device *device); /* NULL allowed */

cer_device_kind cer_device_kind_of(const cer_device *device);
int cer_device_index(const cer_device *device); /* as in DLPack; 0: host */
const char *cer_device_name(const cer_device *device); /* "cpu", "cuda:1" */

/* A number that only the calling thread ever has; the system reuses the ids of
 * ended threads. 0: no memory to store it. */
uintptr_t cer_device_thread(cer_device *device);

/* Between the two, this thread's calls of the device need not make it current
 * and restore the thread's own state each time, which costs more than most
 * calls. May be nested, also with other devices. Around a few calls in
 * succession, and never around code that is not ours. After a failure, do not
 * leave. */
typedef struct cer_device_visit {
    const char *failed; /* the call that failed */
    int mode;           /* the rest is what must be restored */
    bool arrived, outermost;
    cer_device *device;
    struct cer_device_visit *around;
} cer_device_visit;

cer_status cer_device_enter(cer_device *device, cer_device_visit *visit,
                            cer_error *err);
void cer_device_leave(cer_device *device, cer_device_visit *visit);

/* --- memory ---------------------------------------------------------------
 * Every block has a use, by which errors report resident memory. */
typedef enum cer_device_use {
    CER_USE_SHARDS,  /* columns of resident shards: can be reloaded */
    CER_USE_BATCHES, /* batch buffers, and memory that kernels need with them */
    CER_USE_STATES,
    CER_USE_OTHER,
    CER_USE_COUNT
} cer_device_use;

typedef struct cer_device_allocator cer_device_allocator;

/* Copying it takes no reference; { 0 } is empty. */
typedef struct cer_device_block {
    void *data;   /* on CER_ALIGNMENT */
    size_t bytes; /* as requested */
    cer_device_use use;
    bool pinned;   /* host memory that the device accesses directly */
    bool pageable; /* pinned was requested, but it is ordinary memory */
    const cer_device_allocator *from; /* NULL: the device */
    void *ticket;                     /* the allocator's */
} cer_device_block;

/* For 0 `bytes`, gives an empty block. If memory is short, calls the device's
 * reclaimers before it fails with CER_NOMEM; the message then reports the
 * memory that Cerebro holds, by use, and the free memory. */
cer_status cer_device_alloc(cer_device *device, size_t bytes,
                            cer_device_use use, cer_device_block *out,
                            cer_error *err);
/* The same for memory to be used on the caller's own streams. Memory from a
 * framework's pool may still be in use by its previous owner's work: for such a
 * block this waits on the host until that work is done. */
cer_status cer_device_alloc_idle(cer_device *device, size_t bytes,
                                 cer_device_use use, cer_device_block *out,
                                 cer_error *err);
/* The same for pinned host memory, which the CPU uses like any other. If the
 * system cannot pin more (limits on locked memory, containers), the block is
 * ordinary memory: copies go through the driver's buffer, on the same stream in
 * the same order, and a copy to the host waits until it is done. */
cer_status cer_device_alloc_pinned(cer_device *device, size_t bytes,
                                   cer_device_use use, cer_device_block *out,
                                   cer_error *err);
/* Frees either kind and empties *block. The work that uses it must be done
 * (wait for its event first): the memory may be reused at once. Never needs the
 * GIL. Freeing the device's own memory may wait for all work on the device, as
 * cudaFree does; therefore rings reuse theirs. */
void cer_device_free(cer_device *device, cer_device_block *block);

/* Why pinning first failed; NULL if it never failed. */
const char *cer_device_unpinned(cer_device *device);

/* Memory of the whole device. Memory cached by a framework's allocator counts
 * as used. */
cer_status cer_device_memory(cer_device *device, size_t *free_bytes,
                             size_t *total_bytes, cer_error *err);
/* Device memory that Cerebro holds for one use in this process. */
size_t cer_device_held(const cer_device *device, cer_device_use use);

/* An external allocator of device memory (PyTorch's caching allocator), which
 * avoids two competing pools. Its memory may be used at once on the legacy
 * default stream, for which it was requested, and on other streams after the
 * work now on that stream. `alloc` returns CER_NOMEM if memory is short. It may
 * take the GIL, so the caller must hold no lock that a thread with the GIL may
 * wait for. `give_back` is called from any thread, takes no GIL, does not wait,
 * and defers work it cannot do there; it gets the ticket that `alloc` returned.
 * The struct must live as long as the process, because a block is freed by its
 * own allocator. Set NULL to use the device's memory again. */
struct cer_device_allocator {
    void *context;
    cer_status (*alloc)(void *context, int device, size_t bytes, void **out,
                        void **ticket, cer_error *err);
    void (*give_back)(void *context, int device, void *data, void *ticket);
};
void cer_device_set_allocator(cer_device *device,
                              const cer_device_allocator *allocator);

/* Frees memory on demand: shards that no unit uses and that can be reloaded.
 * When an allocation of `bytes` has failed, `reclaim` is called on the
 * allocating thread. It frees blocks of this device and returns whether it did;
 * then the allocation is retried. It must not allocate on the device. The
 * caller keeps the struct until it is removed; `reclaim` is not called after
 * the removal returns. */
typedef struct cer_device_reclaimer {
    bool (*reclaim)(void *context, size_t bytes);
    void *context;
    struct cer_device_reclaimer *next; /* device.c's */
} cer_device_reclaimer;
void cer_device_add_reclaimer(cer_device *device,
                              cer_device_reclaimer *reclaimer);
void cer_device_remove_reclaimer(cer_device *device,
                                 cer_device_reclaimer *reclaimer);

/* --- streams and events --------------------------------------------------- */
/* Does not wait for stream NULL. */
cer_status cer_device_stream_new(cer_device *device, void **out,
                                 cer_error *err);
void cer_device_stream_free(cer_device *device, void *stream);
cer_status cer_device_stream_sync(cer_device *device, void *stream,
                                  cer_error *err);
/* Makes later work on `stream` wait, on the device, for the work before `event`
 * was recorded; an event never recorded is done. */
cer_status cer_device_stream_wait(cer_device *device, void *stream, void *event,
                                  cer_error *err);
/* Whether a CUDA graph is being captured on it: then Cerebro must not use it.
 * Never fails on a stream that is not being captured. */
cer_status cer_device_stream_capturing(cer_device *device, void *stream,
                                       bool *out, cer_error *err);

cer_status cer_device_event_new(cer_device *device, void **out, cer_error *err);
void cer_device_event_free(cer_device *device, void *event);
cer_status cer_device_event_record(cer_device *device, void *event,
                                   void *stream, cer_error *err);
cer_status cer_device_event_query(cer_device *device, void *event, bool *done,
                                  cer_error *err);
cer_status cer_device_event_sync(cer_device *device, void *event,
                                 cer_error *err);

/* Waits until the device has done all work of this process. */
cer_status cer_device_sync(cer_device *device, cer_error *err);

/* --- work ------------------------------------------------------------------
 * Enqueued on `stream`; both sides must stay valid until it is done. */
typedef enum cer_device_copy_kind {
    CER_COPY_TO_DEVICE, /* may wait unless the host memory is pinned */
    CER_COPY_FROM_DEVICE,
    CER_COPY_ON_DEVICE
} cer_device_copy_kind;

cer_status cer_device_copy(cer_device *device, void *to, const void *from,
                           size_t bytes, cer_device_copy_kind kind,
                           void *stream, cer_error *err);
cer_status cer_device_fill(cer_device *device, void *to, uint8_t value,
                           size_t bytes, void *stream, cer_error *err);

/* A kernel takes one struct by value, with fields of fixed size, including
 * pointers to device memory. The struct holds everything the kernel needs, so
 * the reference gives the same result for any grid and block. kernels.h defines
 * the structs and fills them in; other files call its functions. */
#define CER_DEVICE_MAX_KERNELS 64

typedef struct cer_device_launch {
    const char *name;  /* of the kernel's entry in the module */
    unsigned index;    /* its number, below CER_DEVICE_MAX_KERNELS */
    const void *args;  /* copied before the launch returns */
    size_t args_bytes; /* at most 4 KB */
    void (*reference)(const void *args); /* the same on the CPU */
    uint32_t grid[3];                    /* blocks; a 0 means no work */
    uint32_t block[3];                   /* threads */
    uint32_t shared_bytes;               /* dynamic shared memory */
} cer_device_launch;

cer_status cer_device_run(cer_device *device, const cer_device_launch *launch,
                          void *stream, cer_error *err);

/* Enqueues a graph, a cudaGraphExec_t that was made elsewhere. CER_DEVICE: also
 * for devices without graphs, such as the host. */
cer_status cer_device_launch_graph(cer_device *device, void *graph,
                                   void *stream, cer_error *err);

#endif
