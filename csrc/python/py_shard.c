/* py_shard.c -- ShardReader: the columns of a shard as read-only arrays. */
#define NO_IMPORT_ARRAY
#include "py_shard.h"

#include <numpy/arrayobject.h>

#include "hash.h"
#include "py_dtype.h"

typedef struct reader_object {
    PyObject_HEAD
    cer_shard *shard;
} reader_object;

cer_shard *
py_shard_get(core_state *state, PyObject *object)
{
    if (!PyObject_TypeCheck(object, state->shard_reader_type)) {
        PyErr_Format(PyExc_TypeError, "expected a ShardReader, not %.100s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return ((reader_object *)object)->shard;
}

/* --- columns from Python ------------------------------------------------- */

static int
read_size(PyObject *value, uint64_t *out)
{
    *out = PyLong_AsUnsignedLongLong(value);
    return *out == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* The file name in the operating system's encoding. `keep` owns the bytes,
 * because the dict may change once the GIL is released. */
static const char *
keep_file_name(PyObject *name, PyObject *keep)
{
    PyObject *bytes = NULL;
    int failed;

    if (!PyUnicode_FSConverter(name, &bytes))
        return NULL;
    failed = PyList_Append(keep, bytes);
    Py_DECREF(bytes); /* the list holds one */
    return failed ? NULL : PyBytes_AS_STRING(bytes);
}

static bool
ends_with(const char *text, const char *end)
{
    size_t len = strlen(text), end_len = strlen(end);

    return len >= end_len && strcmp(text + len - end_len, end) == 0;
}

/* Reads {file name: bytes}: one file, or for a ragged column two; *.offsets.npy
 * has the offsets. */
static int
read_files(PyObject *files, PyObject *keep, cer_column_spec *spec)
{
    Py_ssize_t at = 0, expected = spec->ragged ? 2 : 1;
    PyObject *key, *value;

    while (PyDict_Next(files, &at, &key, &value)) {
        const char *name;
        uint64_t bytes;
        int failed;

        Py_INCREF(key); /* __fspath__ may run any code */
        Py_INCREF(value);
        name = keep_file_name(key, keep);
        failed = name == NULL || read_size(value, &bytes) < 0;
        Py_DECREF(key);
        Py_DECREF(value);
        if (failed)
            return -1;
        if (spec->ragged && ends_with(name, ".offsets.npy")) {
            spec->offsets_file = name;
            spec->offsets_bytes = bytes;
        } else {
            spec->file = name;
            spec->file_bytes = bytes;
        }
    }
    if (PyDict_GET_SIZE(files) == expected && spec->file != NULL &&
        (!spec->ragged || spec->offsets_file != NULL))
        return 0;
    PyErr_Format(PyExc_ValueError,
                 spec->ragged ? "column %s: a ragged column needs two files, "
                                "*.values.npy and *.offsets.npy"
                              : "column %s: must have one file",
                 spec->name);
    return -1;
}

/* (name, dtype, row shape, ragged, {file name: bytes}) */
static int
read_column(PyObject *column, PyObject *keep, cer_column_spec *spec)
{
    PyObject *shape, *files;
    const char *dtype;
    int ragged;

    if (!PyArg_ParseTuple(column,
                          "ssOpO!;a column must be (name, dtype, row shape, "
                          "ragged, {file name: bytes})",
                          &spec->name, &dtype, &shape, &ragged, &PyDict_Type,
                          &files))
        return -1;
    spec->ragged = ragged != 0;
    if (!cer_dtype_from_name(dtype, &spec->dtype)) {
        PyErr_Format(PyExc_ValueError, "column %s: unknown dtype '%s'",
                     spec->name, dtype);
        return -1;
    }
    if (py_dtype_read_shape(shape, spec->name, CER_COLUMN_MAX_DIMS, spec->shape,
                            &spec->n_dims) < 0)
        return -1;
    return read_files(files, keep, spec);
}

/* Fills `specs`, one per column; `keep` owns everything they point to. */
static int
read_columns(PyObject *columns, PyObject *keep, cer_column_spec *specs)
{
    Py_ssize_t n = PyTuple_GET_SIZE(columns);

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *column = PySequence_Tuple(PyTuple_GET_ITEM(columns, i));
        int failed;

        if (column == NULL)
            return -1;
        failed = PyList_Append(keep, column);
        Py_DECREF(column); /* the list holds one */
        if (failed || read_column(column, keep, &specs[i]) < 0)
            return -1;
    }
    return 0;
}

/* --- the type ------------------------------------------------------------ */

PyDoc_STRVAR(
    reader_doc,
    "ShardReader(directory, rows, columns)\n--\n\n"
    "One shard, mapped read-only and checked against its manifest.\n\n"
    "`columns` has a tuple per column: (name, dtype, row shape, ragged,\n"
    "{file name: size in bytes}). Checks sizes, .npy headers and the\n"
    "order of ragged offsets; hashes() checks the bytes. Raises OSError\n"
    "or CorruptDataError naming the file.");

static PyObject *
reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"directory", "rows", "columns", NULL};
    PyObject *directory = NULL, *given, *columns = NULL, *keep = NULL;
    reader_object *self = NULL;
    cer_column_spec *specs = NULL;
    cer_error err = {0};
    cer_status status;
    cer_shard *shard = NULL;
    Py_ssize_t rows, n;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&nO:ShardReader", keywords,
                                     PyUnicode_FSConverter, &directory, &rows,
                                     &given))
        return NULL;
    if (rows < 0) {
        PyErr_SetString(PyExc_ValueError, "rows must not be negative");
        goto done;
    }
    if ((columns = PySequence_Tuple(given)) == NULL ||
        (keep = PyList_New(0)) == NULL)
        goto done;
    n = PyTuple_GET_SIZE(columns);
    specs = PyMem_Calloc(n == 0 ? 1 : (size_t)n, sizeof *specs);
    if (specs == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (read_columns(columns, keep, specs) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    status = cer_shard_open(PyBytes_AS_STRING(directory), (size_t)rows, specs,
                            (size_t)n, &shard, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK) {
        core_raise(core_state_of_type(type), &err);
        goto done;
    }
    self = (reader_object *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->shard = shard;
    else
        cer_shard_release(shard);

done:
    PyMem_Free(specs);
    Py_XDECREF(keep);
    Py_XDECREF(columns);
    Py_XDECREF(directory);
    return (PyObject *)self;
}

static void
reader_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    cer_shard_release(((reader_object *)self)->shard);
    type->tp_free(self);
    Py_DECREF(type);
}

static const cer_column *
find_column(reader_object *self, PyObject *name, bool ragged)
{
    const char *text = PyUnicode_AsUTF8(name);
    const cer_column *column;

    if (text == NULL)
        return NULL;
    column = cer_shard_find(self->shard, text);
    if (column == NULL)
        PyErr_Format(PyExc_KeyError, "no column %U in %s", name,
                     cer_shard_directory(self->shard));
    else if (column->ragged != ragged)
        PyErr_Format(PyExc_ValueError,
                     ragged ? "column %U is not ragged: use column()"
                            : "column %U is ragged: use ragged()",
                     name);
    else
        return column;
    return NULL;
}

/* A read-only array over memory that lives as long as `self`. */
static PyObject *
view_of(PyObject *self, int type_number, int n_dims, npy_intp *shape,
        const void *data)
{
    PyObject *array =
        PyArray_New(&PyArray_Type, n_dims, shape, type_number, NULL,
                    (void *)(uintptr_t)data, 0, NPY_ARRAY_CARRAY_RO, NULL);

    if (array == NULL)
        return NULL;
    /* Steals the reference, even on failure. */
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0)
        Py_CLEAR(array);
    return array;
}

