/* uses.h -- tracks the streams that use a piece of device memory, which is
 * overwritten only after they are done.
 *
 * Device work is enqueued on streams and done later. Memory is filled on one
 * stream and read on others, whose owners announce each read (`join`). Once
 * they release the memory, all their work with it is enqueued: an event
 * recorded then on their streams follows their last use, and the next write
 * waits for that event on the device. So the host never waits, and a release
 * calls no device function: it can happen anywhere.
 *
 * Two kinds of user leave no stream to record on: those that declined ordering,
 * and a thread's default stream, seen from a different thread. For them the
 * next writer waits on the host until the device is idle. */
#ifndef CER_USES_H
#define CER_USES_H

#include <pthread.h>

#include "device.h"

enum { CER_USES_STREAMS = 4 }; /* for more, the host waits */

typedef struct cer_use {
    void *stream;
    uintptr_t thread; /* the thread that named it, by cer_device_thread */
} cer_use;

typedef struct cer_uses {
    cer_device *device; /* outlives this */
    void *event;        /* after the fill; later, after the users */
    pthread_mutex_t lock;
    bool filled;
    cer_use writer;
    bool anywhere; /* used on streams that cannot be named */
    size_t n;
    cer_use by[CER_USES_STREAMS];
} cer_uses;

cer_status cer_uses_init(cer_uses *uses, cer_device *device, cer_error *err);
void cer_uses_clear(cer_uses *uses); /* after a successful init */

/* Errors of all functions below: CER_DEVICE, which names the failed call. */

/* Orders later work on `stream` after all uses so far, and makes it the only
 * use. No other use may begin meanwhile. */
cer_status cer_uses_before(cer_uses *uses, void *stream, cer_error *err);
/* The work enqueued on `stream` since then fills the memory. */
cer_status cer_uses_filled(cer_uses *uses, void *stream, cer_error *err);
/* Later work on `stream` finds the memory filled and counts as a use. */
cer_status cer_uses_join(cer_uses *uses, void *stream, cer_error *err);
/* The memory will be used on unknown streams. */
void cer_uses_anywhere(cer_uses *uses);
/* Whether a stream that uses the memory is being captured into a CUDA graph
 * now: then no work can be ordered after that use and the device cannot be
 * waited for, so the memory is left alone until the capture ends. */
bool cer_uses_captured(cer_uses *uses);
/* Waits on the host until all uses are over. */
cer_status cer_uses_wait(cer_uses *uses, cer_error *err);

/* For freeing memory; cannot fail. The same, and a wait until a stream is idle;
 * if that fails, until the device is idle. If that fails too, the device no
 * longer does any work. */
void cer_uses_end(cer_uses *uses);
void cer_uses_end_stream(cer_device *device, void *stream);

/* No work may be enqueued on a stream that is being captured into a CUDA graph:
 * it would become part of the graph. Returns CER_DEVICE in this case. */
cer_status cer_uses_check_stream(cer_device *device, void *stream,
                                 cer_error *err);

#endif
