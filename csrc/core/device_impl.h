/* device_impl.h -- the interface between device.c and each kind of device.
 *
 * A device is a struct that begins with a cer_device. device.c counts its
 * references, accounts for its memory and calls its table. The table's
 * functions get arguments that device.c has checked (no sizes of 0, no NULL to
 * free). */
#ifndef CER_DEVICE_IMPL_H
#define CER_DEVICE_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "device.h"

typedef struct cer_device_ops {
    /* Frees the device after its last reference is released. */
    void (*drop)(cer_device *device);
    /* NULL: its calls need no preparation. */
    cer_status (*enter)(cer_device *device, cer_device_visit *visit,
                        cer_error *err);
    void (*leave)(cer_device *device, cer_device_visit *visit);
    /* Restores the thread's own state, also within visits, and puts the
     * device's back; NULL as for `enter`. */
    void (*step_out)(cer_device *device);
    void (*step_in)(cer_device *device);
    /* CER_NOMEM if memory is short, and only then. */
    cer_status (*alloc)(cer_device *device, size_t bytes, void **out,
                        cer_error *err);
    void (*give_back)(cer_device *device, void *data);
    /* CER_NOMEM if the system cannot pin more: ordinary memory is then used. */
    cer_status (*alloc_pinned)(cer_device *device, size_t bytes, void **out,
                               cer_error *err);
    void (*free_pinned)(cer_device *device, void *data);
    cer_status (*memory)(cer_device *device, size_t *free_bytes,
                         size_t *total_bytes, cer_error *err);
    cer_status (*stream_new)(cer_device *device, void **out, cer_error *err);
    void (*stream_free)(cer_device *device, void *stream);
    cer_status (*stream_sync)(cer_device *device, void *stream, cer_error *err);
    cer_status (*stream_wait)(cer_device *device, void *stream, void *event,
                              cer_error *err);
    cer_status (*stream_capturing)(cer_device *device, void *stream, bool *out,
                                   cer_error *err);
    cer_status (*event_new)(cer_device *device, void **out, cer_error *err);
    void (*event_free)(cer_device *device, void *event);
    cer_status (*event_record)(cer_device *device, void *event, void *stream,
                               cer_error *err);
    cer_status (*event_query)(cer_device *device, void *event, bool *done,
                              cer_error *err);
    cer_status (*event_sync)(cer_device *device, void *event, cer_error *err);
    cer_status (*sync)(cer_device *device, cer_error *err);
    cer_status (*copy)(cer_device *device, void *to, const void *from,
                       size_t bytes, cer_device_copy_kind kind, void *stream,
                       cer_error *err);
    cer_status (*fill)(cer_device *device, void *to, uint8_t value,
                       size_t bytes, void *stream, cer_error *err);
    cer_status (*run)(cer_device *device, const cer_device_launch *launch,
                      void *stream, cer_error *err);
    cer_status (*launch_graph)(cer_device *device, void *graph, void *stream,
                               cer_error *err); /* NULL: it has no graphs */
} cer_device_ops;

struct cer_device {
    const cer_device_ops *ops;
    cer_device_kind kind;
    int index;
    char name[24];
    atomic_size_t count;
    atomic_size_t held[CER_USE_COUNT]; /* bytes of device memory */
    _Atomic(const cer_device_allocator *) allocator;
    pthread_mutex_t reclaim_lock; /* guards the list, also during calls */
    cer_device_reclaimer *reclaimers;
    pthread_key_t thread_key; /* holds a thread's number, once assigned */
    atomic_uintptr_t threads; /* the last number assigned */
    atomic_int unpinned_is;   /* device.c's: whether `unpinned` is set */
    char unpinned[CER_ERROR_MESSAGE_BYTES]; /* the first reason */
};

/* Fills in device.c's fields; one reference, owned by the caller. CER_NOMEM. */
cer_status cer_device_init(cer_device *device, const cer_device_ops *ops,
                           cer_device_kind kind, int index, cer_error *err);
/* Releases the resources of cer_device_init; for `drop`. */
void cer_device_clear(cer_device *device);

#endif