static PyObject *
view_of_data(reader_object *self, const cer_column *column)
{
    npy_intp shape[CER_COLUMN_MAX_DIMS + 1];

    shape[0] = (npy_intp)cer_shard_values(self->shard, column);
    for (uint32_t i = 0; i < column->ndim; i++)
        shape[i + 1] = (npy_intp)column->shape[i];
    return view_of((PyObject *)self, py_dtype_number(column->dtype),
                   (int)column->ndim + 1, shape, column->data);
}

static PyObject *
reader_column(PyObject *self, PyObject *name)
{
    const cer_column *column = find_column((reader_object *)self, name, false);

    return column == NULL ? NULL : view_of_data((reader_object *)self, column);
}

static PyObject *
reader_ragged(PyObject *self, PyObject *name)
{
    reader_object *reader = (reader_object *)self;
    const cer_column *column = find_column(reader, name, true);
    PyObject *values, *offsets;
    npy_intp n;

    if (column == NULL || (values = view_of_data(reader, column)) == NULL)
        return NULL;
    n = (npy_intp)cer_shard_rows(reader->shard) + 1;
    offsets = view_of(self, NPY_INT64, 1, &n, column->offsets);
    if (offsets == NULL) {
        Py_DECREF(values);
        return NULL;
    }
    return Py_BuildValue("(NN)", values, offsets);
}

