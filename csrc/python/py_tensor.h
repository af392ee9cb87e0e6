/* py_tensor.h -- what other files of the binding need of Tensor. */
#ifndef CER_PY_TENSOR_H
#define CER_PY_TENSOR_H

#include "module.h"
#include "tensor.h"

/* A Tensor object of this memory; it takes a reference of its own. */
PyObject *py_tensor_new(core_state *state, const cer_tensor *tensor);

/* The tensor of a Tensor object, borrowed; NULL with TypeError if it is none.
 */
const cer_tensor *py_tensor_get(core_state *state, PyObject *object);

/* (a, b, ...) */
PyObject *py_tensor_shape(const cer_tensor *tensor);

#endif
