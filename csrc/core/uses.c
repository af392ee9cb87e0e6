#include "uses.h"

/* Two names of one stream. */
#define LEGACY_STREAM ((void *)1)
#define THREADS_OWN_STREAM ((void *)2)

static cer_use
use_of(cer_uses *uses, void *stream)
{
    return (cer_use){stream == LEGACY_STREAM ? NULL : stream,
                     cer_device_thread(uses->device)};
}

/* A thread without a number equals no thread, not even itself. */
static bool
is_same(const cer_use *a, const cer_use *b)
{
    return a->stream == b->stream &&
           (a->stream != THREADS_OWN_STREAM ||
            (a->thread == b->thread && a->thread != 0));
}

cer_status
cer_uses_init(cer_uses *uses, cer_device *device, cer_error *err)
{
    cer_status status;

    *uses = (cer_uses){.device = device};
    status = cer_device_event_new(device, &uses->event, err);
    if (status == CER_OK && pthread_mutex_init(&uses->lock, NULL) != 0) {
        cer_device_event_free(device, uses->event);
        uses->event = NULL;
        status = cer_fail(err, CER_NOMEM, "out of memory for a lock");
    }
    return status;
}

void
cer_uses_clear(cer_uses *uses)
{
    cer_device_event_free(uses->device, uses->event);
    pthread_mutex_destroy(&uses->lock);
}

cer_status
cer_uses_check_stream(cer_device *device, void *stream, cer_error *err)
{
    bool capturing = false;
    cer_status status =
        cer_device_stream_capturing(device, stream, &capturing, err);

    if (status == CER_OK && capturing)
        status = cer_fail(err, CER_DEVICE,
                          "%s: the stream is being captured into a CUDA graph: "
                          "take batches before the capture and copy them into "
                          "the tensors that the graph reads",
                          cer_device_name(device));
    return status;
}

/* --- under the lock ------------------------------------------------------- */

static void
add(cer_uses *uses, const cer_use *use)
{
    for (size_t i = 0; i < uses->n; i++) {
        if (is_same(&uses->by[i], use))
            return;
    }
    if (uses->n < CER_USES_STREAMS)
        uses->by[uses->n++] = *use;
    else
        uses->anywhere = true;
}

static bool
is_nameable(const cer_uses *uses, const cer_use *use)
{
    return use->stream != THREADS_OWN_STREAM ||
           (use->thread != 0 && use->thread == cer_device_thread(uses->device));
}

static cer_status
wait_for_device(cer_uses *uses, cer_error *err)
{
    return cer_device_sync(uses->device, err);
}

/* Records the event after a user's work on its stream. */
static cer_status
record_behind(cer_uses *uses, const cer_use *use, cer_error *err)
{
    cer_status status = cer_uses_check_stream(uses->device, use->stream, err);

    return status == CER_OK ? cer_device_event_record(uses->device, uses->event,
                                                      use->stream, err)
                            : status;
}

/* Whether waiting for some user requires waiting for the whole device. */
static bool
has_unnameable(const cer_uses *uses)
{
    bool found = uses->anywhere;

    for (size_t i = 0; i < uses->n; i++)
        found = found || !is_nameable(uses, &uses->by[i]);
    return found;
}

static cer_status
put_before(cer_uses *uses, const cer_use *next, cer_error *err)
{
    cer_status status = CER_OK;

    if (has_unnameable(uses))
        return wait_for_device(uses, err);
    for (size_t i = 0; status == CER_OK && i < uses->n; i++) {
        if (is_same(&uses->by[i], next))
            continue;
        status = record_behind(uses, &uses->by[i], err);
        if (status == CER_OK)
            status = cer_device_stream_wait(uses->device, next->stream,
                                            uses->event, err);
    }
    return status;
}

/* --- the functions -------------------------------------------------------- */

cer_status
cer_uses_before(cer_uses *uses, void *stream, cer_error *err)
{
    cer_use next = use_of(uses, stream);
    cer_status status;

    pthread_mutex_lock(&uses->lock);
    status = put_before(uses, &next, err);
    if (status == CER_OK) {
        uses->n = 0;
        uses->anywhere = uses->filled = false;
        add(uses, &next);
    }
    pthread_mutex_unlock(&uses->lock);
    return status;
}

cer_status
cer_uses_filled(cer_uses *uses, void *stream, cer_error *err)
{
    cer_use writer = use_of(uses, stream);
    cer_status status;

    pthread_mutex_lock(&uses->lock);
    add(uses, &writer);
    status =
        cer_device_event_record(uses->device, uses->event, writer.stream, err);
    uses->filled = status == CER_OK;
    uses->writer = writer;
    pthread_mutex_unlock(&uses->lock);
    return status;
}

cer_status
cer_uses_join(cer_uses *uses, void *stream, cer_error *err)
{
    cer_use user = use_of(uses, stream);
    cer_status status = CER_OK;

    pthread_mutex_lock(&uses->lock);
    if (uses->filled && !is_same(&uses->writer, &user))
        status =
            cer_device_stream_wait(uses->device, user.stream, uses->event, err);
    if (status == CER_OK)
        add(uses, &user);
    pthread_mutex_unlock(&uses->lock);
    return status;
}

void
cer_uses_anywhere(cer_uses *uses)
{
    pthread_mutex_lock(&uses->lock);
    uses->anywhere = true;
    pthread_mutex_unlock(&uses->lock);
}

bool
cer_uses_captured(cer_uses *uses)
{
    bool found = false;

    pthread_mutex_lock(&uses->lock);
    for (size_t i = 0; !found && i < uses->n; i++) {
        if (cer_device_stream_capturing(uses->device, uses->by[i].stream,
                                        &found, NULL) != CER_OK)
            found = false; /* the next use of the memory reports the error */
    }
    pthread_mutex_unlock(&uses->lock);
    return found;
}

cer_status
cer_uses_wait(cer_uses *uses, cer_error *err)
{
    cer_status status = CER_OK;

    pthread_mutex_lock(&uses->lock);
    if (has_unnameable(uses))
        status = wait_for_device(uses, err);
    else
        for (size_t i = 0; status == CER_OK && i < uses->n; i++) {
            status = record_behind(uses, &uses->by[i], err);
            if (status == CER_OK)
                status = cer_device_event_sync(uses->device, uses->event, err);
        }
    if (status == CER_OK) {
        uses->n = 0;
        uses->anywhere = uses->filled = false;
    }
    pthread_mutex_unlock(&uses->lock);
    return status;
}

void
cer_uses_end(cer_uses *uses)
{
    if (cer_uses_wait(uses, NULL) != CER_OK)
        (void)cer_device_sync(uses->device, NULL);
}

void
cer_uses_end_stream(cer_device *device, void *stream)
{
    if (cer_device_stream_sync(device, stream, NULL) != CER_OK)
        (void)cer_device_sync(device, NULL);
}
