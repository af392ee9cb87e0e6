/* py_slots.c -- Slots: the two mapped slots of a trial. */
#include "copy.h"
#include "hash.h"
#include "py_pack.h"
#include "py_state.h"
#include "slots.h"

typedef struct slots_object {
    PyObject_HEAD
    cer_slots *slots; /* NULL: closed */
    bool busy;        /* a call is working without the GIL */
} slots_object;

static core_state *
core_of(slots_object *self)
{
    return core_state_of((PyObject *)self);
}

/* Reserves the object for one call that releases the GIL. -1: an exception. */
static int
enter(slots_object *self)
{
    if (self->slots == NULL) {
        PyErr_SetString(PyExc_ValueError, "these Slots are closed");
        return -1;
    }
    if (self->busy) {
        PyErr_SetString(core_of(self)->StateError,
                        "these Slots are in use by another thread");
        return -1;
    }
    self->busy = true;
    return 0;
}

static void
leave(slots_object *self)
{
    self->busy = false;
}

/* Ends a call: returns None or raises `err`. */
static PyObject *
leave_with(slots_object *self, cer_status status, const cer_error *err)
{
    leave(self);
    if (status != CER_OK)
        return core_raise(core_of(self), err);
    Py_RETURN_NONE;
}

static PyObject *
slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"stem", "create", NULL};
    PyObject *stem = NULL;
    int create;
    cer_slots *slots = NULL;
    slots_object *self;
    cer_error err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&p:Slots", keywords,
                                     PyUnicode_FSConverter, &stem, &create))
        return NULL;
    if (cer_slots_open(PyBytes_AS_STRING(stem), create != 0, &slots, &err) !=
        CER_OK)
        core_raise(core_state_of_type(type), &err);
    Py_DECREF(stem);
    if (slots == NULL)
        return NULL;
    self = (slots_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        cer_slots_close(slots);
    else
        self->slots = slots;
    return (PyObject *)self;
}

static void
slots_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    cer_slots_close(((slots_object *)object)->slots);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(slots_close_doc,
             "close()\n--\n\nUnmap the files. Views stay valid.");

static PyObject *
slots_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    slots_object *self = (slots_object *)object;

    if (self->slots == NULL)
        Py_RETURN_NONE;
    if (enter(self) < 0)
        return NULL;
    cer_slots_close(self->slots);
    self->slots = NULL;
    leave(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(slots_fence_doc,
             "fence(attempt)\n--\n\n"
             "Reject packs of lower attempts from now on, in every process.");

static PyObject *
slots_fence(PyObject *object, PyObject *argument)
{
    slots_object *self = (slots_object *)object;
    uint64_t attempt = 0;

    if (core_read_number(argument, "attempt", UINT32_MAX, &attempt) < 0 ||
        enter(self) < 0)
        return NULL;
    cer_slots_fence(self->slots, (uint32_t)attempt);
    leave(self);
    Py_RETURN_NONE;
}

static int
read_attempt(PyObject *number, uint32_t *out)
{
    uint64_t attempt = 0;

    if (core_read_number(number, "attempt", UINT32_MAX, &attempt) < 0)
        return -1;
    *out = (uint32_t)attempt;
    return 0;
}

static int
read_position(PyObject *number, uint64_t *out)
{
    return core_read_number(number, "position", UINT64_MAX, out);
}

/* Begins a pack and calls write(argument, to) without the GIL. */
static PyObject *
pack_with(slots_object *self, size_t nbytes, uint32_t attempt,
          void (*write)(void *, uint8_t *), void *argument)
{
    cer_error err = {0};
    cer_status status;
    uint8_t *to;

    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_slots_begin(self->slots, attempt, nbytes, &to, &err);
    if (status == CER_OK)
        write(argument, to);
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != CER_OK)
        return core_raise(core_of(self), &err);
    return PyLong_FromSize_t(nbytes);
}

static void
write_packed(void *writer, uint8_t *to)
{
    cer_state_writer_write(writer, to);
}

