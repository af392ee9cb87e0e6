/* py_loader.c -- Loader: an iterator of batches, dicts of tensors. */
#define NO_IMPORT_ARRAY
#include "module.h"

#include <numpy/arrayobject.h>
#include <structmember.h>

#include "loader.h"
#include "py_dlpack.h"
#include "py_shard.h"

typedef struct loader_object {
    PyObject_HEAD
    cer_loader *loader;
    py_framework framework;
    PyObject *framework_name;
    PyObject *names; /* tuple: the key of each tensor */
    PyObject *keep;  /* list: the row arrays of the parts */
    Py_ssize_t batch_size;
    Py_ssize_t last_rows;
    /* A call is working without the GIL: no other may come in between. */
    bool busy;
} loader_object;

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

/* --- the plan ------------------------------------------------------------- */

/* One column's chain, as cerebro.transforms.compile makes it. */
typedef struct plan {
    cer_load_column column;
    cer_op *ops;
} plan;

static void
free_plans(plan *plans, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; plans != NULL && i < n; i++) {
        for (size_t k = 0; plans[i].ops != NULL && k < plans[i].column.n_ops;
             k++) {
            PyMem_Free((void *)(uintptr_t)plans[i].ops[k].mean);
            PyMem_Free((void *)(uintptr_t)plans[i].ops[k].std);
        }
        PyMem_Free(plans[i].ops);
    }
    PyMem_Free(plans);
}

static double *
read_doubles(PyObject *values, size_t *n)
{
    PyObject *items = PySequence_Tuple(values);
    double *out = NULL;

    if (items == NULL)
        return NULL;
    *n = (size_t)PyTuple_GET_SIZE(items);
    out = PyMem_Calloc(*n + 1, sizeof *out);
    if (out == NULL)
        PyErr_NoMemory();
    for (size_t i = 0; out != NULL && i < *n; i++) {
        out[i] = PyFloat_AsDouble(PyTuple_GET_ITEM(items, (Py_ssize_t)i));
        if (out[i] == -1 && PyErr_Occurred()) {
            PyMem_Free(out);
            out = NULL;
        }
    }
    Py_DECREF(items);
    return out;
}

static int
read_cast(PyObject *op, cer_op *out)
{
    const char *kind, *dtype;

    out->kind = CER_OP_CAST;
    if (!PyArg_ParseTuple(op, "ss", &kind, &dtype))
        return -1;
    if (cer_dtype_from_name(dtype, &out->dtype))
        return 0;
    PyErr_Format(PyExc_ValueError, "unknown dtype '%s'", dtype);
    return -1;
}

static int
read_scale(PyObject *op, cer_op *out)
{
    const char *kind;

    out->kind = CER_OP_SCALE;
    return PyArg_ParseTuple(op, "sd", &kind, &out->value) ? 0 : -1;
}

static int
read_normalize(PyObject *op, cer_op *out)
{
    const char *kind;
    PyObject *mean, *std;
    size_t n_std = 0;

    out->kind = CER_OP_NORMALIZE;
    if (!PyArg_ParseTuple(op, "sOO", &kind, &mean, &std) ||
        (out->mean = read_doubles(mean, &out->n)) == NULL ||
        (out->std = read_doubles(std, &n_std)) == NULL)
        return -1;
    if (n_std == out->n)
        return 0;
    PyErr_SetString(PyExc_ValueError, "as many means as standard deviations");
    return -1;
}

static int
read_to_chw(PyObject *op, cer_op *out)
{
    const char *kind;

    out->kind = CER_OP_TO_CHW;
    return PyArg_ParseTuple(op, "s", &kind) ? 0 : -1;
}

static int
read_crop(PyObject *op, cer_op *out)
{
    const char *kind;
    Py_ssize_t size[2], padding[2];
    int random;

    out->kind = CER_OP_CROP;
    if (!PyArg_ParseTuple(op, "s(nn)(nn)p", &kind, &size[0], &size[1],
                          &padding[0], &padding[1], &random))
        return -1;
    for (int i = 0; i < 2; i++) {
        if (size[i] < 0 || padding[i] < 0) {
            PyErr_SetString(PyExc_ValueError, "a crop of negative size");
            return -1;
        }
        out->size[i] = (size_t)size[i];
        out->padding[i] = (size_t)padding[i];
    }
    out->random = random != 0;
    return 0;
}

