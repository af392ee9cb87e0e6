/* standin.h -- a CUDA runtime in host memory, for tests without a GPU.
 *
 * libcudart_standin.so has the functions that Cerebro takes from the CUDA
 * runtime (csrc/cuda/cudart.h) and is opened in its place, by its path in
 * CEREBRO_CUDART. Devices are host memory, streams are queues, and kernels run
 * their CPU references. It counts what is not yet given back, makes any call
 * fail, writes down what is put on streams, and checks what callers may not do.
 *
 * At once (the default), work is done when it is put on a stream. Deferred, it
 * is done as late as CUDA allows: when the host waits for it, for something
 * behind it or for the whole device. A wait that is missing then shows as wrong
 * bytes.
 *
 * The environment sets a process up: STANDIN_DEVICES (1), STANDIN_MEMORY (bytes
 * of each device, 1 GB), STANDIN_FAIL (function:nth:code), STANDIN_DEFER (1),
 * STANDIN_VERSION (13000), STANDIN_DRIVER (13000) and STANDIN_BREAK: "copy",
 * "fill", "kernel", "record" or "wait" is taken and not done, "crash" ends the
 * process when anything is put on a stream, and "hang" never returns from it.
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#if defined(__GNUC__)
#define STANDIN_API __attribute__((visibility("default")))
#else
#define STANDIN_API
#endif

/* As the environment says, with no failure armed, an empty log and no faults;
 * what is left stays. */
STANDIN_API void standin_reset(void);
STANDIN_API void standin_devices(int count);
STANDIN_API void standin_memory(size_t bytes); /* of each device */
STANDIN_API void standin_defer(bool on);

/* The nth call from now of `function` (NULL: of any) gives `code`, with 0 every
 * call. One that frees something does so all the same. */
STANDIN_API void standin_fail(const char *function, unsigned nth, int code);
STANDIN_API const char *standin_failed(void); /* which did; NULL: none yet */

/* How many there are: "device", "pinned", "stream", "event", "module";
 * NULL: of all. */
STANDIN_API size_t standin_left(const char *kind);
STANDIN_API size_t standin_device_bytes(int device);
/* Whether the device has its primary context, since the last reset. */
STANDIN_API bool standin_has_context(int device);

/* What callers did that CUDA does not allow, and the last of it. */
STANDIN_API unsigned standin_faults(void);
STANDIN_API const char *standin_fault(void);

/* What was put on streams, one line each: "copy_to s1 16", "record s1 e1",
 * "wait s0 e1", "fill s1 8", "launch s1 name", "copy_from ...", "copy_on ...".
 * Streams and events are numbered as they are made; s0 is the default one. */
STANDIN_API unsigned standin_log_lines(void);
STANDIN_API const char *standin_log_line(unsigned i);

/* A graph is being captured on this stream (NULL: end it). */
STANDIN_API void standin_capture(void *stream);

/* The next cudaStreamSynchronize sets *flag to 1 and goes on when it is 2, or
 * after ten seconds, which is a fault. */
STANDIN_API void standin_gate(atomic_int *flag);

/* Of the calling thread. */
STANDIN_API int standin_thread_device(void);
STANDIN_API int standin_thread_mode(void);   /* of capturing; 0 at first */
STANDIN_API int standin_thread_error(void);  /* 0: none waits to be found */
STANDIN_API void standin_thread_reset(void); /* device 0, mode 0, no error */

/* A kernel beside Cerebro's own: its argument is one struct of `bytes`. */
STANDIN_API void standin_kernel(const char *name, size_t bytes,
                                void (*reference)(const void *args));

#endif
