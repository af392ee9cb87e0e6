/* py_tensor.c -- Tensor: a piece of the core's memory, for DLPack and for the
 * buffer protocol. It computes nothing; every framework takes it as its own. */
#include "py_tensor.h"

#include <string.h>

#define LEGACY_NAME "dltensor"
#define VERSIONED_NAME "dltensor_versioned"

typedef struct tensor_object {
    PyObject_HEAD
    cer_tensor tensor;
    /* The capsule made last, so that its destructor can be looked at; see
     * settle_capsule. */
    PyObject *capsule;
    Py_ssize_t shape[CER_TENSOR_MAX_DIMS]; /* for the buffer protocol */
    Py_ssize_t strides[CER_TENSOR_MAX_DIMS];
} tensor_object;

/* --- capsules ------------------------------------------------------------- */

/* The name is only read: a consumer that failed may have left it as it was and
 * called the deleter all the same, and the export knows. */
static void
capsule_gone(PyObject *capsule)
{
    const char *name = PyCapsule_GetName(capsule);
    bool consumed =
        strcmp(name, LEGACY_NAME) != 0 && strcmp(name, VERSIONED_NAME) != 0;

    cer_export_capsule_gone(PyCapsule_GetContext(capsule), consumed);
}

/* JAX takes the destructor off the capsules that it consumed, so nobody would
 * say that such a capsule is gone; its tensor does. */
static void
settle_capsule(tensor_object *self)
{
    PyObject *capsule = self->capsule;

    if (capsule == NULL)
        return;
    self->capsule = NULL;
    if (PyCapsule_GetDestructor(capsule) == NULL)
        cer_export_capsule_gone(PyCapsule_GetContext(capsule), true);
    Py_DECREF(capsule);
}

static PyObject *
new_capsule(const cer_tensor *tensor, bool versioned, uint64_t flags)
{
    cer_export *block = cer_export_new(tensor, flags);
    PyObject *capsule;

    if (block == NULL)
        return PyErr_NoMemory();
    capsule = versioned ? PyCapsule_New(&block->versioned, VERSIONED_NAME, NULL)
                        : PyCapsule_New(&block->legacy, LEGACY_NAME, NULL);
    if (capsule == NULL) {
        cer_export_capsule_gone(block, false);
        return NULL;
    }
    /* Neither fails on a capsule that was just made. */
    (void)PyCapsule_SetContext(capsule, block);
    (void)PyCapsule_SetDestructor(capsule, capsule_gone);
    return capsule;
}

