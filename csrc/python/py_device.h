/* py_device.h -- what other files of the binding need of devices. */
#ifndef CER_PY_DEVICE_H
#define CER_PY_DEVICE_H

#include "device.h"
#include "module.h"

/* The device of a Device, borrowed: retain it to outlive the object. NULL with
 * TypeError if `object` is none. */
cer_device *py_device_get(core_state *state, PyObject *object);

#endif