PyDoc_STRVAR(
    slots_pack_doc,
    "pack(state, *, attempt)\n--\n\n"
    "Pack a nested state into the older slot; call commit() next.\n\n"
    "Returns its length in bytes. Raises StateError if a higher attempt\n"
    "has begun or the state cannot be packed; the last commit remains\n"
    "valid.");

static PyObject *
slots_pack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    slots_object *self = (slots_object *)object;
    static char *keywords[] = {"state", "attempt", NULL};
    PyObject *state, *number, *result;
    uint32_t attempt = 0;
    py_packed packed;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$O:pack", keywords, &state,
                                     &number) ||
        read_attempt(number, &attempt) < 0 ||
        py_packed_init(&packed, core_of(self), state) < 0)
        return NULL;
    result =
        pack_with(self, packed.nbytes, attempt, write_packed, packed.writer);
    py_packed_clear(&packed);
    return result;
}

static void
write_buffer(void *from, uint8_t *to)
{
    const Py_buffer *view = from;
    int64_t shape = view->len, stride = 1;
    cer_copy copy = {.dense = to,
                     .strided = view->buf,
                     .nbytes = (size_t)view->len,
                     .item = 1,
                     .ndim = 1,
                     .shape = &shape,
                     .strides = &stride};

    cer_copy_all(&copy, 1, CER_COPY_TO_DENSE, 0);
}

/* Whether the bytes are a complete state; -1: an exception. */
static int
check_packed(core_state *core, const Py_buffer *view)
{
    cer_state state;
    cer_error err = {0};

    if (cer_state_open(view->buf, (size_t)view->len, "the state", &state,
                       &err) != CER_OK) {
        core_raise(core, &err);
        return -1;
    }
    cer_state_close(&state);
    return 0;
}

PyDoc_STRVAR(slots_put_doc,
             "put(buffer, *, attempt)\n--\n\n"
             "Like pack(), for a state that is already packed, e.g. a file's\n"
             "bytes.");

static PyObject *
slots_put(PyObject *object, PyObject *args, PyObject *kwargs)
{
    slots_object *self = (slots_object *)object;
    static char *keywords[] = {"buffer", "attempt", NULL};
    PyObject *number, *result = NULL;
    uint32_t attempt = 0;
    Py_buffer view;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*$O:put", keywords, &view,
                                     &number))
        return NULL;
    if (read_attempt(number, &attempt) == 0 &&
        check_packed(core_of(self), &view) == 0)
        result =
            pack_with(self, (size_t)view.len, attempt, write_buffer, &view);
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
hex_of(cer_hash128 hash)
{
    char hex[33];

    cer_hash128_hex(hash, hex);
    return PyUnicode_FromString(hex);
}

PyDoc_STRVAR(
    slots_commit_doc,
    "commit(position)\n--\n\n"
    "Seal the last pack with its hash and make it the newest state.\n\n"
    "Returns the hash, XXH3-128. Raises StateError if a higher attempt\n"
    "has begun or another process has committed since; the last commit\n"
    "then remains valid.");

static PyObject *
slots_commit(PyObject *object, PyObject *argument)
{
    slots_object *self = (slots_object *)object;
    uint64_t position = 0;
    cer_hash128 hash;
    cer_error err = {0};
    cer_status status;

    if (read_position(argument, &position) < 0 || enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_slots_commit(self->slots, position, &hash, &err);
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != CER_OK)
        return core_raise(core_of(self), &err);
    return hex_of(hash);
}

PyDoc_STRVAR(
    slots_revert_doc,
    "revert(*, attempt, position)\n--\n\n"
    "Make the state at `position`, the newest or the one before it, the\n"
    "newest.");

static PyObject *
slots_revert(PyObject *object, PyObject *args, PyObject *kwargs)
{
    slots_object *self = (slots_object *)object;
    static char *keywords[] = {"attempt", "position", NULL};
    PyObject *numbers[2];
    uint32_t attempt = 0;
    uint64_t position = 0;
    cer_error err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OO:revert", keywords,
                                     &numbers[0], &numbers[1]) ||
        read_attempt(numbers[0], &attempt) < 0 ||
        read_position(numbers[1], &position) < 0 || enter(self) < 0)
        return NULL;
    return leave_with(
        self, cer_slots_revert(self->slots, attempt, position, &err), &err);
}

