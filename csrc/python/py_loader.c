/* py_loader.c -- Loader: an iterator of batches (dicts of tensors) in main
 * memory or, with a depot, in device memory. */
#define NO_IMPORT_ARRAY
#include "module.h"

#include <numpy/arrayobject.h>
#include <structmember.h>

#include "cut.h"
#include "py_depot.h"
#include "py_dlpack.h"
#include "py_loader.h"
#include "py_orders.h"
#include "py_plan.h"

typedef struct loader_object {
    PyObject_HEAD
    cer_loader *loader;           /* on a device, only its plan */
    cer_device_loader *on_device; /* NULL: batches in main memory */
    PyObject *depot;              /* a Depot, or None */
    py_framework framework;
    PyObject *framework_name;
    PyObject *names; /* tuple: the key of each tensor */
    PyObject *keep;  /* list: the row arrays of the parts */
    Py_ssize_t batch_size;
    Py_ssize_t last_rows;
    cer_lane *lane; /* made when the first is needed */
    /* A call is working without the GIL, so no other may start. */
    bool busy;
} loader_object;

/* Reserves the loader for one call, which may release the GIL. len(), rows and
 * buffers do without: they only read atomic counts. */
static int
enter(loader_object *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the loader is in use by another thread");
        return -1;
    }
    self->busy = true;
    return 0;
}

/* --- making --------------------------------------------------------------- */

static PyObject *
make_names(const cer_loader *loader)
{
    Py_ssize_t n = (Py_ssize_t)cer_loader_tensors(loader);
    PyObject *names = PyTuple_New(n);

    for (Py_ssize_t i = 0; names != NULL && i < n; i++) {
        PyObject *name = PyUnicode_FromFormat(
            "%s%s", cer_loader_tensor_column(loader, (size_t)i),
            cer_loader_tensor_suffix(loader, (size_t)i));

        if (name == NULL) {
            Py_CLEAR(names);
        } else {
            PyUnicode_InternInPlace(&name);
            PyTuple_SET_ITEM(names, i, name);
        }
    }
    return names;
}

/* The constructor's arguments. */
typedef struct arguments {
    PyObject *parts, *columns, *first_rows; /* tuples */
    cer_depot *depot;                       /* or NULL */
    cer_residence residence;
    cer_load_options options;
} arguments;

static cer_status
open_loader(loader_object *self, const arguments *a, const cer_part *parts,
            const cer_load_column *columns, cer_error *err)
{
    size_t n_parts = (size_t)PyTuple_GET_SIZE(a->parts);
    size_t n_columns = (size_t)PyTuple_GET_SIZE(a->columns);
    cer_status status;

    if (a->depot == NULL)
        return cer_loader_new(parts, n_parts, columns, n_columns, &a->options,
                              &self->loader, err);
    Py_BEGIN_ALLOW_THREADS /* may have to start the device */
    status =
        cer_device_loader_new(a->depot, a->residence, parts, n_parts, columns,
                              n_columns, &a->options, &self->on_device, err);
    Py_END_ALLOW_THREADS
    if (status == CER_OK)
        self->loader = cer_device_loader_plan(self->on_device);
    return status;
}

static int
make_loader(loader_object *self, const arguments *a)
{
    core_state *state = core_state_of((PyObject *)self);
    Py_ssize_t n_parts = PyTuple_GET_SIZE(a->parts);
    Py_ssize_t n_columns = PyTuple_GET_SIZE(a->columns);
    cer_part *c_parts = PyMem_Calloc((size_t)n_parts + 1, sizeof *c_parts);
    py_plan *plans = PyMem_Calloc((size_t)n_columns + 1, sizeof *plans);
    cer_load_column *c_columns =
        PyMem_Calloc((size_t)n_columns + 1, sizeof *c_columns);
    cer_error err = {0};
    int result = -1;

    if (c_parts == NULL || plans == NULL || c_columns == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n_parts; i++) {
        if (py_part_read(state, PyTuple_GET_ITEM(a->parts, i), self->keep,
                         &c_parts[i]) < 0)
            goto done;
    }
    for (Py_ssize_t i = 0; i < n_columns; i++) {
        if (py_plan_read(PyTuple_GET_ITEM(a->columns, i), &plans[i]) < 0)
            goto done;
        c_columns[i] = plans[i].column;
        if (c_columns[i].channels_last &&
            self->framework.kind != FRAMEWORK_TORCH &&
            self->framework.kind != FRAMEWORK_DLPACK) {
            PyErr_SetString(PyExc_ValueError,
                            "channels_last needs framework torch or dlpack");
            goto done;
        }
    }
    if (py_parts_number(a->first_rows, c_parts, n_parts) < 0)
        goto done;
    if (open_loader(self, a, c_parts, c_columns, &err) != CER_OK) {
        core_raise(state, &err);
        goto done;
    }
    result = 0;

done:
    PyMem_Free(c_parts);
    PyMem_Free(c_columns);
    py_plans_free(plans, n_columns);
    return result;
}

