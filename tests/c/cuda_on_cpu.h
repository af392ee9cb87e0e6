/* cuda_on_cpu.h -- the subset of CUDA C++ that csrc/cuda/kernels.cu uses, so
 * that a C++ compiler can compile the same source for the CPU. Indices are
 * computed as on a GPU, and the sanitizers see every access.
 *
 * The threads of a block run one after the other, twice. In the first round, a
 * thread ends at the barrier; shared memory then has the same content as on a
 * GPU. In the second, barriers do nothing. kernels.cu lists the resulting
 * constraints. */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <stdint.h>
#include <string.h>

struct cuda_on_cpu_index {
    uint32_t x;
};

static cuda_on_cpu_index threadIdx, blockIdx;
static bool cuda_on_cpu_behind_barrier;

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __syncthreads()                                                        \
    do {                                                                       \
        if (!cuda_on_cpu_behind_barrier)                                       \
            return;                                                            \
    } while (0)

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

static inline uint2
make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

static inline uint4
make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

template <typename T>
static inline T
__ldg(const T *at)
{
    return *at;
}

/* Runs all blocks of a kernel. A kernel without a barrier does all of its work
 * twice, with the same result. */
template <typename kernel, typename args_type>
static void
cuda_on_cpu_launch(kernel run, const args_type &args, uint32_t blocks,
                   uint32_t threads)
{
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (int round = 0; round < 2; round++) {
            cuda_on_cpu_behind_barrier = round == 1;
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
                run(args);
        }
    }
}

#endif
