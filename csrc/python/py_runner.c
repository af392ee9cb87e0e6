/* py_runner.c -- run_unit: one trial over one part of an epoch. Passes batches
 * to the user's model, sums metrics, counts for the beat, and stops on the
 * cancel flag. */
#define NO_IMPORT_ARRAY
#include "py_runner.h"

#include <structseq.h>
#include <time.h>

#include "py_exchange.h"
#include "py_lanes.h"
#include "py_loader.h"
#include "py_replay.h"
#include "runner.h"

enum { N_RESULTS = 5 }; /* fields of a UnitResult */

typedef struct runner {
    core_state *core;
    PyObject *loader;    /* has last_rows */
    PyObject *last_rows; /* the name "last_rows" */
    PyObject *batches;   /* its iterator */
    PyObject *step;
    PyObject *replays;   /* a list of Replay that `step` may add to, or NULL */
    PyObject *graphs;    /* the same of GraphReplay, on a device */
    PyObject *keep;      /* gets the RunMetrics of graphs; NULL: add them */
    cer_beat_page *page; /* or NULL */
    cer_metrics metrics;
    py_exchange exchange;
    int64_t n_batches, n_rows;
} runner;

/* --- values -------------------------------------------------------------- */
#define WANTED "a number, a tensor of one number or (mean, weight)"

static int
refuse_value(PyObject *name, PyObject *value)
{
    PyObject *shape = PyObject_GetAttrString(value, "shape");

    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear();
    if (shape == NULL)
        PyErr_Format(PyExc_TypeError,
                     "the metric '%S' must be " WANTED ", not %s", name,
                     Py_TYPE(value)->tp_name);
    else
        PyErr_Format(PyExc_TypeError,
                     "the metric '%S' must be " WANTED ", not %s of shape %S",
                     name, Py_TYPE(value)->tp_name, shape);
    Py_XDECREF(shape);
    return -1;
}

/* Reads the one element of a tensor in host memory. 1: read; 0: not such a
 * tensor, use the object's __float__; -1: an exception. */
static int
read_tensor(runner *r, PyObject *value, double *out)
{
    const py_source *source = py_exchange_find(&r->exchange, value);
    py_view view;
    int64_t elements = 1;
    bool read = false;

    if (source == NULL)
        return -1;
    if (source->kind != PY_KIND_NUMPY &&
        !(source->kind == PY_KIND_TORCH && source->api != NULL))
        return 0;
    if (py_exchange_view(source, value, &view) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear(); /* for example, on a device */
        return 0;
    }
    for (uint32_t i = 0; i < view.tensor.ndim; i++)
        elements *= view.tensor.shape[i];
    if (elements == 1)
        read = cer_metric_read(view.tensor.dtype, view.tensor.data, out);
    py_view_clear(&view);
    return read;
}

static int
read_value(runner *r, PyObject *name, PyObject *value, double *out)
{
    PyNumberMethods *number;
    PyObject *as_float;
    int read;

    if (PyFloat_Check(value)) {
        *out = PyFloat_AS_DOUBLE(value);
        return 0;
    }
    read = read_tensor(r, value, out);
    if (read != 0)
        return read < 0 ? -1 : 0;
    number = Py_TYPE(value)->tp_as_number;
    if (number == NULL ||
        (number->nb_float == NULL && number->nb_index == NULL))
        return refuse_value(name, value);
    as_float = PyNumber_Float(value);
    if (as_float == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception) ||
            PyErr_ExceptionMatches(PyExc_MemoryError))
            return -1;
        PyErr_Clear();
        return refuse_value(name, value);
    }
    *out = PyFloat_AS_DOUBLE(as_float);
    Py_DECREF(as_float);
    return 0;
}

/* --- metrics ------------------------------------------------------------- */

/* A number, or (number, weight). */
static int
read_metric(runner *r, PyObject *name, PyObject *metric, double *value,
            double *weight)
{
    if (!PyTuple_CheckExact(metric))
        return read_value(r, name, metric, value);
    if (PyTuple_GET_SIZE(metric) != 2)
        return refuse_value(name, metric);
    if (read_value(r, name, PyTuple_GET_ITEM(metric, 0), value) < 0)
        return -1;
    return read_value(r, name, PyTuple_GET_ITEM(metric, 1), weight);
}

static const char *
metric_name(PyObject *name, Py_ssize_t *len)
{
    if (PyUnicode_Check(name))
        return PyUnicode_AsUTF8AndSize(name, len);
    PyErr_Format(PyExc_TypeError, "the name of a metric must be a str, not %R",
                 name);
    return NULL;
}

