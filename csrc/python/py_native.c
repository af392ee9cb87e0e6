/* py_native.c -- NativeNet: the network of native_net.h, on the host or, with
 * native_cuda.h, on a GPU. */
#define NO_IMPORT_ARRAY
#include "module.h"
#include "native_cuda.h"
#include "py_device.h"
#include "py_tensor.h"

#include <numpy/arrayobject.h>

typedef struct net_object {
    PyObject_HEAD
    cer_native_net *net;
    cer_native_cuda *gpu; /* NULL: computes on the host */
    bool busy;            /* a thread is computing without the GIL */
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

/* Moves the network to a GPU. -1: an exception. */
static int
place(net_object *self, core_state *state, PyObject *device_arg,
      const char *cudnn)
{
    cer_device *device = py_device_get(state, device_arg);
    cer_error err = {0};
    cer_status status;

    if (device == NULL)
        return -1;
    if (cer_device_kind_of(device) != CER_DEVICE_CUDA) {
        PyErr_SetString(PyExc_ValueError, "device must be a GPU, or None");
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = cer_native_cuda_new(self->net, device, cudnn, &self->gpu, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        core_raise(state, &err);
    return status == CER_OK ? 0 : -1;
}

static PyObject *
net_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"channels", "height",   "width",
                               "filters1", "filters2", "classes",
                               "device",   "cudnn",    NULL};
    core_state *state = core_state_of_type(type);
    PyObject *a[6], *device = Py_None;
    const char *cudnn = NULL;
    cer_native_net_sizes sizes;
    cer_error err = {0};
    net_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO|Oz:NativeNet",
                                     keywords, &a[0], &a[1], &a[2], &a[3],
                                     &a[4], &a[5], &device, &cudnn) ||
        read_sizes(a, &sizes) < 0)
        return NULL;
    self = (net_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (cer_native_net_new(&sizes, &self->net, &err) != CER_OK) {
        core_raise(state, &err);
        Py_CLEAR(self);
    } else if (device != Py_None && place(self, state, device, cudnn) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
net_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    net_object *self = (net_object *)object;

    Py_BEGIN_ALLOW_THREADS
    cer_native_cuda_free(self->gpu);
    Py_END_ALLOW_THREADS
    cer_native_net_free(self->net);
    type->tp_free(object);
    Py_DECREF(type);
}

/* --- arguments ------------------------------------------------------------ */

/* Whether `array` is dense and has this type and shape. */
static bool
fits(PyObject *object, int type, int ndim, const npy_intp *shape)
{
    PyArrayObject *array = (PyArrayObject *)object;

    return PyArray_Check(object) && PyArray_TYPE(array) == type &&
           PyArray_ISCARRAY_RO(array) && PyArray_NDIM(array) == ndim &&
           PyArray_CompareLists(PyArray_DIMS(array), shape, ndim);
}

/* Returns the rows of a batch; -1 with ValueError if an array has the wrong
 * type or shape. `labels` may be NULL. */
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
                     "images must be a dense float32 array of shape (rows, "
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

/* Reserves the network for a thread that releases the GIL. */
static int
enter(net_object *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_ValueError,
                        "this NativeNet is in use by another thread");
        return -1;
    }
    self->busy = true;
    return 0;
}

/* --- methods -------------------------------------------------------------- */

