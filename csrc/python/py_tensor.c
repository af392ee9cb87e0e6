/* py_tensor.c -- Tensor: a piece of the core's memory, for DLPack and the
 * buffer protocol. It has no arithmetic; frameworks import it without a copy.
 */
#include "py_tensor.h"

#include <string.h>

#define LEGACY_NAME "dltensor"
#define VERSIONED_NAME "dltensor_versioned"

typedef struct tensor_object {
    PyObject_HEAD
    cer_tensor tensor;
    /* The last capsule made, kept to inspect its destructor; see
     * settle_capsule. */
    PyObject *capsule;
    Py_ssize_t shape[CER_TENSOR_MAX_DIMS]; /* for the buffer protocol */
    Py_ssize_t strides[CER_TENSOR_MAX_DIMS];
} tensor_object;

/* --- capsules ------------------------------------------------------------- */

/* The name is only a hint: a consumer that failed may have kept the name and
 * yet called the deleter. The export tracks that. */
static void
capsule_gone(PyObject *capsule)
{
    const char *name = PyCapsule_GetName(capsule);
    bool consumed =
        strcmp(name, LEGACY_NAME) != 0 && strcmp(name, VERSIONED_NAME) != 0;

    cer_export_capsule_gone(PyCapsule_GetContext(capsule), consumed);
}

/* JAX removes the destructor from capsules that it consumed, so their end goes
 * unnoticed; the tensor handles it. */
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
    /* Neither call fails on a new capsule. */
    (void)PyCapsule_SetContext(capsule, block);
    (void)PyCapsule_SetDestructor(capsule, capsule_gone);
    return capsule;
}

static PyObject *
copied_capsule(core_state *state, const cer_tensor *tensor, bool to_host,
               intptr_t stream, bool versioned)
{
    cer_error err = {0};
    cer_tensor copy;
    cer_status status;
    PyObject *capsule;

    Py_BEGIN_ALLOW_THREADS
    status = tensor->place == NULL
                 ? cer_tensor_copy(tensor, &copy, &err)
                 : tensor->place->copy(tensor, to_host, stream, &copy, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(state, &err);
    if (!versioned)
        py_tensor_use_anywhere(&copy);
    capsule = new_capsule(&copy, versioned, DLPACK_FLAG_BITMASK_IS_COPIED);
    cer_owner_release(copy.owner); /* the capsule holds one */
    return capsule;
}

/* --- arguments of __dlpack__ ---------------------------------------------- */

static int
refuse_stream(PyObject *stream, const char *why)
{
    PyErr_Format(PyExc_BufferError, "%s, not %R", why, stream);
    return -1;
}

/* Consumers on a device name the stream on which they will use the tensor. */
static int
read_stream(const cer_tensor *tensor, PyObject *stream, intptr_t *out)
{
    PyObject *number;

    *out = CER_STREAM_LEGACY; /* the meaning of None */
    if (stream == NULL || stream == Py_None)
        return 0;
    if (tensor->place == NULL)
        return refuse_stream(stream, "tensors in main memory have no streams: "
                                     "stream must be None");
    if (PyBool_Check(stream) || !PyIndex_Check(stream)) {
        PyErr_Format(PyExc_TypeError,
                     "stream must be an int or None, not %.100s",
                     Py_TYPE(stream)->tp_name);
        return -1;
    }
    if ((number = PyNumber_Index(stream)) == NULL)
        return -1;
    *out = (intptr_t)PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (*out == 0 || *out < CER_STREAM_NOBODY || PyErr_Occurred()) {
        PyErr_Clear(); /* an int fails here only if too large */
        return refuse_stream(stream,
                             "stream must be None, -1 (no ordering), 1 (the "
                             "legacy default stream), 2 (the thread's default "
                             "stream) or the address of a stream");
    }
    return 0;
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

/* Reads the requested device: the tensor's own, or main memory for a copy of a
 * device tensor. */
static int
read_device(const cer_tensor *tensor, PyObject *device, bool *to_host)
{
    DLDevice at = cer_tensor_device(tensor);
    int type, number;

    *to_host = false;
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
    if (type == (int)at.device_type && number == at.device_id)
        return 0;
    *to_host = type == kDLCPU && number == 0;
    if (*to_host)
        return 0;
    PyErr_Format(PyExc_BufferError,
                 "the tensor is on device (%d, %d) and cannot be exported to "
                 "device (%d, %d)",
                 (int)at.device_type, at.device_id, type, number);
    return -1;
}

/* A consumer's request. */
typedef struct request {
    intptr_t stream;
    bool versioned, copies, to_host;
} request;

static int
read_request(const cer_tensor *tensor, PyObject *args, PyObject *kwargs,
             request *out)
{
    static char *keywords[] = {"stream", "max_version", "dl_device", "copy",
                               NULL};
    PyObject *stream = NULL, *version = NULL, *device = NULL, *copy = NULL;
    int copies = -1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__",
                                     keywords, &stream, &version, &device,
                                     &copy) ||
        read_stream(tensor, stream, &out->stream) < 0 ||
        read_version(version, &out->versioned) < 0 ||
        read_device(tensor, device, &out->to_host) < 0)
        return -1;
    if (copy != NULL && copy != Py_None && (copies = PyObject_IsTrue(copy)) < 0)
        return -1;
    if (out->to_host && copies == 0) {
        PyErr_SetString(PyExc_BufferError,
                        "a device tensor can only be copied to main memory: "
                        "leave out copy=False");
        return -1;
    }
    out->copies = copies > 0 || out->to_host;
    if (!out->copies && !out->versioned && tensor->read_only) {
        PyErr_SetString(PyExc_BufferError,
                        "read-only memory needs max_version=(1, 0) or "
                        "copy=True");
        return -1;
    }
    return 0;
}

