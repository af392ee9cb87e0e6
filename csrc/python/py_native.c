/* py_native.c -- NativeNet: the network of native_net.h. */
#define NO_IMPORT_ARRAY
#include "module.h"
#include "native_net.h"
#include "py_tensor.h"

#include <numpy/arrayobject.h>

typedef struct net_object {
    PyObject_HEAD
    cer_native_net *net;
    bool busy; /* a thread computes without the GIL */
} net_object;

static int
read_sizes(PyObject *const arguments[6], cer_native_net_sizes *sizes)
{
    static const char *const names[6] = {"channels",
                                         "height",
                                         "width",
                                         "the first of filters",
                                         "the second of filters",
                                         "classes"};
    size_t *const targets[6] = {&sizes->channels,   &sizes->height,
                                &sizes->width,      &sizes->filters[0],
                                &sizes->filters[1], &sizes->classes};

    for (int i = 0; i < 6; i++) {
        uint64_t value = 0;

        if (core_read_number(arguments[i], names[i], CER_NATIVE_NET_MOST,
                             &value) < 0)
            return -1;
        *targets[i] = (size_t)value;
    }
    return 0;
}

static PyObject *
net_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"channels", "height",  "width", "filters1",
                               "filters2", "classes", NULL};
    PyObject *a[6];
    cer_native_net_sizes sizes;
    cer_error err = {0};
    net_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO:NativeNet", keywords,
                                     &a[0], &a[1], &a[2], &a[3], &a[4],
                                     &a[5]) ||
        read_sizes(a, &sizes) < 0)
        return NULL;
    self = (net_object *)type->tp_alloc(type, 0);
    if (self != NULL &&
        cer_native_net_new(&sizes, &self->net, &err) != CER_OK) {
        core_raise(core_state_of_type(type), &err);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
net_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    cer_native_net_free(((net_object *)object)->net);
    type->tp_free(object);
    Py_DECREF(type);
}

/* --- arguments ------------------------------------------------------------ */

/* Whether `array` is dense, of this type and shape. */
static bool
fits(PyObject *object, int type, int ndim, const npy_intp *shape)
{
    PyArrayObject *array = (PyArrayObject *)object;

    return PyArray_Check(object) && PyArray_TYPE(array) == type &&
           PyArray_ISCARRAY_RO(array) && PyArray_NDIM(array) == ndim &&
           PyArray_CompareLists(PyArray_DIMS(array), shape, ndim);
}

/* The rows of a batch; -1 with ValueError if an array is not what the network
 * takes. `labels` may be NULL. */
static npy_intp
batch_rows(const net_object *self, PyObject *pictures, PyObject *labels)
{
    const cer_native_net_sizes *sizes = cer_native_net_sizes_of(self->net);
    npy_intp shape[4] = {0, (npy_intp)sizes->channels, (npy_intp)sizes->height,
                         (npy_intp)sizes->width};

    if (PyArray_Check(pictures) && PyArray_NDIM((PyArrayObject *)pictures) > 0)
        shape[0] = PyArray_DIM((PyArrayObject *)pictures, 0);
    if (shape[0] == 0 || !fits(pictures, NPY_FLOAT32, 4, shape)) {
        PyErr_Format(PyExc_ValueError,
                     "pictures must be a dense float32 array of shape (rows, "
                     "%zd, %zd, %zd), with rows",
                     shape[1], shape[2], shape[3]);
        return -1;
    }
    if (labels != NULL && !fits(labels, NPY_INT64, 1, shape)) {
        PyErr_Format(PyExc_ValueError,
                     "labels must be a dense int64 array of shape (%zd,)",
                     shape[0]);
        return -1;
    }
    return shape[0];
}

/* Takes the network for a thread that gives up the GIL. */
static int
enter(net_object *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_ValueError,
                        "this NativeNet is at work in another thread");
        return -1;
    }
    self->busy = true;
    return 0;
}

/* --- methods -------------------------------------------------------------- */

typedef cer_status (*scoring)(cer_native_net *, const float *, const int64_t *,
                              size_t, cer_native_net_metrics *, cer_error *);

