/* py_watch.c -- FolderWatch: wakes when a file arrives in a folder. */
#include "module.h"
#include "watch.h"

typedef struct watch_object {
    PyObject_HEAD
    cer_watch *watch; /* NULL: closed */
} watch_object;

static PyObject *
watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", NULL};
    PyObject *path = NULL;
    cer_watch *watch = NULL;
    cer_error err = {0};
    watch_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:FolderWatch", keywords,
                                     PyUnicode_FSConverter, &path))
        return NULL;
    if (cer_watch_open(PyBytes_AS_STRING(path), &watch, &err) != CER_OK)
        core_raise(core_state_of_type(type), &err);
    Py_DECREF(path);
    if (watch == NULL)
        return NULL;
    self = (watch_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        cer_watch_close(watch);
    else
        self->watch = watch;
    return (PyObject *)self;
}

static void
watch_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    cer_watch_close(((watch_object *)object)->watch);
    type->tp_free(object);
    Py_DECREF(type);
}

/* The watch, or NULL with an exception if it is closed. */
static cer_watch *
open_watch(const watch_object *self)
{
    if (self->watch == NULL)
        PyErr_SetString(PyExc_ValueError, "this FolderWatch is closed");
    return self->watch;
}

PyDoc_STRVAR(fileno_doc,
             "fileno()\n--\n\n"
             "The descriptor to wait on for reading; only drain() reads it.");

static PyObject *
watch_fileno(watch_object *self, PyObject *Py_UNUSED(unused))
{
    cer_watch *watch = open_watch(self);

    return watch == NULL ? NULL : PyLong_FromLong(cer_watch_fd(watch));
}

PyDoc_STRVAR(drain_doc,
             "drain()\n--\n\n"
             "Take note of all that has arrived; whether there was anything.\n"
             "Never waits. Look into the folder after it, not before.");

static PyObject *
watch_drain(watch_object *self, PyObject *Py_UNUSED(unused))
{
    cer_watch *watch = open_watch(self);
    cer_error err = {0};
    bool arrived;

    if (watch == NULL)
        return NULL;
    if (cer_watch_drain(watch, &arrived, &err) != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    return PyBool_FromLong(arrived);
}

PyDoc_STRVAR(close_doc, "close()\n--\n\nStop watching.");

static PyObject *
watch_close(watch_object *self, PyObject *Py_UNUSED(unused))
{
    cer_watch_close(self->watch);
    self->watch = NULL;
    Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
    {"fileno", (PyCFunction)watch_fileno, METH_NOARGS, fileno_doc},
    {"drain", (PyCFunction)watch_drain, METH_NOARGS, drain_doc},
    {"close", (PyCFunction)watch_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_doc,
     "FolderWatch(path)\n--\n\n"
     "A descriptor that becomes readable when a file arrives in a folder."},
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_methods, watch_methods},
    {0, NULL},
};

static PyType_Spec watch_spec = {
    .name = "cerebro._core.FolderWatch",
    .basicsize = sizeof(watch_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = watch_slots,
};

int
core_register_watch(PyObject *module)
{
    return core_add_type(module, &watch_spec,
                         &core_state_of_module(module)->folder_watch_type);
}