static int
read_framework(loader_object *self, const arguments *a)
{
    const char *name = PyUnicode_AsUTF8(self->framework_name);

    if (name == NULL || py_framework_init(&self->framework, name) < 0)
        return -1;
    if (self->framework.kind != FRAMEWORK_NUMPY || a->depot == NULL ||
        cer_device_kind_of(cer_depot_device(a->depot)) == CER_DEVICE_HOST)
        return 0;
    PyErr_Format(PyExc_ValueError,
                 "NumPy has no arrays on %s: batches there need framework "
                 "torch, jax or dlpack",
                 cer_device_name(cer_depot_device(a->depot)));
    return -1;
}

static int
set_up(loader_object *self, arguments *a)
{
    PyObject *parts = PySequence_Tuple(a->parts), *columns = NULL;
    int result = -1;

    self->keep = PyList_New(0);
    if (parts != NULL)
        columns = PySequence_Tuple(a->columns);
    a->parts = parts;
    a->columns = columns;
    if (self->keep == NULL || columns == NULL || read_framework(self, a) < 0 ||
        make_loader(self, a) < 0)
        goto done;
    self->names = make_names(self->loader);
    result = self->names == NULL ? -1 : 0;

done:
    Py_XDECREF(parts);
    Py_XDECREF(columns);
    return result;
}

PyDoc_STRVAR(
    loader_doc,
    "Loader(parts, plan, *, batch_size, seed=0, shuffle=True, "
    "drop_last=False,\n"
    "       framework='torch', threads=0, first_rows=(), depot=None,\n"
    "       residence='auto', orders=None, draw_across=False)\n--\n\n"
    "An iterator of batches of shuffled rows, reused for many passes.\n\n"
    "`parts` has a pair (ShardReader, rows) per shard of the view: rows\n"
    "are (start, stop) or a uint32 array, which is copied unless its\n"
    "memory is that of bytes. Two more items, uint64 running sums of\n"
    "weights and the sum before them, have as many rows drawn by the\n"
    "weights, with replacement: from each shard or, with `draw_across`,\n"
    "from all, whose sums are then slices of one array over bytes. `plan`\n"
    "comes from cerebro.transforms.compile.\n"
    "Loaders share the orders of rows in `orders`, an Orders. begin()\n"
    "starts a pass; iterating yields dicts of the framework's tensors.\n"
    "With a Depot, they are in its device's memory. Shards are resident\n"
    "there up to the depot's limit ('auto') or while memory lasts\n"
    "('resident'), or are streamed ('streamed').");