static int
add_metric(runner *r, PyObject *name, PyObject *metric, int64_t rows)
{
    double value = 0, weight = (double)rows;
    cer_error err = {0};
    Py_ssize_t len;
    const char *utf8 = metric_name(name, &len);

    if (utf8 == NULL || read_metric(r, name, metric, &value, &weight) < 0)
        return -1;
    if (cer_metrics_add(&r->metrics, utf8, (size_t)len, value, weight, &err) ==
        CER_OK)
        return 0;
    core_raise(r->core, &err);
    return -1;
}

static int
add_metrics(runner *r, PyObject *metrics, int64_t rows)
{
    Py_ssize_t position = 0;
    PyObject *name, *value;

    if (metrics == Py_None)
        return 0;
    if (!PyDict_Check(metrics)) {
        PyErr_Format(PyExc_TypeError,
                     "a model's step must return a dict of metrics or None, "
                     "not %s",
                     Py_TYPE(metrics)->tp_name);
        return -1;
    }
    while (PyDict_Next(metrics, &position, &name, &value)) {
        int failed;

        Py_INCREF(name); /* __float__ may run any code */
        Py_INCREF(value);
        failed = add_metric(r, name, value, rows);
        Py_DECREF(name);
        Py_DECREF(value);
        if (failed)
            return -1;
    }
    return 0;
}

/* --- the loop ------------------------------------------------------------ */
static int
check_cancelled(const runner *r)
{
    if (PyErr_CheckSignals() < 0)
        return -1;
    if (r->page == NULL ||
        atomic_load_explicit(&r->page->cancel, memory_order_relaxed) == 0)
        return 0;
    PyErr_SetString(r->core->UnitCancelled, "the unit was cancelled");
    return -1;
}

static int
rows_of_last(const runner *r, int64_t *rows)
{
    PyObject *number = PyObject_GetAttr(r->loader, r->last_rows);

    if (number == NULL)
        return -1;
    *rows = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return *rows == -1 && PyErr_Occurred() ? -1 : 0;
}

static void
count(runner *r, int64_t rows)
{
    r->metrics.batch = ++r->n_batches;
    r->n_rows += rows;
    if (r->page != NULL) { /* no other thread writes these two */
        atomic_fetch_add_explicit(&r->page->rows, (uint64_t)rows,
                                  memory_order_relaxed);
        atomic_fetch_add_explicit(&r->page->batches, 1, memory_order_relaxed);
    }
}

/* Adds the metrics of the batches of a run, and counts them; those that
 * another run_unit has taken are not counted for the beat again. */
static int
add_run(runner *r, PyObject *metrics)
{
    Py_ssize_t n = py_run_metrics_batches(metrics);
    int64_t rows;

    for (Py_ssize_t i = 0; i < n; i++) {
        if (py_run_metrics_add(metrics, i, &r->metrics, &rows) < 0)
            return -1;
        r->metrics.batch = ++r->n_batches;
        r->n_rows += rows;
    }
    return 0;
}

/* Calls the step; drops the batch, so that its buffer can be refilled. */
static int
take_step(runner *r, PyObject *batch, int64_t rows)
{
    PyObject *metrics = PyObject_CallOneArg(r->step, batch);
    int result;

    Py_DECREF(batch);
    if (metrics == NULL)
        return -1;
    if (py_run_metrics_check(r->core, metrics)) {
        result = add_run(r, metrics);
    } else {
        result = add_metrics(r, metrics, rows);
        if (result == 0)
            count(r, rows);
    }
    Py_DECREF(metrics);
    return result;
}

/* Takes batches by their graphs. 1: some are done; 0: the next has none. */
static int
run_graphs(runner *r)
{
    PyObject *metrics, *result;
    int ran = py_lanes_run(r->core, r->loader, r->graphs, r->page, &metrics);

    if (ran <= 0)
        return ran;
    if (r->keep == NULL) {
        ran = add_run(r, metrics) < 0 ? -1 : 1;
    } else {
        result = PyObject_CallOneArg(r->keep, metrics);
        ran = result == NULL ? -1 : 1;
        Py_XDECREF(result);
    }
    Py_DECREF(metrics);
    return ran;
}

/* The replay for batches like this one, with a reference, or NULL. */
static PyObject *
find_replay(const runner *r, const cer_batch *batch)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(r->replays); i++) {
        PyObject *replay = PyList_GET_ITEM(r->replays, i);

        if (py_replay_fits(r->core, replay, batch))
            return Py_NewRef(replay);
    }
    return NULL;
}