PyDoc_STRVAR(
    slots_committed_doc,
    "committed()\n--\n\n"
    "Return (position, attempt, nbytes) of the newest state, or None.");

static PyObject *
slots_committed(PyObject *object, PyObject *Py_UNUSED(unused))
{
    slots_object *self = (slots_object *)object;
    cer_slots_info info;
    bool found;

    if (enter(self) < 0)
        return NULL;
    found = cer_slots_committed(self->slots, &info);
    leave(self);
    if (!found)
        Py_RETURN_NONE;
    return Py_BuildValue("(KIn)", (unsigned long long)info.position,
                         (unsigned int)info.attempt, (Py_ssize_t)info.nbytes);
}

PyDoc_STRVAR(slots_attempt_doc,
             "attempt()\n--\n\n"
             "Return the highest attempt that has fenced or packed, or 0.");

static PyObject *
slots_attempt(PyObject *object, PyObject *Py_UNUSED(unused))
{
    slots_object *self = (slots_object *)object;
    uint32_t attempt;

    if (enter(self) < 0)
        return NULL;
    attempt = cer_slots_attempt(self->slots);
    leave(self);
    return PyLong_FromUnsignedLong(attempt);
}

static void
release_map(void *map)
{
    cer_slots_map_release(map);
}

/* A StateBuffer of a view's bytes, which it takes over. */
static PyObject *
buffer_of(slots_object *self, const cer_slots_view *view)
{
    return py_state_buffer_new(core_of(self), (uint8_t *)(uintptr_t)view->bytes,
                               view->info.nbytes, true, view->map, release_map);
}

PyDoc_STRVAR(
    slots_view_doc,
    "view(position=None)\n--\n\n"
    "Return the bytes of the newest state, or of the one at `position`,\n"
    "as a read-only buffer. They stay unchanged until the second pack\n"
    "from now.");

static PyObject *
slots_view(PyObject *object, PyObject *args, PyObject *kwargs)
{
    slots_object *self = (slots_object *)object;
    static char *keywords[] = {"position", NULL};
    PyObject *wanted = Py_None;
    uint64_t position = 0;
    cer_slots_view view;
    cer_error err = {0};
    cer_status status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:view", keywords,
                                     &wanted))
        return NULL;
    if (wanted != Py_None && read_position(wanted, &position) < 0)
        return NULL;
    if (enter(self) < 0)
        return NULL;
    status = cer_slots_look(self->slots, wanted == Py_None ? NULL : &position,
                            &view, &err);
    leave(self);
    if (status != CER_OK)
        return core_raise(core_of(self), &err);
    return buffer_of(self, &view);
}

PyDoc_STRVAR(
    slots_sealed_doc,
    "sealed()\n--\n\n"
    "Return (position, attempt, bytes) of the state with the highest\n"
    "position whose bytes match its seal, or None. Reads all its bytes.");

static PyObject *
slots_sealed(PyObject *object, PyObject *Py_UNUSED(unused))
{
    slots_object *self = (slots_object *)object;
    cer_slots_view view;
    bool found;

    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = cer_slots_look_sealed(self->slots, &view);
    Py_END_ALLOW_THREADS
    leave(self);
    if (!found)
        Py_RETURN_NONE;
    return Py_BuildValue("(KIN)", (unsigned long long)view.info.position,
                         (unsigned int)view.info.attempt,
                         buffer_of(self, &view));
}

PyDoc_STRVAR(slots_hash_doc,
             "hash()\n--\n\nReturn the XXH3-128 of the newest state.");

