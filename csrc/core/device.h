/* device.h -- memory, streams, events, copies and launches of one device. No
 * CUDA in it: behind the functions is a table (device_impl.h) that
 * device_host.c fills for host memory and csrc/cuda/device_cuda.c for a GPU.
 * What uses a device works with either, and is tested with both.
 *
 * Streams and events are opaque pointers (a cudaStream_t, a cudaEvent_t). The
 * stream NULL is the legacy default stream, (void *)1 the same by its other
 * name, (void *)2 the default stream of the calling thread; any other pointer
 * may be a framework's own. Events take no times.
 *
 * On the host device everything has happened when a function returns, streams
 * and events are mere names, and a launch runs the kernel's reference.
 *
 * All functions may be called from any thread, without the GIL. They leave the
 * thread's current CUDA device as they find it. An error names the call that
 * failed and leaves the process as it was: other devices and the CPU go on.
 * Freeing never fails; NULL and empty blocks are allowed. */
#ifndef CER_DEVICE_H
#define CER_DEVICE_H

#include "base.h"

typedef enum cer_device_kind {
    CER_DEVICE_HOST,
    CER_DEVICE_CUDA
} cer_device_kind;

typedef struct cer_device cer_device;

/* --- the device ----------------------------------------------------------
 * Counted: whoever keeps one (a loader, a ring, a tensor's owner) retains it
 * and releases it after its last block, stream and event are freed. The last
 * release may happen on any thread. csrc/cuda/device_cuda.h opens GPUs. */
cer_status cer_device_host_new(cer_device **out, cer_error *err);
void cer_device_retain(cer_device *device);
void cer_device_release(cer_device *device); /* NULL allowed */

cer_device_kind cer_device_kind_of(const cer_device *device);
int cer_device_index(const cer_device *device); /* as in DLPack; 0: host */
const char *cer_device_name(const cer_device *device); /* "cpu", "cuda:1" */

/* A number for the calling thread, which no other thread ever has: the system
 * gives a thread's id to another one once it has ended. 0: there is no memory
 * to keep it. */
uintptr_t cer_device_thread(cer_device *device);

/* --- memory ---------------------------------------------------------------
 * Every block says what it is for, so that an error can say what is resident.
 */
typedef enum cer_device_use {
    CER_USE_SHARDS,  /* columns of resident shards: can be loaded again */
    CER_USE_BATCHES, /* batch buffers and what kernels need beside them */
    CER_USE_STATES,
    CER_USE_OTHER,
    CER_USE_COUNT
} cer_device_use;

typedef struct cer_device_allocator cer_device_allocator;

/* Copying it takes no reference; { 0 } is empty. */
typedef struct cer_device_block {
    void *data;   /* on CER_ALIGNMENT */
    size_t bytes; /* as asked for */
    cer_device_use use;
    bool pinned;   /* host memory that the device reads and writes by itself */
    bool pageable; /* it was asked for pinned, and is ordinary memory */
    const cer_device_allocator *from; /* NULL: the device's own */
    void *ticket;                     /* the allocator's */
} cer_device_block;

/* `bytes` of 0 gives an empty block. Where memory is short, the device's
 * reclaimers are asked before this fails with CER_NOMEM; the message then says
 * what Cerebro holds, by use, and what is free. */
cer_status cer_device_alloc(cer_device *device, size_t bytes,
                            cer_device_use use, cer_device_block *out,
                            cer_error *err);
/* The same for memory that is then used on streams of one's own. What a
 * framework's pool gives was somebody else's a moment ago, whose last work with
 * it may still go on: this waits on the host until that is done, if that is
 * where the block is from. */
cer_status cer_device_alloc_idle(cer_device *device, size_t bytes,
                                 cer_device_use use, cer_device_block *out,
                                 cer_error *err);
/* And of pinned host memory: ordinary memory to the CPU. Where a GPU's
 * system pins no more (limits of locked memory, of containers), it is ordinary
 * memory in fact: copies go through the driver's own buffer, on the same stream
 * in the same order, and a copy to the host waits for its end. */
cer_status cer_device_alloc_pinned(cer_device *device, size_t bytes,
                                   cer_device_use use, cer_device_block *out,
                                   cer_error *err);
/* Gives either kind back and empties *block. The work that uses it must be done
 * (wait for its event first): the memory is somebody else's at once. Never
 * needs the GIL; the device's own memory may wait for all work on the device,
 * as cudaFree does, which is why rings use theirs again and again. */