/* Adds {name: hash} for file number `file`. */
static int
add_hash(reader_object *self, size_t file, PyObject *hashes)
{
    cer_status status;
    cer_error err = {0};
    uint64_t hash = 0;
    char hex[17];
    PyObject *name, *text = NULL;
    int result = -1;

    Py_BEGIN_ALLOW_THREADS
    status = cer_shard_hash_file(self->shard, file, &hash, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK) {
        core_raise(core_state_of((PyObject *)self), &err);
        return -1;
    }
    cer_hash64_hex(hash, hex);
    name = PyUnicode_DecodeFSDefault(cer_shard_file_name(self->shard, file));
    if (name != NULL && (text = PyUnicode_FromString(hex)) != NULL)
        result = PyDict_SetItem(hashes, name, text);
    Py_XDECREF(text);
    Py_XDECREF(name);
    return result;
}

static PyObject *
reader_hashes(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    reader_object *reader = (reader_object *)self;
    PyObject *hashes = PyDict_New();
    size_t n = cer_shard_n_files(reader->shard);

    for (size_t i = 0; hashes != NULL && i < n; i++) {
        if (PyErr_CheckSignals() < 0 || add_hash(reader, i, hashes) < 0)
            Py_CLEAR(hashes);
    }
    return hashes;
}

static PyObject *
get_rows(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(cer_shard_rows(((reader_object *)self)->shard));
}

static PyObject *
get_directory(PyObject *self, void *Py_UNUSED(closure))
{
    return PyUnicode_DecodeFSDefault(
        cer_shard_directory(((reader_object *)self)->shard));
}

static PyObject *
get_column_names(PyObject *self, void *Py_UNUSED(closure))
{
    size_t n;
    const cer_column *columns =
        cer_shard_columns(((reader_object *)self)->shard, &n);
    PyObject *names = PyTuple_New((Py_ssize_t)n);

    for (size_t i = 0; names != NULL && i < n; i++) {
        PyObject *name = PyUnicode_FromString(columns[i].name);

        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    return names;
}

static PyMethodDef reader_methods[] = {
    {"column", reader_column, METH_O,
     "column(name)\n--\n\nReturn a read-only view of a column, shape (rows, "
     "*row shape), bfloat16 as\nuint16. It keeps the mapping alive."},
    {"ragged", reader_ragged, METH_O,
     "ragged(name)\n--\n\nReturn read-only views (values, offsets) of a ragged "
     "column: row r is\nvalues[offsets[r]:offsets[r + 1]]."},
    {"hashes", reader_hashes, METH_NOARGS,
     "hashes()\n--\n\n"
     "Reread every file and return {file name: XXH3-64 in hexadecimal}."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reader_getset[] = {
    {"rows", get_rows, NULL, "Rows of the shard.", NULL},
    {"directory", get_directory, NULL, "The shard's folder, as passed.", NULL},
    {"column_names", get_column_names, NULL,
     "Column names in the order passed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)reader_doc},
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, reader_getset},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "cerebro._core.ShardReader",
    .basicsize = sizeof(reader_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = reader_slots,
};

int
core_register_shard(PyObject *module)
{
    core_state *state = core_state_of_module(module);

    return core_add_type(module, &reader_spec, &state->shard_reader_type);
}
