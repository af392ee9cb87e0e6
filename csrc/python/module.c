/* module.c -- the module cerebro._core: init, state, exceptions. */
#include "module.h"

#include <numpy/arrayobject.h>

typedef int (*register_function)(PyObject *module);

static const register_function registrations[] = {
    core_register_rng,
    core_register_hash,
};

core_state *
core_state_of_module(PyObject *module)
{
    return PyModule_GetState(module);
}

core_state *
core_state_of_type(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

PyObject *
core_raise(core_state *state, const cer_error *err)
{
    PyObject *exception = PyExc_RuntimeError;
    PyObject *args;

    switch (err->status) {
    case CER_OK:
        PyErr_SetString(PyExc_SystemError, "core_raise without an error");
        return NULL;
    case CER_NOMEM:
        PyErr_SetString(PyExc_MemoryError, err->message);
        return NULL;
    case CER_IO:
        /* OSError picks its subclass (FileNotFoundError, ...) by errno. */
        args = Py_BuildValue("(is)", err->os_errno, err->message);
        if (args != NULL) {
            PyErr_SetObject(PyExc_OSError, args);
            Py_DECREF(args);
        }
        return NULL;
    case CER_INVALID:
        exception = PyExc_ValueError;
        break;
    case CER_CORRUPT:
        exception = state->CorruptDataError;
        break;
    case CER_STATE:
        exception = state->StateError;
        break;
    case CER_DEVICE:
        exception = state->DeviceError;
        break;
    case CER_CANCELLED:
        exception = state->UnitCancelled;
        break;
    }
    PyErr_SetString(exception, err->message);
    return NULL;
}

int
core_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *slot == NULL ? -1 : PyModule_AddType(module, *slot);
}

static int
load_exceptions(core_state *state)
{
    PyObject *errors = PyImport_ImportModule("cerebro.errors");
    int result = -1;

    if (errors == NULL)
        return -1;
    if ((state->CorruptDataError =
             PyObject_GetAttrString(errors, "CorruptDataError")) == NULL ||
        (state->StateError = PyObject_GetAttrString(errors, "StateError")) ==
            NULL ||
        (state->DeviceError = PyObject_GetAttrString(errors, "DeviceError")) ==
            NULL ||
        (state->UnitCancelled =
             PyObject_GetAttrString(errors, "UnitCancelled")) == NULL)
        goto done;
    result = 0;

done:
    Py_DECREF(errors);
    return result;
}

static int
core_exec(PyObject *module)
{
    size_t n = sizeof registrations / sizeof registrations[0];

    if (PyArray_ImportNumPyAPI() < 0)
        return -1;
    if (load_exceptions(core_state_of_module(module)) < 0)
        return -1;
    for (size_t i = 0; i < n; i++) {
        if (registrations[i](module) < 0)
            return -1;
    }
    return 0;
}

static int
core_traverse(PyObject *module, visitproc visit, void *arg)
{
    core_state *state = core_state_of_module(module);

#define CORE_TYPE_VISIT(name) Py_VISIT(state->name##_type);
    CORE_TYPE_LIST(CORE_TYPE_VISIT)
#undef CORE_TYPE_VISIT
    Py_VISIT(state->CorruptDataError);
    Py_VISIT(state->StateError);
    Py_VISIT(state->DeviceError);
    Py_VISIT(state->UnitCancelled);
    return 0;
}

static int
core_clear(PyObject *module)
{
    core_state *state = core_state_of_module(module);

#define CORE_TYPE_CLEAR(name) Py_CLEAR(state->name##_type);
    CORE_TYPE_LIST(CORE_TYPE_CLEAR)
#undef CORE_TYPE_CLEAR
    Py_CLEAR(state->CorruptDataError);
    Py_CLEAR(state->StateError);
    Py_CLEAR(state->DeviceError);
    Py_CLEAR(state->UnitCancelled);
    return 0;
}

static void
core_free(void *module)
{
    (void)core_clear(module);
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
#if PY_VERSION_HEX >= 0x030c0000
    /* NumPy cannot be loaded into a second interpreter. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cerebro._core",
    .m_doc = "The C core of Cerebro; see cerebro/_core.pyi.",
    .m_size = sizeof(core_state),
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void); /* -Wmissing-prototypes */

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