void cer_device_free(cer_device *device, cer_device_block *block);

/* Why memory could not be pinned, the first time; NULL: it always could. */
const char *cer_device_unpinned(cer_device *device);

/* Memory of the whole device. What a framework's allocator keeps for itself
 * counts as taken. */
cer_status cer_device_memory(cer_device *device, size_t *free_bytes,
                             size_t *total_bytes, cer_error *err);
/* What Cerebro holds of one use in this process, device memory only. */
size_t cer_device_held(const cer_device *device, cer_device_use use);

/* Device memory from somebody else (PyTorch's caching allocator), so that two
 * pools do not compete. It may be used at once on the legacy default stream,
 * as that allocator has it for the stream that it is asked for, and behind what
 * is there now on others. `alloc` gives CER_NOMEM where memory is short; it may
 * take the GIL, so nobody asks for device memory with a lock held that a thread
 * with the GIL may wait for. `give_back` is called from any thread, takes no
 * GIL, does not wait, and defers what it cannot do there; the ticket is what
 * `alloc` returned beside the memory. The struct stays for the life of the
 * process: a block goes back where it came from. NULL: the device's own again.
 */
struct cer_device_allocator {
    void *context;
    cer_status (*alloc)(void *context, int device, size_t bytes, void **out,
                        void **ticket, cer_error *err);
    void (*give_back)(void *context, int device, void *data, void *ticket);
};
void cer_device_set_allocator(cer_device *device,
                              const cer_device_allocator *allocator);

/* Somebody who can give memory back: shards that no unit uses, which can be
 * loaded again. `reclaim` is called on the thread that asks for memory, when an
 * allocation of `bytes` has failed: it frees blocks of this device and says
 * whether it did; then the allocation is tried again. It must not allocate on
 * the device. The struct is the caller's and stays until it is removed; once
 * the removal returns, nothing of it is called any more. */
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
cer_status cer_device_stream_new(cer_device *device, void **out,
                                 cer_error *err); /* does not wait for NULL's */
void cer_device_stream_free(cer_device *device, void *stream);
cer_status cer_device_stream_sync(cer_device *device, void *stream,
                                  cer_error *err);
/* What is put on `stream` from now on waits, on the device, for the work that
 * `event` was recorded behind; an event never recorded is done. */
cer_status cer_device_stream_wait(cer_device *device, void *stream, void *event,
                                  cer_error *err);
/* Whether a CUDA graph is being captured on it: then nothing of ours may touch
 * it. Never an error on a stream that is not captured. */
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

/* Waits until the device has done all that this process put on it. */
cer_status cer_device_sync(cer_device *device, cer_error *err);

/* --- work ------------------------------------------------------------------
 * Put on `stream`; both sides stay until it is done. */
typedef enum cer_device_copy_kind {
    CER_COPY_TO_DEVICE, /* host memory is pinned, or else this may wait */
    CER_COPY_FROM_DEVICE,
    CER_COPY_ON_DEVICE
} cer_device_copy_kind;

cer_status cer_device_copy(cer_device *device, void *to, const void *from,
                           size_t bytes, cer_device_copy_kind kind,
                           void *stream, cer_error *err);
cer_status cer_device_fill(cer_device *device, void *to, uint8_t value,
                           size_t bytes, void *stream, cer_error *err);

/* A kernel takes one struct by value, with fields of fixed size, pointers to
 * device memory among them; all it needs to know is in there, so that the
 * reference gives the same result whatever grid and block are. kernels.h has
 * the structs and fills this in: others call its functions, not this. */
#define CER_DEVICE_MAX_KERNELS 64

typedef struct cer_device_launch {
    const char *name;  /* of the kernel's entry in the module */
    unsigned index;    /* its number, below CER_DEVICE_MAX_KERNELS */
    const void *args;  /* copied before the launch returns */
    size_t args_bytes; /* at most 4 KB */
    void (*reference)(const void *args); /* the same on the CPU */
    uint32_t grid[3];      /* blocks; a 0 means that there is nothing to do */
    uint32_t block[3];     /* threads */
    uint32_t shared_bytes; /* dynamic shared memory */
} cer_device_launch;

cer_status cer_device_run(cer_device *device, const cer_device_launch *launch,
                          void *stream, cer_error *err);

#endif
