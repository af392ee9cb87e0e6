/* py_schedule.c -- Schedule: the scheduler's state machine. */
#include "module.h"
#include "schedule.h"

typedef struct schedule_object {
    PyObject_HEAD
    cer_schedule *schedule;
} schedule_object;

/* --- numbers -------------------------------------------------------------- */

/* For "O&": the number of a trial, a worker, an epoch, ... */
static int
to_number(PyObject *value, void *out)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    PyObject *text;

    if (number == -1 && PyErr_Occurred()) /* raised by __index__ */
        return 0;
    if (number >= 0 && number < UINT32_MAX) {
        *(uint32_t *)out = (uint32_t)number;
        return 1;
    }
    text = core_number_text(value);
    if (text != NULL)
        PyErr_Format(PyExc_ValueError, "%U is not a number from 0 to 2**32 - 2",
                     text);
    Py_XDECREF(text);
    return 0;
}

/* CPython's parser treats all keyword-only arguments as optional if one is. */
static int
given(bool is_given, const char *function, const char *argument)
{
    if (is_given)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s needs the keyword argument %s", function,
                 argument);
    return -1;
}

/* Reads the arguments (worker, now) of events. */
static int
to_event(PyObject *const *args, Py_ssize_t n, const char *name,
         uint32_t *worker, double *now)
{
    if (n != 2) {
        PyErr_Format(PyExc_TypeError, "%s takes a worker and the time", name);
        return -1;
    }
    if (!to_number(args[0], worker))
        return -1;
    *now = PyFloat_AsDouble(args[1]);
    return *now == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static cer_schedule *
schedule_of(PyObject *self)
{
    return ((schedule_object *)self)->schedule;
}

static PyObject *
none_or_raise(PyObject *self, cer_status status, const cer_error *err)
{
    if (status != CER_OK)
        return core_raise(core_state_of(self), err);
    Py_RETURN_NONE;
}

/* --- making --------------------------------------------------------------- */

/* Reads `shards`: their number, or a sequence of their weights. Free *weights
 * with PyMem_Free. */
static int
read_shards(PyObject *shards, cer_schedule_options *options, double **weights)
{
    PyObject *items;
    Py_ssize_t n;

    *weights = NULL;
    if (PyLong_Check(shards))
        return to_number(shards, &options->shards) ? 0 : -1;
    items =
        core_tuple(shards, "shards must be a number or a sequence of weights");
    if (items == NULL)
        return -1;
    n = PyTuple_GET_SIZE(items);
    options->shards = n > INT32_MAX ? UINT32_MAX : (uint32_t)n;
    *weights = PyMem_Calloc(n > 0 ? (size_t)n : 1, sizeof **weights);
    if (*weights == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n && !PyErr_Occurred(); i++)
        (*weights)[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(items, i));
    Py_DECREF(items);
    options->weights = *weights;
    return PyErr_Occurred() ? -1 : 0;
}

PyDoc_STRVAR(
    schedule_doc,
    "Schedule(*, shards, exclusive=False, stagger=True, in_order=False,\n"
    "         eval_cost=0.0, live_models=8, capacity=1024)\n--\n\n"
    "Decides which trial trains next, on which shard and worker.\n\n"
    "It receives events and returns commands; callers pass the time\n"
    "(seconds). `shards` is their number or a weight for each, e.g. its\n"
    "rows; `eval_cost` is the weight of the validation unit (0: none).\n"
    "With `in_order`, every trial visits shards 0, 1, ... in every epoch.");

static PyObject *
schedule_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"shards",    "exclusive",   "stagger",
                               "eval_cost", "live_models", "capacity",
                               "in_order",  NULL};
    cer_schedule_options options = {.live_models = 8, .capacity = 1024};
    int exclusive = 0, stagger = 1, in_order = 0;
    double *weights = NULL;
    cer_schedule *schedule = NULL;
    PyObject *shards = NULL, *self = NULL;
    cer_error err;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "|$OppdO&O&p:Schedule", keywords, &shards, &exclusive,
            &stagger, &options.eval_cost, to_number, &options.live_models,
            to_number, &options.capacity, &in_order))
        return NULL;
    if (given(shards != NULL, "Schedule", "shards") < 0)
        return NULL;
    options.exclusive = exclusive != 0;
    options.stagger = stagger != 0;
    options.in_order = in_order != 0;
    if (read_shards(shards, &options, &weights) < 0)
        goto done;
    if (cer_schedule_new(&options, &schedule, &err) != CER_OK) {
        core_raise(core_state_of_type(type), &err);
        goto done;
    }
    self = type->tp_alloc(type, 0);
    if (self != NULL) {
        ((schedule_object *)self)->schedule = schedule;
        schedule = NULL;
    }

