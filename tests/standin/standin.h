/* standin.h -- a CUDA runtime in host memory, for tests without a GPU.
 *
 * libcudart_standin.so has the functions that Cerebro uses from the CUDA
 * runtime (csrc/cuda/cudart.h) and replaces it through the path in
 * CEREBRO_CUDART. Devices are host memory, streams are queues, and kernels run
 * their CPU references. It counts unfreed resources, makes any call fail, logs
 * the work queued on streams, and detects forbidden calls.
 *
 * By default, work is done as soon as it is queued. Deferred, it is done as
 * late as CUDA allows: when the host waits for it, for later work or for the
 * whole device. A missing wait then shows as wrong bytes.
 *
 * Graphs are made as with CUDA, of copies, fills and kernels, by a capture
 * (cudaStreamBeginCapture, cudaStreamEndCapture, cudaGraphInstantiate). A
 * launch queues their work as one piece.
 *
 * The environment configures a process: STANDIN_DEVICES (1), STANDIN_MEMORY
 * (bytes per device, 1 GB), STANDIN_FAIL (function:nth:code), STANDIN_DEFER
 * (1), STANDIN_ODD (a seed: deferred work is sometimes done earlier, on any
 * stream that need not wait), STANDIN_VERSION (13000), STANDIN_DRIVER (13000)
 * and STANDIN_BREAK: "copy", "fill", "kernel", "record", "wait" or "graph", or
 * several with commas, are queued but not done, "crash" ends the process when
 * work is queued, and "hang" never returns from it.
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define STANDIN_API __attribute__((visibility("default")))
#else
#define STANDIN_API
#endif

/* Resets to the environment's settings, with no armed failure, an empty log and
 * no faults; resources stay. */
STANDIN_API void standin_reset(void);
STANDIN_API void standin_devices(int count);
STANDIN_API void standin_memory(size_t bytes); /* of each device */
STANDIN_API void standin_defer(bool on);

/* The nth call from now of `function` (NULL: any) returns `code`; 0: every
 * call. A call that frees a resource still frees it. */
STANDIN_API void standin_fail(const char *function, unsigned nth, int code);
STANDIN_API const char *standin_failed(void); /* the failed call, or NULL */

/* Unfreed resources: "device", "pinned", "stream", "event", "module", "graph",
 * "exec" (a graph that can be launched); NULL: all. */
STANDIN_API size_t standin_left(const char *kind);
STANDIN_API size_t standin_device_bytes(int device);
/* Whether the device got its primary context since the last reset. */
STANDIN_API bool standin_has_context(int device);

/* Calls that CUDA does not allow: their number, and the last one. */
STANDIN_API unsigned standin_faults(void);
STANDIN_API const char *standin_fault(void);

/* The queued work, one line each: "copy_to s1 16", "record s1 e1", "wait s0
 * e1", "fill s1 8", "launch s1 name", "graph s1 g1", "copy_from ...",
 * "copy_on ...". Streams
 * and events are numbered in order of creation; s0 is the default. */
STANDIN_API unsigned standin_log_lines(void);
STANDIN_API const char *standin_log_line(unsigned i);

/* Calls of this function since the last reset; NULL: of all. */
STANDIN_API unsigned standin_calls(const char *function);

/* Queues a step of a model that has one weight: for every byte of the inputs,
 * weight = weight * 0.999 + rate * byte / 255, in order, as float32. Then the
 * loss is the weight and the sum grows by it. */
typedef struct standin_step {
    const void *inputs[4];
    uint64_t bytes[4];
    float *weight, *loss;
    double *sum;
    const float *rate;
} standin_step;
STANDIN_API int standin_train(void *stream, const standin_step *step);

/* Starts a framework's capture on this stream, which Cerebro must not use
 * (NULL: ends it). */
STANDIN_API void standin_capture(void *stream);

/* The next cudaStreamSynchronize sets *flag to 1 and continues when it is 2, or
 * after ten seconds, which is a fault. */
STANDIN_API void standin_gate(atomic_int *flag);

/* Of the calling thread. */
STANDIN_API int standin_thread_device(void);
STANDIN_API int standin_thread_mode(void);   /* the capture mode; 0 at first */
STANDIN_API int standin_thread_error(void);  /* the last error, or 0 */
STANDIN_API void standin_thread_reset(void); /* device 0, mode 0, no error */

/* Adds a kernel to Cerebro's own; its argument is one struct of `bytes`. */
STANDIN_API void standin_kernel(const char *name, size_t bytes,
                                void (*reference)(const void *args));

#endif