static int
read_flip(PyObject *op, cer_op *out)
{
    const char *kind;

    out->kind = CER_OP_FLIP;
    return PyArg_ParseTuple(op, "sd", &kind, &out->value) ? 0 : -1;
}

static int
read_pad(PyObject *op, cer_op *out)
{
    const char *kind;
    Py_ssize_t max_length, multiple_of;

    out->kind = CER_OP_PAD;
    if (!PyArg_ParseTuple(op, "sdnn", &kind, &out->value, &max_length,
                          &multiple_of))
        return -1;
    if (max_length < 0 || multiple_of < 1) {
        PyErr_SetString(PyExc_ValueError,
                        "Pad needs max_length >= 0 and multiple_of >= 1");
        return -1;
    }
    out->max_length = (size_t)max_length;
    out->multiple_of = (size_t)multiple_of;
    return 0;
}

static int
read_op(PyObject *op, cer_op *out)
{
    static const struct {
        const char *kind;
        int (*read)(PyObject *op, cer_op *out);
    } readers[] = {
        {"cast", read_cast},
        {"scale", read_scale},
        {"normalize", read_normalize},
        {"to_chw", read_to_chw},
        {"crop", read_crop},
        {"flip", read_flip},
        {"pad", read_pad},
    };
    const char *kind = NULL;

    if (PyTuple_Check(op) && PyTuple_GET_SIZE(op) > 0 &&
        PyUnicode_Check(PyTuple_GET_ITEM(op, 0)))
        kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(op, 0));
    for (size_t i = 0; kind != NULL && i < sizeof readers / sizeof readers[0];
         i++) {
        if (strcmp(kind, readers[i].kind) == 0)
            return readers[i].read(op, out);
    }
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "unknown step of a plan: %R", op);
    return -1;
}

