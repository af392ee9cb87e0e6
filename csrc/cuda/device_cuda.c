#include "device_cuda.h"

#include <stdio.h>
#include <string.h>

#include "device_impl.h"

/* A waiting host sleeps, because workers share cores; no timing. */
#define EVENT_FLAGS (CER_CUDA_EVENT_SLEEPING | CER_CUDA_EVENT_TIMELESS)

typedef struct cuda_device {
    cer_device base; /* first, so that a cer_device * casts to cuda_device * */
    cer_cudart *runtime;
    void *context; /* the primary one, never released: frameworks share it */
    const char *ptx;
    pthread_mutex_t lock; /* guards the next two while they are filled */
    void *module;         /* NULL until the first launch */
    _Atomic(void *) functions[CER_DEVICE_MAX_KERNELS];
} cuda_device;

static cuda_device *
cuda_of(cer_device *device)
{
    return (cuda_device *)(void *)device;
}

/* --- on the device and back ----------------------------------------------- */

typedef cer_device_visit cuda_visit;

/* The visit that the thread is in; NULL: none. Calls within it find all
 * prepared. */
static cuda_visit *
visit_of(const cuda_device *device)
{
    return pthread_getspecific(device->runtime->visits);
}

/* Pushes the context on the thread's stack. Setting the device and setting it
 * back would create a context on the current device, which may have none. Any
 * runtime call would do so too, even for the capture mode, so the context comes
 * first. */
static int
prepare(cuda_device *device, cuda_visit *visit)
{
    cer_cudart *runtime = device->runtime;
    int code;

    visit->mode = CER_CUDA_CAPTURE_RELAXED;
    visit->arrived = false;
    visit->failed = "cuCtxPushCurrent";
    code = runtime->cuCtxPushCurrent(device->context);
    if (code != CER_CUDA_SUCCESS)
        return code;
    visit->arrived = true;
    visit->failed = "cudaThreadExchangeStreamCaptureMode";
    code = runtime->cudaThreadExchangeStreamCaptureMode(&visit->mode);
    if (code != CER_CUDA_SUCCESS) {
        visit->mode = CER_CUDA_CAPTURE_RELAXED;
        return code;
    }
    visit->failed = NULL;
    return CER_CUDA_SUCCESS;
}

/* Restores what prepare changed. An error here has occurred before. */
static void
restore(cuda_device *device, cuda_visit *visit)
{
    cer_cudart *runtime = device->runtime;
    void *context;

    if (visit->mode != CER_CUDA_CAPTURE_RELAXED &&
        runtime->cudaThreadExchangeStreamCaptureMode(&visit->mode) !=
            CER_CUDA_SUCCESS)
        (void)runtime->cudaGetLastError();
    if (visit->arrived)
        (void)runtime->cuCtxPopCurrent(&context);
}

/* Returns 0, or the code of the call named in visit->failed. */
static int
enter(cuda_device *device, cuda_visit *visit)
{
    const cuda_visit *around = visit_of(device);

    visit->outermost = around == NULL || around->device != &device->base;
    if (visit->outermost)
        return prepare(device, visit);
    visit->failed = NULL;
    return CER_CUDA_SUCCESS;
}

static void
put_back(cuda_device *device, cuda_visit *visit)
{
    if (visit->outermost)
        restore(device, visit);
}

/* Leaves, and reports the `code` of `call`. */
static cer_status
leave(cuda_device *device, cuda_visit *visit, const char *call, int code,
      cer_error *err)
{
    cer_status status = CER_OK;

    if (code != CER_CUDA_SUCCESS)
        status = cer_cudart_fail(device->runtime, device->base.index,
                                 visit->failed == NULL ? call : visit->failed,
                                 code, err);
    put_back(device, visit);
    return status;
}

static cer_status
cuda_enter(cer_device *device, cer_device_visit *visit, cer_error *err)
{
    cuda_device *self = cuda_of(device);
    int code = enter(self, visit);

    if (code != CER_CUDA_SUCCESS)
        return leave(self, visit, NULL, code, err);
    if (!visit->outermost)
        return CER_OK;
    visit->device = device;
    visit->around = visit_of(self);
    if (pthread_setspecific(self->runtime->visits, visit) == 0)
        return CER_OK;
    put_back(self, visit);
    return cer_fail(err, CER_NOMEM, "out of memory for a thread's visit");
}

static void
cuda_leave(cer_device *device, cer_device_visit *visit)
{
    cuda_device *self = cuda_of(device);

    if (visit->outermost)
        (void)pthread_setspecific(self->runtime->visits, visit->around);
    put_back(self, visit);
}

