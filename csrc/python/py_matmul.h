/* py_matmul.h -- products of matrices, run from other bindings. */
#ifndef CER_PY_MATMUL_H
#define CER_PY_MATMUL_H

#include "module.h"

/* Whether an object is a MatMul. */
bool py_matmul_check(const core_state *core, PyObject *object);
int py_matmul_run(PyObject *object); /* 0 */

#endif