done:
    cer_schedule_free(schedule);
    PyMem_Free(weights);
    return self;
}

static void
schedule_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    cer_schedule_free(schedule_of(self));
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- workers and shards --------------------------------------------------- */

PyDoc_STRVAR(add_worker_doc,
             "add_worker(now)\n--\n\n"
             "Add a worker and return its number, counted from 0.");

static PyObject *
add_worker(PyObject *self, PyObject *now)
{
    uint32_t worker = 0;
    cer_error err;

    if (PyFloat_AsDouble(now) == -1.0 && PyErr_Occurred())
        return NULL;
    if (cer_schedule_add_worker(schedule_of(self), &worker, &err) != CER_OK)
        return core_raise(core_state_of(self), &err);
    return PyLong_FromUnsignedLong(worker);
}

PyDoc_STRVAR(
    remove_worker_doc,
    "remove_worker(worker, now)\n--\n\n"
    "Remove a worker; the unit it was running is lost and runs again.");

static PyObject *
remove_worker(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    uint32_t worker;
    double now;
    cer_error err;

    if (to_event(args, n, "remove_worker", &worker, &now) < 0)
        return NULL;
    return none_or_raise(
        self, cer_schedule_remove_worker(schedule_of(self), worker, &err),
        &err);
}

PyDoc_STRVAR(
    set_holders_doc,
    "set_holders(shard, workers)\n--\n\n"
    "Allow only `workers` to run an exclusive shard.\n\n"
    "Shard -1 is the validation set, which every worker holds until it is\n"
    "placed. For a shard without holders, next() returns a load command.");

static PyObject *
set_holders(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"shard", "workers", NULL};
    long long shard;
    PyObject *workers, *items = NULL, *result = NULL;
    uint32_t *numbers = NULL;
    Py_ssize_t n;
    cer_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LO:set_holders", keywords,
                                     &shard, &workers))
        return NULL;
    items = core_tuple(workers, "workers must be a sequence of numbers");
    if (items == NULL)
        return NULL;
    n = PyTuple_GET_SIZE(items);
    numbers = PyMem_Calloc(n > 0 ? (size_t)n : 1, sizeof *numbers);
    if (numbers == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!to_number(PyTuple_GET_ITEM(items, i), &numbers[i]))
            goto done;
    }
    result = none_or_raise(self,
                           cer_schedule_set_holders(schedule_of(self), shard,
                                                    numbers, (size_t)n, &err),
                           &err);

done:
    PyMem_Free(numbers);
    Py_DECREF(items);
    return result;
}

PyDoc_STRVAR(
    live_doc,
    "live(worker)\n--\n\n"
    "Return the trials whose models the worker should keep in memory,\n"
    "most recently used first; at most live_models.");

static PyObject *
live(PyObject *self, PyObject *worker_arg)
{
    PyObject *result = NULL;
    uint32_t *trials = NULL;
    uint32_t worker;
    size_t n;
    cer_error err;

    if (!to_number(worker_arg, &worker))
        return NULL;
    if (cer_schedule_live(schedule_of(self), worker, NULL, 0, &n, &err) !=
        CER_OK)
        return core_raise(core_state_of(self), &err);
    trials = PyMem_Calloc(n + 1, sizeof *trials);
    if (trials == NULL)
        return PyErr_NoMemory();
    (void)cer_schedule_live(schedule_of(self), worker, trials, n, &n, NULL);
    result = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; result != NULL && i < n; i++) {
        PyObject *trial = PyLong_FromUnsignedLong(trials[i]);

        if (trial == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, trial);
    }
    PyMem_Free(trials);
    return result;
}

PyDoc_STRVAR(forget_live_doc,
             "forget_live(worker, trial)\n--\n\n"
             "Note that the worker dropped its live model of a trial.");

static PyObject *
forget_live(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"worker", "trial", NULL};
    uint32_t worker, trial;
    cer_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:forget_live", keywords,
                                     to_number, &worker, to_number, &trial))
        return NULL;
    return none_or_raise(
        self, cer_schedule_forget_live(schedule_of(self), worker, trial, &err),
        &err);
}

/* --- trials --------------------------------------------------------------- */

