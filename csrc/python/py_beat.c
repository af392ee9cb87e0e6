/* py_beat.c -- BeatPage: the page a worker shares with its coordinator. */
#include "py_runner.h"

typedef struct beat_object {
    PyObject_HEAD
    cer_beat *beat;
} beat_object;

static PyObject *
beat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"fd", NULL};
    PyObject *wanted = Py_None;
    cer_error err = {0};
    cer_beat *beat;
    beat_object *self;
    long fd = -1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:BeatPage", keywords,
                                     &wanted))
        return NULL;
    if (wanted != Py_None) {
        fd = PyLong_AsLong(wanted);
        if (fd == -1 && PyErr_Occurred())
            return NULL;
        if (fd < 0 || fd > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "fd must be a descriptor, not %ld",
                         fd);
            return NULL;
        }
    }
    if (cer_beat_open((int)fd, &beat, &err) != CER_OK)
        return core_raise(core_state_of_type(type), &err);
    self = (beat_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        cer_beat_close(beat);
    else
        self->beat = beat;
    return (PyObject *)self;
}

static void
beat_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    cer_beat_close(((beat_object *)object)->beat);
    type->tp_free(object);
    Py_DECREF(type);
}

cer_beat_page *
py_beat_page_get(core_state *core, PyObject *object)
{
    if (Py_IS_TYPE(object, core->beat_page_type))
        return cer_beat_page_of(((beat_object *)object)->beat);
    PyErr_Format(PyExc_TypeError, "expected a BeatPage, not %s",
                 Py_TYPE(object)->tp_name);
    return NULL;
}

/* Calls atexit.register or unregister with self.stop, so the thread ends before
 * the interpreter does. */
