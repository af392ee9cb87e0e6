/* cudart_calls.h -- the CUDA functions used, with our own constants and
 * prototypes, so that building needs no CUDA header.
 *
 * They are the same in CUDA 12 and 13. Enumerations are `int` here and handles
 * `void *`. tests/c/cuda_headers.cpp compares them with CUDA's headers, if
 * installed. Return codes are cudaError_t, which matches the driver's CUresult.
 */
#ifndef CER_CUDART_CALLS_H
#define CER_CUDART_CALLS_H

#include <stddef.h>

/*    number                       of        in CUDA's headers */
#define CER_CUDA_NUMBERS(X)                                                    \
    X(CER_CUDA_SUCCESS, 0, cudaSuccess)                                        \
    X(CER_CUDA_OUT_OF_MEMORY, 2, cudaErrorMemoryAllocation)                    \
    X(CER_CUDA_NOT_INITIALIZED, 3, cudaErrorInitializationError)               \
    X(CER_CUDA_OLD_DRIVER, 35, cudaErrorInsufficientDriver)                    \
    X(CER_CUDA_OLD_DRIVER_FOR_CALL, 36, cudaErrorCallRequiresNewerDriver)      \
    X(CER_CUDA_DEVICES_TAKEN, 46, cudaErrorDevicesUnavailable)                 \
    X(CER_CUDA_NO_DEVICE, 100, cudaErrorNoDevice)                              \
    X(CER_CUDA_INVALID_DEVICE, 101, cudaErrorInvalidDevice)                    \
    X(CER_CUDA_NO_KERNEL_IMAGE, 209, cudaErrorNoKernelImageForDevice)          \
    X(CER_CUDA_ECC, 214, cudaErrorECCUncorrectable)                            \
    X(CER_CUDA_NVLINK, 220, cudaErrorNvlinkUncorrectable)                      \
    X(CER_CUDA_NEW_PTX, 222, cudaErrorUnsupportedPtxVersion)                   \
    X(CER_CUDA_NOT_READY, 600, cudaErrorNotReady)                              \
    X(CER_CUDA_OPERATING_SYSTEM, 304, cudaErrorOperatingSystem)                \
    X(CER_CUDA_ILLEGAL_ADDRESS, 700, cudaErrorIllegalAddress)                  \
    X(CER_CUDA_LAUNCH_TIMEOUT, 702, cudaErrorLaunchTimeout)                    \
    X(CER_CUDA_ASSERT, 710, cudaErrorAssert)                                   \
    X(CER_CUDA_HARDWARE_STACK, 714, cudaErrorHardwareStackError)               \
    X(CER_CUDA_ILLEGAL_INSTRUCTION, 715, cudaErrorIllegalInstruction)          \
    X(CER_CUDA_MISALIGNED_ADDRESS, 716, cudaErrorMisalignedAddress)            \
    X(CER_CUDA_ADDRESS_SPACE, 717, cudaErrorInvalidAddressSpace)               \
    X(CER_CUDA_INVALID_PC, 718, cudaErrorInvalidPc)                            \
    X(CER_CUDA_LAUNCH_FAILURE, 719, cudaErrorLaunchFailure)                    \
    X(CER_CUDA_NOT_PERMITTED, 800, cudaErrorNotPermitted)                      \
    X(CER_CUDA_NOT_SUPPORTED, 801, cudaErrorNotSupported)                      \
    X(CER_CUDA_SYSTEM_NOT_READY, 802, cudaErrorSystemNotReady)                 \
    X(CER_CUDA_DRIVER_MISMATCH, 803, cudaErrorSystemDriverMismatch)            \
    X(CER_CUDA_BAD_COMPAT, 804, cudaErrorCompatNotSupportedOnDevice)           \
    X(CER_CUDA_CAPTURE_IMPLICIT, 906, cudaErrorStreamCaptureImplicit)          \
    X(CER_CUDA_UNKNOWN, 999, cudaErrorUnknown)                                 \
    X(CER_CUDA_MULTIPROCESSORS, 16, cudaDevAttrMultiProcessorCount)            \
    X(CER_CUDA_MAJOR, 75, cudaDevAttrComputeCapabilityMajor)                   \
    X(CER_CUDA_MINOR, 76, cudaDevAttrComputeCapabilityMinor)                   \
    X(CER_CUDA_MPS, 133, cudaDevAttrMpsEnabled)                                \
    X(CER_CUDA_HOST_PORTABLE, 1, cudaHostAllocPortable)                        \
    X(CER_CUDA_STREAM_NON_BLOCKING, 1, cudaStreamNonBlocking)                  \
    X(CER_CUDA_EVENT_SLEEPING, 1, cudaEventBlockingSync)                       \
    X(CER_CUDA_EVENT_TIMELESS, 2, cudaEventDisableTiming)                      \
    X(CER_CUDA_TO_DEVICE, 1, cudaMemcpyHostToDevice)                           \
    X(CER_CUDA_FROM_DEVICE, 2, cudaMemcpyDeviceToHost)                         \
    X(CER_CUDA_ON_DEVICE, 3, cudaMemcpyDeviceToDevice)                         \
    X(CER_CUDA_CAPTURE_RELAXED, 2, cudaStreamCaptureModeRelaxed)               \
    X(CER_CUDA_CAPTURE_NONE, 0, cudaStreamCaptureStatusNone)                   \
    X(CER_CUDA_ENTRY_DEFAULT, 0, cudaEnableDefault)                            \
    X(CER_CUDA_ENTRY_FOUND, 0, cudaDriverEntryPointSuccess)                    \
    X(CER_CUDA_JIT_LOG, 5, CU_JIT_ERROR_LOG_BUFFER)                            \
    X(CER_CUDA_JIT_LOG_BYTES, 6, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)           \
    X(CER_CUDA_LAUNCH_END, 0, CU_LAUNCH_PARAM_END_AS_INT)                      \
    X(CER_CUDA_LAUNCH_BUFFER, 1, CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT)        \
    X(CER_CUDA_LAUNCH_BUFFER_BYTES, 2, CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT)

