/* py_device.h -- Device for the other files of the binding. */
#ifndef CER_PY_DEVICE_H
#define CER_PY_DEVICE_H

#include "device.h"
#include "module.h"

/* The device of a Device, borrowed: retain it to outlive the object. NULL with
 * TypeError if `object` is not a Device. */
cer_device *py_device_get(core_state *state, PyObject *object);

#endif
