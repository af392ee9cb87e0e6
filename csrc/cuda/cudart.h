/* cudart.h -- the CUDA runtime of this process, loaded on demand.
 *
 * Nothing is linked; cudart_calls.h lists the functions used. A process has one
 * runtime: the one that a framework has loaded, else that of NVIDIA's wheels,
 * else the system's. It also provides the driver functions. The context is the
 * primary one, which frameworks share. */
#ifndef CER_CUDART_H
#define CER_CUDART_H

#include <pthread.h>
#include <stdatomic.h>

#include "cudart_calls.h"
#include "library.h"

typedef struct cer_cudart {
#define CER_CUDART_MEMBER(result, name, params) result(*name) params;
    CER_CUDART_LIST(CER_CUDART_MEMBER)
    CER_CUDA_DRIVER_LIST(CER_CUDART_MEMBER)
#undef CER_CUDART_MEMBER
    atomic_size_t count;
    pthread_key_t visits; /* device_cuda.c's: the visit a thread is in */
    int version;          /* 12080 is 12.8 */
    int driver;           /* the newest CUDA that the driver supports */
    char path[CER_LIBRARY_PATH_BYTES];
} cer_cudart;

typedef struct cer_cudart_search {
    const char *path;           /* only this library; NULL: search */
    const char *const *folders; /* with libraries, best first; ends with NULL */
    int prefer; /* 12 or 13, as the framework was built for; 0: newest */
} cer_cudart_search;

/* Opens the runtime; the caller owns one reference. The library stays loaded.
 * CER_DEVICE: no driver, no runtime that it supports, or a function is missing;
 * the message says what to install. */
cer_status cer_cudart_open(const cer_cudart_search *search, cer_cudart **out,
                           cer_error *err);
void cer_cudart_retain(cer_cudart *runtime);
void cer_cudart_release(cer_cudart *runtime); /* NULL allowed */

/* Counts the devices that this process may use. Initializes the driver but
 * creates no context. */
cer_status cer_cudart_devices(cer_cudart *runtime, int *count, cer_error *err);

typedef struct cer_cudart_device {
    char name[128];
    char uuid[33];    /* unique to this GPU, in hexadecimal */
    int major, minor; /* compute capability */
    int multiprocessors;
    size_t total_bytes;
    bool mps; /* runs under the Multi-Process Service */
} cer_cudart_device;

/* Describes a device without creating a context. */
cer_status cer_cudart_describe(cer_cudart *runtime, int device,
                               cer_cudart_device *out, cer_error *err);

/* Reports that `call` returned `code`, with the error's name and cure. Also
 * clears the error from the thread's state, where the next user of CUDA would
 * find it. CER_NOMEM for out of memory, else CER_DEVICE. `device` < 0: not of
 * one device. */
cer_status cer_cudart_fail(const cer_cudart *runtime, int device,
                           const char *call, int code, cer_error *err);

#endif