enum {
#define CER_CUDA_ENUM(name, value, of) name = value,
    CER_CUDA_NUMBERS(CER_CUDA_ENUM)
#undef CER_CUDA_ENUM
};

#define CER_CUDART_LIST(X)                                                     \
    X(int, cudaRuntimeGetVersion, (int *version))                              \
    X(int, cudaDriverGetVersion, (int *version))                               \
    X(const char *, cudaGetErrorName, (int code))                              \
    X(const char *, cudaGetErrorString, (int code))                            \
    X(int, cudaGetLastError, (void))                                           \
    X(int, cudaGetDeviceCount, (int *count))                                   \
    X(int, cudaDeviceSynchronize, (void))                                      \
    X(int, cudaDeviceGetAttribute, (int *value, int attribute, int device))    \
    X(int, cudaMemGetInfo, (size_t * free_bytes, size_t * total))              \
    X(int, cudaMalloc, (void **out, size_t bytes))                             \
    X(int, cudaFree, (void *data))                                             \
    X(int, cudaHostAlloc, (void **out, size_t bytes, unsigned flags))          \
    X(int, cudaFreeHost, (void *data))                                         \
    X(int, cudaMemcpyAsync,                                                    \
      (void *to, const void *from, size_t bytes, int kind, void *stream))      \
    X(int, cudaMemsetAsync, (void *to, int value, size_t bytes, void *stream)) \
    X(int, cudaStreamCreateWithFlags, (void **out, unsigned flags))            \
    X(int, cudaStreamDestroy, (void *stream))                                  \
    X(int, cudaStreamSynchronize, (void *stream))                              \
    X(int, cudaStreamWaitEvent, (void *stream, void *event, unsigned flags))   \
    X(int, cudaStreamIsCapturing, (void *stream, int *status))                 \
    X(int, cudaThreadExchangeStreamCaptureMode, (int *mode))                   \
    X(int, cudaEventCreateWithFlags, (void **out, unsigned flags))             \
    X(int, cudaEventDestroy, (void *event))                                    \
    X(int, cudaEventRecord, (void *event, void *stream))                       \
    X(int, cudaEventSynchronize, (void *event))                                \
    X(int, cudaGraphLaunch, (void *graph, void *stream))

/* Driver functions, from the runtime's cudaGetDriverEntryPoint. */
#define CER_CUDA_DRIVER_LIST(X)                                                \
    X(int, cuDeviceGetName, (char *name, int bytes, int device))               \
    X(int, cuDeviceTotalMem, (size_t * bytes, int device))                     \
    X(int, cuDeviceGetUuid, (void *uuid, int device))                          \
    X(int, cuDevicePrimaryCtxRetain, (void **out, int device))                 \
    X(int, cuCtxPushCurrent, (void *context))                                  \
    X(int, cuCtxPopCurrent, (void **out))                                      \
    X(int, cuEventQuery, (void *event))                                        \
    X(int, cuModuleLoadDataEx,                                                 \
      (void **out, const void *image, unsigned n, int *options,                \
       void **values))                                                         \
    X(int, cuModuleUnload, (void *module))                                     \
    X(int, cuModuleGetFunction, (void **out, void *module, const char *name))  \
    X(int, cuLaunchKernel,                                                     \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,      \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,  \
       void *stream, void **params, void **extra))

/* Looks up driver functions; the first is available since 12.5. */
#define CER_CUDA_ENTRY_LIST(X)                                                 \
    X(int, cudaGetDriverEntryPointByVersion,                                   \
      (const char *name, void **out, unsigned version,                         \
       unsigned long long flags, int *result))                                 \
    X(int, cudaGetDriverEntryPoint,                                            \
      (const char *name, void **out, unsigned long long flags, int *result))

#endif
