/* base_shared.h -- the common start of headers whose functions also run on a
 * GPU.
 *
 * They are compiled as C11 into the core, as CUDA C++ by nvcc and NVRTC, and as
 * plain C++ where tests run the kernels' source on the CPU: one source, one
 * arithmetic. They use only features that all of these support: types of fixed
 * size, no library, no bool in structs, and single operations that every
 * platform rounds correctly (multiply-adds are not contracted). */
#ifndef CER_BASE_SHARED_H
#define CER_BASE_SHARED_H

#if defined(__CUDACC_RTC__) /* has no system headers */
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#include <string.h>
#endif

/* Marks a function of these headers; one that a GPU calls instead of inlining;
 * and a loop that a GPU must not unroll. */
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CER_SHARED static __device__ inline
#define CER_SHARED_CALL static __device__ __noinline__
#define CER_ROLLED _Pragma("unroll 1")
#else
#define CER_SHARED static inline
#define CER_SHARED_CALL static inline
#define CER_ROLLED
#endif

#if defined(__CUDA_ARCH__)
#define CER_MULHI64(a, b) __umul64hi((a), (b))
#define CER_MULHI32(a, b) __umulhi((a), (b))
#else
#define CER_MULHI64(a, b)                                                      \
    ((uint64_t)(((__extension__(unsigned __int128)(a)) * (b)) >> 64))
#define CER_MULHI32(a, b) ((uint32_t)(((uint64_t)(a) * (b)) >> 32))
#endif

CER_SHARED uint32_t
cer_float_bits(float x)
{
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

CER_SHARED float
cer_bits_float(uint32_t bits)
{
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

#endif
