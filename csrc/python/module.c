/* module.c -- the module cerebro._core: init, state, exceptions. */
#include "module.h"

#include <numpy/arrayobject.h>

#include "cudart.h"
#include "lanes.h"

typedef int (*register_function)(PyObject *module);

static const register_function registrations[] = {
    core_register_rng,     core_register_hash,
    core_register_shard,   core_register_fsio,
    core_register_tensor,  core_register_loader,
    core_register_orders,  core_register_schedule,
    core_register_state,   core_register_slots,
    core_register_beat,    core_register_runner,
    core_register_device,  core_register_depot,
    core_register_native,  core_register_elementwise,
    core_register_replay,  core_register_lanes,
    core_register_regions, core_register_mt19937,
    core_register_matmul,  core_register_reductions,
    core_register_entries, core_register_optimizer_step,
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

static PyObject *
exception_for(const core_state *state, cer_status status)
{
    switch (status) {
    case CER_OK:
        return PyExc_SystemError; /* core_raise without an error */
    case CER_NOMEM:
        return PyExc_MemoryError;
    case CER_INVALID:
        return PyExc_ValueError;
    case CER_IO:
        return PyExc_OSError;
    case CER_CORRUPT:
        return state->CorruptDataError;
    case CER_STATE:
        return state->StateError;
    case CER_DEVICE:
        return state->DeviceError;
    case CER_CANCELLED:
        return state->UnitCancelled;
    }
    return PyExc_SystemError;
}

PyObject *
core_raise(core_state *state, const cer_error *err)
{
    PyObject *exception = exception_for(state, err->status);
    /* A file name need not be UTF-8, and a long message may be cut within a
     * character. Neither may hide the error. */
    PyObject *value = PyUnicode_DecodeUTF8(
        err->message, (Py_ssize_t)strlen(err->message), "replace");

    /* The OSError constructor picks the subclass (FileNotFoundError, ...) by
     * errno. Raised unconstructed, it would miss `except FileNotFoundError` in
     * 3.10. */
    if (value != NULL && err->status == CER_IO) {
        Py_SETREF(value,
                  PyObject_CallFunction(exception, "iO", err->os_errno, value));
        exception = value == NULL ? NULL : (PyObject *)Py_TYPE(value);
    }
    if (value != NULL) {
        PyErr_SetObject(exception, value);
        Py_DECREF(value);
    }
    return NULL;
}

PyObject *
core_number_text(PyObject *number)
{
    PyObject *text = PyObject_Repr(number);

    /* Python refuses to print thousands of digits. */
    if (text == NULL && PyLong_Check(number) &&
        PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        text = PyUnicode_FromString("an int of too many digits to print");
    }
    return text;
}

int
core_read_number(PyObject *argument, const char *name, uint64_t most,
                 uint64_t *out)
{
    PyObject *number, *text;
    uint64_t value;
    bool fits;

    if (argument == NULL)
        return 0;
    if (!PyIndex_Check(argument)) {
        PyErr_Format(PyExc_TypeError, "%s must be a whole number, not %.100s",
                     name, Py_TYPE(argument)->tp_name);
        return -1;
    }
    if ((number = PyNumber_Index(argument)) == NULL)
        return -1;
    value = PyLong_AsUnsignedLongLong(number);
    fits = value <= most && !PyErr_Occurred();
    Py_DECREF(number);
    if (fits) {
        *out = value;
        return 0;
    }
    PyErr_Clear(); /* an int fails here only by its size or sign */
    text = core_number_text(argument);
    if (text != NULL)
        PyErr_Format(PyExc_ValueError,
                     "%s must be a whole number from 0 to %llu, not %U", name,
                     (unsigned long long)most, text);
    Py_XDECREF(text);
    return -1;
}

PyObject *
core_tuple(PyObject *iterable, const char *message)
{
    PyObject *list = PySequence_Fast(iterable, message);
    PyObject *tuple = list == NULL ? NULL : PySequence_Tuple(list);

    Py_XDECREF(list);
    return tuple;
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
    cer_cudart_release(core_state_of_module(module)->cudart);
    cer_lanes_free(core_state_of_module(module)->lanes);
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
