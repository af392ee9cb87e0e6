/* py_state.c -- pack_state, unpack_state, load_into, hash_state, and the buffer
 * of a packed state. */
#include "py_state.h"

#include <string.h>

#include "hash.h"
#include "py_pack.h"
#include "py_unpack.h"

/* --- StateBuffer --------------------------------------------------------- */
typedef struct state_buffer {
    PyObject_HEAD
    uint8_t *bytes;
    size_t nbytes;
    bool read_only;
    void *owner;
    void (*release)(void *owner);
} state_buffer;

PyObject *
py_state_buffer_new(core_state *core, uint8_t *bytes, size_t nbytes,
                    bool read_only, void *owner, void (*release)(void *owner))
{
    PyTypeObject *type = core->state_buffer_type;
    state_buffer *self = (state_buffer *)type->tp_alloc(type, 0);

    if (self == NULL) {
        release(owner);
        return NULL;
    }
    self->bytes = bytes;
    self->nbytes = nbytes;
    self->read_only = read_only;
    self->owner = owner;
    self->release = release;
    return (PyObject *)self;
}

static void
buffer_dealloc(PyObject *object)
{
    state_buffer *self = (state_buffer *)object;
    PyTypeObject *type = Py_TYPE(object);

    self->release(self->owner);
    type->tp_free(object);
    Py_DECREF(type);
}

static int
buffer_get(PyObject *object, Py_buffer *view, int flags)
{
    state_buffer *self = (state_buffer *)object;

    return PyBuffer_FillInfo(view, object, self->bytes,
                             (Py_ssize_t)self->nbytes, self->read_only, flags);
}

static Py_ssize_t
buffer_length(PyObject *object)
{
    return (Py_ssize_t)((state_buffer *)object)->nbytes;
}

static PyObject *
buffer_nbytes(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((state_buffer *)object)->nbytes);
}

