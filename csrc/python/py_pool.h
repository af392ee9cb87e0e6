/* py_pool.h -- device memory from an allocator that is written in Python. */
#ifndef CER_PY_POOL_H
#define CER_PY_POOL_H

#include "device.h"
#include "module.h"

/* An allocator that calls `allocate(bytes, device) -> address` and
 * `release(address)`. It lives as long as the process, for blocks of it may be
 * given back at any time. MemoryError of `allocate` means that memory is short.
 * NULL with an exception. */
const cer_device_allocator *py_pool_new(PyObject *allocate, PyObject *release);

#endif