PyDoc_STRVAR(
    add_trial_doc,
    "add_trial(trial, *, epochs, epoch=0, step=0, stream=trial)\n--\n\n"
    "Add a trial that trains until `epochs` epochs are done.\n\n"
    "It starts at `epoch` and `step`, and visits shards as trial\n"
    "`stream` does.");

static PyObject *
add_trial(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"trial", "epochs", "epoch",
                               "step",  "stream", NULL};
    uint32_t trial, epochs = UINT32_MAX, epoch = 0, step = 0;
    uint32_t stream = UINT32_MAX;
    cer_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$O&O&O&O&:add_trial",
                                     keywords, to_number, &trial, to_number,
                                     &epochs, to_number, &epoch, to_number,
                                     &step, to_number, &stream) ||
        given(epochs != UINT32_MAX, "add_trial", "epochs") < 0)
        return NULL;
    if (stream == UINT32_MAX)
        stream = trial;
    return none_or_raise(self,
                         cer_schedule_add_trial(schedule_of(self), trial,
                                                stream, epochs, epoch, step,
                                                &err),
                         &err);
}

PyDoc_STRVAR(extend_trial_doc,
             "extend_trial(trial, epochs)\n--\n\n"
             "Let a trial train until `epochs` epochs are done.");

static PyObject *
extend_trial(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"trial", "epochs", NULL};
    uint32_t trial, epochs;
    cer_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:extend_trial",
                                     keywords, to_number, &trial, to_number,
                                     &epochs))
        return NULL;
    return none_or_raise(
        self, cer_schedule_extend_trial(schedule_of(self), trial, epochs, &err),
        &err);
}

PyDoc_STRVAR(
    drop_trial_doc,
    "drop_trial(trial)\n--\n\n"
    "End a trial. Its running unit, if any, occupies the worker until it\n"
    "is reported as done, failed or lost.");

static PyObject *
drop_trial(PyObject *self, PyObject *trial_arg)
{
    uint32_t trial;
    cer_error err;

    if (!to_number(trial_arg, &trial))
        return NULL;
    return none_or_raise(
        self, cer_schedule_drop_trial(schedule_of(self), trial, &err), &err);
}

PyDoc_STRVAR(forget_trial_doc, "forget_trial(trial)\n--\n\n"
                               "Free a dropped trial's entry for reuse.");

static PyObject *
forget_trial(PyObject *self, PyObject *trial_arg)
{
    uint32_t trial;
    cer_error err;

    if (!to_number(trial_arg, &trial))
        return NULL;
    return none_or_raise(
        self, cer_schedule_forget_trial(schedule_of(self), trial, &err), &err);
}

PyDoc_STRVAR(
    hold_trial_doc,
    "hold_trial(trial)\n--\n\n"
    "Pause a trial until it is released; its running unit finishes first.");

static PyObject *
hold_trial(PyObject *self, PyObject *trial_arg)
{
    uint32_t trial;
    cer_error err;

    if (!to_number(trial_arg, &trial))
        return NULL;
    return none_or_raise(
        self, cer_schedule_hold_trial(schedule_of(self), trial, &err), &err);
}

PyDoc_STRVAR(release_trial_doc, "release_trial(trial)\n--\n\n"
                                "Continue a held trial from its position.");

static PyObject *
release_trial(PyObject *self, PyObject *trial_arg)
{
    uint32_t trial;
    cer_error err;

    if (!to_number(trial_arg, &trial))
        return NULL;
    return none_or_raise(
        self, cer_schedule_release_trial(schedule_of(self), trial, &err), &err);
}

PyDoc_STRVAR(
    rewind_trial_doc,
    "rewind_trial(trial, *, epoch, step)\n--\n\n"
    "Move a trial that is not running back to an earlier unit, because\n"
    "its later state is lost.");

static PyObject *
rewind_trial(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"trial", "epoch", "step", NULL};
    PyObject *trial_arg, *epoch_arg, *step_arg;
    uint32_t trial, epoch, step;
    cer_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$OO:rewind_trial", names,
                                     &trial_arg, &epoch_arg, &step_arg) ||
        !to_number(trial_arg, &trial) || !to_number(epoch_arg, &epoch) ||
        !to_number(step_arg, &step))
        return NULL;
    return none_or_raise(
        self,
        cer_schedule_rewind_trial(schedule_of(self), trial, epoch, step, &err),
        &err);
}

PyDoc_STRVAR(
    trial_status_doc,
    "trial_status(trial)\n--\n\n"
    "Return 'ready', 'running', 'waiting' (its epochs are done, or it is\n"
    "held) or 'dropped'.");

