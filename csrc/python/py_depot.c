/* py_depot.c -- Depot: the memory that all loaders of a device share. */
#include "py_depot.h"

#include <structmember.h>

#include "py_device.h"
#include "py_shard.h"

typedef struct depot_object {
    PyObject_HEAD
    cer_depot *depot;
    PyObject *device; /* the Device that it serves */
} depot_object;

PyDoc_STRVAR(
    depot_doc,
    "Depot(device, *, limit=None)\n--\n\n"
    "The resident shards of a Device, and its memory for batches.\n\n"
    "All loaders of a device share one, so a column of a shard is\n"
    "uploaded once. Columns that no pass uses are freed, least recently\n"
    "used first, when memory is short or more than `limit` bytes (None:\n"
    "half of the device's) would be resident.");

static PyObject *
depot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device", "limit", NULL};
    core_state *state = core_state_of_type(type);
    PyObject *device, *limit = Py_None;
    uint64_t bytes = 0;
    cer_device *opened;
    cer_error err = {0};
    cer_status status;
    depot_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:Depot", keywords,
                                     &device, &limit) ||
        (opened = py_device_get(state, device)) == NULL ||
        (limit != Py_None &&
         core_read_number(limit, "limit", SIZE_MAX, &bytes) < 0))
        return NULL;
    self = (depot_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->device = Py_NewRef(device);
    Py_BEGIN_ALLOW_THREADS
    status = cer_depot_new(opened, &self->depot, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK) {
        Py_DECREF(self);
        return core_raise(state, &err);
    }
    if (limit != Py_None)
        cer_depot_set_limit(self->depot, (size_t)bytes);
    return (PyObject *)self;
}

static void
depot_dealloc(PyObject *object)
{
    depot_object *self = (depot_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    Py_BEGIN_ALLOW_THREADS
    cer_depot_release(self->depot);
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->device);
    type->tp_free(object);
    Py_DECREF(type);
}

cer_depot *
py_depot_get(core_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->depot_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Depot, not %.100s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return ((depot_object *)object)->depot;
}

/* Finds a column by name; ValueError if the shard has no such column. */
static int
read_column(core_state *state, PyObject *args, cer_shard **shard,
            size_t *column)
{
    PyObject *reader;
    const char *name;
    const cer_column *found;
    size_t n;

    if (!PyArg_ParseTuple(args, "Os", &reader, &name) ||
        (*shard = py_shard_get(state, reader)) == NULL)
        return -1;
    found = cer_shard_find(*shard, name);
    if (found == NULL) {
        PyErr_Format(PyExc_ValueError, "no column '%s' in %s", name,
                     cer_shard_directory(*shard));
        return -1;
    }
    *column = (size_t)(found - cer_shard_columns(*shard, &n));
    return 0;
}

PyDoc_STRVAR(has_doc, "has($self, reader, column, /)\n--\n\n"
                      "Return whether a column of a shard is resident now.");

static PyObject *
depot_has(PyObject *object, PyObject *args)
{
    depot_object *self = (depot_object *)object;
    cer_shard *shard;
    size_t column;

    if (read_column(core_state_of(object), args, &shard, &column) < 0)
        return NULL;
    return PyBool_FromLong(cer_depot_has(self->depot, shard, column));
}

PyDoc_STRVAR(
    bring_doc,
    "bring($self, reader, column, /)\n--\n\n"
    "Make a column of a shard resident before the first pass that uses\n"
    "it. Raises MemoryError if it does not fit.");

static PyObject *
depot_bring(PyObject *object, PyObject *args)
{
    depot_object *self = (depot_object *)object;
    core_state *state = core_state_of(object);
    cer_resident *resident = NULL;
    cer_error err = {0};
    cer_status status;
    cer_shard *shard;
    size_t column;

    if (read_column(state, args, &shard, &column) < 0)
        return NULL;
    cer_shard_retain(shard);
    Py_BEGIN_ALLOW_THREADS
    status = cer_depot_bring(self->depot, shard, column, true, &resident, &err);
    if (status == CER_OK)
        cer_depot_put_back(self->depot, resident);
    cer_shard_release(shard);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(state, &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    drop_doc,
    "drop($self, reader=None, /)\n--\n\n"
    "Free the resident columns of a shard (None: of all) that no pass\n"
    "uses.\n\n"
    "Returns the number of bytes freed.");

static PyObject *
depot_drop(PyObject *object, PyObject *args)
{
    depot_object *self = (depot_object *)object;
    PyObject *reader = Py_None;
    cer_shard *shard = NULL;
    size_t bytes;

    if (!PyArg_ParseTuple(args, "|O:drop", &reader))
        return NULL;
    if (reader != Py_None &&
        (shard = py_shard_get(core_state_of(object), reader)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    bytes = cer_depot_drop(self->depot, shard);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(bytes);
}

static PyObject *
depot_get_resident(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(
        cer_depot_resident_bytes(((depot_object *)object)->depot));
}

static PyObject *
depot_get_limit(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(cer_depot_limit(((depot_object *)object)->depot));
}

static int
depot_set_limit(PyObject *object, PyObject *value, void *Py_UNUSED(closure))
{
    uint64_t bytes = 0;

    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "limit cannot be deleted");
        return -1;
    }
    if (core_read_number(value, "limit", SIZE_MAX, &bytes) < 0)
        return -1;
    cer_depot_set_limit(((depot_object *)object)->depot, (size_t)bytes);
    return 0;
}

static PyMethodDef depot_methods[] = {
    {"has", depot_has, METH_VARARGS, has_doc},
    {"bring", depot_bring, METH_VARARGS, bring_doc},
    {"drop", depot_drop, METH_VARARGS, drop_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef depot_members[] = {
    {"device", T_OBJECT, offsetof(depot_object, device), READONLY,
     "The Device."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *
depot_get_stream(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(
        cer_depot_stream(((depot_object *)object)->depot, CER_DEPOT_KERNELS));
}

static PyGetSetDef depot_getset[] = {
    {"stream", depot_get_stream, NULL,
     "The stream of kernels for consumers whose stream is not known.", NULL},
    {"resident_bytes", depot_get_resident, NULL, "Bytes of resident shards.",
     NULL},
    {"limit", depot_get_limit, depot_set_limit,
     "Maximum bytes of resident shards.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot depot_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)depot_doc},
    {Py_tp_new, depot_new},
    {Py_tp_dealloc, depot_dealloc},
    {Py_tp_methods, depot_methods},
    {Py_tp_members, depot_members},
    {Py_tp_getset, depot_getset},
    {0, NULL},
};

static PyType_Spec depot_spec = {
    .name = "cerebro._core.Depot",
    .basicsize = sizeof(depot_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = depot_slots,
};

int
core_register_depot(PyObject *module)
{
    return core_add_type(module, &depot_spec,
                         &core_state_of_module(module)->depot_type);
}