static PyObject *
scored(net_object *self, PyObject *args, const char *format, scoring function)
{
    PyObject *pictures, *labels;
    cer_native_net_metrics metrics;
    cer_error err = {0};
    cer_status status;
    npy_intp rows;

    if (!PyArg_ParseTuple(args, format, &pictures, &labels) ||
        (rows = batch_rows(self, pictures, labels)) < 0 || enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = function(self->net, PyArray_DATA((PyArrayObject *)pictures),
                      PyArray_DATA((PyArrayObject *)labels), (size_t)rows,
                      &metrics, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    return Py_BuildValue("(dd)", metrics.loss, metrics.accuracy);
}

PyDoc_STRVAR(differentiate_doc,
             "differentiate(pictures, labels, /)\n--\n\n"
             "Write the gradients of the mean loss; return loss and accuracy.");

static PyObject *
net_differentiate(net_object *self, PyObject *args)
{
    return scored(self, args, "OO:differentiate", cer_native_net_differentiate);
}

PyDoc_STRVAR(evaluate_doc, "evaluate(pictures, labels, /)\n--\n\n"
                           "Return loss and accuracy.");

static PyObject *
net_evaluate(net_object *self, PyObject *args)
{
    return scored(self, args, "OO:evaluate", cer_native_net_evaluate);
}

PyDoc_STRVAR(step_doc, "step(rate, momentum, /)\n--\n\n"
                       "Take one step along the gradients.");

static PyObject *
net_step(net_object *self, PyObject *args)
{
    float rate, momentum;

    if (!PyArg_ParseTuple(args, "ff:step", &rate, &momentum) || enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    cer_native_net_step(self->net, rate, momentum);
    Py_END_ALLOW_THREADS
    self->busy = false;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(predict_doc,
             "predict(pictures, /)\n--\n\n"
             "Return the scores, (rows, classes), before the softmax.");

static PyObject *
net_predict(net_object *self, PyObject *pictures)
{
    cer_error err = {0};
    cer_status status;
    PyObject *scores;
    npy_intp shape[2];

    if ((shape[0] = batch_rows(self, pictures, NULL)) < 0)
        return NULL;
    shape[1] = (npy_intp)cer_native_net_sizes_of(self->net)->classes;
    if ((scores = PyArray_SimpleNew(2, shape, NPY_FLOAT32)) == NULL)
        return NULL;
    if (enter(self) < 0) {
        Py_DECREF(scores);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = cer_native_net_predict(
        self->net, PyArray_DATA((PyArrayObject *)pictures), (size_t)shape[0],
        PyArray_DATA((PyArrayObject *)scores), &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK) {
        Py_DECREF(scores);
        return core_raise(core_state_of((PyObject *)self), &err);
    }
    return scores;
}

static int
add_part(core_state *state, PyObject *parts, const cer_native_net *net,
         cer_native_net_kind kind, cer_native_net_part part)
{
    cer_tensor tensor;
    PyObject *object;
    int result;

    cer_native_net_tensor(net, kind, part, &tensor);
    if ((object = py_tensor_new(state, &tensor)) == NULL)
        return -1;
    result =
        PyDict_SetItemString(parts, cer_native_net_part_name(part), object);
    Py_DECREF(object);
    return result;
}

PyDoc_STRVAR(parts_doc,
             "parts(kind, /)\n--\n\n"
             "Return the Tensor of each part by its name: the network's own "
             "memory.\n\n"
             "`kind` is 'values', 'momenta' or 'gradients'.");

static PyObject *
net_parts(net_object *self, PyObject *argument)
{
    static const char *const kinds[] = {"values", "momenta", "gradients"};
    core_state *state = core_state_of((PyObject *)self);
    PyObject *parts;
    int kind = 0;

    while (kind < CER_NATIVE_NET_KIND_COUNT &&
           !(PyUnicode_Check(argument) &&
             PyUnicode_CompareWithASCIIString(argument, kinds[kind]) == 0))
        kind++;
    if (kind == CER_NATIVE_NET_KIND_COUNT) {
        PyErr_Format(PyExc_ValueError,
                     "kind must be 'values', 'momenta' or 'gradients', not %R",
                     argument);
        return NULL;
    }
    parts = PyDict_New();
    for (int part = 0; parts != NULL && part < CER_NATIVE_NET_PART_COUNT;
         part++) {
        if (add_part(state, parts, self->net, (cer_native_net_kind)kind,
                     (cer_native_net_part)part) < 0)
            Py_CLEAR(parts);
    }
    return parts;
}

static PyMethodDef net_methods[] = {
    {"differentiate", (PyCFunction)net_differentiate, METH_VARARGS,
     differentiate_doc},
    {"evaluate", (PyCFunction)net_evaluate, METH_VARARGS, evaluate_doc},
    {"step", (PyCFunction)net_step, METH_VARARGS, step_doc},
    {"predict", (PyCFunction)net_predict, METH_O, predict_doc},
    {"parts", (PyCFunction)net_parts, METH_O, parts_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot net_slots[] = {
    {Py_tp_doc,
     "NativeNet(channels, height, width, filters1, filters2, classes)\n--\n\n"
     "A small convolutional network in C; all its parts begin as zeros."},
    {Py_tp_new, net_new},
    {Py_tp_dealloc, net_dealloc},
    {Py_tp_methods, net_methods},
    {0, NULL},
};

static PyType_Spec net_spec = {
    .name = "cerebro._core.NativeNet",
    .basicsize = sizeof(net_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = net_slots,
};

int
core_register_native(PyObject *module)
{
    return core_add_type(module, &net_spec,
                         &core_state_of_module(module)->native_net_type);
}