static PyObject *
slots_hash(PyObject *object, PyObject *Py_UNUSED(unused))
{
    slots_object *self = (slots_object *)object;
    cer_slots_view view;
    cer_hash128 hash;
    cer_error err = {0};
    cer_status status;

    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_slots_look(self->slots, NULL, &view, &err);
    if (status == CER_OK) {
        hash = cer_hash128_of(view.bytes, view.info.nbytes);
        cer_slots_map_release(view.map);
    }
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != CER_OK)
        return core_raise(core_of(self), &err);
    return hex_of(hash);
}

PyDoc_STRVAR(slots_save_doc,
             "save(path)\n--\n\n"
             "Write the newest state to a file, without syncing it.");

static PyObject *
slots_save(PyObject *object, PyObject *args)
{
    slots_object *self = (slots_object *)object;
    PyObject *path;
    cer_error err = {0};
    cer_status status;

    if (!PyArg_ParseTuple(args, "O&:save", PyUnicode_FSConverter, &path))
        return NULL;
    if (enter(self) < 0) {
        Py_DECREF(path);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = cer_slots_save(self->slots, PyBytes_AS_STRING(path), &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return leave_with(self, status, &err);
}

static PyMethodDef slots_methods[] = {
    {"close", slots_close, METH_NOARGS, slots_close_doc},
    {"fence", slots_fence, METH_O, slots_fence_doc},
    {"pack", (PyCFunction)(void (*)(void))slots_pack,
     METH_VARARGS | METH_KEYWORDS, slots_pack_doc},
    {"put", (PyCFunction)(void (*)(void))slots_put,
     METH_VARARGS | METH_KEYWORDS, slots_put_doc},
    {"commit", slots_commit, METH_O, slots_commit_doc},
    {"revert", (PyCFunction)(void (*)(void))slots_revert,
     METH_VARARGS | METH_KEYWORDS, slots_revert_doc},
    {"committed", slots_committed, METH_NOARGS, slots_committed_doc},
    {"view", (PyCFunction)(void (*)(void))slots_view,
     METH_VARARGS | METH_KEYWORDS, slots_view_doc},
    {"hash", slots_hash, METH_NOARGS, slots_hash_doc},
    {"sealed", slots_sealed, METH_NOARGS, slots_sealed_doc},
    {"attempt", slots_attempt, METH_NOARGS, slots_attempt_doc},
    {"save", slots_save, METH_VARARGS, slots_save_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_doc,
     "Slots(stem, create)\n--\n\n"
     "The two slots of a trial: <stem>.a, <stem>.b and <stem>.slots."},
    {Py_tp_new, slots_new},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_methods, slots_methods},
    {0, NULL},
};

static PyType_Spec slots_spec = {
    .name = "cerebro._core.Slots",
    .basicsize = sizeof(slots_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots_slots,
};

/* --- checking ------------------------------------------------------------ */
PyDoc_STRVAR(
    check_slots_doc,
    "check_slots(stem)\n--\n\n"
    "Compare a trial's slots with their records and seals; change nothing.\n\n"
    "Returns None, or (suffix, what, in_use): the damaged file's suffix,\n"
    "the kind of damage, and whether the slots changed during the read\n"
    "and may be intact.");

static PyObject *
check_slots(PyObject *module, PyObject *args)
{
    cer_slots_damage damage;
    cer_error err = {0};
    cer_status status;
    PyObject *stem;

    if (!PyArg_ParseTuple(args, "O&:check_slots", PyUnicode_FSConverter, &stem))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_slots_check(PyBytes_AS_STRING(stem), &damage, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(stem);
    if (status != CER_OK)
        return core_raise(core_state_of_module(module), &err);
    if (damage.suffix == NULL)
        Py_RETURN_NONE;
    return Py_BuildValue("(sNN)", damage.suffix,
                         PyUnicode_DecodeFSDefault(damage.what.message),
                         PyBool_FromLong(damage.in_use));
}

static PyMethodDef functions[] = {
    {"check_slots", check_slots, METH_VARARGS, check_slots_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_slots(PyObject *module)
{
    if (core_add_type(module, &slots_spec,
                      &core_state_of_module(module)->slots_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
