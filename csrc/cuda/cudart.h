/* cudart.h -- the CUDA runtime of this process, found when it is needed.
 *
 * Nothing is linked; cudart_calls.h lists what is called. A process has one
 * runtime: the one that a framework has loaded, else
 * the one of NVIDIA's wheels, else the system's. Driver functions come through
 * it, and the context is the primary one, which frameworks use too. */
#ifndef CER_CUDART_H
#define CER_CUDART_H

#include <stdatomic.h>

#include "cudart_calls.h"
#include "library.h"

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
    char uuid[33];    /* of this GPU and no other, in hexadecimal */
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