static int
read_residence(const char *name, cer_residence *out)
{
    static const char *const names[] = {[CER_RESIDENT_AUTO] = "auto",
                                        [CER_RESIDENT] = "resident",
                                        [CER_STREAMED] = "streamed"};

    for (int i = 0; i < 3; i++) {
        if (name == NULL || strcmp(name, names[i]) == 0) {
            *out = (cer_residence)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "residence must be 'auto', 'resident' or 'streamed', not '%s'",
                 name);
    return -1;
}

static PyObject *
loader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "parts",     "plan",      "batch_size",  "seed",       "shuffle",
        "drop_last", "framework", "threads",     "first_rows", "depot",
        "residence", "orders",    "draw_across", NULL};
    arguments a = {.first_rows = NULL};
    PyObject *framework = NULL, *seed_arg = NULL, *none = NULL;
    PyObject *depot = Py_None, *orders = Py_None;
    const char *residence = NULL;
    Py_ssize_t batch_size = 0, threads = 0;
    uint64_t seed = 0;
    int shuffle = 1, drop_last = 0, draw_across = 0;
    loader_object *self;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO|$nOppUnOOsOp:Loader", keywords, &a.parts,
            &a.columns, &batch_size, &seed_arg, &shuffle, &drop_last,
            &framework, &threads, &a.first_rows, &depot, &residence, &orders,
            &draw_across) ||
        core_read_number(seed_arg, "seed", UINT64_MAX, &seed) < 0 ||
        read_residence(residence, &a.residence) < 0)
        return NULL;
    if (batch_size < 1 || threads < 0 || threads > CER_MAX_THREADS) {
        PyErr_Format(PyExc_ValueError,
                     "batch_size must be 1 or more and threads from 0 to %d, "
                     "not %zd and %zd",
                     CER_MAX_THREADS, batch_size, threads);
        return NULL;
    }
    self = (loader_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (depot != Py_None &&
        (a.depot = py_depot_get(core_state_of((PyObject *)self), depot)) ==
            NULL)
        goto failed;
    self->depot = Py_NewRef(depot);
    self->batch_size = batch_size;
    self->framework_name = framework != NULL ? Py_NewRef(framework)
                                             : PyUnicode_FromString("torch");
    none = PyTuple_New(0);
    if (a.first_rows == NULL)
        a.first_rows = none;
    a.options = (cer_load_options){
        .batch_size = (size_t)batch_size,
        .seed = seed,
        .shuffle = shuffle != 0,
        .drop_last = drop_last != 0,
        .draw_across = draw_across != 0,
        .threads = (uint32_t)threads,
    };
    if (orders != Py_None &&
        (a.options.orders =
             py_orders_get(core_state_of((PyObject *)self), orders)) == NULL)
        goto failed;
    if (self->framework_name == NULL || none == NULL || set_up(self, &a) < 0)
        goto failed;
    Py_DECREF(none);
    return (PyObject *)self;

failed:
    Py_XDECREF(none);
    Py_DECREF(self);
    return NULL;
}

static int
loader_traverse(PyObject *object, visitproc visit, void *arg)
{
    loader_object *self = (loader_object *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->framework.from_dlpack);
    Py_VISIT(self->keep);
    return 0;
}

/* Keeps row arrays alive until the loader is freed, because its threads read
 * them. */
static int
loader_clear(PyObject *object)
{
    py_framework_clear(&((loader_object *)object)->framework);
    return 0;
}

static void
loader_dealloc(PyObject *object)
{
    loader_object *self = (loader_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    /* Joins the threads and, on a device, waits for copies. These may be queued
     * behind work that needs the GIL. No other reference to the object exists.
     */
    Py_BEGIN_ALLOW_THREADS
    cer_lane_free(self->lane);
    if (self->on_device != NULL)
        cer_device_loader_free(self->on_device);
    else
        cer_loader_free(self->loader);
    Py_END_ALLOW_THREADS(void)
    loader_clear(object);
    Py_XDECREF(self->depot);
    Py_XDECREF(self->framework_name);
    Py_XDECREF(self->names);
    Py_XDECREF(self->keep);
    type->tp_free(object);
    Py_DECREF(type);
}

/* --- the pass ------------------------------------------------------------- */

/* Mixes of a pass and, behind them, the numbers of their parts. */
typedef struct mixes {
    cer_mix *all;
    uint32_t *parts;
    size_t n;
} mixes;

static int
read_mix(PyObject *mix, uint32_t *parts)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mix); i++) {
        Py_ssize_t shard =
            PyNumber_AsSsize_t(PyTuple_GET_ITEM(mix, i), PyExc_OverflowError);

        if (shard == -1 && PyErr_Occurred())
            return -1;
        if (shard < 0 || shard > UINT32_MAX) {
            PyErr_Format(PyExc_ValueError, "no shard %zd", shard);
            return -1;
        }
        parts[i] = (uint32_t)shard;
    }
    return 0;
}

/* Reads a tuple of tuples of shard numbers. */
static int
read_tuples(PyObject *tuples, mixes *out)
{
    size_t n = 0;

    out->n = (size_t)PyTuple_GET_SIZE(tuples);
    for (size_t i = 0; i < out->n; i++)
        n += (size_t)PyTuple_GET_SIZE(PyTuple_GET_ITEM(tuples, (Py_ssize_t)i));
    out->all = PyMem_Calloc(out->n + 1, sizeof *out->all);
    out->parts = PyMem_Calloc(n + 1, sizeof *out->parts);
    if (out->all == NULL || out->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    n = 0;
    for (size_t i = 0; i < out->n; i++) {
        PyObject *mix = PyTuple_GET_ITEM(tuples, (Py_ssize_t)i);

        out->all[i] = (cer_mix){out->parts + n, (size_t)PyTuple_GET_SIZE(mix)};
        if (read_mix(mix, out->parts + n) < 0)
            return -1;
        n += out->all[i].n;
    }
    return 0;
}

static void
free_mixes(mixes *m)
{
    PyMem_Free(m->all);
    PyMem_Free(m->parts);
}

/* Returns a tuple of tuples, from any iterables. */
static PyObject *
tuples_of(PyObject *iterables)
{
    PyObject *list = PySequence_List(iterables), *all = NULL;

    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(list); i++) {
        PyObject *mix = PySequence_Tuple(PyList_GET_ITEM(list, i));

        if (mix == NULL)
            Py_CLEAR(list);
        else
            (void)PyList_SetItem(list, i, mix);
    }
    if (list != NULL)
        all = PyList_AsTuple(list);
    Py_XDECREF(list);
    return all;
}

