/* uses.h -- which streams use a piece of a device's memory, and how it is
 * written again only when they are done.
 *
 * Work on a device is put on streams and done later. Memory is filled on one
 * stream and read on others, whose owners say so before they read (`join`).
 * When they have let go of it, all they will ever do with it is on their
 * streams: an event recorded there then is behind their last use, and whoever
 * writes next puts that event before it. So nobody waits on the host, and
 * letting go calls no function of the device: it may happen anywhere.
 *
 * Two kinds of user leave no stream to record on: those that wanted no order,
 * and the default stream of a thread, seen from another thread. For them the
 * next writer waits on the host until the device has nothing left to do. */
#ifndef CER_USES_H
#define CER_USES_H

#include <pthread.h>

#include "device.h"

enum { CER_USES_STREAMS = 4 }; /* more are waited for on the host */

typedef struct cer_use {
    void *stream;
    uintptr_t thread; /* that named it, by cer_device_thread */
} cer_use;

typedef struct cer_uses {
    cer_device *device; /* lives longer */
    void *event;        /* behind what filled the memory; later, behind users */
    pthread_mutex_t lock;
    bool filled;
    cer_use writer;
    bool anywhere; /* used on streams that cannot be named */
    size_t n;
    cer_use by[CER_USES_STREAMS];
} cer_uses;

cer_status cer_uses_init(cer_uses *uses, cer_device *device, cer_error *err);
void cer_uses_clear(cer_uses *uses); /* of one that init made */

/* Errors of all that follow: CER_DEVICE, by the call that failed. */

/* What is put on `stream` from now on comes after all uses so far, and is the
 * only one from now on. Nobody else uses the memory meanwhile. */
cer_status cer_uses_before(cer_uses *uses, void *stream, cer_error *err);
/* What was put on `stream` since has filled the memory. */
cer_status cer_uses_filled(cer_uses *uses, void *stream, cer_error *err);
/* What is put on `stream` from now on finds the memory filled and is a use. */
cer_status cer_uses_join(cer_uses *uses, void *stream, cer_error *err);
/* Somebody will use it on streams of their own. */
void cer_uses_anywhere(cer_uses *uses);
/* Whether a stream that uses the memory is being captured into a CUDA graph
 * now: then nothing can be put behind that use, nor can the device be waited
 * for, and the memory is left alone until the capture ends. */
bool cer_uses_captured(cer_uses *uses);
/* Waits on the host until all uses are over. */
cer_status cer_uses_wait(cer_uses *uses, cer_error *err);

/* For whoever frees memory, and cannot fail: the same, and until a stream has
 * nothing left to do; where that cannot be had, until the device has. If it can
 * not even say that, it does nothing any more. */
void cer_uses_end(cer_uses *uses);
void cer_uses_end_stream(cer_device *device, void *stream);

/* Nothing may be put on a stream that is being captured into a CUDA graph: it
 * would become part of the graph. CER_DEVICE, saying so. */
cer_status cer_uses_check_stream(cer_device *device, void *stream,
                                 cer_error *err);

#endif
