/* gather_kernel.c -- launches one kernel, which gathers rows in device memory,
 * for benchmarks.gather_kernel through ctypes. Loaders launch theirs from C.
 * Each function returns 0, or a status with a message. */
#include <stdio.h>

#include "device_cuda.h"
#include "kernels.h"

enum { MESSAGE_BYTES = CER_ERROR_MESSAGE_BYTES };

static int
result(cer_status status, const cer_error *err, char *message)
{
    if (status != CER_OK)
        (void)snprintf(message, MESSAGE_BYTES, "%s", err->message);
    return (int)status;
}

int gather_open(const char *runtime, int index, const char *ptx,
                cer_device **out, char *message);
int gather_rows(cer_device *device, void *dst, const cer_kernel_part *parts,
                size_t row_bytes, const cer_row_place *places, size_t n_rows,
                void *stream, char *message);

/* Opens device `index` of the CUDA runtime at a path; NULL is the host. `ptx`
 * must stay valid. The device stays open until the process ends. */
int
gather_open(const char *runtime, int index, const char *ptx, cer_device **out,
            char *message)
{
    cer_cudart_search search = {.path = runtime};
    cer_cudart *cudart = NULL;
    cer_error err = {0};
    cer_status status;

    if (runtime == NULL)
        return result(cer_device_host_new(out, &err), &err, message);
    status = cer_cudart_open(&search, &cudart, &err);
    if (status == CER_OK)
        status = cer_device_cuda_new(cudart, index, ptx, out, &err);
    cer_cudart_release(cudart);
    return result(status, &err, message);
}

/* Copies row places[i].row of parts[places[i].part] to row i of `dst`, on a
 * stream. Arguments are not checked and must stay valid until the stream is
 * done. */
int
gather_rows(cer_device *device, void *dst, const cer_kernel_part *parts,
            size_t row_bytes, const cer_row_place *places, size_t n_rows,
            void *stream, char *message)
{
    const cer_kernel_source from = {.parts = parts, .places = places};
    cer_kernel_call call;
    cer_error err = {0};
    cer_status status =
        cer_kernel_rows(dst, &from, row_bytes, n_rows, &call, &err);

    if (status == CER_OK)
        status = cer_kernel_launch(device, &call, stream, &err);
    return result(status, &err, message);
}
