/* kernels_on_cpu.h -- csrc/cuda/kernels.cu itself, run on the CPU. */
#ifndef KERNELS_ON_CPU_H
#define KERNELS_ON_CPU_H

#include "kernels.h"

void kernels_on_cpu_run(const cer_kernel_call *call);

#endif
