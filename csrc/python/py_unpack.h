/* py_unpack.h -- the nested Python value of a state; see py_pack.h. */
#ifndef CER_PY_UNPACK_H
#define CER_PY_UNPACK_H

#include "py_import.h"
#include "py_pack.h"

/* Returns the nested value of an opened state, with new tensors; with `only`,
 * the value under this key of the state's dict. */
PyObject *py_unpack(core_state *core, const cer_state *state,
                    const py_import_options *options, const char *only);

/* The same, but copies the values into the tensors of `live` and returns these.
 * Py_None, with nothing copied, if the two do not match. */
PyObject *py_unpack_into(core_state *core, const cer_state *state,
                         const char *name, py_packed *live);

#endif
