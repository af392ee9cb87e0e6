#include "device_check.h"

#include <string.h>

#include "kernels.h"

#define ROWS 64
#define ROW_BYTES 48

/* What goes there, and what comes back. */
typedef struct page {
    uint8_t rows[ROWS][ROW_BYTES];
    uint32_t order[ROWS];
    uint8_t gathered[ROWS][ROW_BYTES];
} page;

static void
fill(page *p)
{
    for (uint32_t i = 0; i < ROWS; i++) {
        for (uint32_t j = 0; j < ROW_BYTES; j++)
            p->rows[i][j] = (uint8_t)(i * 7 + j);
        p->order[i] = (i * 5 + 3) % ROWS; /* a permutation: 5 and 64 */
    }
}

static bool
is_right(const page *p)
{
    for (size_t i = 0; i < ROWS; i++) {
        if (memcmp(p->gathered[i], p->rows[p->order[i]], ROW_BYTES) != 0)
            return false;
    }
    return true;
}

cer_status
cer_device_check(cer_device *device, cer_error *err)
{
    cer_device_block there = {0}, here = {0};
    void *stream = NULL, *event = NULL;
    cer_kernel_call call;
    page *p, *q;
    cer_status status;

    if ((status = cer_device_alloc_idle(device, sizeof *p, CER_USE_OTHER,
                                        &there, err)) != CER_OK ||
        (status = cer_device_alloc_pinned(device, sizeof *p, CER_USE_OTHER,
                                          &here, err)) != CER_OK ||
        (status = cer_device_stream_new(device, &stream, err)) != CER_OK ||
        (status = cer_device_event_new(device, &event, err)) != CER_OK)
        goto done;
    p = here.data;
    q = there.data;
    fill(p);
    memset(p->gathered, 0, sizeof p->gathered);
    if ((status = cer_device_copy(device, q, p, sizeof *p, CER_COPY_TO_DEVICE,
                                  stream, err)) != CER_OK)
        goto done;
    if ((status = cer_kernel_rows(q->gathered, q->rows, ROW_BYTES, q->order,
                                  ROWS, &call, err)) != CER_OK ||
        (status = cer_kernel_launch(device, &call, stream, err)) != CER_OK)
        goto wait;
    if ((status = cer_device_copy(device, p->gathered, q->gathered,
                                  sizeof p->gathered, CER_COPY_FROM_DEVICE,
                                  stream, err)) != CER_OK ||
        (status = cer_device_event_record(device, event, stream, err)) !=
            CER_OK ||
        (status = cer_device_event_sync(device, event, err)) != CER_OK)
        goto wait;
    if (!is_right(p))
        status = cer_fail(err, CER_DEVICE,
                          "%s: a kernel gave wrong bytes: the driver or the "
                          "device is faulty",
                          cer_device_name(device));
    goto done;

wait: /* the blocks may be in use until the stream is done */
    (void)cer_device_stream_sync(device, stream, NULL);
done:
    cer_device_event_free(device, event);
    cer_device_stream_free(device, stream);
    cer_device_free(device, &here);
    cer_device_free(device, &there);
    return status;
}
