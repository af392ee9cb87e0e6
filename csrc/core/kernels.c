#include "kernels.h"

#include <string.h>

#include "kernels_impl.h"

/* --- the table of kernels ------------------------------------------------- */

#define REFERENCE(id, name, family, args, mode)                                \
    static void run_##id(const void *a)                                        \
    {                                                                          \
        cer_kernels_host_##family(a, CER_VALUES_##mode);                       \
    }
CER_KERNEL_LIST(REFERENCE)

typedef struct kernel_entry {
    const char *name;
    size_t args_bytes, tiling_at;
    void (*reference)(const void *args);
} kernel_entry;

#define ENTRY(id, name, family, args, mode)                                    \
    {#name, sizeof(cer_##args##_args), offsetof(cer_##args##_args, tiling),    \
     run_##id},
static const kernel_entry entries[CER_KERNEL_COUNT] = {CER_KERNEL_LIST(ENTRY)};

const char *
cer_kernel_name(cer_kernel kernel)
{
    return entries[kernel].name;
}

bool
cer_kernel_find(const char *name, cer_kernel *out)
{
    for (unsigned i = 0; i < CER_KERNEL_COUNT; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            *out = (cer_kernel)i;
            return true;
        }
    }
    return false;
}

size_t
cer_kernel_args_bytes(cer_kernel kernel)
{
    return entries[kernel].args_bytes;
}

void
cer_kernel_run_host(cer_kernel kernel, const cer_kernel_args *args)
{
    entries[kernel].reference(args);
}

/* --- division of work ----------------------------------------------------- */

uint32_t
cer_kernel_blocks(cer_kernel kernel, const cer_kernel_args *args)
{
    const cer_tiling *t =
        (const void *)((const char *)args + entries[kernel].tiling_at);

    return (uint32_t)((t->n_rows + t->rows - 1) / t->rows * t->chunks);
}

/* Multiplier and shift as in Granlund and Montgomery, "Division by invariant
 * integers using multiplication", 1994. */
cer_divider
cer_kernels_divider(uint32_t divisor)
{
    cer_divider d = {divisor, 0, 0};

    while (((uint64_t)1 << d.shift) < divisor)
        d.shift++;
    d.multiplier =
        (uint32_t)(((((uint64_t)1 << d.shift) - divisor) << 32) / divisor + 1);
    return d;
}

bool
cer_kernels_cut(size_t n_rows, size_t items, uint32_t most_rows,
                cer_tiling *out)
{
    size_t rows, blocks;

    *out = (cer_tiling){.rows = 1, .chunks = 1};
    out->by_items = cer_kernels_divider(1);
    if (n_rows == 0 || items == 0)
        return true; /* no block */
    if (items > CER_KERNEL_MOST)
        return false;
    rows = CER_KERNEL_TILE / items;
    rows = rows < 1 ? 1 : rows < most_rows ? rows : most_rows;
    out->n_rows = n_rows;
    out->items = (uint32_t)items;
    out->rows = (uint32_t)rows;
    out->by_items = cer_kernels_divider(out->items);
    if (items > CER_KERNEL_TILE)
        out->chunks = (uint32_t)((items - 1) / CER_KERNEL_TILE + 1);
    return cer_mul_size((n_rows - 1) / rows + 1, out->chunks, &blocks) &&
           blocks <= CER_KERNEL_MOST;
}

cer_status
cer_kernel_launch(cer_device *device, const cer_kernel_call *call, void *stream,
                  cer_error *err)
{
    const kernel_entry *entry = &entries[call->kernel];
    const cer_device_launch launch = {
        .name = entry->name,
        .index = (unsigned)call->kernel,
        .args = &call->args,
        .args_bytes = entry->args_bytes,
        .reference = entry->reference,
        .grid = {cer_kernel_blocks(call->kernel, &call->args), 1, 1},
        .block = {CER_KERNEL_THREADS, 1, 1},
    };

    return cer_device_run(device, &launch, stream, err);
}
