/* py_regions.c -- Regions: pieces of memory, saved, restored and compared at
 * once.
 *
 * Regions are addresses here; the caller keeps their memory alive. */
#include "module.h"
#include "regions.h"

enum {
    WITHOUT_GIL = 1 << 20 /* bytes; fewer are done before another thread would
                             have taken the GIL */
};

typedef struct regions_object {
    PyObject_HEAD
    cer_regions *list;
    Py_ssize_t n;
} regions_object;

static int
make_list(regions_object *self, PyObject *tuple)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    cer_region *regions = cer_calloc((size_t)n + 1, sizeof *regions);
    cer_error err = {0};
    int result = -1;

    if (regions == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        unsigned long long start;
        Py_ssize_t nbytes;

        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "a region must be a tuple");
            goto done;
        }
        if (!PyArg_ParseTuple(item, "Kn", &start, &nbytes))
            goto done;
        if (nbytes < 0) {
            PyErr_SetString(PyExc_ValueError, "a region's size is negative");
            goto done;
        }
        regions[i] = (cer_region){(uint8_t *)(uintptr_t)start, (size_t)nbytes};
    }
    if (cer_regions_new(regions, (size_t)n, &self->list, &err) != CER_OK) {
        core_raise(core_state_of((PyObject *)self), &err);
        goto done;
    }
    self->n = n;
    result = 0;

done:
    cer_free(regions);
    return result;
}

static PyObject *
regions_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"regions", NULL};
    PyObject *regions, *tuple = NULL, *result = NULL;
    regions_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Regions", keywords,
                                     &regions))
        return NULL;
    self = (regions_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if ((tuple = core_tuple(regions, "regions must be a list of tuples")) ==
        NULL)
        goto done;
    if (make_list(self, tuple) < 0)
        goto done;
    result = Py_NewRef((PyObject *)self);

done:
    Py_XDECREF(tuple);
    Py_DECREF(self);
    return result;
}

static void
regions_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    cer_regions_free(((regions_object *)object)->list);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Fills `view` with a buffer of the regions' size; -1 with an exception. */
static int
get_buffer(const regions_object *self, PyObject *object, int flags,
           Py_buffer *view)
{
    size_t nbytes = cer_regions_nbytes(self->list);

    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if ((size_t)view->len == nbytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "the buffer has %zd bytes, the regions %zu",
                 view->len, nbytes);
    PyBuffer_Release(view);
    return -1;
}

/* Copies the regions to a buffer or, with `restores`, a buffer to them. */
static PyObject *
copy(regions_object *self, PyObject *argument, bool restores)
{
    Py_buffer view;
    PyThreadState *released = NULL;

    if (get_buffer(self, argument, restores ? PyBUF_SIMPLE : PyBUF_WRITABLE,
                   &view) < 0)
        return NULL;
    if (view.len >= WITHOUT_GIL)
        released = PyEval_SaveThread();
    if (restores)
        cer_regions_restore(self->list, view.buf);
    else
        cer_regions_save(self->list, view.buf);
    if (released != NULL)
        PyEval_RestoreThread(released);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *
regions_save(PyObject *object, PyObject *argument)
{
    return copy((regions_object *)object, argument, false);
}

static PyObject *
regions_restore(PyObject *object, PyObject *argument)
{
    return copy((regions_object *)object, argument, true);
}

static PyObject *
regions_differing(PyObject *object, PyObject *args)
{
    regions_object *self = (regions_object *)object;
    Py_buffer view, other = {0};
    PyObject *first, *second = Py_None;
    size_t found;

    if (!PyArg_ParseTuple(args, "O|O:differing", &first, &second))
        return NULL;
    if (get_buffer(self, first, PyBUF_SIMPLE, &view) < 0)
        return NULL;
    if (second != Py_None &&
        get_buffer(self, second, PyBUF_SIMPLE, &other) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    /* Without bytes, a buffer's address may be NULL; nothing is read then. */
    if (view.len < WITHOUT_GIL) {
        found = cer_regions_differing(self->list, view.buf, other.buf);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = cer_regions_differing(self->list, view.buf, other.buf);
        Py_END_ALLOW_THREADS
    }
    if (second != Py_None)
        PyBuffer_Release(&other);
    PyBuffer_Release(&view);
    if (found == (size_t)self->n)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(found);
}

static PyObject *
regions_nbytes(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(
        cer_regions_nbytes(((regions_object *)object)->list));
}

static PyMethodDef regions_methods[] = {
    {"save", regions_save, METH_O,
     "save(buffer, /)\n--\n\nCopy all regions into a buffer."},
    {"restore", regions_restore, METH_O,
     "restore(buffer, /)\n--\n\nCopy a buffer into all regions."},
    {"differing", regions_differing, METH_VARARGS,
     "differing(buffer, other=None, /)\n--\n\n"
     "Return the index of the first region whose bytes differ between a\n"
     "buffer and the memory, or another buffer; None if all are equal."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef regions_properties[] = {
    {"nbytes", regions_nbytes, NULL, "The number of bytes of all regions.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot regions_slots[] = {
    {Py_tp_doc,
     "Regions(regions)\n--\n\n"
     "Pieces of memory that are saved, restored and compared at once.\n\n"
     "A region is (address, bytes); its memory must outlive this object. A\n"
     "buffer has the bytes of all regions, one after the other."},
    {Py_tp_new, regions_new},
    {Py_tp_dealloc, regions_dealloc},
    {Py_tp_methods, regions_methods},
    {Py_tp_getset, regions_properties},
    {0, NULL},
};

static PyType_Spec regions_spec = {
    .name = "cerebro._core.Regions",
    .basicsize = sizeof(regions_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = regions_slots,
};

int
core_register_regions(PyObject *module)
{
    return core_add_type(module, &regions_spec,
                         &core_state_of_module(module)->regions_type);
}
