/* py_plan.c -- reads a loader's columns, with their chains, and its parts. */
#define NO_IMPORT_ARRAY
#include "py_plan.h"

#include <numpy/arrayobject.h>

#include "py_shard.h"

/* --- columns -------------------------------------------------------------- */

void
py_plans_free(py_plan *plans, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; plans != NULL && i < n; i++) {
        for (size_t k = 0; plans[i].ops != NULL && k < plans[i].column.n_ops;
             k++) {
            PyMem_Free((void *)(uintptr_t)plans[i].ops[k].mean);
            PyMem_Free((void *)(uintptr_t)plans[i].ops[k].std);
        }
        PyMem_Free(plans[i].ops);
        Py_XDECREF(plans[i].name);
        Py_XDECREF(plans[i].source);
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
    PyErr_SetString(PyExc_ValueError,
                    "means and standard deviations differ in number");
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
            PyErr_SetString(PyExc_ValueError, "a crop has a negative size");
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
        PyErr_Format(PyExc_ValueError, "unknown operation in a plan: %R", op);
    return -1;
}

/* The entry of a column's dict with a reference, or NULL without an exception.
 * Comparing keys may run any code. */
static PyObject *
entry_of(PyObject *column, const char *key)
{
    return Py_XNewRef(PyDict_GetItemString(column, key));
}

int
py_plan_read(PyObject *column, py_plan *out)
{
    PyObject *list = NULL, *last = NULL, *ops = NULL;
    Py_ssize_t n;
    int result = -1;

    if (PyDict_Check(column)) {
        out->name = entry_of(column, "name");
        out->source = entry_of(column, "source");
        list = entry_of(column, "ops");
        last = entry_of(column, "channels_last");
    }
    if (out->name == NULL || list == NULL || !PyList_Check(list)) {
        PyErr_SetString(PyExc_ValueError,
                        "a plan needs a dict per column: name and a list ops");
        goto done;
    }
    out->column.channels_last = last == Py_True;
    /* Converting numbers may run Python code, which could change the list. */
    if ((ops = core_tuple(list, "ops must be a list")) == NULL ||
        (out->column.name = PyUnicode_AsUTF8(out->name)) == NULL)
        goto done;
    if (out->source != NULL &&
        (out->column.source = PyUnicode_AsUTF8(out->source)) == NULL)
        goto done;
    n = PyTuple_GET_SIZE(ops);
    out->ops = PyMem_Calloc((size_t)n + 1, sizeof *out->ops);
    if (out->ops == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    out->column.ops = out->ops;
    for (Py_ssize_t i = 0; i < n; i++) {
        out->column.n_ops++; /* first, so a half-read one is freed too */
        if (read_op(PyTuple_GET_ITEM(ops, i), &out->ops[i]) < 0)
            goto done;
    }
    result = 0;

done:
    Py_XDECREF(list);
    Py_XDECREF(last);
    Py_XDECREF(ops);
    return result;
}

/* --- the parts ------------------------------------------------------------ */

/* Whether nobody can change an array: its memory is that of bytes. Any other
 * owner can, also one that is read-only now. */
static bool
is_constant(PyArrayObject *array)
{
    PyObject *base = PyArray_BASE(array);

    while (base != NULL && PyArray_Check(base))
        base = PyArray_BASE((PyArrayObject *)base);
    return base != NULL && PyBytes_CheckExact(base) &&
           !PyArray_ISWRITEABLE(array);
}

/* Row numbers are checked once, so an array that could still change is copied.
 */
static void *
keep_array(PyArrayObject *array, PyObject *keep)
{
    PyObject *kept = is_constant(array) ? Py_NewRef((PyObject *)array)
                                        : PyArray_NewCopy(array, NPY_CORDER);
    void *data = NULL;

    if (kept == NULL)
        return NULL;
    if (PyList_Append(keep, kept) == 0)
        data = PyArray_DATA((PyArrayObject *)kept);
    Py_DECREF(kept);
    return data;
}

static bool
is_array(PyObject *object, int type)
{
    return PyArray_Check(object) &&
           PyArray_NDIM((PyArrayObject *)object) == 1 &&
           PyArray_TYPE((PyArrayObject *)object) == type &&
           PyArray_ISCARRAY_RO((PyArrayObject *)object);
}

static int
read_rows(PyObject *rows, PyObject *keep, cer_part *out)
{
    Py_ssize_t start, stop;

    if (PyTuple_Check(rows)) {
        if (!PyArg_ParseTuple(rows, "nn;rows must be (start, stop) or an array",
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
    if (!is_array(rows, NPY_UINT32)) {
        PyErr_SetString(PyExc_TypeError, "rows must be (start, stop) or a "
                                         "contiguous uint32 array");
        return -1;
    }
    out->rows = keep_array((PyArrayObject *)rows, keep);
    out->count = (size_t)PyArray_DIM((PyArrayObject *)rows, 0);
    return out->rows == NULL ? -1 : 0;
}

/* Running sums of the rows' weights. */
static int
read_sums(PyObject *sums, PyObject *keep, cer_part *out)
{
    if (sums == Py_None)
        return 0;
    if (!is_array(sums, NPY_UINT64) ||
        (size_t)PyArray_DIM((PyArrayObject *)sums, 0) != out->count) {
        PyErr_SetString(PyExc_TypeError, "sums must be None or a contiguous "
                                         "uint64 array, one for each row");
        return -1;
    }
    out->sums = keep_array((PyArrayObject *)sums, keep);
    return out->sums == NULL ? -1 : 0;
}

int
py_part_read(core_state *state, PyObject *part, PyObject *keep, cer_part *out)
{
    PyObject *reader, *rows, *sums = Py_None, *before = NULL;

    if (!PyTuple_Check(part)) {
        PyErr_SetString(PyExc_TypeError, "a part must be (ShardReader, rows)");
        return -1;
    }
    if (!PyArg_ParseTuple(part, "OO|OO;a part must be (ShardReader, rows)",
                          &reader, &rows, &sums, &before) ||
        (out->shard = py_shard_get(state, reader)) == NULL ||
        read_rows(rows, keep, out) < 0 ||
        core_read_number(before, "before", UINT64_MAX, &out->sum_before) < 0)
        return -1;
    return read_sums(sums, keep, out);
}

int
py_parts_number(PyObject *first_rows, cer_part *parts, Py_ssize_t n)
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