static PyObject *
copied_capsule(core_state *state, const cer_tensor *tensor, bool versioned)
{
    cer_error err = {0};
    cer_tensor copy;
    cer_status status;
    PyObject *capsule;

    Py_BEGIN_ALLOW_THREADS
    status = cer_tensor_copy(tensor, &copy, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(state, &err);
    capsule = new_capsule(&copy, versioned, DLPACK_FLAG_BITMASK_IS_COPIED);
    cer_owner_release(copy.owner); /* the capsule has one */
    return capsule;
}

/* --- arguments of __dlpack__ ---------------------------------------------- */

static int
check_stream(PyObject *stream)
{
    if (stream == NULL || stream == Py_None)
        return 0;
    PyErr_Format(PyExc_BufferError,
                 "tensors in main memory have no streams: stream must be None, "
                 "not %R",
                 stream);
    return -1;
}

static int
read_version(PyObject *max_version, bool *versioned)
{
    unsigned int major, minor;

    *versioned = false;
    if (max_version == NULL || max_version == Py_None)
        return 0;
    if (!PyTuple_Check(max_version)) {
        PyErr_Format(PyExc_TypeError,
                     "max_version must be a tuple (major, minor), not %R",
                     max_version);
        return -1;
    }
    if (!PyArg_ParseTuple(max_version, "II;max_version must be (major, minor)",
                          &major, &minor))
        return -1;
    *versioned = major >= DLPACK_MAJOR_VERSION;
    return 0;
}

static int
check_device(PyObject *device)
{
    int type, number;

    if (device == NULL || device == Py_None)
        return 0;
    if (!PyTuple_Check(device)) {
        PyErr_Format(PyExc_TypeError,
                     "dl_device must be a tuple (type, number), not %R",
                     device);
        return -1;
    }
    if (!PyArg_ParseTuple(device, "ii;dl_device must be (type, number)", &type,
                          &number))
        return -1;
    if (type == kDLCPU && number == 0)
        return 0;
    PyErr_Format(PyExc_BufferError,
                 "the tensor is in main memory (device (%d, 0)) and cannot be "
                 "exported to device (%d, %d)",
                 kDLCPU, type, number);
    return -1;
}

PyDoc_STRVAR(
    dlpack_doc,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None,\n"
    "           copy=None)\n--\n\n"
    "Return a DLPack capsule: versioned if max_version is (1, 0) or later.\n\n"
    "Raises BufferError for a stream, for a device other than main memory, "
    "and\n"
    "for read-only memory in the legacy form, which cannot say so.");

static PyObject *
tensor_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"stream", "max_version", "dl_device", "copy",
                               NULL};
    tensor_object *self = (tensor_object *)object;
    PyObject *stream = NULL, *version = NULL, *device = NULL, *copy = NULL;
    PyObject *capsule;
    bool versioned;
    int copies = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__",
                                     keywords, &stream, &version, &device,
                                     &copy))
        return NULL;
    if (check_stream(stream) < 0 || read_version(version, &versioned) < 0 ||
        check_device(device) < 0)
        return NULL;
    if (copy != NULL && copy != Py_None && (copies = PyObject_IsTrue(copy)) < 0)
        return NULL;
    if (!copies && !versioned && self->tensor.read_only) {
        PyErr_SetString(PyExc_BufferError,
                        "read-only memory needs max_version=(1, 0) or "
                        "copy=True");
        return NULL;
    }
    capsule =
        copies ? copied_capsule(core_state_of(object), &self->tensor, versioned)
               : new_capsule(&self->tensor, versioned, 0);
    if (capsule != NULL) {
        settle_capsule(self);
        self->capsule = Py_NewRef(capsule);
    }
    return capsule;
}

static PyObject *
tensor_dlpack_device(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args))
{
    return Py_BuildValue("(ii)", kDLCPU, 0);
}

/* --- the buffer protocol -------------------------------------------------- */

static const char *
buffer_format(cer_dtype dtype)
{
    static const char *const formats[CER_DTYPE_COUNT] = {
        [CER_BOOL] = "?", [CER_I8] = "b",  [CER_I16] = "h",  [CER_I32] = "i",
        [CER_I64] = "q",  [CER_U8] = "B",  [CER_U16] = "H",  [CER_U32] = "I",
        [CER_U64] = "Q",  [CER_F16] = "e", [CER_BF16] = "H", /* its bits */
        [CER_F32] = "f",  [CER_F64] = "d", [CER_C64] = "Zf",
    };

    return formats[dtype];
}

static int
tensor_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    tensor_object *self = (tensor_object *)object;
    cer_tensor *t = &self->tensor;
    size_t item = cer_dtype_size(t->dtype);

    view->obj = NULL;
    if ((flags & PyBUF_WRITABLE) != 0 && t->read_only) {
        PyErr_SetString(PyExc_BufferError, "the tensor is read-only");
        return -1;
    }
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && t->ndim > 1) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor is row-major: Fortran order needs a copy");
        return -1;
    }
    for (int32_t i = 0; i < t->ndim; i++) {
        self->shape[i] = (Py_ssize_t)t->shape[i];
        self->strides[i] = (Py_ssize_t)t->strides[i] * (Py_ssize_t)item;
    }
    view->obj = Py_NewRef(object);
    /* Some readers take NULL for a failure: without values any address does. */
    view->buf = t->data != NULL ? t->data : (void *)self->shape;
    view->len = (Py_ssize_t)cer_tensor_bytes(t);
    view->readonly = t->read_only;
    view->itemsize = (Py_ssize_t)item;
    view->format = (flags & PyBUF_FORMAT) != 0
                       ? (char *)(uintptr_t)buffer_format(t->dtype)
                       : NULL;
    view->ndim = t->ndim;
    view->shape = (flags & PyBUF_ND) != 0 ? self->shape : NULL;
    view->strides =
        (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? self->strides : NULL;
    view->suboffsets = NULL;
    view->internal = NULL;
    return 0;
}

