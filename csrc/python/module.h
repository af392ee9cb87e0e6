/* module.h -- shared by the binding's files: the module's state, the one
 * mapping from cer_status to exceptions, and the registration of types.
 *
 * The binding only converts. It uses multi-phase init and heap types; every
 * Python object that it needs is in core_state, not in static variables.
 *
 * No borrowed reference and no address of an object's memory lives across a
 * call into Python, because that may run any code: conversions (__float__,
 * __index__, __fspath__), attributes, comparisons of keys, the methods of
 * subclasses. Take a reference before such a call, and addresses after it. What
 * a tuple of our own or the caller's arguments hold stays. */
#ifndef CER_MODULE_H
#define CER_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base.h"

/* The types of this module, kept so that C code can create and recognize them.
 * One line per py_<name>.c with a type; each file adds its own lines. */
#define CORE_TYPE_LIST(X)                                                      \
    X(shard_reader)                                                            \
    X(npy_writer)                                                              \
    X(tensor)                                                                  \
    X(depot)                                                                   \
    X(loader)                                                                  \
    X(orders)                                                                  \
    X(schedule)                                                                \
    X(state_buffer)                                                            \
    X(slots)                                                                   \
    X(beat_page)                                                               \
    X(device)                                                                  \
    X(native_net)                                                              \
    X(elementwise)                                                             \
    X(matmul)                                                                  \
    X(reduction)                                                               \
    X(regions)                                                                 \
    X(replay)                                                                  \
    X(graph_replay)                                                            \
    X(run_metrics)                                                             \
    X(unit_result)

typedef struct core_state {
#define CORE_TYPE_MEMBER(name) PyTypeObject *name##_type;
    CORE_TYPE_LIST(CORE_TYPE_MEMBER)
#undef CORE_TYPE_MEMBER
    /* Exceptions of cerebro.errors. */
    PyObject *CorruptDataError;
    PyObject *StateError;
    PyObject *DeviceError;
    PyObject *UnitCancelled;
    /* The CUDA runtime of this process; NULL until cuda_open. */
    struct cer_cudart *cudart;
    /* The lanes of this process; NULL until the first. */
    struct cer_lanes *lanes;
} core_state;

extern struct PyModuleDef core_module;

core_state *core_state_of_module(PyObject *module);
core_state *core_state_of_type(PyTypeObject *type); /* of a type made here */
static inline core_state *
core_state_of(PyObject *self)
{
    return core_state_of_type(Py_TYPE(self));
}

/* Raises the exception for `err`; the only mapping from statuses to exceptions.
 * NOMEM is MemoryError, INVALID ValueError, IO OSError (errno, message);
 * CORRUPT, STATE, DEVICE and CANCELLED are the classes of cerebro.errors.
 * Returns NULL. */
PyObject *core_raise(core_state *state, const cer_error *err);

/* Reads the argument `name`, an integer from 0 to `most`; an omitted argument
 * (NULL) leaves *out unchanged. The parser's formats for unsigned numbers
 * silently truncate values that do not fit. 0, or -1 with ValueError or
 * TypeError. */
int core_read_number(PyObject *argument, const char *name, uint64_t most,
                     uint64_t *out);

/* Returns the repr of a number for a message, even if it is an int of so many
 * digits that repr raises. NULL: an exception. */
PyObject *core_number_text(PyObject *number);

/* Returns the items of an iterable as a tuple; TypeError with `message` for
 * anything else. Converting items may run Python code, which could change a
 * list but not a tuple. NULL: an exception. */
PyObject *core_tuple(PyObject *iterable, const char *message);

/* Creates the heap type of `spec`, adds it to the module and stores it in
 * *slot.
 */
int core_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot);

/* One per file; each adds its types and functions. 0, or -1 with an exception.
 */
int core_register_rng(PyObject *module);
int core_register_hash(PyObject *module);
int core_register_shard(PyObject *module);
int core_register_fsio(PyObject *module);
int core_register_tensor(PyObject *module);
int core_register_depot(PyObject *module);
int core_register_loader(PyObject *module);
int core_register_orders(PyObject *module);
int core_register_schedule(PyObject *module);
int core_register_state(PyObject *module);
int core_register_slots(PyObject *module);
int core_register_beat(PyObject *module);
int core_register_native(PyObject *module);
int core_register_runner(PyObject *module);
int core_register_device(PyObject *module);
int core_register_elementwise(PyObject *module);
int core_register_matmul(PyObject *module);
int core_register_reductions(PyObject *module);
int core_register_replay(PyObject *module);
int core_register_lanes(PyObject *module);
int core_register_regions(PyObject *module);
int core_register_mt19937(PyObject *module);
int core_register_entries(PyObject *module);
int core_register_optimizer_step(PyObject *module);

/* Except for module.c, files here that need NumPy define NO_IMPORT_ARRAY. */
#define PY_ARRAY_UNIQUE_SYMBOL cer_numpy_api
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION

#if PY_VERSION_HEX < 0x030a00f0
#error "Cerebro needs CPython 3.10 or later"
#endif

#endif
