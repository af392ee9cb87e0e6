#include "cudart.h"

#include <stdio.h>
#include <string.h>

#define OLDEST 12000
/* Driver functions as of CUDA 12.0; they have not changed since. */
#define ENTRY_POINT_VERSION 12000

/* --- errors --------------------------------------------------------------- */

/* The cure for an error; other errors' names say enough. */
static const char *
advice(int code)
{
    switch (code) {
    case CER_CUDA_OLD_DRIVER:
    case CER_CUDA_OLD_DRIVER_FOR_CALL:
    case CER_CUDA_NEW_PTX:
        return "the NVIDIA driver is too old: update it, or install a "
               "framework made for an older CUDA";
    case CER_CUDA_NOT_INITIALIZED:
        return "CUDA does not survive a fork: start processes with 'spawn' or "
               "'forkserver'; if this one was not forked, see nvidia-smi";
    case CER_CUDA_DEVICES_TAKEN:
        return "another process uses the device exclusively, or it failed: see "
               "nvidia-smi";
    case CER_CUDA_NO_DEVICE:
        return "see CUDA_VISIBLE_DEVICES and nvidia-smi";
    case CER_CUDA_INVALID_DEVICE:
        return "there are fewer devices: see CUDA_VISIBLE_DEVICES and "
               "nvidia-smi";
    case CER_CUDA_NO_KERNEL_IMAGE:
        return "the device is older than compute capability 7.5";
    case CER_CUDA_ECC:
    case CER_CUDA_NVLINK:
    case CER_CUDA_ILLEGAL_ADDRESS:
    case CER_CUDA_LAUNCH_TIMEOUT:
    case CER_CUDA_ASSERT:
    case CER_CUDA_HARDWARE_STACK:
    case CER_CUDA_ILLEGAL_INSTRUCTION:
    case CER_CUDA_MISALIGNED_ADDRESS:
    case CER_CUDA_ADDRESS_SPACE:
    case CER_CUDA_INVALID_PC:
    case CER_CUDA_LAUNCH_FAILURE:
        return "this process can no longer use the device, a new process can";
    case CER_CUDA_SYSTEM_NOT_READY:
        return "the fabric manager is not running: start nvidia-fabricmanager";
    case CER_CUDA_DRIVER_MISMATCH:
        return "the driver was updated while it was loaded: restart the "
               "machine";
    case CER_CUDA_BAD_COMPAT:
        return "a CUDA compatibility library is in the way: remove it from "
               "LD_LIBRARY_PATH";
    case CER_CUDA_UNKNOWN:
        return "the driver did not start: see nvidia-smi and the system's log";
    default:
        return NULL;
    }
}

cer_status
cer_cudart_fail(const cer_cudart *runtime, int device, const char *call,
                int code, cer_error *err)
{
    const char *name = runtime->cudaGetErrorName(code);
    const char *text = runtime->cudaGetErrorString(code);
    const char *hint = advice(code);
    char where[24] = "CUDA";

    (void)runtime->cudaGetLastError();
    if (device >= 0)
        (void)snprintf(where, sizeof where, "cuda:%d", device);
    return cer_fail(
        err, code == CER_CUDA_OUT_OF_MEMORY ? CER_NOMEM : CER_DEVICE,
        "%s: %s: %s (%d): %s%s%s", where, call,
        name == NULL ? "unknown error" : name, code, text == NULL ? "" : text,
        hint == NULL ? "" : "; ", hint == NULL ? "" : hint);
}

/* --- finding it ----------------------------------------------------------- */

#define HOW_TO_GET_A_RUNTIME                                                   \
    "a PyTorch or JAX for CUDA brings one, or pip install "                    \
    "nvidia-cuda-runtime-cu12"

static cer_status
no_driver(cer_error *err)
{
    return cer_fail(err, CER_DEVICE,
                    "no NVIDIA driver: libcuda.so.1 is not on this machine or "
                    "not in this container");
}

/* The newest CUDA version that the driver supports. */
static cer_status
driver_version(int *out, cer_error *err)
{
    static const char *const names[] = {"libcuda.so.1", NULL};
    static const char *const nowhere[] = {NULL};
    int (*get_version)(int *) = NULL;
    void *library = NULL;
    cer_status status = cer_library_open(names, nowhere, &library, err);

    if (status != CER_OK)
        return status;
    if (library == NULL)
        return no_driver(err);
    if (!cer_library_symbol(library, "cuDriverGetVersion",
                            (void *)&get_version) ||
        get_version(out) != CER_CUDA_SUCCESS)
        return cer_fail(
            err, CER_DEVICE,
            "the NVIDIA driver does not report its version: see nvidia-smi");
    if (*out < OLDEST)
        return cer_fail(err, CER_DEVICE,
                        "the NVIDIA driver runs CUDA up to %d.%d, and 12.0 or "
                        "later is needed: update the driver",
                        *out / 1000, *out % 1000 / 10);
    return CER_OK;
}

