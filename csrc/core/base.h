/* base.h -- status codes, error reports, the allocator interface and checked
 * arithmetic for every file of the core.
 *
 * The core never prints, never exits and keeps no global state. A function that
 * can fail returns a cer_status and fills a cer_error if the caller passed one;
 * the error may always be NULL. After its first acquisition a function returns
 * only through its `done:` label. */
#ifndef CER_BASE_H
#define CER_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* States, slots and .npy files are little-endian and copied unchanged. */
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Cerebro's files need a little-endian machine"
#endif

/* This list defines the enum and the names. */
#define CER_STATUS_LIST(X)                                                     \
    X(OK, "ok")                                                                \
    X(NOMEM, "out of memory")                                                  \
    X(INVALID, "invalid argument")                                             \
    X(IO, "input/output error")                                                \
    X(CORRUPT, "corrupt data")                                                 \
    X(STATE, "invalid model state")                                            \
    X(DEVICE, "device error")                                                  \
    X(CANCELLED, "cancelled")

typedef enum cer_status {
#define CER_STATUS_ENUM(name, text) CER_##name,
    CER_STATUS_LIST(CER_STATUS_ENUM)
#undef CER_STATUS_ENUM
} cer_status;

#define CER_ERROR_MESSAGE_BYTES 512

typedef struct cer_error {
    cer_status status;
    int os_errno; /* 0 if the operating system reported none */
    char message[CER_ERROR_MESSAGE_BYTES];
} cer_error;

#if defined(__GNUC__)
#define CER_PRINTF(format_at, args_at)                                         \
    __attribute__((format(printf, format_at, args_at)))
#else
#define CER_PRINTF(format_at, args_at)
#endif

/* "ok", "out of memory", ...; a constant string for every value. */
const char *cer_status_name(cer_status status);

/* Fills `err` (may be NULL) and returns `status`: `status = cer_fail(err,
 * CER_INVALID, "...")`. Long messages are truncated. */
cer_status cer_fail(cer_error *err, cer_status status, const char *format, ...)
    CER_PRINTF(3, 4);

/* Does the same with CER_IO, stores `os_errno` and appends its text to the
 * message: "cannot open data/x.npy: No such file or directory". */
cer_status cer_fail_errno(cer_error *err, int os_errno, const char *format, ...)
    CER_PRINTF(3, 4);

/* --- allocator -----------------------------------------------------------
 * The core allocates only through these functions. alloc.c holds nothing else:
 * out-of-memory tests link a different file in its place and make the nth
 * allocation fail. cer_alloc and cer_calloc also return NULL for a size of
 * 0. */
#define CER_ALIGNMENT 256 /* bytes; batch buffers and tensors start on this */

void *cer_alloc(size_t size);
void *cer_calloc(size_t count, size_t size); /* NULL if the product overflows */
void *cer_realloc(void *old, size_t size);   /* old stays valid on failure */
void cer_free(void *block);                  /* NULL allowed */
void *cer_aligned_alloc(size_t size); /* on CER_ALIGNMENT; release with: */
void cer_aligned_free(void *block);   /* NULL allowed */

/* --- checked arithmetic --------------------------------------------------
 * For sizes from a file or a caller. Returns false and leaves *out alone if the
 * result does not fit. */
static inline bool
cer_add_size(size_t a, size_t b, size_t *out)
{
    if (a > SIZE_MAX - b)
        return false;
    *out = a + b;
    return true;
}

static inline bool
cer_mul_size(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b)
        return false;
    *out = a * b;
    return true;
}

/* Rounds up to a multiple of `step` (a power of two). */
static inline bool
cer_round_up_size(size_t n, size_t step, size_t *out)
{
    if (!cer_add_size(n, step - 1, &n))
        return false;
    *out = n & ~(step - 1);
    return true;
}

#endif