static PyObject *
trial_status(PyObject *self, PyObject *trial_arg)
{
    static const char *const names[] = {
        [CER_TRIAL_READY] = "ready",
        [CER_TRIAL_RUNNING] = "running",
        [CER_TRIAL_WAITING] = "waiting",
        [CER_TRIAL_DROPPED] = "dropped",
    };
    cer_trial_status status = CER_TRIAL_DROPPED;
    uint32_t trial;
    cer_error err;

    if (!to_number(trial_arg, &trial))
        return NULL;
    if (cer_schedule_status(schedule_of(self), trial, &status, &err) != CER_OK)
        return core_raise(core_state_of(self), &err);
    return PyUnicode_FromString(names[status]);
}

PyDoc_STRVAR(trial_position_doc,
             "trial_position(trial)\n--\n\n"
             "Return (epoch, step, attempt) of the next or running unit.");

static PyObject *
trial_position(PyObject *self, PyObject *trial_arg)
{
    cer_unit unit = {0};
    uint32_t trial;
    cer_error err;

    if (!to_number(trial_arg, &trial))
        return NULL;
    if (cer_schedule_position(schedule_of(self), trial, &unit, &err) != CER_OK)
        return core_raise(core_state_of(self), &err);
    return Py_BuildValue("(III)", unit.epoch, unit.step, unit.attempt);
}

/* --- steps ---------------------------------------------------------------- */

PyDoc_STRVAR(next_doc,
             "next(now)\n--\n\n"
             "Return the next command, or None when nothing can start now:\n"
             "('run', worker, trial, epoch, step, shard, attempt) or\n"
             "('load', worker, shard). step == shards and shard -1 is the\n"
             "validation unit.");

static PyObject *
next(PyObject *self, PyObject *now_arg)
{
    double now = PyFloat_AsDouble(now_arg);
    cer_command command;
    const cer_unit *unit = &command.unit;

    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    if (!cer_schedule_next(schedule_of(self), now, &command))
        Py_RETURN_NONE;
    if (command.kind == CER_COMMAND_LOAD)
        return Py_BuildValue("(sIL)", "load", command.worker,
                             (long long)unit->shard);
    return Py_BuildValue("(sIIIILI)", "run", command.worker, unit->trial,
                         unit->epoch, unit->step, (long long)unit->shard,
                         unit->attempt);
}

typedef cer_status (*event_function)(cer_schedule *schedule, uint32_t worker,
                                     double now, cer_unit *unit,
                                     cer_error *err);

static PyObject *
event(PyObject *self, PyObject *const *args, Py_ssize_t n, const char *name,
      event_function function)
{
    uint32_t worker;
    double now;
    cer_unit unit;
    cer_error err;

    if (to_event(args, n, name, &worker, &now) < 0)
        return NULL;
    if (function(schedule_of(self), worker, now, &unit, &err) != CER_OK)
        return core_raise(core_state_of(self), &err);
    return Py_BuildValue("(III)", unit.trial, unit.epoch, unit.step);
}

PyDoc_STRVAR(
    unit_done_doc,
    "unit_done(worker, now, /)\n--\n\n"
    "Mark the worker's unit as done; return its (trial, epoch, step).");

static PyObject *
unit_done(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    return event(self, args, n, "unit_done", cer_schedule_unit_done);
}

PyDoc_STRVAR(
    unit_continued_doc,
    "unit_continued(worker, now, /)\n--\n\n"
    "Mark the worker's unit as done and the trial's next unit as begun on\n"
    "the same worker; return (trial, epoch, step) of the unit that is done.");

static PyObject *
unit_continued(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    return event(self, args, n, "unit_continued", cer_schedule_unit_continued);
}

PyDoc_STRVAR(
    next_here_doc,
    "next_here(worker)\n--\n\n"
    "Return (epoch, step, shard) of the unit with which the worker\n"
    "should go on when its running unit is done: the trial's next one,\n"
    "of the same epoch. None if it should wait for commands.");

static PyObject *
next_here(PyObject *self, PyObject *worker_arg)
{
    cer_unit unit = {0};
    uint32_t worker;
    bool stays;
    cer_error err;

    if (!to_number(worker_arg, &worker))
        return NULL;
    if (cer_schedule_next_here(schedule_of(self), worker, &stays, &unit,
                               &err) != CER_OK)
        return core_raise(core_state_of(self), &err);
    if (!stays)
        Py_RETURN_NONE;
    return Py_BuildValue("(IIL)", unit.epoch, unit.step, (long long)unit.shard);
}

