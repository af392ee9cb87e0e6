#include "cuda_on_cpu.h"

#include "../../csrc/cuda/kernels.cu"

extern "C" {
#include "kernels_on_cpu.h"
}

#define RUN(id, name, family, args_of, mode)                                   \
    case CER_KERNEL_##id:                                                      \
        cuda_on_cpu_launch(name, call->args.args_of, blocks,                   \
                           CER_KERNEL_THREADS);                                \
        break;

void
kernels_on_cpu_run(const cer_kernel_call *call)
{
    uint32_t blocks = cer_kernel_blocks(call->kernel, &call->args);

    switch (call->kernel) {
        CER_KERNEL_LIST(RUN)
    case CER_KERNEL_COUNT:
        break;
    }
}
