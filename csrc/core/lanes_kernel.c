#include "lanes_kernel.h"

#include <string.h>

#include "kernels.h"
#include "native_kernels.h"

#define NAME "cer_lane_kernel"
#define INDEX ((unsigned)CER_KERNEL_COUNT + (unsigned)CER_NATIVE_KERNEL_COUNT)

_Static_assert(INDEX < CER_DEVICE_MAX_KERNELS, "a device counts its kernels");

static void
run_reference(const void *args)
{
    const cer_lane_args *a = args;

    for (uint64_t i = 0; i < a->items; i++)
        cer_lane_between(a, i);
}

bool
cer_lane_kernel_find(const char *name, void (**reference)(const void *),
                     size_t *args_bytes)
{
    if (strcmp(name, NAME) != 0)
        return false;
    *reference = run_reference;
    *args_bytes = sizeof(cer_lane_args);
    return true;
}

cer_status
cer_lane_kernel_launch(cer_device *device, const cer_lane_args *args,
                       void *stream, cer_error *err)
{
    const cer_device_launch launch = {
        .name = NAME,
        .index = INDEX,
        .args = args,
        .args_bytes = sizeof *args,
        .reference = run_reference,
        .grid = {(uint32_t)((args->items + CER_KERNEL_THREADS - 1) /
                            CER_KERNEL_THREADS),
                 1, 1},
        .block = {CER_KERNEL_THREADS, 1, 1},
    };

    return cer_device_run(device, &launch, stream, err);
}