/* A batch of a loader's, replayed without Python where that is possible. */
static int
run_host_batch(runner *r)
{
    PyObject *replay, *dict;
    cer_batch *batch;
    int64_t rows;
    int result;

    if (py_loader_take(r->loader, &batch) < 0)
        return -1;
    if (batch == NULL)
        return 0;
    rows = (int64_t)batch->n_rows;
    replay = find_replay(r, batch);
    if (replay == NULL) {
        dict = py_loader_dict(r->loader, batch);
        cer_owner_release(&batch->owner); /* the tensors hold their own */
        result = dict == NULL ? -1 : take_step(r, dict, rows);
    } else {
        result = py_replay_run(replay, batch);
        cer_owner_release(&batch->owner);
        if (result == 0)
            result = py_replay_measure(replay, &r->metrics, rows);
        if (result == 0)
            count(r, rows);
        Py_DECREF(replay);
    }
    return result < 0 ? -1 : 1;
}

/* 1: a batch is done; 0: no more batches; -1: an exception. */
static int
run_batch(runner *r)
{
    PyObject *batch;
    int64_t rows;
    int ran;

    if (check_cancelled(r) < 0)
        return -1;
    if (r->replays != NULL)
        return run_host_batch(r);
    if (r->graphs != NULL && PyList_GET_SIZE(r->graphs) != 0 &&
        (ran = run_graphs(r)) != 0)
        return ran;
    batch = PyIter_Next(r->batches);
    if (batch == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (rows_of_last(r, &rows) < 0) {
        Py_DECREF(batch);
        return -1;
    }
    return take_step(r, batch, rows) < 0 ? -1 : 1;
}

/* --- sums in and out ----------------------------------------------------- */
static int
begin_sum(runner *r, PyObject *name, PyObject *pair)
{
    cer_error err = {0};
    double sum, weight;
    Py_ssize_t len;
    const char *utf8 = metric_name(name, &len);

    if (utf8 == NULL || !PyArg_Parse(pair,
                                     "(dd);sums must be a dict of "
                                     "name to (sum, weight)",
                                     &sum, &weight))
        return -1;
    if (cer_metrics_begin(&r->metrics, utf8, (size_t)len, sum, weight, &err) ==
        CER_OK)
        return 0;
    core_raise(r->core, &err);
    return -1;
}

static int
begin_sums(runner *r, PyObject *sums)
{
    Py_ssize_t position = 0;
    PyObject *name, *pair;

    while (PyDict_Next(sums, &position, &name, &pair)) {
        int failed;

        Py_INCREF(name); /* __float__ may run any code */
        Py_INCREF(pair);
        failed = begin_sum(r, name, pair);
        Py_DECREF(name);
        Py_DECREF(pair);
        if (failed)
            return -1;
    }
    return 0;
}

static PyObject *
sums_of(const cer_metrics *metrics)
{
    PyObject *sums = PyDict_New();

    for (size_t i = 0; sums != NULL && i < metrics->n; i++) {
        const cer_metric *metric = &metrics->items[i];
        PyObject *name = PyUnicode_FromStringAndSize(
            metric->name, (Py_ssize_t)metric->name_len);
        PyObject *pair = Py_BuildValue("(dd)", metric->sum, metric->weight);

        if (name == NULL || pair == NULL ||
            PyDict_SetItem(sums, name, pair) < 0)
            Py_CLEAR(sums);
        Py_XDECREF(name);
        Py_XDECREF(pair);
    }
    return sums;
}

/* {name: (batch, value)} of the metrics that had a non-finite value. */
static PyObject *
not_finite_of(const cer_metrics *metrics)
{
    PyObject *found = PyDict_New();

    for (size_t i = 0; found != NULL && i < metrics->n; i++) {
        const cer_metric *metric = &metrics->items[i];
        PyObject *name, *pair;

        if (metric->bad_batch == 0)
            continue;
        name = PyUnicode_FromStringAndSize(metric->name,
                                           (Py_ssize_t)metric->name_len);
        pair = Py_BuildValue("(Ld)", (long long)metric->bad_batch - 1,
                             metric->bad_value);
        if (name == NULL || pair == NULL ||
            PyDict_SetItem(found, name, pair) < 0)
            Py_CLEAR(found);
        Py_XDECREF(name);
        Py_XDECREF(pair);
    }
    return found;
}

static PyObject *
make_result(const runner *r, double seconds)
{
    PyObject *result = PyStructSequence_New(r->core->unit_result_type);
    PyObject *values[N_RESULTS] = {
        PyLong_FromLongLong(r->n_rows), PyLong_FromLongLong(r->n_batches),
        sums_of(&r->metrics), PyFloat_FromDouble(seconds),
        not_finite_of(&r->metrics)};
    bool failed = result == NULL;

    for (int i = 0; i < N_RESULTS; i++)
        failed = failed || values[i] == NULL;
    for (int i = 0; i < N_RESULTS; i++) {
        if (failed)
            Py_XDECREF(values[i]);
        else
            PyStructSequence_SetItem(result, i, values[i]);
    }
    if (failed)
        Py_CLEAR(result);
    return result;
}

static double
now_seconds(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

PyDoc_STRVAR(
    run_unit_doc,
    "run_unit(loader, step, *, beat=None, sums=None, replays=None,\n"
    "         keep=None)\n--\n\n"
    "Call step(batch) for every batch of `loader` and sum the metrics.\n\n"
    "`loader` is iterable and has `last_rows`, the rows of its last\n"
    "batch. step returns a dict of metrics or None. A metric is a number,\n"
    "a tensor of one number, or (mean, weight); the default weight is the\n"
    "batch's rows, and a mean of weight 0 does not count. Sums continue\n"
    "from `sums`, a dict of name to (sum, weight). If a Replay in the list\n"
    "`replays`, to which step may add, fits a batch of a Loader in main\n"
    "memory, it takes the step instead, and GraphReplays take batches of a\n"
    "Loader on their device, as many as fit in succession. The numbers of\n"
    "these are in a RunMetrics. It is summed, or given to keep(), so that a\n"
    "later run_unit sums it when its step returns it. Returns a UnitResult,\n"
    "which lacks what was given to keep(). Raises\n"
    "UnitCancelled if the flag of `beat`, a BeatPage, is set, and any\n"
    "exception of step.");

static PyObject *
run_unit(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"loader",  "step", "beat", "sums",
                               "replays", "keep", NULL};
    runner r = {.core = core_state_of_module(module)};
    PyObject *beat = Py_None, *sums = Py_None, *result = NULL;
    PyObject *replays = Py_None, *keep = Py_None;
    double start = now_seconds();
    int more;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOO:run_unit",
                                     keywords, &r.loader, &r.step, &beat, &sums,
                                     &replays, &keep))
        return NULL;
    if (beat != Py_None && (r.page = py_beat_page_get(r.core, beat)) == NULL)
        return NULL;
    if (sums != Py_None && !PyDict_Check(sums)) {
        PyErr_SetString(PyExc_TypeError, "sums must be a dict");
        return NULL;
    }
    if (replays != Py_None && !PyList_Check(replays)) {
        PyErr_SetString(PyExc_TypeError, "replays must be a list");
        return NULL;
    }
    if (replays != Py_None && py_loader_is_on_host(r.core, r.loader))
        r.replays = replays;
    if (replays != Py_None && py_loader_on_device(r.core, r.loader) != NULL)
        r.graphs = replays;
    r.keep = keep == Py_None ? NULL : keep;
    r.last_rows = PyUnicode_InternFromString("last_rows");
    r.batches = PyObject_GetIter(r.loader);
    if (r.last_rows == NULL || r.batches == NULL ||
        (sums != Py_None && begin_sums(&r, sums) < 0))
        goto done;
    do
        more = run_batch(&r);
    while (more > 0);
    if (more == 0)
        result = make_result(&r, now_seconds() - start);

done:
    Py_XDECREF(r.last_rows);
    Py_XDECREF(r.batches);
    cer_metrics_clear(&r.metrics);
    py_exchange_clear(&r.exchange);
    return result;
}

static PyMethodDef functions[] = {
    {"run_unit", (PyCFunction)(void (*)(void))run_unit,
     METH_VARARGS | METH_KEYWORDS, run_unit_doc},
    {NULL, NULL, 0, NULL},
};

static PyStructSequence_Field result_fields[] = {
    {"rows", "rows in all batches"},
    {"batches", "number of batches"},
    {"sums", "metric name to (sum of value x weight, sum of weight)"},
    {"seconds", "wall-clock time"},
    {"not_finite",
     "metric name to (batch, value) of the first non-finite value"},
    {NULL, NULL},
};

static PyStructSequence_Desc result_desc = {
    .name = "cerebro._core.UnitResult",
    .doc = "The result of run_unit.",
    .fields = result_fields,
    .n_in_sequence = N_RESULTS,
};

int
core_register_runner(PyObject *module)
{
    core_state *core = core_state_of_module(module);

    core->unit_result_type = PyStructSequence_NewType(&result_desc);
    if (core->unit_result_type == NULL ||
        PyModule_AddType(module, core->unit_result_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