static cer_status
find(const cer_cudart_search *search, void **out, cer_error *err)
{
    static const char *const newest_first[] = {"libcudart.so.13",
                                               "libcudart.so.12", NULL};
    static const char *const older_first[] = {"libcudart.so.12",
                                              "libcudart.so.13", NULL};
    const char *const *names = newest_first;
    int driver;
    cer_status status;

    if (search->path != NULL)
        return cer_library_open_path(search->path, out, err);
    if ((status = driver_version(&driver, err)) != CER_OK)
        return status;
    if (driver < 13000)
        names = &newest_first[1];
    else if (search->prefer == 12)
        names = older_first;
    status = cer_library_open(names, search->folders, out, err);
    if (status == CER_OK && *out == NULL)
        status = cer_fail(err, CER_DEVICE,
                          "no CUDA runtime (%s) that the driver, of CUDA "
                          "%d.%d, can run: " HOW_TO_GET_A_RUNTIME,
                          driver < 13000 ? "libcudart.so.12"
                                         : "libcudart.so.12 or .13",
                          driver / 1000, driver % 1000 / 10);
    return status;
}

/* --- its functions -------------------------------------------------------- */

typedef struct entry_points {
#define MEMBER(result, name, params) result(*name) params;
    CER_CUDA_ENTRY_LIST(MEMBER)
#undef MEMBER
} entry_points;

static cer_status
driver_symbol(const cer_cudart *runtime, const entry_points *entries,
              const char *name, void *function, cer_error *err)
{
    const char *call = "cudaGetDriverEntryPointByVersion";
    void *symbol = NULL;
    int found = !CER_CUDA_ENTRY_FOUND;
    int code;

    if (entries->cudaGetDriverEntryPointByVersion != NULL) {
        code = entries->cudaGetDriverEntryPointByVersion(
            name, &symbol, ENTRY_POINT_VERSION, CER_CUDA_ENTRY_DEFAULT, &found);
    } else {
        call = "cudaGetDriverEntryPoint";
        code = entries->cudaGetDriverEntryPoint(name, &symbol,
                                                CER_CUDA_ENTRY_DEFAULT, &found);
    }
    if (code != CER_CUDA_SUCCESS)
        return cer_cudart_fail(runtime, -1, call, code, err);
    if (found != CER_CUDA_ENTRY_FOUND || symbol == NULL)
        return cer_fail(err, CER_DEVICE,
                        "the NVIDIA driver lacks %s: update it", name);
    memcpy(function, &symbol, sizeof symbol);
    return CER_OK;
}