/* {"name": ..., "ops": [...]}; both stay alive through the plan's dict. */
static int
read_plan(PyObject *column, plan *out)
{
    PyObject *name, *ops;
    Py_ssize_t n;

    if (!PyDict_Check(column) ||
        (name = PyDict_GetItemString(column, "name")) == NULL ||
        (ops = PyDict_GetItemString(column, "ops")) == NULL ||
        !PyList_Check(ops)) {
        PyErr_SetString(PyExc_ValueError,
                        "a plan has a dict per column: name and a list ops");
        return -1;
    }
    if ((out->column.name = PyUnicode_AsUTF8(name)) == NULL)
        return -1;
    n = PyList_GET_SIZE(ops);
    out->ops = PyMem_Calloc((size_t)n + 1, sizeof *out->ops);
    if (out->ops == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    out->column.ops = out->ops;
    for (Py_ssize_t i = 0; i < n; i++) {
        out->column.n_ops++; /* counted first: a half-read one is freed too */
        if (read_op(PyList_GET_ITEM(ops, i), &out->ops[i]) < 0)
            return -1;
    }
    return 0;
}

/* --- the parts ------------------------------------------------------------ */

/* Whether nobody can change an array, short of making it writable again. */
static bool
is_read_only(PyArrayObject *array)
{
    PyObject *base = (PyObject *)array;

    while (base != NULL && PyArray_Check(base)) {
        if (PyArray_ISWRITEABLE((PyArrayObject *)base))
            return false;
        base = PyArray_BASE((PyArrayObject *)base);
    }
    /* What else may own memory, but for bytes, can change it. */
    return base == NULL || PyBytes_Check(base);
}

/* Row numbers are checked once: an array that may still change is copied. */
static int
read_row_array(PyArrayObject *rows, PyObject *keep, cer_part *out)
{
    PyObject *kept = is_read_only(rows) ? Py_NewRef((PyObject *)rows)
                                        : PyArray_NewCopy(rows, NPY_CORDER);
    int result;

    if (kept == NULL)
        return -1;
    out->rows = PyArray_DATA((PyArrayObject *)kept);
    out->count = (size_t)PyArray_DIM((PyArrayObject *)kept, 0);
    result = PyList_Append(keep, kept);
    Py_DECREF(kept);
    return result;
}

static int
read_rows(PyObject *rows, PyObject *keep, cer_part *out)
{
    Py_ssize_t start, stop;

    if (PyTuple_Check(rows)) {
        if (!PyArg_ParseTuple(rows, "nn;rows are (start, stop) or an array",
                              &start, &stop))
            return -1;
        if (start < 0 || stop < start) {
            PyErr_Format(PyExc_ValueError, "rows %zd to %zd", start, stop);
            return -1;
        }
        out->start = (size_t)start;
        out->count = (size_t)(stop - start);
        return 0;
    }
    if (!PyArray_Check(rows) || PyArray_NDIM((PyArrayObject *)rows) != 1 ||
        PyArray_TYPE((PyArrayObject *)rows) != NPY_UINT32 ||
        !PyArray_ISCARRAY_RO((PyArrayObject *)rows)) {
        PyErr_SetString(PyExc_TypeError, "rows are (start, stop) or a "
                                         "contiguous uint32 array");
        return -1;
    }
    return read_row_array((PyArrayObject *)rows, keep, out);
}

static int
read_part(core_state *state, PyObject *part, PyObject *keep, cer_part *out)
{
    PyObject *reader, *rows;

    if (!PyTuple_Check(part)) {
        PyErr_SetString(PyExc_TypeError, "a part is (ShardReader, rows)");
        return -1;
    }
    if (!PyArg_ParseTuple(part, "OO;a part is (ShardReader, rows)", &reader,
                          &rows) ||
        (out->shard = py_shard_get(state, reader)) == NULL)
        return -1;
    return read_rows(rows, keep, out);
}

/* Global row numbers of the shards' first rows; as if one followed the other
 * where none are given. */
static int
read_first_rows(PyObject *first_rows, cer_part *parts, Py_ssize_t n)
{
    PyObject *numbers = PySequence_Tuple(first_rows);
    uint64_t next = 0;
    int result = -1;

    if (numbers == NULL)
        return -1;
    if (PyTuple_GET_SIZE(numbers) != 0 && PyTuple_GET_SIZE(numbers) != n) {
        PyErr_Format(PyExc_ValueError, "%zd first_rows for %zd parts",
                     PyTuple_GET_SIZE(numbers), n);
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyTuple_GET_SIZE(numbers) != 0)
            next = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(numbers, i));
        if (next == (uint64_t)-1 && PyErr_Occurred())
            goto done;
        parts[i].first_row = next;
        next += cer_shard_rows(parts[i].shard);
    }
    result = 0;

done:
    Py_DECREF(numbers);
    return result;
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

static int
make_loader(loader_object *self, PyObject *parts, PyObject *columns,
            PyObject *first_rows, const cer_load_options *options)
{
    core_state *state = core_state_of((PyObject *)self);
    Py_ssize_t n_parts = PyTuple_GET_SIZE(parts);
    Py_ssize_t n_columns = PyTuple_GET_SIZE(columns);
    cer_part *c_parts = PyMem_Calloc((size_t)n_parts + 1, sizeof *c_parts);
    plan *plans = PyMem_Calloc((size_t)n_columns + 1, sizeof *plans);
    cer_load_column *c_columns =
        PyMem_Calloc((size_t)n_columns + 1, sizeof *c_columns);
    cer_error err = {0};
    int result = -1;

    if (c_parts == NULL || plans == NULL || c_columns == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n_parts; i++) {
        if (read_part(state, PyTuple_GET_ITEM(parts, i), self->keep,
                      &c_parts[i]) < 0)
            goto done;
    }
    for (Py_ssize_t i = 0; i < n_columns; i++) {
        if (read_plan(PyTuple_GET_ITEM(columns, i), &plans[i]) < 0)
            goto done;
        c_columns[i] = plans[i].column;
    }
    if (read_first_rows(first_rows, c_parts, n_parts) < 0)
        goto done;
    if (cer_loader_new(c_parts, (size_t)n_parts, c_columns, (size_t)n_columns,
                       options, &self->loader, &err) != CER_OK) {
        core_raise(state, &err);
        goto done;
    }
    result = 0;

done:
    PyMem_Free(c_parts);
    PyMem_Free(c_columns);
    free_plans(plans, n_columns);
    return result;
}

