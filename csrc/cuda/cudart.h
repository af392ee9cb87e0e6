/* cudart.h -- the CUDA runtime of this process, found when it is needed.
 *
 * Nothing is linked and no header of CUDA is used: the functions that Cerebro
 * calls are listed here with prototypes of its own, and are the same in CUDA 12
 * and 13. A process has one runtime: the one that a framework has loaded, else
 * the one of NVIDIA's wheels, else the system's. Driver functions come through
 * it, and the context is the primary one, which frameworks use too. */
#ifndef CER_CUDART_H
#define CER_CUDART_H

#include <stdatomic.h>

#include "library.h"

/* Return codes are cudaError_t, which agrees with the driver's CUresult. */
enum {
    CER_CUDA_SUCCESS = 0,
    CER_CUDA_OUT_OF_MEMORY = 2,
    CER_CUDA_NOT_READY = 600,
    CER_CUDA_CAPTURE_IMPLICIT = 906
};

#define CER_CUDART_LIST(X)                                                     \
    X(int, cudaRuntimeGetVersion, (int *version))                              \
    X(int, cudaDriverGetVersion, (int *version))                               \
    X(const char *, cudaGetErrorName, (int code))                              \
    X(const char *, cudaGetErrorString, (int code))                            \
    X(int, cudaGetLastError, (void))                                           \
    X(int, cudaGetDeviceCount, (int *count))                                   \
    X(int, cudaGetDevice, (int *device))                                       \
    X(int, cudaSetDevice, (int device))                                        \
    X(int, cudaDeviceSynchronize, (void))                                      \
    X(int, cudaDeviceGetAttribute, (int *value, int attribute, int device))    \
    X(int, cudaMemGetInfo, (size_t * free_bytes, size_t * total))              \
    X(int, cudaMalloc, (void **out, size_t bytes))                             \
    X(int, cudaFree, (void *data))                                             \
    X(int, cudaHostAlloc, (void **out, size_t bytes, unsigned flags))          \
    X(int, cudaFreeHost, (void *data))                                         \
    X(int, cudaHostRegister, (void *data, size_t bytes, unsigned flags))       \
    X(int, cudaHostUnregister, (void *data))                                   \
    X(int, cudaMemcpyAsync,                                                    \
      (void *to, const void *from, size_t bytes, int kind, void *stream))      \
    X(int, cudaMemsetAsync, (void *to, int value, size_t bytes, void *stream)) \
    X(int, cudaStreamCreateWithFlags, (void **out, unsigned flags))            \
    X(int, cudaStreamDestroy, (void *stream))                                  \
    X(int, cudaStreamSynchronize, (void *stream))                              \
    X(int, cudaStreamWaitEvent, (void *stream, void *event, unsigned flags))   \
    X(int, cudaStreamIsCapturing, (void *stream, int *status))                 \
    X(int, cudaThreadExchangeStreamCaptureMode, (int *mode))                   \
    X(int, cudaEventCreateWithFlags, (void **out, unsigned flags))             \
    X(int, cudaEventDestroy, (void *event))                                    \
    X(int, cudaEventRecord, (void *event, void *stream))                       \
    X(int, cudaEventQuery, (void *event))                                      \
    X(int, cudaEventSynchronize, (void *event))

/* The driver's; through the runtime's cudaGetDriverEntryPoint. */
#define CER_CUDA_DRIVER_LIST(X)                                                \
    X(int, cuDeviceGetName, (char *name, int bytes, int device))               \
    X(int, cuDeviceTotalMem, (size_t * bytes, int device))                     \
    X(int, cuModuleLoadDataEx,                                                 \
      (void **out, const void *image, unsigned n, int *options,                \
       void **values))                                                         \
    X(int, cuModuleUnload, (void *module))                                     \
    X(int, cuModuleGetFunction, (void **out, void *module, const char *name))  \
    X(int, cuLaunchKernel,                                                     \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,      \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,  \
       void *stream, void **params, void **extra))

typedef struct cer_cudart {
#define CER_CUDART_MEMBER(result, name, params) result(*name) params;
    CER_CUDART_LIST(CER_CUDART_MEMBER)
    CER_CUDA_DRIVER_LIST(CER_CUDART_MEMBER)
#undef CER_CUDART_MEMBER
    atomic_size_t count;
    int version; /* 12080 is 12.8 */
    int driver;  /* the newest CUDA that the driver can run */
    char path[CER_LIBRARY_PATH_BYTES];
} cer_cudart;

typedef struct cer_cudart_search {
    const char *path; /* this library and no other; NULL: look for one */
    const char *const *folders; /* with libraries, the best first; ends with
                                   NULL */
    int prefer; /* 12 or 13: what the framework was made for; 0: the newest */
} cer_cudart_search;

/* Opens the runtime; one reference, the caller's. The library stays loaded.
 * CER_DEVICE: there is no driver, no runtime that it can run, or one that lacks
 * a function; the message says what to install. */
cer_status cer_cudart_open(const cer_cudart_search *search, cer_cudart **out,
                           cer_error *err);
void cer_cudart_retain(cer_cudart *runtime);
void cer_cudart_release(cer_cudart *runtime); /* NULL allowed */

/* How many devices this process may use. Starts the driver, no context. */
cer_status cer_cudart_devices(cer_cudart *runtime, int *count, cer_error *err);

typedef struct cer_cudart_device {
    char name[128];
    int major, minor; /* compute capability */
    int multiprocessors;
    size_t total_bytes;
    bool mps; /* contexts are shared through the Multi-Process Service */
} cer_cudart_device;

/* What a device is. No context is made. */
cer_status cer_cudart_describe(cer_cudart *runtime, int device,
                               cer_cudart_device *out, cer_error *err);

/* Reports that `call` gave `code`, with its name and what to do about it, and
 * takes the error out of the thread's state, where the next user of CUDA would
 * find it. CER_NOMEM for memory, else CER_DEVICE. `device` < 0: of none. */
cer_status cer_cudart_fail(const cer_cudart *runtime, int device,
                           const char *call, int code, cer_error *err);

#endif
