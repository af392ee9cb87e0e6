/* cuda_files.h -- for GPU tests: the stand-in opened as the CUDA runtime, and a
 * kernel that adds. */
#ifndef CUDA_FILES_H
#define CUDA_FILES_H

#include "check.h"
#include "device_cuda.h"
#include "standin.h"

#define STANDIN STANDIN_FOLDER "/libcudart_standin.so"
#define OLD_STANDIN STANDIN_FOLDER "/libcudart_old_standin.so"

/* What the stand-in checks in a module: that it is PTX, and its entries. */
static const char add_ptx[] = ".version 7.8\n.visible .entry test_add(\n";

typedef struct add_args {
    int32_t *to;
    int32_t n, by;
} add_args;

static inline void
add_reference(const void *args)
{
    const add_args *a = args;

    for (int32_t i = 0; i < a->n; i++)
        a->to[i] += a->by;
}

static inline cer_device_launch
add_launch(const add_args *args)
{
    return (cer_device_launch){.name = "test_add",
                               .args = args,
                               .args_bytes = sizeof *args,
                               .reference = add_reference,
                               .grid = {1, 1, 1},
                               .block = {32, 1, 1}};
}

/* Resets the stand-in, with two devices and the kernel. */
static inline void
fresh_standin(void)
{
    static bool registered;

    standin_reset();
    standin_thread_reset();
    standin_devices(2);
    if (!registered)
        standin_kernel("test_add", sizeof(add_args), add_reference);
    registered = true;
}

static inline cer_status
open_standin(cer_cudart **out, cer_error *err)
{
    const cer_cudart_search search = {.path = STANDIN};

    return cer_cudart_open(&search, out, err);
}

/* Device `index` of the stand-in, with the kernel that adds. */
static inline cer_device *
standin_device(int index)
{
    cer_cudart *runtime = NULL;
    cer_device *device = NULL;

    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_cuda_new(runtime, index, add_ptx, &device, NULL),
                 CER_OK);
    cer_cudart_release(runtime);
    return device;
}

/* Ends a test: checks that nothing leaked and CUDA's rules were kept. */
static inline void
nothing_left(void)
{
    CHECK_EQ_INT(standin_left(NULL), 0);
    CHECK_EQ_STR(standin_fault(), "");
    CHECK_EQ_INT(standin_thread_error(), 0);
}

#endif
