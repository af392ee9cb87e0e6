/* py_lanes.c -- GraphReplay, RunMetrics, and a run of GraphReplays.
 *
 * Tensors are addresses here; the caller keeps their memory alive. */
#define NO_IMPORT_ARRAY
#include "py_lanes.h"

#include <structmember.h>

#include "py_device.h"
#include "py_loader.h"
#include "py_replay.h"

enum {
    SLICE_MS = 50, /* between two looks for signals */
    SLICE_BATCHES = 16
};

typedef struct graph_replay {
    PyObject_HEAD
    PyObject *device;
    void *graph;
    PyObject *launch; /* a callable instead of the graph, or NULL */
    size_t n_inputs, n_metrics, n_rates, n_values;
    cer_tensor *inputs;
    void **addresses; /* theirs */
    py_replay_metric *metrics;
    cer_lane_value *values; /* of the metrics, those in device memory */
    void **rates;
    PyObject *prepare; /* or None */
    PyObject *context; /* makes the context manager around a run */
    Py_ssize_t runs;
} graph_replay;

/* --- the numbers of a run --------------------------------------------------
 */

typedef struct run_metrics {
    PyObject_HEAD
    PyObject *names; /* a tuple */
    Py_ssize_t n;    /* batches */
    int64_t *rows;   /* of each */
    double *numbers; /* of each: value and weight of every metric */
} run_metrics;

bool
py_run_metrics_check(const core_state *core, PyObject *object)
{
    return Py_TYPE(object) == core->run_metrics_type;
}

Py_ssize_t
py_run_metrics_batches(PyObject *object)
{
    return ((run_metrics *)object)->n;
}

int
py_run_metrics_add(PyObject *object, Py_ssize_t batch, cer_metrics *metrics,
                   int64_t *rows)
{
    const run_metrics *self = (const run_metrics *)object;
    Py_ssize_t n = PyTuple_GET_SIZE(self->names);
    const double *numbers = self->numbers + 2 * n * batch;

    *rows = self->rows[batch];
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t length;
        const char *name =
            PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(self->names, i), &length);
        cer_error err = {0};

        if (name == NULL)
            return -1;
        if (cer_metrics_add(metrics, name, (size_t)length, numbers[2 * i],
                            numbers[2 * i + 1], &err) != CER_OK) {
            core_raise(core_state_of(object), &err);
            return -1;
        }
    }
    return 0;
}

