/* py_state.h -- nested Python values to states and back; used by py_state.c
 * (functions over buffers) and py_slots.c (slots).
 *
 * The structure, the JSON text beside the tensors, is described in
 * docs/design/states.md; py_pack.c writes it and py_unpack.c reads it. */
#ifndef CER_PY_STATE_H
#define CER_PY_STATE_H

#include "module.h"

#include "py_exchange.h"
#include "state.h"

/* Values nested deeper are refused; it also ends a list that holds itself. */
#define PY_STATE_DEPTH 200

/* --- packing (py_pack.c) ------------------------------------------------- */
typedef struct py_packed_tensor {
    PyObject *object; /* as met in the state */
    PyObject *owner;  /* of the memory to read */
    py_kind kind;
} py_packed_tensor;

/* A state that has been walked: laid out, nothing copied yet. Holds references
 * to its tensors, whose values must not change until it is written. */
typedef struct py_packed {
    cer_state_writer *writer;
    py_packed_tensor *tensors; /* numbered as in the writer */
    size_t n_tensors, capacity;
    size_t nbytes; /* of the buffer */
    bool in_place; /* every tensor may be written to */
} py_packed;

/* Walks `state`. -1: an exception (StateError names the place), and nothing to
 * clear. */
int py_packed_init(py_packed *packed, core_state *core, PyObject *state);
void py_packed_clear(py_packed *packed);

/* --- unpacking (py_unpack.c) --------------------------------------------- */
typedef struct py_unpack_options {
    PyObject *buffer;  /* whose bytes the state is in; kept alive by views */
    const char *name;  /* for errors */
    py_kind framework; /* for tensors whose own framework is not there */
    bool copy;         /* false: tensors are views of the buffer */
    bool read_only;    /* the buffer is */
    bool trusted;      /* nobody writes to a view of a read-only buffer */
} py_unpack_options;

/* The nested value of an opened state, its tensors new ones. */
PyObject *py_unpack(core_state *core, const cer_state *state,
                    const py_unpack_options *options);

/* The same with the values copied into `live`, whose tensors it returns.
 * Py_None, and nothing copied, if the two do not fit. */
PyObject *py_unpack_into(core_state *core, const cer_state *state,
                         const char *name, py_packed *live);

/* --- buffers (py_state.c) ------------------------------------------------ */

/* A new StateBuffer over `bytes`; release(owner) is called when it goes, also
 * if it cannot be made. */
PyObject *py_state_buffer_new(core_state *core, uint8_t *bytes, size_t nbytes,
                              bool read_only, void *owner,
                              void (*release)(void *owner));

/* "torch", "numpy", "jax" or "dlpack", and back (PY_KIND_NONE: none of them).
 */
const char *py_kind_name(py_kind kind);
py_kind py_kind_of_name(const char *name, size_t len);

#endif