static int
set_up(loader_object *self, PyObject *parts, PyObject *columns,
       PyObject *first_rows, const cer_load_options *options)
{
    const char *name = PyUnicode_AsUTF8(self->framework_name);
    PyObject *part_tuple = NULL, *column_tuple = NULL;
    int result = -1;

    if (name == NULL || py_framework_init(&self->framework, name) < 0)
        return -1;
    self->keep = PyList_New(0);
    part_tuple = PySequence_Tuple(parts);
    column_tuple = PySequence_Tuple(columns);
    if (self->keep == NULL || part_tuple == NULL || column_tuple == NULL ||
        make_loader(self, part_tuple, column_tuple, first_rows, options) < 0)
        goto done;
    self->names = make_names(self->loader);
    result = self->names == NULL ? -1 : 0;

done:
    Py_XDECREF(part_tuple);
    Py_XDECREF(column_tuple);
    return result;
}

PyDoc_STRVAR(
    loader_doc,
    "Loader(parts, plan, *, batch_size, seed=0, shuffle=True, "
    "drop_last=False,\n"
    "       framework='torch', threads=0, first_rows=())\n--\n\n"
    "An iterator of batches of shuffled rows, used for many passes.\n\n"
    "`parts` has a pair (ShardReader, rows) per shard of the view: rows are\n"
    "(start, stop) or a uint32 array, which is copied if it can be changed.\n"
    "`plan` is made by\n"
    "cerebro.transforms.compile. begin() starts a pass; iterating gives dicts\n"
    "of tensors of the framework.");

static PyObject *
loader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "parts",     "plan",      "batch_size", "seed",       "shuffle",
        "drop_last", "framework", "threads",    "first_rows", NULL};
    PyObject *parts, *columns, *framework = NULL, *first_rows = NULL;
    PyObject *seed_arg = NULL, *none = NULL;
    Py_ssize_t batch_size = 0, threads = 0;
    uint64_t seed = 0;
    int shuffle = 1, drop_last = 0;
    loader_object *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$nOppUnO:Loader",
                                     keywords, &parts, &columns, &batch_size,
                                     &seed_arg, &shuffle, &drop_last,
                                     &framework, &threads, &first_rows) ||
        core_read_number(seed_arg, "seed", UINT64_MAX, &seed) < 0)
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
    self->batch_size = batch_size;
    self->framework_name = framework != NULL ? Py_NewRef(framework)
                                             : PyUnicode_FromString("torch");
    none = PyTuple_New(0);
    if (self->framework_name == NULL || none == NULL ||
        set_up(self, parts, columns, first_rows != NULL ? first_rows : none,
               &(cer_load_options){
                   .batch_size = (size_t)batch_size,
                   .seed = seed,
                   .shuffle = shuffle != 0,
                   .drop_last = drop_last != 0,
                   .threads = (uint32_t)threads,
               }) < 0)
        Py_CLEAR(self);
    Py_XDECREF(none);
    return (PyObject *)self;
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

/* Row arrays stay until the loader is freed: its threads read them. */
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
    /* Joins the threads with the GIL held: they never ask for it, and have at
     * most one batch each to finish. */
    cer_loader_free(self->loader);
    (void)loader_clear(object);
    Py_XDECREF(self->framework_name);
    Py_XDECREF(self->names);
    Py_XDECREF(self->keep);
    type->tp_free(object);
    Py_DECREF(type);
}

/* --- the pass ------------------------------------------------------------- */

static uint32_t *
read_numbers(PyObject *shards, size_t *n)
{
    PyObject *numbers = PySequence_Tuple(shards);
    uint32_t *out = NULL;

    if (numbers == NULL)
        return NULL;
    *n = (size_t)PyTuple_GET_SIZE(numbers);
    out = PyMem_Calloc(*n + 1, sizeof *out);
    if (out == NULL)
        PyErr_NoMemory();
    for (size_t i = 0; out != NULL && i < *n; i++) {
        PyObject *number = PyTuple_GET_ITEM(numbers, (Py_ssize_t)i);
        Py_ssize_t shard = PyNumber_AsSsize_t(number, PyExc_OverflowError);

        if (shard < 0 || shard > UINT32_MAX) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "no shard %zd", shard);
            PyMem_Free(out);
            out = NULL;
        } else {
            out[i] = (uint32_t)shard;
        }
    }
    Py_DECREF(numbers);
    return out;
}

