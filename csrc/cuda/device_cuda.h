/* device_cuda.h -- a GPU behind the device layer.
 *
 * Every call makes the GPU's primary context the thread's current one and takes
 * it off again; it also leaves graphs that the process is capturing elsewhere
 * as they are (capture mode "relaxed"). Kernels are PTX, compiled by the driver
 * when the first is launched and kept in the driver's own cache. */
#ifndef CER_DEVICE_CUDA_H
#define CER_DEVICE_CUDA_H

#include "cudart.h"
#include "device.h"

/* Opens device `index` with the process's primary context; one reference, the
 * caller's. `ptx` is the text of the kernels, ends with a 0 and stays. */
cer_status cer_device_cuda_new(cer_cudart *runtime, int index, const char *ptx,
                               cer_device **out, cer_error *err);

/* For other libraries of CUDA: between the two, what the thread calls is of the
 * device, and graphs that are captured elsewhere stay as they are. After a
 * failure there is nothing to leave. */
typedef struct cer_cuda_visit {
    const char *failed; /* the call that did not get us there */
    int mode;           /* of capturing, to be put back */
    bool arrived;       /* there is a context to be taken off */
} cer_cuda_visit;

cer_status cer_device_cuda_enter(cer_device *device, cer_cuda_visit *visit,
                                 cer_error *err);
void cer_device_cuda_leave(cer_device *device, cer_cuda_visit *visit);

#endif
