/* py_reductions.h -- sums in PyTorch's order, run from other bindings. */
#ifndef CER_PY_REDUCTIONS_H
#define CER_PY_REDUCTIONS_H

#include "module.h"

/* Whether an object is a Reduction. */
bool py_reduction_check(const core_state *core, PyObject *object);
int py_reduction_run(PyObject *object); /* -1 with an exception set */

#endif
