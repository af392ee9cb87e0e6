/* native_kernels.h -- the kernels of the native network on a device: table,
 * references and launch. native_shared.h has their arithmetic. */
#ifndef CER_NATIVE_KERNELS_H
#define CER_NATIVE_KERNELS_H

#include "device.h"
#include "native_shared.h"

/*    id       entry in the module   function, and its arguments */
#define CER_NATIVE_KERNEL_LIST(X)                                              \
    X(POOL, cer_native_pool_kernel, cer_native_pool, pool)                     \
    X(UNPOOL, cer_native_unpool_kernel, cer_native_unpool, unpool)             \
    X(SUM, cer_native_sum_kernel, cer_native_sum, sum)                         \
    X(PRODUCT, cer_native_product_kernel, cer_native_product, product)         \
    X(SCORE, cer_native_score_kernel, cer_native_score, score)                 \
    X(DESCEND, cer_native_descend_kernel, cer_native_descend_one, descend)

typedef enum cer_native_kernel {
#define CER_NATIVE_KERNEL_ENUM(id, name, function, args) CER_NATIVE_KERNEL_##id,
    CER_NATIVE_KERNEL_LIST(CER_NATIVE_KERNEL_ENUM)
#undef CER_NATIVE_KERNEL_ENUM
        CER_NATIVE_KERNEL_COUNT
} cer_native_kernel;

/* Finds a kernel's reference and the size of its arguments by the name of its
 * entry; returns false if the kernel does not exist. */
bool cer_native_kernel_find(const char *name,
                            void (**reference)(const void *args),
                            size_t *args_bytes);

/* Enqueues the kernel on `stream` and copies its struct `args`. CER_INVALID:
 * more items than can be counted. */
cer_status cer_native_kernel_launch(cer_device *device,
                                    cer_native_kernel kernel, const void *args,
                                    void *stream, cer_error *err);

#endif
