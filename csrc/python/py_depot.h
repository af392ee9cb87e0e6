/* py_depot.h -- what other files of the binding need of Depot. */
#ifndef CER_PY_DEPOT_H
#define CER_PY_DEPOT_H

#include "module.h"

#include "depot.h"

/* The depot of a Depot object, valid while the object is; NULL with TypeError
 * if it is none. */
cer_depot *py_depot_get(core_state *state, PyObject *object);

#endif