static int
read_mixes(PyObject *iterables, mixes *out)
{
    PyObject *tuples = tuples_of(iterables);
    int result = -1;

    if (tuples != NULL)
        result = read_tuples(tuples, out);
    Py_XDECREF(tuples);
    return result;
}

PyDoc_STRVAR(
    begin_doc,
    "begin($self, mixes, epoch, start=0, count=None)\n--\n\n"
    "Start a pass over mixes: sequences of ascending shard numbers.\n\n"
    "The rows of a mix are shuffled together and cut into batches of\n"
    "even sizes. Skips the first `start` batches of the pass and\n"
    "gives at most `count`. Drops the rest of the previous pass;\n"
    "batches already returned stay valid.");

static PyObject *
loader_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"mixes", "epoch", "start", "count", NULL};
    loader_object *self = (loader_object *)object;
    PyObject *iterables, *epoch_arg, *count_arg = Py_None, *result = NULL;
    uint64_t epoch = 0, count = SIZE_MAX;
    Py_ssize_t start = 0;
    mixes m = {NULL, NULL, 0};
    cer_error err = {0};
    cer_status status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|nO:begin", keywords,
                                     &iterables, &epoch_arg, &start,
                                     &count_arg) ||
        core_read_number(epoch_arg, "epoch", UINT64_MAX, &epoch) < 0 ||
        (count_arg != Py_None &&
         core_read_number(count_arg, "count", SIZE_MAX, &count) < 0))
        return NULL;
    if (start < 0) {
        PyErr_Format(PyExc_ValueError, "start must be 0 or more, not %zd",
                     start);
        return NULL;
    }
    if (read_mixes(iterables, &m) < 0 || enter(self) < 0)
        goto done;
    self->last_rows = 0;
    Py_BEGIN_ALLOW_THREADS
    status = self->on_device != NULL
                 ? cer_device_loader_begin(self->on_device, m.all, m.n, epoch,
                                           (size_t)start, (size_t)count, &err)
                 : cer_loader_begin(self->loader, m.all, m.n, epoch,
                                    (size_t)start, (size_t)count, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK)
        core_raise(core_state_of(object), &err);
    else
        result = Py_NewRef(Py_None);

done:
    free_mixes(&m);
    return result;
}

