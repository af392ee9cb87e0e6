#include "device_check.h"

#include <stdio.h>
#include <string.h>

#include "uses.h"

enum {
    BENCH_BYTES = 3 << 19,
    ROUNDS = 3,
    FILLS = 8, /* keep the device busy while the host continues */
};

static cer_status
wrong(const cer_device_bench *b, const char *what, cer_error *err)
{
    return cer_fail(err, CER_DEVICE,
                    "%s: %s: the driver or the device is faulty",
                    cer_device_name(b->device), what);
}

/* --- memory ----------------------------------------------------------------
 */

static uint8_t
byte_of(size_t i)
{
    return (uint8_t)(i * 7 + (i >> 8) * 13 + (i >> 16));
}

/* Host memory has two halves: the bytes sent and the bytes returned. On the
 * device, the first quarter is copied to the second and the third is filled. */
static bool
came_back(const uint8_t *back, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t expected = i < n / 4       ? byte_of(i)
                           : i < n / 2     ? byte_of(i - n / 4)
                           : i < 3 * n / 4 ? 0x5a
                                           : byte_of(i);

        if (back[i] != expected)
            return false;
    }
    return true;
}

static cer_status
check_memory(const cer_device_bench *b, cer_error *err)
{
    cer_device *d = b->device;
    size_t n = b->bytes / 2;
    uint8_t *here = b->here.data, *there = b->there.data;
    void *stream = b->streams[0];
    cer_status status;

    for (size_t i = 0; i < n; i++)
        here[i] = byte_of(i);
    memset(here + n, 0, n);
    if ((status = cer_device_copy(d, there, here, n, CER_COPY_TO_DEVICE, stream,
                                  err)) != CER_OK ||
        (status = cer_device_copy(d, there + n / 4, there, n / 4,
                                  CER_COPY_ON_DEVICE, stream, err)) != CER_OK ||
        (status = cer_device_fill(d, there + n / 2, 0x5a, n / 4, stream,
                                  err)) != CER_OK ||
        (status = cer_device_copy(d, here + n, there, n, CER_COPY_FROM_DEVICE,
                                  stream, err)) != CER_OK ||
        (status = cer_device_stream_sync(d, stream, err)) != CER_OK)
        return status;
    return came_back(here + n, n) ? CER_OK
                                  : wrong(b, "copies give wrong bytes", err);
}

/* --- streams ---------------------------------------------------------------
 */

/* The first stream waits for the second, then fills the memory repeatedly, the
 * last time with `value`; the second makes a copy. */
static cer_status
put_round(const cer_device_bench *b, cer_uses *uses, uint8_t value,
          size_t bytes, uint8_t *to, cer_error *err)
{
    cer_device *d = b->device;
    cer_status status = cer_uses_before(uses, b->streams[0], err);

    for (int i = 1; status == CER_OK && i <= FILLS; i++)
        status = cer_device_fill(d, b->there.data, (uint8_t)(value + FILLS - i),
                                 b->bytes, b->streams[0], err);
    if (status == CER_OK)
        status = cer_uses_filled(uses, b->streams[0], err);
    if (status == CER_OK)
        status = cer_uses_join(uses, b->streams[1], err);
    return status == CER_OK
               ? cer_device_copy(
                     d, to, (uint8_t *)b->there.data + b->bytes - bytes, bytes,
                     CER_COPY_FROM_DEVICE, b->streams[1], err)
               : status;
}

static cer_status
run_rounds(const cer_device_bench *b, cer_uses *uses, cer_error *err)
{
    uint8_t *here = b->here.data;
    size_t n = b->bytes / ROUNDS;
    cer_status status = CER_OK;

    memset(here, 0, b->bytes);
    for (size_t i = 0; status == CER_OK && i < ROUNDS; i++)
        status =
            put_round(b, uses, (uint8_t)(i * 40 + 1), n, here + i * n, err);
    if (status == CER_OK)
        status = cer_uses_wait(uses, err);
    if (status != CER_OK)
        return status;
    for (size_t i = 0; i < b->bytes; i++) {
        if (here[i] != (uint8_t)(i / n * 40 + 1))
            return wrong(b, "a stream does not wait for another's event", err);
    }
    return CER_OK;
}

static cer_status
check_streams(const cer_device_bench *b, cer_error *err)
{
    cer_uses uses;
    bool capturing;
    cer_status status = cer_uses_init(&uses, b->device, err);

    if (status != CER_OK)
        return status;
    status =
        cer_device_stream_capturing(b->device, b->streams[1], &capturing, err);
    if (status == CER_OK && capturing)
        status = wrong(b, "a new stream is reported as captured", err);
    if (status == CER_OK)
        status = run_rounds(b, &uses, err);
    if (status != CER_OK)
        cer_uses_end(&uses);
    cer_uses_clear(&uses);
    return status;
}

/* --- the whole check -------------------------------------------------------
 */

static cer_status
set_up(cer_device_bench *b, cer_error *err)
{
    cer_status status = cer_device_alloc_idle(b->device, b->bytes,
                                              CER_USE_OTHER, &b->there, err);

    if (status == CER_OK)
        status = cer_device_alloc_pinned(b->device, b->bytes, CER_USE_OTHER,
                                         &b->here, err);
    for (int i = 0; status == CER_OK && i < 2; i++)
        status = cer_device_stream_new(b->device, &b->streams[i], err);
    return status;
}

static void
tear_down(cer_device_bench *b)
{
    for (int i = 0; i < 2; i++)
        cer_device_stream_free(b->device, b->streams[i]);
    cer_device_free(b->device, &b->here);
    cer_device_free(b->device, &b->there);
}

cer_status
cer_device_check(cer_device *device, cer_error *err)
{
    static const struct {
        const char *name;
        cer_status (*check)(const cer_device_bench *bench, cer_error *err);
    } parts[] = {{"memory", check_memory},
                 {"streams", check_streams},
                 {"kernels", cer_device_check_kernels}};
    size_t least = cer_device_check_kernels_bytes();
    cer_device_bench b = {.device = device,
                          .bytes = least > BENCH_BYTES ? least : BENCH_BYTES};
    cer_error why = {0};
    const char *part = "memory";
    cer_status status = set_up(&b, &why);

    for (size_t i = 0; status == CER_OK && i < sizeof parts / sizeof parts[0];
         i++) {
        part = parts[i].name;
        status = parts[i].check(&b, &why);
        if (status != CER_OK) { /* the memory may still be in use */
            cer_uses_end_stream(device, b.streams[0]);
            cer_uses_end_stream(device, b.streams[1]);
        }
    }
    tear_down(&b);
    return status == CER_OK
               ? CER_OK
               : cer_fail(err, status, "the check of %s failed: %s", part,
                          why.message);
}
