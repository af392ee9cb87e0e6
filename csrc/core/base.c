#include "base.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *
cer_status_name(cer_status status)
{
    switch (status) {
#define CER_STATUS_CASE(name, text)                                            \
    case CER_##name:                                                           \
        return text;
        CER_STATUS_LIST(CER_STATUS_CASE)
#undef CER_STATUS_CASE
    }
    return "unknown status";
}

static void
fill(cer_error *err, cer_status status, int os_errno, const char *format,
     va_list args)
{
    if (err == NULL)
        return;
    err->status = status;
    err->os_errno = os_errno;
    (void)vsnprintf(err->message, sizeof err->message, format, args);
}

cer_status
cer_fail(cer_error *err, cer_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fill(err, status, 0, format, args);
    va_end(args);
    return status;
}

/* strerror is not thread-safe, and strerror_r has two variants, which differ in
 * their result type. */
static const char *
errno_text_posix(int result, const char *buffer)
{
    return result == 0 ? buffer : "unknown error";
}

static const char *
errno_text_gnu(const char *result, const char *buffer)
{
    (void)buffer;
    return result;
}

#define ERRNO_TEXT(os_errno, buffer)                                           \
    _Generic(strerror_r(os_errno, buffer, sizeof(buffer)),                     \
        int: errno_text_posix,                                                 \
        char *: errno_text_gnu)(                                               \
        strerror_r(os_errno, buffer, sizeof(buffer)), buffer)

cer_status
cer_fail_errno(cer_error *err, int os_errno, const char *format, ...)
{
    va_list args;
    char text[128];
    size_t used;

    va_start(args, format);
    fill(err, CER_IO, os_errno, format, args);
    va_end(args);
    if (err != NULL && os_errno != 0) {
        used = strlen(err->message);
        (void)snprintf(err->message + used, sizeof err->message - used, ": %s",
                       ERRNO_TEXT(os_errno, text));
    }
    return CER_IO;
}