static PyObject *
as_dict(loader_object *self, cer_batch *batch)
{
    core_state *state = core_state_of((PyObject *)self);
    PyObject *dict = PyDict_New();

    for (size_t i = 0; dict != NULL && i < batch->n_tensors; i++) {
        PyObject *value = py_framework_tensor(
            state, &self->framework, &batch->tensors[i], &batch->exports[i]);

        if (value == NULL ||
            PyDict_SetItem(dict, PyTuple_GET_ITEM(self->names, (Py_ssize_t)i),
                           value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

/* Chooses the stream for kernels: torch's current one if the batches are torch
 * tensors. Other consumers name their stream only when they take a tensor.
 */
static int
find_stream(loader_object *self, void **stream, bool *known)
{
    int index;

    *known = false;
    if (self->on_device == NULL)
        return 0;
    *stream = cer_device_loader_stream(self->on_device);
    if (cer_device_kind_of(cer_device_loader_device(self->on_device)) ==
        CER_DEVICE_HOST)
        return 0;
    index = cer_device_index(cer_device_loader_device(self->on_device));
    return py_framework_stream(&self->framework, index, stream, known);
}

static cer_status
next_batch(loader_object *self, void *stream, bool known, cer_batch **out,
           cer_error *err)
{
    cer_place *place;
    cer_status status;

    if (self->on_device == NULL)
        return cer_loader_next(self->loader, out, err);
    status = cer_device_loader_next(self->on_device, stream, out, err);
    if (status != CER_OK || *out == NULL || !known)
        return status;
    place = (*out)->block.place;
    if (place != NULL)
        status = place->join(
            place, stream == NULL ? CER_STREAM_LEGACY : (intptr_t)stream, err);
    if (status != CER_OK) {
        cer_owner_release(&(*out)->owner);
        *out = NULL;
    }
    return status;
}

bool
py_loader_is_on_host(const core_state *core, PyObject *object)
{
    return Py_TYPE(object) == core->loader_type &&
           ((loader_object *)object)->on_device == NULL;
}

cer_device_loader *
py_loader_on_device(const core_state *core, PyObject *object)
{
    return Py_TYPE(object) == core->loader_type
               ? ((loader_object *)object)->on_device
               : NULL;
}

/* A lane is made once, because pinned memory is slow to get. */
static int
make_lane(loader_object *self)
{
    cer_error err = {0};
    cer_status status;

    if (self->lane != NULL)
        return 0;
    Py_BEGIN_ALLOW_THREADS
    status = cer_lane_new(self->on_device, &self->lane, &err);
    Py_END_ALLOW_THREADS
    if (status == CER_OK)
        return 0;
    core_raise(core_state_of((PyObject *)self), &err);
    return -1;
}

int
py_loader_borrow(PyObject *object, void **stream, cer_lane **out)
{
    loader_object *self = (loader_object *)object;
    bool known;

    if (find_stream(self, stream, &known) < 0)
        return -1;
    if (!known && self->framework.kind == FRAMEWORK_TORCH)
        return 0;
    if (enter(self) < 0)
        return -1;
    if (make_lane(self) < 0) {
        self->busy = false;
        return -1;
    }
    *out = self->lane;
    return 1;
}

void
py_loader_give_back(PyObject *object, size_t last_rows)
{
    loader_object *self = (loader_object *)object;

    self->busy = false;
    if (last_rows != 0)
        self->last_rows = (Py_ssize_t)last_rows;
}

int
py_loader_take(PyObject *object, cer_batch **out)
{
    loader_object *self = (loader_object *)object;
    cer_error err = {0};
    cer_status status;
    void *stream = NULL;
    bool known;

    *out = NULL;
    if (find_stream(self, &stream, &known) < 0 || enter(self) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = next_batch(self, stream, known, out, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK) {
        core_raise(core_state_of(object), &err);
        return -1;
    }
    if (*out != NULL)
        self->last_rows = (Py_ssize_t)(*out)->n_rows;
    return 0;
}

PyObject *
py_loader_dict(PyObject *loader, cer_batch *batch)
{
    return as_dict((loader_object *)loader, batch);
}

static PyObject *
loader_next(PyObject *object)
{
    cer_batch *batch;
    PyObject *dict;

    if (py_loader_take(object, &batch) < 0 || batch == NULL)
        return NULL; /* the end: no exception means StopIteration */
    dict = py_loader_dict(object, batch);
    cer_owner_release(&batch->owner); /* the tensors hold their own */
    return dict;
}

PyDoc_STRVAR(close_doc,
             "close($self, /)\n--\n\n"
             "Stop the threads and release the shards; batches stay valid.");

static PyObject *
loader_close(PyObject *object, PyObject *Py_UNUSED(args))
{
    loader_object *self = (loader_object *)object;

    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    cer_lane_free(self->lane);
    self->lane = NULL;
    if (self->on_device != NULL)
        cer_device_loader_close(self->on_device);
    else
        cer_loader_close(self->loader);
    Py_END_ALLOW_THREADS
    self->busy = false;
    Py_RETURN_NONE;
}

static Py_ssize_t
loader_length(PyObject *object)
{
    return (Py_ssize_t)cer_loader_batches(((loader_object *)object)->loader);
}

static PyObject *
loader_get_rows(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(
        cer_loader_rows(((loader_object *)object)->loader));
}

static PyObject *
loader_get_buffers(PyObject *object, void *Py_UNUSED(closure))
{
    loader_object *self = (loader_object *)object;

    return PyLong_FromSize_t(self->on_device != NULL
                                 ? cer_device_loader_buffers(self->on_device)
                                 : cer_loader_buffers(self->loader));
}

static PyObject *
loader_get_resident(PyObject *object, void *Py_UNUSED(closure))
{
    loader_object *self = (loader_object *)object;
    size_t n = 0;

    if (enter(self) < 0)
        return NULL;
    if (self->on_device != NULL)
        n = cer_device_loader_resident(self->on_device);
    self->busy = false;
    return PyLong_FromSize_t(n);
}

static PyObject *
loader_get_note(PyObject *object, void *Py_UNUSED(closure))
{
    loader_object *self = (loader_object *)object;
    PyObject *note;

    if (enter(self) < 0)
        return NULL;
    note = PyUnicode_FromString(
        self->on_device != NULL ? cer_device_loader_note(self->on_device) : "");
    self->busy = false;
    return note;
}

static PyMethodDef loader_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))loader_begin,
     METH_VARARGS | METH_KEYWORDS, begin_doc},
    {"close", loader_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef loader_members[] = {
    {"batch_size", T_PYSSIZET, offsetof(loader_object, batch_size), READONLY,
     "Rows per batch."},
    {"framework", T_OBJECT, offsetof(loader_object, framework_name), READONLY,
     "The framework of the batches' tensors."},
    {"depot", T_OBJECT, offsetof(loader_object, depot), READONLY,
     "The Depot of the batches' device; None: main memory."},
    {"last_rows", T_PYSSIZET, offsetof(loader_object, last_rows), READONLY,
     "Rows of the last batch returned."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef loader_getset[] = {
    {"rows", loader_get_rows, NULL, "Rows in the pass.", NULL},
    {"buffers", loader_get_buffers, NULL, "Allocated batch buffers.", NULL},
    {"resident_shards", loader_get_resident, NULL,
     "Shards of the pass that are resident on the device.", NULL},
    {"note", loader_get_note, NULL,
     "Why shards are streamed that could be resident; '' if none are.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot loader_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)loader_doc},
    {Py_tp_new, loader_new},
    {Py_tp_dealloc, loader_dealloc},
    {Py_tp_traverse, loader_traverse},
    {Py_tp_clear, loader_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, loader_next},
    {Py_tp_methods, loader_methods},
    {Py_tp_members, loader_members},
    {Py_tp_getset, loader_getset},
    {Py_sq_length, loader_length},
    {0, NULL},
};

static PyType_Spec loader_spec = {
    .name = "cerebro._core.Loader",
    .basicsize = sizeof(loader_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = loader_slots,
};

/* Reads (rows, batch_size, drop_last) and, if `batch` is given, a batch. */
static int
read_cut(PyObject *args, cer_cut *cut, Py_ssize_t *batch)
{
    Py_ssize_t rows, batch_size;
    int drop_last;

    if (batch == NULL ? !PyArg_ParseTuple(args, "nnp:batch_count", &rows,
                                          &batch_size, &drop_last)
                      : !PyArg_ParseTuple(args, "nnpn:batch_start", &rows,
                                          &batch_size, &drop_last, batch))
        return -1;
    if (rows < 0 || batch_size < 1 || (batch != NULL && *batch < 0)) {
        PyErr_Format(PyExc_ValueError, "%zd rows in batches of %zd", rows,
                     batch_size);
        return -1;
    }
    *cut = (cer_cut){(size_t)rows, (size_t)batch_size, drop_last != 0};
    return 0;
}

PyDoc_STRVAR(batch_count_doc,
             "batch_count(rows, batch_size, drop_last, /)\n--\n\n"
             "Return the number of batches of a pass over `rows` rows.");

static PyObject *
batch_count(PyObject *Py_UNUSED(module), PyObject *args)
{
    cer_cut cut;

    if (read_cut(args, &cut, NULL) < 0)
        return NULL;
    return PyLong_FromSize_t(cer_cut_count(&cut));
}

PyDoc_STRVAR(batch_start_doc,
             "batch_start(rows, batch_size, drop_last, batch, /)\n--\n\n"
             "Return the first row of a batch; of the batch after the last,\n"
             "the number of rows in all batches.");

static PyObject *
batch_start(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t batch;
    cer_cut cut;

    if (read_cut(args, &cut, &batch) < 0)
        return NULL;
    if ((size_t)batch > cer_cut_count(&cut)) {
        PyErr_Format(PyExc_ValueError, "no batch %zd of %zu", batch,
                     cer_cut_count(&cut));
        return NULL;
    }
    return PyLong_FromSize_t(cer_cut_first(&cut, (size_t)batch));
}

static PyMethodDef functions[] = {
    {"batch_count", batch_count, METH_VARARGS, batch_count_doc},
    {"batch_start", batch_start, METH_VARARGS, batch_start_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_loader(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    return core_add_type(module, &loader_spec,
                         &core_state_of_module(module)->loader_type);
}