/* --- the type ------------------------------------------------------------- */

PyObject *
py_tensor_new(core_state *state, const cer_tensor *tensor)
{
    tensor_object *self = PyObject_New(tensor_object, state->tensor_type);

    if (self == NULL)
        return NULL;
    self->tensor = *tensor;
    self->capsule = NULL;
    cer_owner_retain(tensor->owner, 1);
    return (PyObject *)self;
}

const cer_tensor *
py_tensor_get(core_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->tensor_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Tensor, not %.100s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return &((tensor_object *)object)->tensor;
}

static void
tensor_dealloc(PyObject *object)
{
    tensor_object *self = (tensor_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    settle_capsule(self);
    cer_owner_release(self->tensor.owner);
    PyObject_Free(object);
    Py_DECREF(type);
}

PyObject *
py_tensor_shape(const cer_tensor *tensor)
{
    PyObject *shape = PyTuple_New(tensor->ndim);

    for (int32_t i = 0; shape != NULL && i < tensor->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(tensor->shape[i]);

        if (size == NULL)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, i, size);
    }
    return shape;
}

static PyObject *
tensor_shape(PyObject *object, void *Py_UNUSED(closure))
{
    return py_tensor_shape(&((tensor_object *)object)->tensor);
}

static PyObject *
tensor_dtype(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(
        cer_dtype_name(((tensor_object *)object)->tensor.dtype));
}

static PyObject *
tensor_nbytes(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(
        cer_tensor_bytes(&((tensor_object *)object)->tensor));
}

static PyObject *
tensor_readonly(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((tensor_object *)object)->tensor.read_only);
}

static PyObject *
tensor_repr(PyObject *object)
{
    const cer_tensor *tensor = &((tensor_object *)object)->tensor;
    PyObject *shape = py_tensor_shape(tensor), *text = NULL;

    if (shape != NULL)
        text = PyUnicode_FromFormat("Tensor(shape=%R, dtype='%s')", shape,
                                    cer_dtype_name(tensor->dtype));
    Py_XDECREF(shape);
    return text;
}

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack,
     METH_VARARGS | METH_KEYWORDS, dlpack_doc},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self, /)\n--\n\nReturn (1, 0): main memory."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tensor_getset[] = {
    {"shape", tensor_shape, NULL, "Sizes of the dimensions.", NULL},
    {"dtype", tensor_dtype, NULL, "Name of the element type.", NULL},
    {"nbytes", tensor_nbytes, NULL, "Size of the values in bytes.", NULL},
    {"readonly", tensor_readonly, NULL, "Whether the values must not change.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(tensor_doc,
             "A piece of memory with a shape and an element type.\n\n"
             "Frameworks take it without a copy: np.from_dlpack,\n"
             "torch.from_dlpack, jax.dlpack.from_dlpack; memoryview and\n"
             "np.asarray too, bfloat16 as uint16. Row-major, on 256 bytes.");

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)tensor_doc},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_repr, tensor_repr},
    {Py_tp_methods, tensor_methods},
    {Py_tp_getset, tensor_getset},
    {Py_bf_getbuffer, tensor_getbuffer},
    {0, NULL},
};

static PyType_Spec tensor_spec = {
    .name = "cerebro._core.Tensor",
    .basicsize = sizeof(tensor_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tensor_slots,
};

int
core_register_tensor(PyObject *module)
{
    return core_add_type(module, &tensor_spec,
                         &core_state_of_module(module)->tensor_type);
}
