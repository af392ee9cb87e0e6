#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FLAGS (RTLD_NOW | RTLD_LOCAL)

cer_status
cer_library_open_path(const char *path, void **out, cer_error *err)
{
    const char *reason;

    *out = dlopen(path, FLAGS);
    if (*out != NULL)
        return CER_OK;
    reason = dlerror();
    return cer_fail(err, CER_DEVICE, "%s does not load: %s", path,
                    reason == NULL ? "unknown reason" : reason);
}

cer_status
cer_library_open(const char *const *names, const char *const *folders,
                 void **out, cer_error *err)
{
    char path[CER_LIBRARY_PATH_BYTES];

    for (const char *const *n = names; *n != NULL; n++) {
        if ((*out = dlopen(*n, FLAGS | RTLD_NOLOAD)) != NULL)
            return CER_OK;
    }
    for (const char *const *n = names; *n != NULL; n++) {
        for (const char *const *f = folders; *f != NULL; f++) {
            int length = snprintf(path, sizeof path, "%s/%s", *f, *n);

            if (length > 0 && (size_t)length < sizeof path &&
                access(path, R_OK) == 0)
                return cer_library_open_path(path, out, err);
        }
    }
    for (const char *const *n = names; *n != NULL; n++) {
        if ((*out = dlopen(*n, FLAGS)) != NULL)
            return CER_OK;
    }
    return CER_OK;
}

bool
cer_library_symbol(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);

    /* ISO C forbids the cast to a function pointer; POSIX defines the copy. */
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

void
cer_library_path(void *library, const char *name,
                 char path[CER_LIBRARY_PATH_BYTES])
{
    void *symbol = dlsym(library, name);
    Dl_info info;

    path[0] = '\0';
    if (symbol != NULL && dladdr(symbol, &info) != 0 && info.dli_fname != NULL)
        (void)snprintf(path, CER_LIBRARY_PATH_BYTES, "%s", info.dli_fname);
}
