/* py_replay.c -- Replay: the calls of a recorded step, with its inputs, the
 * numbers that change with every step, and its metrics.
 *
 * Tensors are addresses here; the caller keeps their memory alive. */
#define NO_IMPORT_ARRAY
#include "py_replay.h"

#include <structmember.h>

#include "optimizer_numbers.h"
#include "py_elementwise.h"
#include "py_matmul.h"
#include "py_reductions.h"
#include "tensor.h"

typedef struct replay_number {
    cer_number_formula formula;
    double lr, beta;
    const float *steps; /* a tensor: steps taken so far */
    void *target;
    cer_dtype dtype; /* of the target */
} replay_number;

typedef struct replay_call {
    PyObject *run, *args, *kwargs; /* kwargs may be NULL */
    int (*native)(PyObject *run);  /* NULL: `run` is called from Python */
} replay_call;

typedef struct replay_object {
    PyObject_HEAD
    size_t n_inputs, n_calls, n_numbers, n_metrics;
    cer_tensor *inputs;
    replay_call *calls;
    replay_number *numbers;
    py_replay_metric *metrics;
    PyObject *context;       /* makes the context manager in which calls run */
    PyObject *enter, *leave; /* the names of its methods */
    Py_ssize_t runs;
    Py_ssize_t most; /* with so many runs, no batch fits */
    char failed;     /* whether a run has raised an exception */
} replay_object;

/* --- running ---------------------------------------------------------------
 */

bool
py_replay_are_alike(const cer_tensor *ones, const cer_tensor *twos, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const cer_tensor *one = &ones[i], *two = &twos[i];
        size_t sizes = (size_t)two->ndim * sizeof two->shape[0];

        if (one->dtype != two->dtype || one->ndim != two->ndim ||
            memcmp(one->shape, two->shape, sizes) != 0 ||
            memcmp(one->strides, two->strides, sizes) != 0)
            return false;
    }
    return true;
}

bool
py_replay_fits(const core_state *core, PyObject *object, const cer_batch *batch)
{
    const replay_object *self = (const replay_object *)object;

    return Py_TYPE(object) == core->replay_type && self->runs < self->most &&
           batch->n_tensors == self->n_inputs &&
           py_replay_are_alike(batch->tensors, self->inputs, self->n_inputs);
}

static void
set_number(const replay_number *number)
{
    double value = cer_number(number->formula, number->lr, number->beta,
                              (double)*number->steps + 1);
    float rounded = (float)value;

    if (number->dtype == CER_F32)
        memcpy(number->target, &rounded, sizeof rounded);
    else
        memcpy(number->target, &value, sizeof value);
}

