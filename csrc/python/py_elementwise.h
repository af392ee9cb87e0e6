/* py_elementwise.h -- lists of operators, run from other bindings. */
#ifndef CER_PY_ELEMENTWISE_H
#define CER_PY_ELEMENTWISE_H

#include "module.h"

/* Whether an object is an Elementwise. */
bool py_elementwise_check(const core_state *core, PyObject *object);
int py_elementwise_run(PyObject *object); /* 0 */

#endif