static PyObject *
scored(net_object *self, PyObject *args, const char *format, bool gradients)
{
    PyObject *pictures, *labels;
    cer_native_net_metrics metrics;
    cer_error err = {0};
    cer_status status;
    const float *x;
    const int64_t *y;
    npy_intp rows;

    if (!PyArg_ParseTuple(args, format, &pictures, &labels) ||
        (rows = batch_rows(self, pictures, labels)) < 0 || enter(self) < 0)
        return NULL;
    x = PyArray_DATA((PyArrayObject *)pictures);
    y = PyArray_DATA((PyArrayObject *)labels);
    Py_BEGIN_ALLOW_THREADS
    if (self->gpu == NULL)
        status = (gradients ? cer_native_net_differentiate
                            : cer_native_net_evaluate)(
            self->net, x, y, (size_t)rows, &metrics, &err);
    else
        status = (gradients ? cer_native_cuda_differentiate
                            : cer_native_cuda_evaluate)(
            self->gpu, x, y, (size_t)rows, &metrics, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    return Py_BuildValue("(dd)", metrics.loss, metrics.accuracy);
}

PyDoc_STRVAR(
    differentiate_doc,
    "differentiate(images, labels, /)\n--\n\n"
    "Compute the gradients of the mean loss; return loss and accuracy.");

static PyObject *
net_differentiate(PyObject *object, PyObject *args)
{
    net_object *self = (net_object *)object;

    return scored(self, args, "OO:differentiate", true);
}

PyDoc_STRVAR(evaluate_doc, "evaluate(images, labels, /)\n--\n\n"
                           "Return loss and accuracy.");

static PyObject *
net_evaluate(PyObject *object, PyObject *args)
{
    net_object *self = (net_object *)object;

    return scored(self, args, "OO:evaluate", false);
}

PyDoc_STRVAR(step_doc, "step(rate, momentum, /)\n--\n\n"
                       "Take one SGD step with the gradients.");

static PyObject *
net_step(PyObject *object, PyObject *args)
{
    net_object *self = (net_object *)object;
    cer_status status = CER_OK;
    cer_error err = {0};
    float rate, momentum;

    if (!PyArg_ParseTuple(args, "ff:step", &rate, &momentum) || enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (self->gpu == NULL)
        cer_native_net_step(self->net, rate, momentum);
    else
        status = cer_native_cuda_step(self->gpu, rate, momentum, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(predict_doc,
             "predict(images, /)\n--\n\n"
             "Return the scores, (rows, classes), before the softmax.");

static PyObject *
net_predict(PyObject *object, PyObject *pictures)
{
    net_object *self = (net_object *)object;
    cer_error err = {0};
    cer_status status;
    PyObject *scores;
    npy_intp shape[2];
    const float *x;
    float *to;

    if ((shape[0] = batch_rows(self, pictures, NULL)) < 0)
        return NULL;
    shape[1] = (npy_intp)cer_native_net_sizes_of(self->net)->classes;
    if ((scores = PyArray_SimpleNew(2, shape, NPY_FLOAT32)) == NULL)
        return NULL;
    if (enter(self) < 0) {
        Py_DECREF(scores);
        return NULL;
    }
    x = PyArray_DATA((PyArrayObject *)pictures);
    to = PyArray_DATA((PyArrayObject *)scores);
    Py_BEGIN_ALLOW_THREADS
    if (self->gpu == NULL)
        status =
            cer_native_net_predict(self->net, x, (size_t)shape[0], to, &err);
    else
        status =
            cer_native_cuda_predict(self->gpu, x, (size_t)shape[0], to, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK) {
        Py_DECREF(scores);
        return core_raise(core_state_of((PyObject *)self), &err);
    }
    return scores;
}

static PyObject *
copied(net_object *self,
       cer_status (*copy)(cer_native_cuda *gpu, cer_error *err))
{
    cer_status status = CER_OK;
    cer_error err = {0};

    if (enter(self) < 0)
        return NULL;
    if (self->gpu != NULL) {
        Py_BEGIN_ALLOW_THREADS
        status = copy(self->gpu, &err);
        Py_END_ALLOW_THREADS
    }
    self->busy = false;
    if (status != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(push_doc, "push()\n--\n\n"
                       "Copy values and momenta to the GPU, if any.");

static PyObject *
net_push(PyObject *object, PyObject *Py_UNUSED(unused))
{
    net_object *self = (net_object *)object;

    return copied(self, cer_native_cuda_push);
}

PyDoc_STRVAR(pull_doc, "pull()\n--\n\n"
                       "Copy all parts from the GPU, if any.");

static PyObject *
net_pull(PyObject *object, PyObject *Py_UNUSED(unused))
{
    net_object *self = (net_object *)object;

    return copied(self, cer_native_cuda_pull);
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
             "Return the Tensor of each part by name. It shares the network's\n"
             "memory; on a GPU, the copy in host memory.\n\n"
             "`kind` is 'values', 'momenta' or 'gradients'.");

static PyObject *
net_parts(PyObject *object, PyObject *argument)
{
    net_object *self = (net_object *)object;

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
    {"differentiate", net_differentiate, METH_VARARGS, differentiate_doc},
    {"evaluate", net_evaluate, METH_VARARGS, evaluate_doc},
    {"step", net_step, METH_VARARGS, step_doc},
    {"predict", net_predict, METH_O, predict_doc},
    {"push", net_push, METH_NOARGS, push_doc},
    {"pull", net_pull, METH_NOARGS, pull_doc},
    {"parts", net_parts, METH_O, parts_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot net_slots[] = {
    {Py_tp_doc,
     "NativeNet(channels, height, width, filters1, filters2, classes, "
     "device=None, cudnn=None)\n--\n\n"
     "A small convolutional network in C; all its parts are initially\n"
     "zeros."},
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
