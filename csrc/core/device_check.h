/* device_check.h -- whether a device does what it is told: the first thing that
 * is asked of one, before batches come from it. */
#ifndef CER_DEVICE_CHECK_H
#define CER_DEVICE_CHECK_H

#include "device.h"

/* Tries, in this order:
 *
 *   memory    bytes to the device and back, from pinned memory; copied and
 *             filled there
 *   streams   work on one stream waits for an event behind work on another, in
 *             both directions, and the host waits for both
 *   kernels   each kernel of the loader gives the bits of its reference
 *
 * It takes less than 2 MB of device memory and, without the time that the
 * driver compiles the kernels in, some milliseconds. CER_DEVICE: a call failed,
 * or the bytes are wrong; CER_NOMEM. The message names the part that failed. */
cer_status cer_device_check(cer_device *device, cer_error *err);

/* --- its parts, which share what they work with ----------------------------
 */

typedef struct cer_device_bench {
    cer_device *device;
    cer_device_block there, here; /* of these bytes each, and pinned memory */
    size_t bytes;
    void *streams[2];
} cer_device_bench;

/* All kernels, one after the other, on the first stream. The bench has at least
 * cer_device_check_kernels_bytes() bytes on both sides. */
cer_status cer_device_check_kernels(const cer_device_bench *bench,
                                    cer_error *err);
size_t cer_device_check_kernels_bytes(void);

#endif