PyDoc_STRVAR(
    unit_failed_doc,
    "unit_failed(worker, now, /)\n--\n\n"
    "Mark the unit as failed or lost, to run again with the next attempt;\n"
    "return its (trial, epoch, step).");

static PyObject *
unit_failed(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    return event(self, args, n, "unit_failed", cer_schedule_unit_failed);
}

PyDoc_STRVAR(
    remaining_doc,
    "remaining()\n--\n\n"
    "Return the seconds that one worker would need for all remaining\n"
    "units, counting running ones in full; None until a unit has been\n"
    "timed.");

static PyObject *
remaining(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    bool seconds;
    double work = cer_schedule_remaining(schedule_of(self), &seconds);

    if (!seconds && work > 0.0)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(work);
}

/* --- properties ----------------------------------------------------------- */

static PyObject *
get_idle_workers(PyObject *self, void *Py_UNUSED(closure))
{
    cer_schedule *schedule = schedule_of(self);
    PyObject *result = PyList_New(0);

    for (uint32_t i = 0; result != NULL && i < cer_schedule_workers(schedule);
         i++) {
        PyObject *worker;

        if (!cer_schedule_idle(schedule, i))
            continue;
        worker = PyLong_FromUnsignedLong(i);
        if (worker == NULL || PyList_Append(result, worker) < 0)
            Py_CLEAR(result);
        Py_XDECREF(worker);
    }
    return result;
}

static PyObject *
get_finished(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(cer_schedule_finished(schedule_of(self)));
}

static PyObject *
get_nbytes(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(cer_schedule_bytes(schedule_of(self)));
}

/* --- the type ------------------------------------------------------------- */

static PyMethodDef schedule_methods[] = {
    {"add_worker", add_worker, METH_O, add_worker_doc},
    {"remove_worker", (PyCFunction)(void (*)(void))remove_worker, METH_FASTCALL,
     remove_worker_doc},
    {"set_holders", (PyCFunction)(void (*)(void))set_holders,
     METH_VARARGS | METH_KEYWORDS, set_holders_doc},
    {"live", live, METH_O, live_doc},
    {"forget_live", (PyCFunction)(void (*)(void))forget_live,
     METH_VARARGS | METH_KEYWORDS, forget_live_doc},
    {"add_trial", (PyCFunction)(void (*)(void))add_trial,
     METH_VARARGS | METH_KEYWORDS, add_trial_doc},
    {"extend_trial", (PyCFunction)(void (*)(void))extend_trial,
     METH_VARARGS | METH_KEYWORDS, extend_trial_doc},
    {"drop_trial", drop_trial, METH_O, drop_trial_doc},
    {"forget_trial", forget_trial, METH_O, forget_trial_doc},
    {"hold_trial", hold_trial, METH_O, hold_trial_doc},
    {"release_trial", release_trial, METH_O, release_trial_doc},
    {"rewind_trial", (PyCFunction)(void (*)(void))rewind_trial,
     METH_VARARGS | METH_KEYWORDS, rewind_trial_doc},
    {"trial_status", trial_status, METH_O, trial_status_doc},
    {"trial_position", trial_position, METH_O, trial_position_doc},
    {"next", next, METH_O, next_doc},
    {"unit_done", (PyCFunction)(void (*)(void))unit_done, METH_FASTCALL,
     unit_done_doc},
    {"unit_continued", (PyCFunction)(void (*)(void))unit_continued,
     METH_FASTCALL, unit_continued_doc},
    {"next_here", next_here, METH_O, next_here_doc},
    {"unit_failed", (PyCFunction)(void (*)(void))unit_failed, METH_FASTCALL,
     unit_failed_doc},
    {"remaining", remaining, METH_NOARGS, remaining_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef schedule_properties[] = {
    {"idle_workers", get_idle_workers, NULL, "Numbers of the idle workers.",
     NULL},
    {"finished", get_finished, NULL, "True when no trial is ready or running.",
     NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of memory used.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot schedule_slots[] = {
    {Py_tp_doc, (void *)schedule_doc},   {Py_tp_new, schedule_new},
    {Py_tp_dealloc, schedule_dealloc},   {Py_tp_methods, schedule_methods},
    {Py_tp_getset, schedule_properties}, {0, NULL},
};

static PyType_Spec schedule_spec = {
    .name = "cerebro._core.Schedule",
    .basicsize = sizeof(schedule_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = schedule_slots,
};

int
core_register_schedule(PyObject *module)
{
    core_state *state = core_state_of_module(module);

    return core_add_type(module, &schedule_spec, &state->schedule_type);
}
