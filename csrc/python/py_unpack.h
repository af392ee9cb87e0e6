/* py_unpack.h -- the nested Python value of a state; see py_pack.h. */
#ifndef CER_PY_UNPACK_H
#define CER_PY_UNPACK_H

#include "py_import.h"
#include "py_pack.h"

/* The nested value of an opened state, its tensors new ones; with `only`, the
 * value under this key of the state's dict. */
PyObject *py_unpack(core_state *core, const cer_state *state,
                    const py_import_options *options, const char *only);

/* The same with the values copied into `live`, whose tensors it returns.
 * Py_None, and nothing copied, if the two do not fit. */
PyObject *py_unpack_into(core_state *core, const cer_state *state,
                         const char *name, py_packed *live);

#endif