static int
run_call(const replay_call *call)
{
    PyObject *result;

    if (call->native != NULL)
        return call->native(call->run);
    result = PyObject_Call(call->run, call->args, call->kwargs);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int
run_calls(void *object)
{
    const replay_object *self = object;
    int result = 0;

    for (size_t i = 0; i < self->n_calls && result == 0; i++)
        result = run_call(&self->calls[i]);
    return result;
}

int
py_replay_in_context(PyObject *make, PyObject *enter, PyObject *leave,
                     int (*run)(void *of), void *of)
{
    PyObject *context = PyObject_CallNoArgs(make);
    PyObject *entered = NULL, *left, *type, *value, *traceback;
    PyObject *leaving[] = {context, Py_None, Py_None, Py_None};
    int result;

    if (context == NULL)
        return -1;
    entered = PyObject_CallMethodNoArgs(context, enter);
    if (entered == NULL) {
        Py_DECREF(context);
        return -1;
    }
    result = run(of);
    PyErr_Fetch(&type, &value, &traceback);
    left = PyObject_VectorcallMethod(leave, leaving, 4, NULL);
    if (left == NULL)
        result = -1;
    if (type != NULL) { /* the first failure is the one to tell */
        PyErr_Clear();
        PyErr_Restore(type, value, traceback);
    }
    Py_XDECREF(left);
    Py_DECREF(entered);
    Py_DECREF(context);
    return result;
}

int
py_replay_run(PyObject *object, const cer_batch *batch)
{
    replay_object *self = (replay_object *)object;

    for (size_t i = 0; i < self->n_inputs; i++) {
        size_t bytes = cer_tensor_bytes(&self->inputs[i]);

        if (bytes != 0)
            memcpy(self->inputs[i].data, batch->tensors[i].data, bytes);
    }
    for (size_t i = 0; i < self->n_numbers; i++)
        set_number(&self->numbers[i]);
    self->runs++;
    if (py_replay_in_context(self->context, self->enter, self->leave, run_calls,
                             self) < 0) {
        self->failed = 1;
        return -1;
    }
    return 0;
}

static double
read_value(const py_replay_value *value)
{
    double number = value->number;

    if (value->data != NULL)
        (void)cer_metric_read(value->dtype, value->data, &number);
    return number;
}

int
py_replay_measure(PyObject *object, cer_metrics *metrics, int64_t rows)
{
    const replay_object *self = (const replay_object *)object;

    for (size_t i = 0; i < self->n_metrics; i++) {
        const py_replay_metric *metric = &self->metrics[i];
        Py_ssize_t length;
        const char *name = PyUnicode_AsUTF8AndSize(metric->name, &length);
        double weight =
            metric->weighted ? read_value(&metric->weight) : (double)rows;
        cer_error err = {0};

        if (name == NULL)
            return -1;
        if (cer_metrics_add(metrics, name, (size_t)length,
                            read_value(&metric->value), weight,
                            &err) != CER_OK) {
            core_raise(core_state_of(object), &err);
            return -1;
        }
    }
    return 0;
}

/* --- making ----------------------------------------------------------------
 */

/* Reads a type that one number can be read from. */
static int
read_dtype(const char *name, cer_dtype *out)
{
    if (cer_dtype_from_name(name, out))
        return 0;
    PyErr_Format(PyExc_ValueError, "unknown element type '%s'", name);
    return -1;
}

static int
read_sizes(PyObject *sizes, int32_t ndim, int64_t *out)
{
    if (PyTuple_GET_SIZE(sizes) != ndim) {
        PyErr_SetString(PyExc_ValueError, "a shape and strides must match");
        return -1;
    }
    for (int32_t i = 0; i < ndim; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
        if (out[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

int
py_replay_read_input(PyObject *item, void *out)
{
    cer_tensor *input = out;
    unsigned long long address;
    PyObject *shape, *strides;
    const char *dtype;

    if (!PyArg_ParseTuple(item, "KsO!O!", &address, &dtype, &PyTuple_Type,
                          &shape, &PyTuple_Type, &strides) ||
        read_dtype(dtype, &input->dtype) < 0)
        return -1;
    if (PyTuple_GET_SIZE(shape) > CER_TENSOR_MAX_DIMS) {
        PyErr_SetString(PyExc_ValueError, "an input has too many dimensions");
        return -1;
    }
    input->data = (void *)(uintptr_t)address;
    input->ndim = (int32_t)PyTuple_GET_SIZE(shape);
    if (read_sizes(shape, input->ndim, input->shape) < 0)
        return -1;
    return read_sizes(strides, input->ndim, input->strides);
}

/* (callable, arguments, keywords or None) */
static int
read_a_call(PyObject *item, void *out)
{
    replay_call *call = out;
    PyObject *run, *args, *kwargs;

    if (!PyArg_ParseTuple(item, "OO!O", &run, &PyTuple_Type, &args, &kwargs))
        return -1;
    if (kwargs != Py_None && !PyDict_Check(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "keywords must be a dict or None");
        return -1;
    }
    call->run = Py_NewRef(run);
    call->args = Py_NewRef(args);
    call->kwargs = kwargs == Py_None ? NULL : Py_NewRef(kwargs);
    return 0;
}

/* (formula, lr, beta, address of the steps, address of the target, dtype) */
static int
read_number(PyObject *item, void *out)
{
    replay_number *number = out;
    unsigned long long steps, target;
    const char *formula, *dtype;

    if (!PyArg_ParseTuple(item, "sddKKs", &formula, &number->lr, &number->beta,
                          &steps, &target, &dtype) ||
        read_dtype(dtype, &number->dtype) < 0)
        return -1;
    if (!cer_number_find(formula, &number->formula) ||
        (number->dtype != CER_F32 && number->dtype != CER_F64)) {
        PyErr_Format(PyExc_ValueError, "unknown formula '%s' of type %s",
                     formula, dtype);
        return -1;
    }
    number->steps = (const float *)(uintptr_t)steps;
    number->target = (void *)(uintptr_t)target;
    return 0;
}

/* A number or (address, dtype) */
static int
read_a_value(PyObject *item, py_replay_value *value)
{
    unsigned long long address;
    const char *dtype;

    if (!PyTuple_Check(item)) {
        value->number = PyFloat_AsDouble(item);
        return value->number == -1 && PyErr_Occurred() ? -1 : 0;
    }
    if (!PyArg_ParseTuple(item, "Ks", &address, &dtype) ||
        read_dtype(dtype, &value->dtype) < 0)
        return -1;
    if (value->dtype == CER_C64) {
        PyErr_SetString(PyExc_ValueError, "a metric cannot be complex");
        return -1;
    }
    value->data = (const void *)(uintptr_t)address;
    return 0;
}

int
py_replay_read_metric(PyObject *item, void *out)
{
    py_replay_metric *metric = out;
    PyObject *name, *value, *weight;

    if (!PyArg_ParseTuple(item, "UOO", &name, &value, &weight) ||
        read_a_value(value, &metric->value) < 0)
        return -1;
    metric->weighted = weight != Py_None;
    if (metric->weighted && read_a_value(weight, &metric->weight) < 0)
        return -1;
    metric->name = Py_NewRef(name);
    return 0;
}

int
py_replay_read_list(PyObject *list, size_t size,
                    int (*read)(PyObject *item, void *out), void *array,
                    size_t *n)
{
    PyObject *tuple = core_tuple(list, "a Replay needs lists of tuples");
    char *items;
    int result = -1;

    if (tuple == NULL)
        return -1;
    items = cer_calloc((size_t)PyTuple_GET_SIZE(tuple) + 1, size);
    memcpy(array, &items, sizeof items);
    if (items == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; *n < (size_t)PyTuple_GET_SIZE(tuple); (*n)++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, (Py_ssize_t)*n);

        if (!PyTuple_Check(item)) {
            PyErr_SetString(PyExc_TypeError, "a Replay needs lists of tuples");
            goto done;
        }
        if (read(item, items + *n * size) < 0)
            goto done;
    }
    result = 0;

done:
    Py_DECREF(tuple);
    return result;
}

static int
make(replay_object *self, PyObject *lists[4], PyObject *context)
{
    const core_state *core = core_state_of((PyObject *)self);

    if (py_replay_read_list(lists[0], sizeof *self->inputs,
                            py_replay_read_input, &self->inputs,
                            &self->n_inputs) < 0 ||
        py_replay_read_list(lists[1], sizeof *self->calls, read_a_call,
                            &self->calls, &self->n_calls) < 0 ||
        py_replay_read_list(lists[2], sizeof *self->numbers, read_number,
                            &self->numbers, &self->n_numbers) < 0 ||
        py_replay_read_list(lists[3], sizeof *self->metrics,
                            py_replay_read_metric, &self->metrics,
                            &self->n_metrics) < 0)
        return -1;
    for (size_t i = 0; i < self->n_calls; i++) {
        replay_call *call = &self->calls[i];

        if (py_elementwise_check(core, call->run))
            call->native = py_elementwise_run;
        else if (py_matmul_check(core, call->run))
            call->native = py_matmul_run;
        else if (py_reduction_check(core, call->run))
            call->native = py_reduction_run;
    }
    self->most = PY_SSIZE_T_MAX;
    self->context = Py_NewRef(context);
    self->enter = PyUnicode_InternFromString("__enter__");
    self->leave = PyUnicode_InternFromString("__exit__");
    return self->enter == NULL || self->leave == NULL ? -1 : 0;
}

static PyObject *
replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"inputs",  "calls",   "numbers",
                               "metrics", "context", NULL};
    PyObject *lists[4], *context;
    replay_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO:Replay", keywords,
                                     &lists[0], &lists[1], &lists[2], &lists[3],
                                     &context))
        return NULL;
    self = (replay_object *)type->tp_alloc(type, 0);
    if (self != NULL && make(self, lists, context) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
replay_traverse(PyObject *object, visitproc visit, void *arg)
{
    replay_object *self = (replay_object *)object;

    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->n_calls; i++) {
        Py_VISIT(self->calls[i].run);
        Py_VISIT(self->calls[i].args);
        Py_VISIT(self->calls[i].kwargs);
    }
    Py_VISIT(self->context);
    return 0;
}

static int
replay_clear(PyObject *object)
{
    replay_object *self = (replay_object *)object;

    for (size_t i = 0; i < self->n_calls; i++) {
        Py_CLEAR(self->calls[i].run);
        Py_CLEAR(self->calls[i].args);
        Py_CLEAR(self->calls[i].kwargs);
    }
    self->n_calls = 0;
    Py_CLEAR(self->context);
    return 0;
}

static void
replay_dealloc(PyObject *object)
{
    replay_object *self = (replay_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    replay_clear(object);
    for (size_t i = 0; i < self->n_metrics; i++)
        Py_XDECREF(self->metrics[i].name);
    Py_XDECREF(self->enter);
    Py_XDECREF(self->leave);
    cer_free(self->inputs);
    cer_free(self->calls);
    cer_free(self->numbers);
    cer_free(self->metrics);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef replay_members[] = {
    {"runs", T_PYSSIZET, offsetof(replay_object, runs), 0,
     "Steps taken so far."},
    {"most", T_PYSSIZET, offsetof(replay_object, most), 0,
     "The number of runs from which on run_unit calls `step` instead."},
    {"failed", T_BOOL, offsetof(replay_object, failed), 0,
     "Whether a run has raised an exception."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot replay_slots[] = {
    {Py_tp_doc,
     "Replay(inputs, calls, numbers, metrics, context)\n--\n\n"
     "A recorded step, for run_unit.\n\n"
     "Tensors are addresses of memory that must outlive this object.\n"
     "`inputs`: (address, dtype, shape, strides) in the order of a batch's\n"
     "columns. `calls`: (callable, arguments, keywords or None), within\n"
     "context(). `numbers`: (formula, lr, beta, steps, target, dtype).\n"
     "`metrics`: (name, value, weight or None); a value is a number or\n"
     "(address, dtype)."},
    {Py_tp_new, replay_new},
    {Py_tp_dealloc, replay_dealloc},
    {Py_tp_traverse, replay_traverse},
    {Py_tp_clear, replay_clear},
    {Py_tp_members, replay_members},
    {0, NULL},
};

static PyType_Spec replay_spec = {
    .name = "cerebro._core.Replay",
    .basicsize = sizeof(replay_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = replay_slots,
};

PyDoc_STRVAR(step_number_doc,
             "step_number(formula, lr, beta, t, /)\n--\n\n"
             "Return a number as a Replay computes it for step t.");

static PyObject *
step_number(PyObject *Py_UNUSED(module), PyObject *args)
{
    cer_number_formula formula;
    double lr, beta, t;
    const char *name;

    if (!PyArg_ParseTuple(args, "sddd:step_number", &name, &lr, &beta, &t))
        return NULL;
    if (!cer_number_find(name, &formula)) {
        PyErr_Format(PyExc_ValueError, "unknown formula '%s'", name);
        return NULL;
    }
    return PyFloat_FromDouble(cer_number(formula, lr, beta, t));
}

static PyMethodDef functions[] = {
    {"step_number", step_number, METH_VARARGS, step_number_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_replay(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    return core_add_type(module, &replay_spec,
                         &core_state_of_module(module)->replay_type);
}
