/* py_state.h -- the buffer that a packed state lies in. */
#ifndef CER_PY_STATE_H
#define CER_PY_STATE_H

#include "module.h"

/* A new StateBuffer over `bytes`; release(owner) is called when it goes, also
 * if it cannot be made. */
PyObject *py_state_buffer_new(core_state *core, uint8_t *bytes, size_t nbytes,
                              bool read_only, void *owner,
                              void (*release)(void *owner));

#endif
