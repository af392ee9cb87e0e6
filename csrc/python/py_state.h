/* py_state.h -- the buffer of a packed state. */
#ifndef CER_PY_STATE_H
#define CER_PY_STATE_H

#include "module.h"

/* Makes a StateBuffer over `bytes`. Calls release(owner) when it is freed, or
 * if it cannot be made. */
PyObject *py_state_buffer_new(core_state *core, uint8_t *bytes, size_t nbytes,
                              bool read_only, void *owner,
                              void (*release)(void *owner));

#endif
