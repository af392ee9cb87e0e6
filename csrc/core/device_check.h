/* device_check.h -- whether a device does what it is told. */
#ifndef CER_DEVICE_CHECK_H
#define CER_DEVICE_CHECK_H

#include "device.h"

/* Brings a few rows to the device, gathers them there in another order with a
 * kernel, brings them back and looks: memory, pinned memory, copies, a stream,
 * an event and a kernel. CER_DEVICE: a call failed, or the rows are wrong. */
cer_status cer_device_check(cer_device *device, cer_error *err);

#endif
