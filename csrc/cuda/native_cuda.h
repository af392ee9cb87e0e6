/* native_cuda.h -- the native network on a GPU: convolutions by cuDNN, the rest
 * by kernels (native_shared.h).
 *
 * Values, momenta and gradients are on the device, in the layout of the network
 * in host memory, which mirrors them: push and pull copy. Work runs on a
 * separate stream; functions that return results wait for them. As on the host,
 * the same batches give the same bits, but only for one kind of GPU and one
 * version of cuDNN. Compared to the host, sums have a different order, and exp
 * and log are CUDA's. */
#ifndef CER_NATIVE_CUDA_H
#define CER_NATIVE_CUDA_H

#include "cudnn_conv.h"
#include "device.h"
#include "native_net.h"

typedef struct cer_native_cuda cer_native_cuda;

/* Makes a copy for `net`, which must outlive it; pushes nothing. The device is
 * a GPU, and is retained. `cudnn` is its path; NULL is a CER_DEVICE error. */
cer_status cer_native_cuda_new(cer_native_net *net, cer_device *device,
                               const char *cudnn, cer_native_cuda **out,
                               cer_error *err);
void cer_native_cuda_free(cer_native_cuda *gpu); /* NULL allowed */

/* Push copies all values and momenta to the device; pull copies all values,
 * momenta and gradients from it. */
cer_status cer_native_cuda_push(cer_native_cuda *gpu, cer_error *err);
cer_status cer_native_cuda_pull(cer_native_cuda *gpu, cer_error *err);

/* As in native_net.h; batches and scores are in host memory. */
cer_status cer_native_cuda_differentiate(cer_native_cuda *gpu,
                                         const float *pictures,
                                         const int64_t *labels, size_t rows,
                                         cer_native_net_metrics *out,
                                         cer_error *err);
cer_status cer_native_cuda_step(cer_native_cuda *gpu, float rate,
                                float momentum, cer_error *err);
cer_status cer_native_cuda_evaluate(cer_native_cuda *gpu, const float *pictures,
                                    const int64_t *labels, size_t rows,
                                    cer_native_net_metrics *out,
                                    cer_error *err);
cer_status cer_native_cuda_predict(cer_native_cuda *gpu, const float *pictures,
                                   size_t rows, float *scores, cer_error *err);

#endif
