#include "cudnn.h"

cer_status
cer_cudnn_find(const char *const *folders, cer_cudnn *out, cer_error *err)
{
    static const char *const names[] = {"libcudnn.so.9", NULL};
    size_t (*get_version)(void) = NULL;
    size_t (*get_cudart)(void) = NULL;
    void *library = NULL;
    cer_status status = cer_library_open(names, folders, &library, err);

    *out = (cer_cudnn){.version = 0};
    if (status != CER_OK || library == NULL)
        return status;
    cer_library_path(library, "cudnnGetVersion", out->path);
    if (!cer_library_symbol(library, "cudnnGetVersion", (void *)&get_version) ||
        !cer_library_symbol(library, "cudnnGetCudartVersion",
                            (void *)&get_cudart))
        return cer_fail(err, CER_DEVICE, "libcudnn.so.9 lacks cudnnGetVersion");
    out->version = (int)get_version();
    out->cudart = (int)get_cudart();
    return CER_OK;
}