/* Of the innermost visit. One around it, of another device, stays. */
static void
cuda_step_out(cer_device *device)
{
    cuda_visit *visit = visit_of(cuda_of(device));

    if (visit != NULL)
        restore(cuda_of(visit->device), visit);
}

/* After a failure, the calls that follow report it. */
static void
cuda_step_in(cer_device *device)
{
    cuda_visit *visit = visit_of(cuda_of(device));

    if (visit != NULL && prepare(cuda_of(visit->device), visit) != 0)
        (void)cuda_of(device)->runtime->cudaGetLastError();
}

/* Enters, makes one CUDA call and leaves: VISIT(cudaFree, (data)). */
#define VISIT(call, arguments)                                                 \
    cuda_visit v;                                                              \
    cuda_device *self = cuda_of(device);                                       \
    int code = enter(self, &v);                                                \
                                                                               \
    if (code == CER_CUDA_SUCCESS)                                              \
        code = self->runtime->call arguments;                                  \
    return leave(self, &v, #call, code, err)

/* The same for releasing, which is always tried and does not report errors. */
#define VISIT_QUIETLY(call, arguments)                                         \
    cuda_visit v;                                                              \
    cuda_device *self = cuda_of(device);                                       \
    int arrived = enter(self, &v), code = self->runtime->call arguments;       \
                                                                               \
    if (arrived != CER_CUDA_SUCCESS || code != CER_CUDA_SUCCESS)               \
        (void)self->runtime->cudaGetLastError();                               \
    put_back(self, &v)

/* --- memory --------------------------------------------------------------- */

static cer_status
cuda_alloc(cer_device *device, size_t bytes, void **out, cer_error *err)
{
    VISIT(cudaMalloc, (out, bytes));
}

static void
cuda_give_back(cer_device *device, void *data)
{
    VISIT_QUIETLY(cudaFree, (data));
}

/* Whether the system, not the device, prevents pinning: a limit on locked
 * memory, or a container or virtual machine that does not let drivers pin.
 */
static bool
pins_no_more(int code)
{
    return code == CER_CUDA_OUT_OF_MEMORY ||
           code == CER_CUDA_OPERATING_SYSTEM ||
           code == CER_CUDA_NOT_PERMITTED || code == CER_CUDA_NOT_SUPPORTED;
}

static cer_status
cuda_alloc_pinned(cer_device *device, size_t bytes, void **out, cer_error *err)
{
    cuda_device *self = cuda_of(device);
    cuda_visit v;
    int code = enter(self, &v);
    bool system = false;
    cer_status status;

    if (code == CER_CUDA_SUCCESS) {
        code = self->runtime->cudaHostAlloc(out, bytes, CER_CUDA_HOST_PORTABLE);
        system = pins_no_more(code);
    }
    status = leave(self, &v, "cudaHostAlloc", code, err);
    return system ? CER_NOMEM : status;
}

static void
cuda_free_pinned(cer_device *device, void *data)
{
    VISIT_QUIETLY(cudaFreeHost, (data));
}

static cer_status
cuda_memory(cer_device *device, size_t *free_bytes, size_t *total_bytes,
            cer_error *err)
{
    VISIT(cudaMemGetInfo, (free_bytes, total_bytes));
}

/* --- streams and events --------------------------------------------------- */

static cer_status
cuda_stream_new(cer_device *device, void **out, cer_error *err)
{
    VISIT(cudaStreamCreateWithFlags, (out, CER_CUDA_STREAM_NON_BLOCKING));
}

static void
cuda_stream_free(cer_device *device, void *stream)
{
    VISIT_QUIETLY(cudaStreamDestroy, (stream));
}

static cer_status
cuda_stream_sync(cer_device *device, void *stream, cer_error *err)
{
    VISIT(cudaStreamSynchronize, (stream));
}

static cer_status
cuda_stream_wait(cer_device *device, void *stream, void *event, cer_error *err)
{
    VISIT(cudaStreamWaitEvent, (stream, event, 0));
}

static cer_status
cuda_stream_capturing(cer_device *device, void *stream, bool *out,
                      cer_error *err)
{
    cuda_device *self = cuda_of(device);
    cuda_visit v;
    int capturing = CER_CUDA_CAPTURE_NONE, code = enter(self, &v);

    if (code == CER_CUDA_SUCCESS)
        code = self->runtime->cudaStreamIsCapturing(stream, &capturing);
    /* The legacy default stream is unusable while a different one is captured.
     */
    if (code == CER_CUDA_CAPTURE_IMPLICIT) {
        (void)self->runtime->cudaGetLastError();
        capturing = !CER_CUDA_CAPTURE_NONE;
        code = CER_CUDA_SUCCESS;
    }
    *out = capturing != CER_CUDA_CAPTURE_NONE;
    return leave(self, &v, "cudaStreamIsCapturing", code, err);
}

static cer_status
cuda_event_new(cer_device *device, void **out, cer_error *err)
{
    VISIT(cudaEventCreateWithFlags, (out, EVENT_FLAGS));
}

static void
cuda_event_free(cer_device *device, void *event)
{
    VISIT_QUIETLY(cudaEventDestroy, (event));
}

static cer_status
cuda_event_record(cer_device *device, void *event, void *stream, cer_error *err)
{
    VISIT(cudaEventRecord, (event, stream));
}

/* Queries the driver. In the runtime, "not ready" would become the last error
 * and replace one that PyTorch has not read yet. */
static cer_status
cuda_event_query(cer_device *device, void *event, bool *done, cer_error *err)
{
    cuda_device *self = cuda_of(device);
    cuda_visit v;
    int code = enter(self, &v);

    if (code == CER_CUDA_SUCCESS) {
        code = self->runtime->cuEventQuery(event);
        *done = code == CER_CUDA_SUCCESS;
    }
    if (code == CER_CUDA_NOT_READY)
        code = CER_CUDA_SUCCESS;
    return leave(self, &v, "cuEventQuery", code, err);
}

static cer_status
cuda_event_sync(cer_device *device, void *event, cer_error *err)
{
    VISIT(cudaEventSynchronize, (event));
}

static cer_status
cuda_sync(cer_device *device, cer_error *err)
{
    VISIT(cudaDeviceSynchronize, ());
}

/* --- work ----------------------------------------------------------------- */

static cer_status
cuda_copy(cer_device *device, void *to, const void *from, size_t bytes,
          cer_device_copy_kind kind, void *stream, cer_error *err)
{
    static const int kinds[] = {[CER_COPY_TO_DEVICE] = CER_CUDA_TO_DEVICE,
                                [CER_COPY_FROM_DEVICE] = CER_CUDA_FROM_DEVICE,
                                [CER_COPY_ON_DEVICE] = CER_CUDA_ON_DEVICE};

    VISIT(cudaMemcpyAsync, (to, from, bytes, kinds[kind], stream));
}

static cer_status
cuda_fill(cer_device *device, void *to, uint8_t value, size_t bytes,
          void *stream, cer_error *err)
{
    VISIT(cudaMemsetAsync, (to, value, bytes, stream));
}

/* Compiles the kernels. The context is current and the lock is held. */
static cer_status
load_module(cuda_device *self, cer_error *err)
{
    char log[256] = "";
    int options[] = {CER_CUDA_JIT_LOG, CER_CUDA_JIT_LOG_BYTES};
    void *values[] = {log, (void *)(uintptr_t)sizeof log};
    int code = self->runtime->cuModuleLoadDataEx(&self->module, self->ptx, 2,
                                                 options, values);
    cer_status status;
    size_t used;

    if (code == CER_CUDA_SUCCESS)
        return CER_OK;
    self->module = NULL;
    status = cer_cudart_fail(self->runtime, self->base.index,
                             "cuModuleLoadDataEx", code, err);
    if (err != NULL && log[0] != '\0') {
        log[strcspn(log, "\n")] = '\0';
        used = strlen(err->message);
        (void)snprintf(err->message + used, sizeof err->message - used, ": %s",
                       log);
    }
    return status;
}

/* Returns the kernel's function, looked up at its first launch. */
static cer_status
find_function(cuda_device *self, const cer_device_launch *launch, void **out,
              cer_error *err)
{
    cer_status status = CER_OK;
    int code;

    *out = atomic_load_explicit(&self->functions[launch->index],
                                memory_order_acquire);
    if (*out != NULL)
        return CER_OK;
    (void)pthread_mutex_lock(&self->lock);
    if (self->module == NULL && (status = load_module(self, err)) != CER_OK)
        goto done;
    code = self->runtime->cuModuleGetFunction(out, self->module, launch->name);
    if (code != CER_CUDA_SUCCESS) {
        *out = NULL;
        status = cer_cudart_fail(self->runtime, self->base.index,
                                 "cuModuleGetFunction", code, err);
        goto done;
    }
    atomic_store_explicit(&self->functions[launch->index], *out,
                          memory_order_release);

done:
    (void)pthread_mutex_unlock(&self->lock);
    return status;
}

static cer_status
cuda_run(cer_device *device, const cer_device_launch *launch, void *stream,
         cer_error *err)
{
    cuda_device *self = cuda_of(device);
    /* The driver only reads them, although its prototype is not const. */
    void *args = (void *)(uintptr_t)launch->args;
    size_t args_bytes = launch->args_bytes;
    void *extra[] = {(void *)CER_CUDA_LAUNCH_BUFFER, args,
                     (void *)CER_CUDA_LAUNCH_BUFFER_BYTES, &args_bytes,
                     (void *)CER_CUDA_LAUNCH_END};
    void *function = NULL;
    cuda_visit v;
    int code = enter(self, &v);

    if (code == CER_CUDA_SUCCESS) {
        cer_status status = find_function(self, launch, &function, err);

        if (status != CER_OK) {
            put_back(self, &v);
            return status;
        }
        code = self->runtime->cuLaunchKernel(
            function, launch->grid[0], launch->grid[1], launch->grid[2],
            launch->block[0], launch->block[1], launch->block[2],
            launch->shared_bytes, stream, NULL, extra);
    }
    return leave(self, &v, "cuLaunchKernel", code, err);
}

static cer_status
cuda_launch_graph(cer_device *device, void *graph, void *stream, cer_error *err)
{
    VISIT(cudaGraphLaunch, (graph, stream));
}

/* --- the device ----------------------------------------------------------- */

static void
drop(cer_device *device)
{
    cuda_device *self = cuda_of(device);
    cuda_visit v;

    if (self->module != NULL) {
        if (enter(self, &v) != CER_CUDA_SUCCESS)
            (void)self->runtime->cudaGetLastError();
        (void)self->runtime->cuModuleUnload(self->module);
        put_back(self, &v);
    }
    (void)pthread_mutex_destroy(&self->lock);
    cer_device_clear(device);
    cer_cudart_release(self->runtime);
    cer_free(self);
}

static const cer_device_ops cuda_ops = {
    .drop = drop,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .step_out = cuda_step_out,
    .step_in = cuda_step_in,
    .alloc = cuda_alloc,
    .give_back = cuda_give_back,
    .alloc_pinned = cuda_alloc_pinned,
    .free_pinned = cuda_free_pinned,
    .memory = cuda_memory,
    .stream_new = cuda_stream_new,
    .stream_free = cuda_stream_free,
    .stream_sync = cuda_stream_sync,
    .stream_wait = cuda_stream_wait,
    .stream_capturing = cuda_stream_capturing,
    .event_new = cuda_event_new,
    .event_free = cuda_event_free,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .event_sync = cuda_event_sync,
    .sync = cuda_sync,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .run = cuda_run,
    .launch_graph = cuda_launch_graph,
};

/* Creates the primary context and the runtime's state in it, so that errors
 * show here. */
static cer_status
start(cer_device *device, cer_error *err)
{
    cuda_device *of = cuda_of(device);
    int made =
        of->runtime->cuDevicePrimaryCtxRetain(&of->context, device->index);

    if (made != CER_CUDA_SUCCESS)
        return cer_cudart_fail(of->runtime, device->index,
                               "cuDevicePrimaryCtxRetain", made, err);
    VISIT(cudaFree, (NULL));
}

cer_status
cer_device_cuda_new(cer_cudart *runtime, int index, const char *ptx,
                    cer_device **out, cer_error *err)
{
    cuda_device *self = NULL;
    int count = 0;
    cer_status status = cer_cudart_devices(runtime, &count, err);

    *out = NULL;
    if (status != CER_OK)
        return status;
    if (index < 0 || index >= count)
        return cer_fail(err, CER_INVALID,
                        "cuda:%d: there are %d CUDA devices, counted from 0, "
                        "that this process may use",
                        index, count);
    if ((self = cer_calloc(1, sizeof *self)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a device");
    for (size_t i = 0; i < CER_DEVICE_MAX_KERNELS; i++)
        atomic_init(&self->functions[i], NULL);
    self->ptx = ptx;
    self->runtime = runtime;
    if (pthread_mutex_init(&self->lock, NULL) != 0) {
        cer_free(self);
        return cer_fail(err, CER_NOMEM, "out of memory for a device's lock");
    }
    status =
        cer_device_init(&self->base, &cuda_ops, CER_DEVICE_CUDA, index, err);
    if (status != CER_OK) {
        (void)pthread_mutex_destroy(&self->lock);
        cer_free(self);
        return status;
    }
    cer_cudart_retain(runtime);
    if ((status = start(&self->base, err)) != CER_OK)
        cer_device_release(&self->base);
    else
        *out = &self->base;
    return status;
}
