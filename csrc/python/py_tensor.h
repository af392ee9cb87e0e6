/* py_tensor.h -- Tensor for the other files of the binding. */
#ifndef CER_PY_TENSOR_H
#define CER_PY_TENSOR_H

#include "module.h"
#include "tensor.h"

/* Makes a Tensor object of this memory; it takes a new reference. */
PyObject *py_tensor_new(core_state *state, const cer_tensor *tensor);

/* The tensor of a Tensor object, borrowed; NULL with TypeError for other
 * objects.
 */
const cer_tensor *py_tensor_get(core_state *state, PyObject *object);

/* Makes a consumer's stream wait for the work that fills the tensor; does
 * nothing in main memory. `stream` is as in cer_place. 0, or -1 with an
 * exception.
 */
int py_tensor_join(core_state *state, const cer_tensor *tensor,
                   intptr_t stream);

/* Notes that a consumer will also use the tensor on streams that it does not
 * name. */
void py_tensor_use_anywhere(const cer_tensor *tensor);

/* (a, b, ...) */
PyObject *py_tensor_shape(const cer_tensor *tensor);

#endif