static cer_status
load_runtime(cer_cudart *runtime, void *library, cer_error *err)
{
    cer_library_path(library, "cudaRuntimeGetVersion", runtime->path);
#define LOAD(result, name, params)                                             \
    if (!cer_library_symbol(library, #name, (void *)&runtime->name))           \
        return cer_fail(err, CER_DEVICE,                                       \
                        "%s lacks " #name                                      \
                        ", so it is not a CUDA runtime of 12.0 or later",      \
                        runtime->path);
    CER_CUDART_LIST(LOAD)
#undef LOAD
    return CER_OK;
}

static cer_status
load_driver(cer_cudart *runtime, void *library, cer_error *err)
{
    entry_points entries = {NULL, NULL};
    cer_status status;

    if (!cer_library_symbol(
            library, "cudaGetDriverEntryPointByVersion",
            (void *)&entries.cudaGetDriverEntryPointByVersion) &&
        !cer_library_symbol(library, "cudaGetDriverEntryPoint",
                            (void *)&entries.cudaGetDriverEntryPoint))
        return cer_fail(err, CER_DEVICE, "%s lacks cudaGetDriverEntryPoint",
                        runtime->path);
#define LOAD(result, name, params)                                             \
    if ((status = driver_symbol(runtime, &entries, #name,                      \
                                (void *)&runtime->name, err)) != CER_OK)       \
        return status;
    CER_CUDA_DRIVER_LIST(LOAD)
#undef LOAD
    return CER_OK;
}

static cer_status
read_versions(cer_cudart *runtime, cer_error *err)
{
    int code = runtime->cudaRuntimeGetVersion(&runtime->version);

    if (code != CER_CUDA_SUCCESS)
        return cer_cudart_fail(runtime, -1, "cudaRuntimeGetVersion", code, err);
    code = runtime->cudaDriverGetVersion(&runtime->driver);
    if (code != CER_CUDA_SUCCESS)
        return cer_cudart_fail(runtime, -1, "cudaDriverGetVersion", code, err);
    if (runtime->version < OLDEST)
        return cer_fail(err, CER_DEVICE,
                        "%s is the runtime of CUDA %d.%d, and 12.0 or later is "
                        "needed: " HOW_TO_GET_A_RUNTIME,
                        runtime->path, runtime->version / 1000,
                        runtime->version % 1000 / 10);
    if (runtime->driver == 0)
        return no_driver(err);
    return CER_OK;
}

cer_status
cer_cudart_open(const cer_cudart_search *search, cer_cudart **out,
                cer_error *err)
{
    cer_cudart *runtime = NULL;
    void *library = NULL;
    cer_status status = find(search, &library, err);

    *out = NULL;
    if (status != CER_OK)
        return status;
    if ((runtime = cer_calloc(1, sizeof *runtime)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for the CUDA runtime");
    if (pthread_key_create(&runtime->visits, NULL) != 0) {
        cer_free(runtime);
        return cer_fail(err, CER_NOMEM, "out of memory for the CUDA runtime");
    }
    atomic_init(&runtime->count, 1);
    if ((status = load_runtime(runtime, library, err)) != CER_OK ||
        (status = read_versions(runtime, err)) != CER_OK ||
        (status = load_driver(runtime, library, err)) != CER_OK)
        goto done;
    *out = runtime;

done:
    if (status != CER_OK)
        cer_cudart_release(runtime);
    return status;
}

void
cer_cudart_retain(cer_cudart *runtime)
{
    atomic_fetch_add_explicit(&runtime->count, 1, memory_order_relaxed);
}

void
cer_cudart_release(cer_cudart *runtime)
{
    if (runtime == NULL || atomic_fetch_sub_explicit(&runtime->count, 1,
                                                     memory_order_acq_rel) != 1)
        return;
    (void)pthread_key_delete(runtime->visits);
    cer_free(runtime);
}

/* --- its devices ---------------------------------------------------------- */

cer_status
cer_cudart_devices(cer_cudart *runtime, int *count, cer_error *err)
{
    int code;

    *count = 0;
    code = runtime->cudaGetDeviceCount(count);
    if (code == CER_CUDA_SUCCESS)
        return CER_OK;
    *count = 0;
    return cer_cudart_fail(runtime, -1, "cudaGetDeviceCount", code, err);
}

static cer_status
attribute(cer_cudart *runtime, int device, int which, int *out, cer_error *err)
{
    int code = runtime->cudaDeviceGetAttribute(out, which, device);

    if (code == CER_CUDA_SUCCESS)
        return CER_OK;
    return cer_cudart_fail(runtime, device, "cudaDeviceGetAttribute", code,
                           err);
}

cer_status
cer_cudart_describe(cer_cudart *runtime, int device, cer_cudart_device *out,
                    cer_error *err)
{
    unsigned char uuid[16] = {0};
    int mps = 0, code;
    cer_status status;

    *out = (cer_cudart_device){.major = 0};
    if ((status = attribute(runtime, device, CER_CUDA_MAJOR, &out->major,
                            err)) != CER_OK ||
        (status = attribute(runtime, device, CER_CUDA_MINOR, &out->minor,
                            err)) != CER_OK ||
        (status = attribute(runtime, device, CER_CUDA_MULTIPROCESSORS,
                            &out->multiprocessors, err)) != CER_OK)
        return status;
    code = runtime->cuDeviceGetName(out->name, (int)sizeof out->name, device);
    if (code != CER_CUDA_SUCCESS)
        return cer_cudart_fail(runtime, device, "cuDeviceGetName", code, err);
    code = runtime->cuDeviceTotalMem(&out->total_bytes, device);
    if (code != CER_CUDA_SUCCESS)
        return cer_cudart_fail(runtime, device, "cuDeviceTotalMem", code, err);
    code = runtime->cuDeviceGetUuid(uuid, device);
    if (code != CER_CUDA_SUCCESS)
        return cer_cudart_fail(runtime, device, "cuDeviceGetUuid", code, err);
    for (size_t i = 0; i < sizeof uuid; i++)
        (void)snprintf(out->uuid + 2 * i, 3, "%02x", uuid[i]);
    /* Runtimes before 12.2 do not have this attribute. */
    out->mps = attribute(runtime, device, CER_CUDA_MPS, &mps, NULL) == CER_OK &&
               mps != 0;
    return CER_OK;
}
