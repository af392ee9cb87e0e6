/* py_pool.h -- device memory from an allocator written in Python. */
#ifndef CER_PY_POOL_H
#define CER_PY_POOL_H

#include "device.h"
#include "module.h"

/* Makes an allocator that calls `allocate(bytes, device) -> address` and
 * `release(address)`. It lives as long as the process, because its blocks may
 * be freed at any time. MemoryError from `allocate` means out of memory. NULL
 * with an exception. */
const cer_device_allocator *py_pool_new(PyObject *allocate, PyObject *release);

#endif