void
py_tensor_use_anywhere(const cer_tensor *tensor)
{
    if (tensor->place != NULL) /* cannot fail: queues nothing */
        (void)tensor->place->join(tensor->place, CER_STREAM_NOBODY, NULL);
}

int
py_tensor_join(core_state *state, const cer_tensor *tensor, intptr_t stream)
{
    cer_error err = {0};
    cer_status status;

    if (tensor->place == NULL)
        return 0;
    Py_BEGIN_ALLOW_THREADS
    status = tensor->place->join(tensor->place, stream, &err);
    Py_END_ALLOW_THREADS
    if (status == CER_OK)
        return 0;
    core_raise(state, &err);
    return -1;
}

PyDoc_STRVAR(
    dlpack_doc,
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None,\n"
    "           copy=None)\n--\n\n"
    "Return a DLPack capsule: versioned if max_version is (1, 0) or later.\n\n"
    "For a tensor on a CUDA device, `stream` is the consumer's stream:\n"
    "None or 1 (the legacy default stream), 2 (the thread's default\n"
    "stream), the address of a stream, or -1 for no ordering.\n"
    "dl_device=(1, 0) copies to main memory.\n\n"
    "Raises BufferError for stream 0, for a stream with a tensor in main\n"
    "memory, for a different device, and for read-only memory in the\n"
    "legacy form, which cannot express it; DeviceError if the stream is\n"
    "being captured.");

static PyObject *
tensor_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    tensor_object *self = (tensor_object *)object;
    core_state *state = core_state_of(object);
    PyObject *capsule = NULL;
    request ask;

    if (read_request(&self->tensor, args, kwargs, &ask) < 0)
        return NULL;
    if (ask.copies)
        capsule = copied_capsule(state, &self->tensor, ask.to_host, ask.stream,
                                 ask.versioned);
    else if (py_tensor_join(state, &self->tensor, ask.stream) == 0)
        capsule = new_capsule(&self->tensor, ask.versioned, 0);
    if (!ask.versioned) /* JAX's request; see py_dlpack.c */
        py_tensor_use_anywhere(&self->tensor);
    if (capsule != NULL) {
        settle_capsule(self);
        self->capsule = Py_NewRef(capsule);
    }
    return capsule;
}

static PyObject *
tensor_dlpack_device(PyObject *self, PyObject *Py_UNUSED(args))
{
    DLDevice at = cer_tensor_device(&((tensor_object *)self)->tensor);

    return Py_BuildValue("(ii)", (int)at.device_type, at.device_id);
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
    if (t->place != NULL) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor is in a device's memory: use "
                        "from_dlpack(tensor, device='cpu') for a copy");
        return -1;
    }
    if ((flags & PyBUF_WRITABLE) != 0 && t->read_only) {
        PyErr_SetString(PyExc_BufferError, "the tensor is read-only");
        return -1;
    }
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && t->ndim > 1) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor is row-major: Fortran order needs a copy");
        return -1;
    }
    if (t->channels_last &&
        ((flags & PyBUF_STRIDES) != PyBUF_STRIDES ||
         (flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS ||
         (flags & PyBUF_ANY_CONTIGUOUS) == PyBUF_ANY_CONTIGUOUS)) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor has channels last: C order needs a copy");
        return -1;
    }
    for (int32_t i = 0; i < t->ndim; i++) {
        self->shape[i] = (Py_ssize_t)t->shape[i];
        self->strides[i] = (Py_ssize_t)t->strides[i] * (Py_ssize_t)item;
    }
    view->obj = Py_NewRef(object);
    /* Some readers treat NULL as a failure; an empty tensor may use any
     * address. */
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
        text = tensor->place == NULL
                   ? PyUnicode_FromFormat("Tensor(shape=%R, dtype='%s')", shape,
                                          cer_dtype_name(tensor->dtype))
                   : PyUnicode_FromFormat(
                         "Tensor(shape=%R, dtype='%s', device='cuda:%d')",
                         shape, cer_dtype_name(tensor->dtype),
                         (int)tensor->place->device.device_id);
    Py_XDECREF(shape);
    return text;
}

static PyMethodDef tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack,
     METH_VARARGS | METH_KEYWORDS, dlpack_doc},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self, /)\n--\n\n"
     "Return (type, number): (1, 0) is main memory, (2, n) CUDA device n."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tensor_getset[] = {
    {"shape", tensor_shape, NULL, "Sizes of the dimensions.", NULL},
    {"dtype", tensor_dtype, NULL, "Name of the element type.", NULL},
    {"nbytes", tensor_nbytes, NULL, "Size of the values in bytes.", NULL},
    {"readonly", tensor_readonly, NULL, "Whether the values are read-only.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    tensor_doc,
    "A piece of memory with a shape and an element type.\n\n"
    "np.from_dlpack, torch.from_dlpack and jax.dlpack.from_dlpack take it\n"
    "without a copy; so do memoryview and np.asarray, with bfloat16 as\n"
    "uint16. Row-major, aligned to 256 bytes.");

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
