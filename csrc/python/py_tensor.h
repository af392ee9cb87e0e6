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

/* Puts a consumer's stream behind what fills the tensor; nothing where it is in
 * main memory. `stream` as cer_place counts them. 0, or -1 with an exception.
 */
int py_tensor_join(core_state *state, const cer_tensor *tensor,
                   intptr_t stream);

/* Says that a consumer will also use it on streams that it does not name. */
void py_tensor_use_anywhere(const cer_tensor *tensor);

/* (a, b, ...) */
PyObject *py_tensor_shape(const cer_tensor *tensor);

#endif
