/* py_depot.h -- Depot for the other files of the binding. */
#ifndef CER_PY_DEPOT_H
#define CER_PY_DEPOT_H

#include "module.h"

#include "depot.h"

/* The depot of a Depot object, valid while the object lives; NULL with
 * TypeError if `object` is not a Depot. */
cer_depot *py_depot_get(core_state *state, PyObject *object);

#endif
