/* py_dtype.h -- element types and shapes between the core and NumPy. */
#ifndef CER_PY_DTYPE_H
#define CER_PY_DTYPE_H

#include "module.h"

#include "dtype.h"

/* NumPy's type number (NPY_FLOAT32, ...); NPY_UINT16 for bfloat16. */
int py_dtype_number(cer_dtype dtype);

/* Reads a sequence of at most `max_dims` sizes. `what` names the column or the
 * file in the error. 0, or -1 with an exception. */
int py_dtype_read_shape(PyObject *shape, const char *what, uint32_t max_dims,
                        size_t *out, uint32_t *n_dims);

#endif
