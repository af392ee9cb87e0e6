/* module.h -- what the binding's files share: the module's state, the one
 * mapping from cer_status to exceptions, and the registration of types.
 *
 * The binding only converts. Multi-phase init, heap types, every Python object
 * it needs lives in core_state; nothing is static. */
#ifndef CER_MODULE_H
#define CER_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base.h"

/* Types of this module, kept so that C code can make and recognise them. One
 * line per py_<name>.c with a type; a file adds its own lines. */
#define CORE_TYPE_LIST(X)                                                      \
    X(shard_reader)                                                            \
    X(npy_writer)                                                              \
    X(tensor)                                                                  \
    X(depot)                                                                   \
    X(loader)                                                                  \
    X(schedule)                                                                \
    X(state_buffer)                                                            \
    X(slots)                                                                   \
    X(beat_page)                                                               \
    X(device)                                                                  \
    X(native_net)                                                              \
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
    /* The CUDA runtime of this process; NULL until it is looked for. */
    struct cer_cudart *cudart;
} core_state;

extern struct PyModuleDef core_module;

core_state *core_state_of_module(PyObject *module);
core_state *core_state_of_type(PyTypeObject *type); /* of a type made here */
static inline core_state *
core_state_of(PyObject *self)
{
    return core_state_of_type(Py_TYPE(self));
}

/* Raises what `err` says; the only mapping from statuses to exceptions:
 * NOMEM MemoryError, INVALID ValueError, IO OSError (errno, message), CORRUPT,
 * STATE, DEVICE and CANCELLED the classes of cerebro.errors. Returns NULL. */
PyObject *core_raise(core_state *state, const cer_error *err);

/* Reads the argument `name`, a whole number from 0 to `most`; an argument that
 * was not given (NULL) leaves *out as it is. The parser's own formats for
 * unsigned numbers cut off what does not fit, without a word. 0, or -1 with
 * ValueError or TypeError. */
int core_read_number(PyObject *argument, const char *name, uint64_t most,
                     uint64_t *out);

/* The items of an iterable in a tuple, TypeError with `message` for anything
 * else. Unlike a list, a tuple stays as it is while its items are converted,
 * which may run Python. NULL: an exception. */
PyObject *core_tuple(PyObject *iterable, const char *message);

/* Makes the heap type of `spec`, adds it to the module and keeps it in *slot.
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
int core_register_schedule(PyObject *module);
int core_register_state(PyObject *module);
int core_register_slots(PyObject *module);
int core_register_beat(PyObject *module);
int core_register_native(PyObject *module);
int core_register_runner(PyObject *module);
int core_register_device(PyObject *module);

/* csrc/python files that need NumPy define NO_IMPORT_ARRAY, all but module.c.
 */
#define PY_ARRAY_UNIQUE_SYMBOL cer_numpy_api
#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION

#if PY_VERSION_HEX < 0x030a00f0
#error "Cerebro needs CPython 3.10 or later"
#endif

#endif