static int
at_exit(beat_object *self, const char *function)
{
    PyObject *atexit = PyImport_ImportModule("atexit");
    PyObject *stop = NULL, *done = NULL;

    if (atexit != NULL)
        stop = PyObject_GetAttrString((PyObject *)self, "stop");
    if (stop != NULL)
        done = PyObject_CallMethod(atexit, function, "O", stop);
    Py_XDECREF(atexit);
    Py_XDECREF(stop);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyDoc_STRVAR(
    start_doc,
    "start_beating(interval_ms, coordinator=None)\n--\n\n"
    "Beat from a C thread, immediately and then every interval_ms, until\n"
    "stop() or the interpreter's end. Keeps this object alive. Given the\n"
    "descriptor of a socket to the coordinator, the thread also kills\n"
    "this process and its group when the other end or the parent process\n"
    "is gone.");

static PyObject *
beat_start(PyObject *object, PyObject *args, PyObject *kwargs)
{
    beat_object *self = (beat_object *)object;
    static char *keywords[] = {"", "coordinator", NULL};
    PyObject *interval, *coordinator = Py_None;
    uint64_t interval_ms = 0, peer = 0;
    cer_error err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:start_beating",
                                     keywords, &interval, &coordinator) ||
        core_read_number(interval, "interval_ms", UINT32_MAX, &interval_ms) < 0)
        return NULL;
    if (coordinator != Py_None &&
        core_read_number(coordinator, "coordinator", INT32_MAX, &peer) < 0)
        return NULL;
    if (cer_beat_start(self->beat, (uint32_t)interval_ms,
                       coordinator == Py_None ? -1 : (int)peer, &err) != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    if (at_exit(self, "unregister") < 0 || at_exit(self, "register") < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(stop_doc, "stop()\n--\n\n"
                       "Stop beating and wait for the thread.");

static PyObject *
beat_stop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    beat_object *self = (beat_object *)object;

    /* Holds the GIL, so that no other call overlaps. The thread never takes the
     * GIL and ends immediately. */
    cer_beat_stop(self->beat);
    if (at_exit(self, "unregister") < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(cancel_doc,
             "cancel()\n--\n\n"
             "Set the flag that stops the running unit within a batch.");

static PyObject *
beat_cancel(PyObject *object, PyObject *Py_UNUSED(unused))
{
    beat_object *self = (beat_object *)object;

    atomic_store(&cer_beat_page_of(self->beat)->cancel, 1);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(clear_doc, "clear()\n--\n\n"
                        "Clear the cancel flag.");

static PyObject *
beat_clear(PyObject *object, PyObject *Py_UNUSED(unused))
{
    beat_object *self = (beat_object *)object;

    atomic_store(&cer_beat_page_of(self->beat)->cancel, 0);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(hear_doc,
             "hear(answer, /)\n--\n\n"
             "Tell the worker which answer was heard last, by its number.");

static PyObject *
beat_hear(PyObject *object, PyObject *answer_arg)
{
    beat_object *self = (beat_object *)object;
    unsigned long long answer = PyLong_AsUnsignedLongLong(answer_arg);

    if (PyErr_Occurred())
        return NULL;
    atomic_store(&cer_beat_page_of(self->beat)->heard, answer);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    begin_task_doc,
    "begin_task(grace=0.0)\n--\n\n"
    "Start or restart the clock of a task; the first `grace` seconds are\n"
    "not counted.");

static PyObject *
beat_begin_task(PyObject *object, PyObject *args, PyObject *kwargs)
{
    beat_object *self = (beat_object *)object;
    static char *keywords[] = {"grace", NULL};
    double grace = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|d:begin_task", keywords,
                                     &grace))
        return NULL;
    if (!(grace >= 0 && grace < 1e6)) {
        PyErr_SetString(PyExc_ValueError, "grace must be from 0 to 1e6");
        return NULL;
    }
    cer_beat_begin_task(self->beat, grace);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    postpone_task_doc,
    "postpone_task(seconds, /)\n--\n\n"
    "Make the clock of the running task show less by `seconds`, or more if\n"
    "negative: time in the middle of a task that does not count.");

static PyObject *
beat_postpone_task(PyObject *object, PyObject *argument)
{
    beat_object *self = (beat_object *)object;
    double seconds = PyFloat_AsDouble(argument);

    if (seconds == -1.0 && PyErr_Occurred())
        return NULL;
    if (!(seconds > -1e7 && seconds < 1e7)) {
        PyErr_SetString(PyExc_ValueError, "seconds must be within 1e7");
        return NULL;
    }
    cer_beat_postpone_task(self->beat, seconds);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(end_task_doc, "end_task()\n--\n\nStop the clock of the task.");

static PyObject *
beat_end_task(PyObject *object, PyObject *Py_UNUSED(unused))
{
    beat_object *self = (beat_object *)object;

    cer_beat_end_task(self->beat);
    Py_RETURN_NONE;
}

static PyObject *
get_task_seconds(PyObject *self, void *Py_UNUSED(closure))
{
    double seconds;

    if (!cer_beat_task_seconds(((beat_object *)self)->beat, &seconds))
        Py_RETURN_NONE;
    return PyFloat_FromDouble(seconds);
}

static PyObject *
get_fd(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(cer_beat_fd(((beat_object *)self)->beat));
}

/* The closure is the offset of a 64-bit count in the page. */
static PyObject *
get_count(PyObject *self, void *closure)
{
    char *page = (char *)cer_beat_page_of(((beat_object *)self)->beat);
    _Atomic uint64_t *count =
        (_Atomic uint64_t *)(void *)(page + (uintptr_t)closure);

    return PyLong_FromUnsignedLongLong(
        atomic_load_explicit(count, memory_order_relaxed));
}

static PyObject *
get_cancelled(PyObject *self, void *Py_UNUSED(closure))
{
    cer_beat_page *page = cer_beat_page_of(((beat_object *)self)->beat);

    return PyBool_FromLong(atomic_load(&page->cancel) != 0);
}

static PyMethodDef beat_methods[] = {
    {"start_beating", (PyCFunction)(void (*)(void))beat_start,
     METH_VARARGS | METH_KEYWORDS, start_doc},
    {"stop", beat_stop, METH_NOARGS, stop_doc},
    {"cancel", beat_cancel, METH_NOARGS, cancel_doc},
    {"clear", beat_clear, METH_NOARGS, clear_doc},
    {"hear", beat_hear, METH_O, hear_doc},
    {"begin_task", (PyCFunction)(void (*)(void))beat_begin_task,
     METH_VARARGS | METH_KEYWORDS, begin_task_doc},
    {"postpone_task", beat_postpone_task, METH_O, postpone_task_doc},
    {"end_task", beat_end_task, METH_NOARGS, end_task_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef beat_getset[] = {
    {"fd", get_fd, NULL,
     "The page's descriptor, for a child process to inherit.", NULL},
    {"beats", get_count, NULL, "Beats so far.",
     (void *)offsetof(cer_beat_page, beats)},
    {"batches", get_count, NULL, "Batches trained or evaluated so far.",
     (void *)offsetof(cer_beat_page, batches)},
    {"rows", get_count, NULL, "Rows trained or evaluated so far.",
     (void *)offsetof(cer_beat_page, rows)},
    {"heard", get_count, NULL, "The answer that the coordinator heard last.",
     (void *)offsetof(cer_beat_page, heard)},
    {"cancelled", get_cancelled, NULL, "Whether the cancel flag is set.", NULL},
    {"task_seconds", get_task_seconds, NULL,
     "Seconds since begin_task, negative in its grace; None between tasks.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot beat_slots[] = {
    {Py_tp_doc,
     "BeatPage(fd=None)\n--\n\n"
     "A page shared between a worker and its coordinator. Without `fd`,\n"
     "makes a page; otherwise opens that of an inherited descriptor, which\n"
     "the caller still closes."},
    {Py_tp_new, beat_new},
    {Py_tp_dealloc, beat_dealloc},
    {Py_tp_methods, beat_methods},
    {Py_tp_getset, beat_getset},
    {0, NULL},
};

static PyType_Spec beat_spec = {
    .name = "cerebro._core.BeatPage",
    .basicsize = sizeof(beat_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = beat_slots,
};

int
core_register_beat(PyObject *module)
{
    return core_add_type(module, &beat_spec,
                         &core_state_of_module(module)->beat_page_type);
}