PyDoc_STRVAR(
    begin_doc,
    "begin($self, shards, epoch, start=0)\n--\n\n"
    "Start a pass over these parts in this order.\n\n"
    "`start` batches are left out. What was left of the pass before is\n"
    "dropped; batches given out stay valid.");

static PyObject *
loader_begin(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"shards", "epoch", "start", NULL};
    loader_object *self = (loader_object *)object;
    PyObject *shards, *epoch_arg;
    uint64_t epoch = 0;
    Py_ssize_t start = 0;
    cer_error err = {0};
    cer_status status;
    uint32_t *numbers;
    size_t n;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|n:begin", keywords,
                                     &shards, &epoch_arg, &start) ||
        core_read_number(epoch_arg, "epoch", UINT64_MAX, &epoch) < 0)
        return NULL;
    if (start < 0) {
        PyErr_Format(PyExc_ValueError, "start must be 0 or more, not %zd",
                     start);
        return NULL;
    }
    if ((numbers = read_numbers(shards, &n)) == NULL)
        return NULL;
    if (enter(self) < 0) {
        PyMem_Free(numbers);
        return NULL;
    }
    self->last_rows = 0;
    Py_BEGIN_ALLOW_THREADS
    status =
        cer_loader_begin(self->loader, numbers, n, epoch, (size_t)start, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    PyMem_Free(numbers);
    if (status != CER_OK)
        return core_raise(core_state_of(object), &err);
    Py_RETURN_NONE;
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

static PyObject *
loader_next(PyObject *object)
{
    loader_object *self = (loader_object *)object;
    cer_batch *batch = NULL;
    cer_error err = {0};
    cer_status status;
    PyObject *dict;

    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_loader_next(self->loader, &batch, &err);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (status != CER_OK)
        return core_raise(core_state_of(object), &err);
    if (batch == NULL)
        return NULL; /* the end: no exception means StopIteration */
    self->last_rows = (Py_ssize_t)batch->n_rows;
    dict = as_dict(self, batch);
    cer_owner_release(&batch->owner); /* the tensors have their own */
    return dict;
}

PyDoc_STRVAR(close_doc,
             "close($self, /)\n--\n\n"
             "Stop the threads and let go of the shards; batches stay valid.");

static PyObject *
loader_close(PyObject *object, PyObject *Py_UNUSED(args))
{
    loader_object *self = (loader_object *)object;

    if (enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
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
    return PyLong_FromSize_t(
        cer_loader_buffers(((loader_object *)object)->loader));
}

static PyMethodDef loader_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))loader_begin,
     METH_VARARGS | METH_KEYWORDS, begin_doc},
    {"close", loader_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef loader_members[] = {
    {"batch_size", T_PYSSIZET, offsetof(loader_object, batch_size), READONLY,
     "Rows of a batch."},
    {"framework", T_OBJECT, offsetof(loader_object, framework_name), READONLY,
     "Whose tensors the batches are."},
    {"last_rows", T_PYSSIZET, offsetof(loader_object, last_rows), READONLY,
     "Rows of the batch given last."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef loader_getset[] = {
    {"rows", loader_get_rows, NULL, "Rows of the pass.", NULL},
    {"buffers", loader_get_buffers, NULL, "Batch buffers in existence.", NULL},
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

PyDoc_STRVAR(batch_count_doc,
             "batch_count(rows, batch_size, drop_last, /)\n--\n\n"
             "Return how many batches a shard of `rows` rows gives.");

static PyObject *
batch_count(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t rows, batch_size;
    int drop_last;

    if (!PyArg_ParseTuple(args, "nnp:batch_count", &rows, &batch_size,
                          &drop_last))
        return NULL;
    if (rows < 0 || batch_size < 1) {
        PyErr_Format(PyExc_ValueError, "%zd rows in batches of %zd", rows,
                     batch_size);
        return NULL;
    }
    return PyLong_FromSize_t(
        cer_loader_count((size_t)rows, (size_t)batch_size, drop_last != 0));
}

static PyMethodDef functions[] = {
    {"batch_count", batch_count, METH_VARARGS, batch_count_doc},
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
