/* py_entries.c -- has_entries: whether a namespace has the same objects. */
#include "module.h"

PyDoc_STRVAR(
    has_entries_doc,
    "has_entries(names, keys, values, /)\n--\n\n"
    "Return whether names[key] is the value for each key.\n\n"
    "`names` is a mapping, `keys` and `values` are tuples. False, too,\n"
    "if a key is missing.");

/* The entry with a reference; NULL: an exception, or none if it is missing. */
static PyObject *
entry_of(PyObject *names, PyObject *key)
{
    PyObject *found;

    if (!PyDict_CheckExact(names))
        return PyObject_GetItem(names, key);
    found = PyDict_GetItemWithError(names, key);
    Py_XINCREF(found);
    return found;
}

static PyObject *
has_entries(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *names, *keys, *values;

    if (!PyArg_ParseTuple(args, "OO!O!:has_entries", &names, &PyTuple_Type,
                          &keys, &PyTuple_Type, &values))
        return NULL;
    if (PyTuple_GET_SIZE(keys) != PyTuple_GET_SIZE(values)) {
        PyErr_SetString(PyExc_ValueError, "there must be a value for each key");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *found = entry_of(names, PyTuple_GET_ITEM(keys, i));

        if (found == NULL) {
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_KeyError))
                return NULL;
            PyErr_Clear();
            Py_RETURN_FALSE;
        }
        Py_DECREF(found); /* only its address is compared */
        if (found != PyTuple_GET_ITEM(values, i))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {
    {"has_entries", has_entries, METH_VARARGS, has_entries_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_entries(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
