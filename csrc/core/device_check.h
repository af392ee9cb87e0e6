/* device_check.h -- tests whether a device works correctly, before batches are
 * made on it. */
#ifndef CER_DEVICE_CHECK_H
#define CER_DEVICE_CHECK_H

#include "device.h"

/* Tries, in this order:
 *
 * memory    bytes to the device and back, from pinned memory; copied and
 *             filled on the device
 *   streams   work on one stream waits for an event behind work on another, in
 *             both directions, and the host waits for both
 *   kernels   each kernel of the loader gives the bits of its reference
 *
 * It takes less than 2 MB of device memory and a few milliseconds, plus the
 * driver's time to compile the kernels. Errors: CER_DEVICE (a call failed or
 * the bytes are wrong), CER_NOMEM. The message names the part that failed. */
cer_status cer_device_check(cer_device *device, cer_error *err);

/* --- its parts, which share a bench ---------------------------- */

typedef struct cer_device_bench {
    cer_device *device;
    cer_device_block there, here; /* device and pinned memory, `bytes` each */
    size_t bytes;
    void *streams[2];
} cer_device_bench;

/* Runs all kernels in turn on the first stream. The bench must have at least
 * cer_device_check_kernels_bytes() bytes on both sides. */
cer_status cer_device_check_kernels(const cer_device_bench *bench,
                                    cer_error *err);
size_t cer_device_check_kernels_bytes(void);

#endif