static PyGetSetDef buffer_getset[] = {
    {"nbytes", buffer_nbytes, NULL, "Length in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, "The bytes of a packed state; supports the buffer protocol."},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_getset, buffer_getset},
    {Py_bf_getbuffer, buffer_get},
    {Py_sq_length, buffer_length},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "cerebro._core.StateBuffer",
    .basicsize = sizeof(state_buffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = buffer_slots,
};

/* --- functions ----------------------------------------------------------- */
PyDoc_STRVAR(
    pack_state_doc,
    "pack_state(state)\n--\n\n"
    "Return a nested state as one buffer in the safetensors layout.\n\n"
    "Raises StateError naming the value that cannot be packed.");

static PyObject *
pack_state(PyObject *module, PyObject *state)
{
    core_state *core = core_state_of_module(module);
    py_packed packed;
    PyObject *result = NULL;
    uint8_t *bytes;

    if (py_packed_init(&packed, core, state) < 0)
        return NULL;
    bytes = cer_aligned_alloc(packed.nbytes);
    if (bytes == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    cer_state_writer_write(packed.writer, bytes);
    Py_END_ALLOW_THREADS
    result = py_state_buffer_new(core, bytes, packed.nbytes, false, bytes,
                                 cer_aligned_free);

done:
    py_packed_clear(&packed);
    return result;
}

/* Opens the state in a buffer; -1 with an exception, and nothing needs closing.
 */
static int
open_state(core_state *core, PyObject *buffer, const char *name,
           Py_buffer *view, cer_state *state)
{
    cer_error err = {0};

    if (PyObject_GetBuffer(buffer, view, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (cer_state_open(view->buf, (size_t)view->len, name, state, &err) ==
        CER_OK)
        return 0;
    core_raise(core, &err);
    PyBuffer_Release(view);
    return -1;
}

PyDoc_STRVAR(
    unpack_state_doc,
    "unpack_state(buffer, framework='numpy', copy=True, *, name='the state',\n"
    "             only=None)\n--\n\n"
    "Return the nested state in a buffer.\n\n"
    "Tensors come back in the framework they were packed from. If it\n"
    "cannot be imported or is not supported, they come back as\n"
    "`framework`: 'torch', 'numpy' or 'jax'. With copy=False they are\n"
    "views of the buffer (except for JAX). Torch has no read-only\n"
    "tensors: views of a read-only buffer raise BufferError, unless\n"
    "copy=None promises not to write to them. `name` is the buffer's name\n"
    "in errors. With `only`, a key of the state's dict, only the value\n"
    "under it is unpacked and returned. Raises CorruptDataError.");

static PyObject *
unpack_state(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"buffer", "framework", "copy",
                               "name",   "only",      NULL};
    core_state *core = core_state_of_module(module);
    py_import_options options = {.name = "the state"};
    const char *framework = "numpy", *only = NULL;
    PyObject *copy_object = Py_True, *result;
    int copy = 0;
    Py_buffer view;
    cer_state state;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|sO$sz:unpack_state",
                                     keywords, &options.buffer, &framework,
                                     &copy_object, &options.name, &only))
        return NULL;
    options.trusted = copy_object == Py_None;
    if (!options.trusted && (copy = PyObject_IsTrue(copy_object)) < 0)
        return NULL;
    options.framework = py_kind_of_name(framework, strlen(framework));
    options.copy = copy != 0;
    if (options.framework == PY_KIND_NONE ||
        options.framework == PY_KIND_DLPACK) {
        PyErr_Format(PyExc_ValueError,
                     "unknown framework '%s': must be torch, numpy or jax",
                     framework);
        return NULL;
    }
    if (open_state(core, options.buffer, options.name, &view, &state) < 0)
        return NULL;
    options.read_only = view.readonly;
    result = py_unpack(core, &state, &options, only);
    cer_state_close(&state);
    PyBuffer_Release(&view);
    return result;
}

PyDoc_STRVAR(
    load_into_doc,
    "load_into(buffer, state, *, name='the state')\n--\n\n"
    "Copy a packed state into the tensors of an equally structured one.\n\n"
    "Returns the buffer's nested state with the tensors of `state`, which\n"
    "now hold the buffer's values; or None, with nothing changed, if the\n"
    "tensors' paths, types or shapes differ or one is read-only.");

static PyObject *
load_into(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"buffer", "state", "name", NULL};
    core_state *core = core_state_of_module(module);
    PyObject *buffer, *nested, *result = NULL;
    const char *name = "the state";
    py_packed live;
    Py_buffer view;
    cer_state state;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$s:load_into", keywords,
                                     &buffer, &nested, &name))
        return NULL;
    if (py_packed_init(&live, core, nested) < 0)
        return NULL;
    if (open_state(core, buffer, name, &view, &state) == 0) {
        result = py_unpack_into(core, &state, name, &live);
        cer_state_close(&state);
        PyBuffer_Release(&view);
    }
    py_packed_clear(&live);
    return result;
}

PyDoc_STRVAR(hash_state_doc,
             "hash_state(buffer)\n--\n\n"
             "Return the XXH3-128 of a packed state as 32 hexadecimal digits.");

static PyObject *
hash_state(PyObject *Py_UNUSED(module), PyObject *buffer)
{
    Py_buffer view;
    char hex[33];

    if (PyObject_GetBuffer(buffer, &view, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    cer_hash128_hex(cer_hash128_of(view.buf, (size_t)view.len), hex);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyUnicode_FromString(hex);
}

static PyMethodDef functions[] = {
    {"pack_state", pack_state, METH_O, pack_state_doc},
    {"unpack_state", (PyCFunction)(void (*)(void))unpack_state,
     METH_VARARGS | METH_KEYWORDS, unpack_state_doc},
    {"load_into", (PyCFunction)(void (*)(void))load_into,
     METH_VARARGS | METH_KEYWORDS, load_into_doc},
    {"hash_state", hash_state, METH_O, hash_state_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_state(PyObject *module)
{
    core_state *core = core_state_of_module(module);

    if (core_add_type(module, &buffer_spec, &core->state_buffer_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
