/* py_pack.h -- a nested Python value, laid out as a state.
 *
 * The structure, the JSON text beside the tensors, is described in
 * docs/design/states.md; py_pack.c writes it and py_unpack.c reads it. */
#ifndef CER_PY_PACK_H
#define CER_PY_PACK_H

#include "module.h"

#include "py_exchange.h"
#include "state.h"

/* Deeper nesting is an error; this also catches a list that contains itself. */
#define PY_STATE_DEPTH 200

typedef struct py_packed_tensor {
    PyObject *object;             /* as found in the state */
    PyObject *owner;              /* of the memory to read */
    const DLPackExchangeAPI *api; /* as in py_view */
    py_kind kind;
} py_packed_tensor;

/* A state that is laid out but not copied yet. Holds references to its tensors,
 * whose values must not change until it is written. */
typedef struct py_packed {
    cer_state_writer *writer;
    py_packed_tensor *tensors; /* numbered as in the writer */
    size_t n_tensors, capacity;
    size_t nbytes; /* of the buffer */
    bool in_place; /* every tensor can be written to in place */
} py_packed;

/* Walks `state`. -1: an exception (StateError names the place); nothing needs
 * clearing. */
int py_packed_init(py_packed *packed, core_state *core, PyObject *state);
void py_packed_clear(py_packed *packed);

/* Checks that no code has replaced the memory of a tensor since the walk; call
 * it before the copy if Python code may have run after py_packed_init, which
 * ends with it. 0, or -1 with a StateError that names the tensor. */
int py_packed_check(const py_packed *packed, core_state *core);

#endif