static PyObject *
new_run_metrics(const core_state *core, const graph_replay *replay, size_t n)
{
    PyTypeObject *type = core->run_metrics_type;
    run_metrics *self = (run_metrics *)type->tp_alloc(type, 0);

    if (self == NULL)
        return NULL;
    self->n = (Py_ssize_t)n;
    self->rows = cer_calloc(n, sizeof *self->rows);
    self->numbers =
        cer_calloc(n * 2 * replay->n_metrics + 1, sizeof *self->numbers);
    self->names = PyTuple_New((Py_ssize_t)replay->n_metrics);
    if (self->names == NULL || self->rows == NULL || self->numbers == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (size_t i = 0; i < replay->n_metrics; i++)
        PyTuple_SET_ITEM(self->names, (Py_ssize_t)i,
                         Py_NewRef(replay->metrics[i].name));
    return (PyObject *)self;
}

static void
run_metrics_dealloc(PyObject *object)
{
    run_metrics *self = (run_metrics *)object;
    PyTypeObject *type = Py_TYPE(object);

    Py_XDECREF(self->names);
    cer_free(self->rows);
    cer_free(self->numbers);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef run_metrics_members[] = {
    {"batches", T_PYSSIZET, offsetof(run_metrics, n), READONLY,
     "Batches of the run."},
    {"names", T_OBJECT, offsetof(run_metrics, names), READONLY,
     "The metrics' names."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot run_metrics_slots[] = {
    {Py_tp_doc, "The metrics of batches that run_unit took by GraphReplays."},
    {Py_tp_dealloc, run_metrics_dealloc},
    {Py_tp_members, run_metrics_members},
    {0, NULL},
};

static PyType_Spec run_metrics_spec = {
    .name = "cerebro._core.RunMetrics",
    .basicsize = sizeof(run_metrics),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = run_metrics_slots,
};

/* --- a run -----------------------------------------------------------------
 */

typedef struct lane_run {
    core_state *core;
    PyObject *loader;
    PyObject *replays; /* a tuple: those of the list that may be taken */
    cer_lane *lane;
    cer_lane_run run;
    cer_lane_graph *graphs; /* one for each replay */
    uint32_t *taken;        /* for each batch, the replay */
    PyObject *metrics;      /* a RunMetrics */
    Py_buffer rates;
    uint64_t *kept;
    size_t done;
} lane_run;

static graph_replay *
replay_at(const lane_run *r, size_t i)
{
    return (graph_replay *)PyTuple_GET_ITEM(r->replays, (Py_ssize_t)i);
}

static size_t
count_replays(const lane_run *r)
{
    return (size_t)PyTuple_GET_SIZE(r->replays);
}

static bool
same_value(const py_replay_value *a, const py_replay_value *b)
{
    return (a->data == NULL) == (b->data == NULL);
}

/* Whether two can take batches of one run. */
static bool
belong_together(const graph_replay *a, const graph_replay *b)
{
    bool same = a->n_metrics == b->n_metrics && a->n_rates == b->n_rates &&
                a->prepare == b->prepare && a->context == b->context;

    for (size_t i = 0; same && i < a->n_rates; i++)
        same = a->rates[i] == b->rates[i];
    for (size_t i = 0; same && i < a->n_metrics; i++) {
        const py_replay_metric *one = &a->metrics[i], *two = &b->metrics[i];

        same = one->weighted == two->weighted &&
               same_value(&one->value, &two->value) &&
               same_value(&one->weight, &two->weight) &&
               PyUnicode_Compare(one->name, two->name) == 0;
    }
    return same;
}

/* Whether a replay takes batches of this loader that have as many rows as its
 * inputs. 1 or 0; -1: an exception. */
static int
fits_loader(const lane_run *r, const graph_replay *replay,
            const cer_device_loader *loader)
{
    const cer_loader *plan =
        cer_device_loader_plan((cer_device_loader *)(uintptr_t)loader);
    cer_device *ours = py_device_get(r->core, replay->device);
    cer_device *theirs = cer_device_loader_device(loader);
    size_t n = cer_loader_tensors(plan);
    cer_tensor *shapes;
    int fits;

    if (ours == NULL)
        return -1;
    if (cer_device_kind_of(ours) != cer_device_kind_of(theirs) ||
        cer_device_index(ours) != cer_device_index(theirs)) {
        PyErr_Format(PyExc_ValueError,
                     "a GraphReplay for %s cannot take batches on %s",
                     cer_device_name(ours), cer_device_name(theirs));
        return -1;
    }
    if (n != replay->n_inputs || replay->inputs[0].ndim == 0)
        return 0;
    shapes = PyMem_Calloc(n, sizeof *shapes);
    if (shapes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    fits = cer_device_loader_shapes(loader, (size_t)replay->inputs[0].shape[0],
                                    shapes) &&
           py_replay_are_alike(shapes, replay->inputs, n);
    PyMem_Free(shapes);
    return fits;
}

/* Takes those of the list that fit the loader and belong to the first of them.
 * -1: an exception. */
static int
choose_replays(lane_run *r, PyObject *list, const cer_device_loader *loader)
{
    PyObject *chosen = PyList_New(0);

    for (Py_ssize_t i = 0; chosen != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *replay = PyList_GET_ITEM(list, i);
        int fits;

        if (Py_TYPE(replay) != r->core->graph_replay_type)
            continue;
        fits = fits_loader(r, (graph_replay *)replay, loader);
        if (fits > 0 && PyList_GET_SIZE(chosen) != 0)
            fits = belong_together((graph_replay *)PyList_GET_ITEM(chosen, 0),
                                   (graph_replay *)replay);
        if (fits < 0 || (fits > 0 && PyList_Append(chosen, replay) < 0))
            Py_CLEAR(chosen);
    }
    if (chosen == NULL)
        return -1;
    r->replays = PyList_AsTuple(chosen);
    Py_DECREF(chosen);
    return r->replays == NULL ? -1 : 0;
}

/* Counts the next batches that have a replay, and notes their replays. */
static int
count_batches(lane_run *r, const cer_device_loader *loader)
{
    cer_device_ahead ahead = cer_device_loader_look_ahead(loader);
    size_t n_replays = count_replays(r), n_rows;
    bool resident;

    r->taken = PyMem_Calloc(CER_LANE_MOST, sizeof *r->taken);
    if (r->taken == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    while (r->run.n < CER_LANE_MOST &&
           cer_device_loader_look(loader, &ahead, &n_rows, &resident)) {
        uint32_t i = 0;

        while (i < n_replays &&
               (size_t)replay_at(r, i)->inputs[0].shape[0] != n_rows)
            i++;
        if (i == n_replays)
            break;
        r->taken[r->run.n++] = i;
    }
    return 0;
}

/* --- the rates before each launch -------------------------------------------
 */

static int
refuse_rates(size_t n, size_t n_rates)
{
    PyErr_Format(PyExc_ValueError,
                 "prepare(%zu) must return a C-contiguous buffer of %zu x %zu "
                 "float32 values, None, or a smaller number of batches",
                 n, n, n_rates);
    return -1;
}

/* Reads a buffer of bytes or float32. */
static int
take_rates(lane_run *r, PyObject *made, size_t n_rates)
{
    size_t bytes = r->run.n * n_rates * sizeof(float);
    const char *format;

    if (PyObject_GetBuffer(made, &r->rates, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) <
        0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
        return refuse_rates(r->run.n, n_rates);
    }
    format = r->rates.format == NULL ? "B" : r->rates.format;
    if ((size_t)r->rates.len != bytes ||
        (strcmp(format, "f") != 0 && strcmp(format, "B") != 0) ||
        (uintptr_t)r->rates.buf % sizeof(float) != 0)
        return refuse_rates(r->run.n, n_rates);
    r->run.rate_values = r->rates.buf;
    return 0;
}

/* Asks for the rates of the run, which may become shorter. */
static int
prepare(lane_run *r)
{
    const graph_replay *first = replay_at(r, 0);

    while (first->prepare != Py_None && r->run.n != 0) {
        PyObject *made =
            PyObject_CallFunction(first->prepare, "n", (Py_ssize_t)r->run.n);
        Py_ssize_t fewer;
        int result;

        if (made == NULL)
            return -1;
        if (!PyLong_Check(made)) {
            result = made == Py_None ? 0 : take_rates(r, made, first->n_rates);
            Py_DECREF(made);
            return result;
        }
        fewer = PyLong_AsSsize_t(made);
        Py_DECREF(made);
        if (fewer < 0 || (size_t)fewer >= r->run.n) {
            PyErr_Clear();
            return refuse_rates(r->run.n, first->n_rates);
        }
        r->run.n = (size_t)fewer; /* and their rates */
    }
    return 0;
}

/* --- driving ----------------------------------------------------------------
 */

static int
make_graphs(lane_run *r)
{
    const graph_replay *first = replay_at(r, 0);
    size_t n = count_replays(r);

    r->graphs = PyMem_Calloc(n, sizeof *r->graphs);
    r->kept = cer_calloc(r->run.n * first->n_values + 1, sizeof *r->kept);
    if (r->graphs == NULL || r->kept == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        const graph_replay *replay = replay_at(r, i);

        r->graphs[i] = (cer_lane_graph){
            .n_rows = (size_t)replay->inputs[0].shape[0],
            .graph = replay->graph,
            .inputs = replay->addresses,
            .values = replay->values,
        };
    }
    r->run.graphs = r->graphs;
    r->run.n_graphs = n;
    r->run.n_values = first->n_values;
    r->run.rates = first->rates;
    r->run.n_rates = first->n_rates;
    return 0;
}

/* Takes batches that any thread may not take, until Python is needed. */
static int
take_own(lane_run *r)
{
    size_t graph = 0;
    bool launched = true;
    PyObject *result;

    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; launched && i < SLICE_BATCHES &&
                    cer_lane_state_of(r->lane) == CER_LANE_OWNERS;
         i++)
        launched = cer_lane_take(r->lane, &graph);
    Py_END_ALLOW_THREADS
    if (launched)
        return 0;
    result = PyObject_CallNoArgs(replay_at(r, graph)->launch);
    if (result == NULL)
        return -1;
    Py_DECREF(result);
    Py_BEGIN_ALLOW_THREADS
    cer_lane_launched(r->lane);
    Py_END_ALLOW_THREADS
    return 0;
}

/* Until all work is on the stream. -1: an exception of Python code. */
static int
drive(lane_run *r)
{
    cer_lane_state state = cer_lane_state_of(r->lane);
    int result = 0;

    while (result == 0 && state != CER_LANE_QUEUED &&
           state != CER_LANE_FAILED) {
        if (state == CER_LANE_OWNERS) {
            result = take_own(r);
            state = cer_lane_state_of(r->lane);
        } else {
            Py_BEGIN_ALLOW_THREADS
            state = cer_lanes_drive(r->core->lanes, r->lane, SLICE_MS);
            Py_END_ALLOW_THREADS
        }
        if (result == 0)
            result = PyErr_CheckSignals();
    }
    return result;
}

static int
drive_and_end(void *run)
{
    lane_run *r = run;
    cer_error err = {0};
    cer_status status;
    int result;

    Py_BEGIN_ALLOW_THREADS
    status = cer_lane_begin(r->lane, &r->run, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK) {
        core_raise(r->core, &err);
        return -1;
    }
    result = drive(r);
    Py_BEGIN_ALLOW_THREADS
    cer_lanes_leave(r->core->lanes, r->lane);
    status = cer_lane_end(r->lane, r->kept, &r->done, &err);
    Py_END_ALLOW_THREADS
    if (result == 0 && status != CER_OK) {
        core_raise(r->core, &err);
        result = -1;
    }
    return result;
}

/* Drives the run within its context. */
static int
run_in_context(lane_run *r)
{
    PyObject *enter = PyUnicode_InternFromString("__enter__");
    PyObject *leave = PyUnicode_InternFromString("__exit__");
    int result = -1;

    if (enter != NULL && leave != NULL)
        result = py_replay_in_context(replay_at(r, 0)->context, enter, leave,
                                      drive_and_end, r);
    Py_XDECREF(enter);
    Py_XDECREF(leave);
    return result;
}

/* --- the whole --------------------------------------------------------------
 */

static double
read_number(const py_replay_value *value, const uint64_t **kept)
{
    double number = value->number;

    if (value->data != NULL)
        (void)cer_metric_read(value->dtype, (*kept)++, &number);
    return number;
}

/* Turns what the device kept into the run's metrics. */
static void
read_metrics(const lane_run *r)
{
    run_metrics *metrics = (run_metrics *)r->metrics;
    const uint64_t *kept = r->kept;
    double *out = metrics->numbers;

    for (size_t k = 0; k < r->run.n; k++) {
        const graph_replay *replay = replay_at(r, r->taken[k]);

        metrics->rows[k] = replay->inputs[0].shape[0];
        for (size_t i = 0; i < replay->n_metrics; i++) {
            const py_replay_metric *metric = &replay->metrics[i];

            *out++ = read_number(&metric->value, &kept);
            *out++ = metric->weighted ? read_number(&metric->weight, &kept)
                                      : (double)metrics->rows[k];
        }
    }
}

/* With the loader borrowed: as py_lanes_run. */
static int
run_batches(lane_run *r, const cer_device_loader *loader)
{
    int result;

    if (count_batches(r, loader) < 0 || prepare(r) < 0)
        return -1;
    if (r->run.n == 0)
        return 0;
    r->metrics = new_run_metrics(r->core, replay_at(r, 0), r->run.n);
    if (r->metrics == NULL || make_graphs(r) < 0)
        return -1;
    result = run_in_context(r);
    for (size_t k = 0; k < r->done; k++)
        replay_at(r, r->taken[k])->runs++;
    if (result < 0)
        return -1;
    read_metrics(r);
    return 1;
}

static int
make_lanes(core_state *core)
{
    cer_error err = {0};

    if (core->lanes != NULL || cer_lanes_new(&core->lanes, &err) == CER_OK)
        return 0;
    core_raise(core, &err);
    return -1;
}

static void
clear_run(lane_run *r)
{
    if (r->rates.obj != NULL)
        PyBuffer_Release(&r->rates);
    Py_XDECREF(r->replays);
    Py_XDECREF(r->metrics);
    PyMem_Free(r->graphs);
    PyMem_Free(r->taken);
    cer_free(r->kept);
}

int
py_lanes_run(core_state *core, PyObject *loader, PyObject *replays,
             cer_beat_page *page, PyObject **out)
{
    lane_run r = {.core = core, .loader = loader, .run.page = page};
    const cer_device_loader *there = py_loader_on_device(core, loader);
    size_t last_rows = 0;
    int result = -1;

    if (make_lanes(core) < 0 || choose_replays(&r, replays, there) < 0)
        goto done;
    result = count_replays(&r) == 0
                 ? 0
                 : py_loader_borrow(loader, &r.run.stream, &r.lane);
    if (result <= 0)
        goto done;
    result = run_batches(&r, there);
    if (r.done != 0)
        last_rows =
            (size_t)replay_at(&r, r.taken[r.done - 1])->inputs[0].shape[0];
    py_loader_give_back(loader, last_rows);
    if (result > 0)
        *out = Py_NewRef(r.metrics);

done:
    clear_run(&r);
    return result;
}

/* --- making -----------------------------------------------------------------
 */

static int
read_rates(graph_replay *self, PyObject *list)
{
    PyObject *tuple = core_tuple(list, "rates must be a list of addresses");
    size_t n;

    if (tuple == NULL)
        return -1;
    n = (size_t)PyTuple_GET_SIZE(tuple);
    self->rates = cer_calloc(n + 1, sizeof *self->rates);
    if (self->rates == NULL)
        PyErr_NoMemory();
    for (size_t i = 0; self->rates != NULL && i < n; i++) {
        self->rates[i] =
            PyLong_AsVoidPtr(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i));
        if (PyErr_Occurred())
            break;
        self->n_rates++;
    }
    Py_DECREF(tuple);
    return PyErr_Occurred() ? -1 : 0;
}

/* A handle, or a callable. */
static int
read_launch(graph_replay *self, PyObject *launch)
{
    if (PyCallable_Check(launch)) {
        self->launch = Py_NewRef(launch);
        return 0;
    }
    if (!PyLong_Check(launch)) {
        PyErr_Format(PyExc_TypeError,
                     "launch must be a graph's handle, an int, or a callable, "
                     "not %s",
                     Py_TYPE(launch)->tp_name);
        return -1;
    }
    self->graph = PyLong_AsVoidPtr(launch);
    if (self->graph == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "launch is 0, not a graph's handle");
    return self->graph == NULL ? -1 : 0;
}

static void
list_value(graph_replay *self, const py_replay_value *value)
{
    if (value->data != NULL)
        self->values[self->n_values++] =
            (cer_lane_value){value->data, cer_dtype_size(value->dtype)};
}

static int
list_addresses(graph_replay *self)
{
    self->addresses = cer_calloc(self->n_inputs + 1, sizeof *self->addresses);
    self->values = cer_calloc(2 * self->n_metrics + 1, sizeof *self->values);
    if (self->addresses == NULL || self->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->n_inputs; i++)
        self->addresses[i] = self->inputs[i].data;
    for (size_t i = 0; i < self->n_metrics; i++) {
        list_value(self, &self->metrics[i].value);
        list_value(self, &self->metrics[i].weight);
    }
    return 0;
}

static PyObject *
graph_replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device", "launch",  "inputs",  "metrics",
                               "rates",  "prepare", "context", NULL};
    PyObject *device, *launch, *inputs, *metrics, *rates, *ready, *context;
    graph_replay *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOO:GraphReplay",
                                     keywords, &device, &launch, &inputs,
                                     &metrics, &rates, &ready, &context) ||
        py_device_get(core_state_of_type(type), device) == NULL)
        return NULL;
    if (ready != Py_None && !PyCallable_Check(ready)) {
        PyErr_SetString(PyExc_TypeError, "prepare must be a callable or None");
        return NULL;
    }
    self = (graph_replay *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->device = Py_NewRef(device);
    self->prepare = Py_NewRef(ready);
    self->context = Py_NewRef(context);
    if (read_launch(self, launch) < 0 || read_rates(self, rates) < 0 ||
        py_replay_read_list(inputs, sizeof *self->inputs, py_replay_read_input,
                            &self->inputs, &self->n_inputs) < 0 ||
        py_replay_read_list(metrics, sizeof *self->metrics,
                            py_replay_read_metric, &self->metrics,
                            &self->n_metrics) < 0 ||
        list_addresses(self) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
graph_replay_traverse(PyObject *object, visitproc visit, void *arg)
{
    graph_replay *self = (graph_replay *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->launch);
    Py_VISIT(self->prepare);
    Py_VISIT(self->context);
    return 0;
}

/* A run holds its replays, so none of them is cleared during it. */
static int
graph_replay_clear(PyObject *object)
{
    graph_replay *self = (graph_replay *)object;

    Py_CLEAR(self->launch);
    Py_CLEAR(self->prepare);
    Py_CLEAR(self->context);
    return 0;
}

static void
graph_replay_dealloc(PyObject *object)
{
    graph_replay *self = (graph_replay *)object;
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    graph_replay_clear(object);
    Py_XDECREF(self->device);
    for (size_t i = 0; i < self->n_metrics; i++)
        Py_XDECREF(self->metrics[i].name);
    cer_free(self->inputs);
    cer_free(self->addresses);
    cer_free(self->metrics);
    cer_free(self->values);
    cer_free(self->rates);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMemberDef graph_replay_members[] = {
    {"runs", T_PYSSIZET, offsetof(graph_replay, runs), 0, "Launches so far."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot graph_replay_slots[] = {
    {Py_tp_doc,
     "GraphReplay(device, launch, inputs, metrics, rates, prepare, "
     "context)\n--\n\n"
     "A step in a CUDA graph, for run_unit.\n\n"
     "Tensors are addresses of device memory that must outlive this object.\n"
     "`launch`: the handle of a cudaGraphExec_t, or a callable that launches\n"
     "on the unit's stream. `inputs` and `metrics` are as a Replay's.\n"
     "`rates`: addresses of float32. prepare(n), or None, is called before n\n"
     "launches in succession: it returns n x len(rates) float32 values, None\n"
     "if they do not change, or a number m < n if only m batches can be taken\n"
     "now; then it is asked again for m. The launches are in context()."},
    {Py_tp_new, graph_replay_new},
    {Py_tp_dealloc, graph_replay_dealloc},
    {Py_tp_traverse, graph_replay_traverse},
    {Py_tp_clear, graph_replay_clear},
    {Py_tp_members, graph_replay_members},
    {0, NULL},
};

static PyType_Spec graph_replay_spec = {
    .name = "cerebro._core.GraphReplay",
    .basicsize = sizeof(graph_replay),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = graph_replay_slots,
};

int
core_register_lanes(PyObject *module)
{
    core_state *core = core_state_of_module(module);

    if (core_add_type(module, &run_metrics_spec, &core->run_metrics_type) < 0)
        return -1;
    return core_add_type(module, &graph_replay_spec, &core->graph_replay_type);
}
