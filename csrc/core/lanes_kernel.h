/* lanes_kernel.h -- the kernel between two launches of a lane's graph. */
#ifndef CER_LANES_KERNEL_H
#define CER_LANES_KERNEL_H

#include "device.h"
#include "lanes_shared.h"

/* As cer_native_kernel_find. */
bool cer_lane_kernel_find(const char *name, void (**reference)(const void *),
                          size_t *args_bytes);

/* Enqueues it on `stream`, unless there are no items. */
cer_status cer_lane_kernel_launch(cer_device *device, const cer_lane_args *args,
                                  void *stream, cer_error *err);

#endif
