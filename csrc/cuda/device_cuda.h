/* device_cuda.h -- the device layer for a GPU.
 *
 * Every call makes the GPU's primary context current and restores the previous
 * one. It does not disturb graphs that the process is capturing elsewhere
 * (capture mode "relaxed"). Kernels are PTX, compiled by the driver at the
 * first launch and kept in the driver's cache. */
#ifndef CER_DEVICE_CUDA_H
#define CER_DEVICE_CUDA_H

#include "cudart.h"
#include "device.h"

/* Opens device `index` with the process's primary context; the caller owns one
 * reference. `ptx` is the kernels' text, ends with a 0 and must stay valid. */
cer_status cer_device_cuda_new(cer_cudart *runtime, int index, const char *ptx,
                               cer_device **out, cer_error *err);

#endif
