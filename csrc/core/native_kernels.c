#include "native_kernels.h"

#include <string.h>

#include "kernels.h"

#define REFERENCE(id, name, function, family)                                  \
    static void run_##id(const void *a)                                        \
    {                                                                          \
        const cer_native_##family##_args *args = a;                            \
                                                                               \
        for (uint64_t i = 0; i < args->items; i++)                             \
            function(args, i);                                                 \
    }
CER_NATIVE_KERNEL_LIST(REFERENCE)

typedef struct kernel_entry {
    const char *name;
    size_t args_bytes, items_at;
    void (*reference)(const void *args);
} kernel_entry;

#define ENTRY(id, name, function, family)                                      \
    {#name, sizeof(cer_native_##family##_args),                                \
     offsetof(cer_native_##family##_args, items), run_##id},
static const kernel_entry entries[CER_NATIVE_KERNEL_COUNT] = {
    CER_NATIVE_KERNEL_LIST(ENTRY)};

_Static_assert((unsigned)CER_KERNEL_COUNT + CER_NATIVE_KERNEL_COUNT <=
                   CER_DEVICE_MAX_KERNELS,
               "a device counts its kernels");

bool
cer_native_kernel_find(const char *name, void (**reference)(const void *args),
                       size_t *args_bytes)
{
    for (unsigned i = 0; i < CER_NATIVE_KERNEL_COUNT; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            *reference = entries[i].reference;
            *args_bytes = entries[i].args_bytes;
            return true;
        }
    }
    return false;
}

cer_status
cer_native_kernel_launch(cer_device *device, cer_native_kernel kernel,
                         const void *args, void *stream, cer_error *err)
{
    const kernel_entry *entry = &entries[kernel];
    uint64_t items, blocks;
    cer_device_launch launch = {
        .name = entry->name,
        .index = (unsigned)CER_KERNEL_COUNT + (unsigned)kernel,
        .args = args,
        .args_bytes = entry->args_bytes,
        .reference = entry->reference,
        .block = {CER_KERNEL_THREADS, 1, 1},
    };

    memcpy(&items, (const char *)args + entry->items_at, sizeof items);
    blocks = items / CER_KERNEL_THREADS + (items % CER_KERNEL_THREADS != 0);
    if (blocks > INT32_MAX)
        return cer_fail(err, CER_INVALID,
                        "the batch is too large for the device: use a smaller "
                        "batch_size");
    launch.grid[0] = (uint32_t)blocks;
    launch.grid[1] = launch.grid[2] = 1;
    return cer_device_run(device, &launch, stream, err);
}
