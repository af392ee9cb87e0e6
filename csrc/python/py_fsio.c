/* py_fsio.c -- NpyWriter, fsync_directory, replace_file and publish_files. */
#define NO_IMPORT_ARRAY
#include "module.h"

#include <numpy/arrayobject.h>

#include "fsio.h"
#include "hash.h"
#include "npy.h"
#include "npy_writer.h"
#include "publish.h"
#include "py_dtype.h"

typedef struct writer_object {
    PyObject_HEAD
    cer_npy_writer *writer; /* NULL: closed or aborted */
    bool busy;              /* a thread is inside without the GIL */
    cer_dtype dtype;
    uint32_t n_dims;
    size_t row_shape[CER_NPY_MAX_DIMS - 1];
    PyObject *path;
} writer_object;

PyDoc_STRVAR(
    writer_doc,
    "NpyWriter(path, dtype, row_shape, rows)\n--\n\n"
    "Streams rows into one new .npy file and hashes on the way.\n\n"
    "The file must not be there yet and counts only once close() returned; a\n"
    "writer that fails, is aborted or is forgotten removes its file again.\n"
    "Raises OSError (FileExistsError, no space, ...) naming the file.");

static PyObject *
writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", "dtype", "row_shape", "rows", NULL};
    PyObject *path = NULL, *row_shape;
    writer_object *self = NULL;
    const char *dtype;
    Py_ssize_t rows;
    cer_status status;
    cer_error err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&sOn:NpyWriter", keywords,
                                     PyUnicode_FSConverter, &path, &dtype,
                                     &row_shape, &rows))
        return NULL;
    self = (writer_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_DECREF(path);
        return NULL;
    }
    self->path = path; /* the object's from here on */
    if (!cer_dtype_from_name(dtype, &self->dtype) || rows < 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: cannot write %zd rows of dtype '%s'",
                     PyBytes_AS_STRING(path), rows, dtype);
        goto failed;
    }
    if (py_dtype_read_shape(row_shape, PyBytes_AS_STRING(path),
                            CER_NPY_MAX_DIMS - 1, self->row_shape,
                            &self->n_dims) < 0)
        goto failed;
    Py_BEGIN_ALLOW_THREADS
    status =
        cer_npy_writer_open(PyBytes_AS_STRING(path), self->dtype, self->n_dims,
                            self->row_shape, (size_t)rows, &self->writer, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK) {
        core_raise(core_state_of_type(type), &err);
        goto failed;
    }
    return (PyObject *)self;

failed:
    Py_DECREF(self);
    return NULL;
}

static void
writer_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    writer_object *self = (writer_object *)object;

    cer_npy_writer_free(self->writer);
    Py_XDECREF(self->path);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Takes the writer for this thread, to be used without the GIL. */
static int
acquire(writer_object *self)
{
    if (self->writer != NULL && !self->busy) {
        self->busy = true;
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 self->busy ? "%s: another thread is using the writer"
                            : "%s: the writer is closed",
                 PyBytes_AS_STRING(self->path));
    return -1;
}

/* Removes the file, unless it was closed. */
static void
drop(writer_object *self)
{
    cer_npy_writer_free(self->writer);
    self->writer = NULL;
}

/* Gives the writer back. After a failed write there is nothing to go on with;
 * after a refused argument there is. */
static void
release(writer_object *self, cer_status status)
{
    self->busy = false;
    if (status != CER_OK && status != CER_INVALID)
        drop(self);
}

/* Rows of the writer's type and shape, contiguous; a new reference. */
static PyArrayObject *
rows_of(writer_object *self, PyObject *object)
{
    PyArray_Descr *wanted = PyArray_DescrFromType(py_dtype_number(self->dtype));
    PyArrayObject *array =
        (PyArrayObject *)PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
    PyArrayObject *rows = NULL;
    bool fits;

    if (array == NULL || wanted == NULL)
        goto done;
    fits = PyArray_EquivTypes(PyArray_DESCR(array), wanted) &&
           PyArray_NDIM(array) == (int)self->n_dims + 1;
    for (uint32_t i = 0; fits && i < self->n_dims; i++)
        fits = (size_t)PyArray_DIM(array, (int)i + 1) == self->row_shape[i];
    if (fits)
        rows = PyArray_GETCONTIGUOUS(array); /* copies only if it is not */
    else
        PyErr_Format(PyExc_ValueError,
                     "%s: rows of another dtype (%S) or shape than announced",
                     PyBytes_AS_STRING(self->path), PyArray_DESCR(array));

done:
    Py_XDECREF(wanted);
    Py_XDECREF(array);
    return rows;
}

static PyObject *
writer_write(PyObject *object, PyObject *array)
{
    writer_object *self = (writer_object *)object;
    PyArrayObject *rows = rows_of(self, array);
    PyObject *result = NULL;
    cer_error err = {0};
    cer_status status;

    if (rows == NULL || acquire(self) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    status = cer_npy_writer_write(self->writer, PyArray_DATA(rows),
                                  (size_t)PyArray_DIM(rows, 0), &err);
    Py_END_ALLOW_THREADS
    release(self, status);
    if (status == CER_OK)
        result = Py_NewRef(Py_None);
    else
        core_raise(core_state_of(object), &err);

done:
    Py_XDECREF(rows);
    return result;
}

static PyObject *
writer_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    writer_object *self = (writer_object *)object;
    uint64_t file_bytes = 0, hash = 0;
    cer_error err = {0};
    cer_status status;
    char hex[17];

    if (acquire(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_npy_writer_close(self->writer, &file_bytes, &hash, &err);
    Py_END_ALLOW_THREADS
    release(self, status);
    if (status != CER_OK)
        return core_raise(core_state_of(object), &err);
    drop(self);
    cer_hash64_hex(hash, hex);
    return Py_BuildValue("(Ks)", (unsigned long long)file_bytes, hex);
}

static PyObject *
writer_abort(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    writer_object *self = (writer_object *)object;

    if (self->writer != NULL) {
        if (acquire(self) < 0)
            return NULL;
        self->busy = false;
        drop(self);
    }
    Py_RETURN_NONE;
}

static PyMethodDef writer_methods[] = {
    {"write", writer_write, METH_O,
     "write(array)\n--\n\nAppend rows: an array of shape (n, *row_shape) and "
     "of "
     "the writer's dtype\n(uint16 for bfloat16). Contiguous arrays are not "
     "copied."},
    {"close", writer_close, METH_NOARGS,
     "close()\n--\n\nMake the file durable and return (size in bytes, XXH3-64 "
     "in hexadecimal).\n\nRaises ValueError if rows are missing, OSError if "
     "the "
     "disk refuses."},
    {"abort", writer_abort, METH_NOARGS,
     "abort()\n--\n\nRemove the file; nothing if it was closed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)writer_doc},
    {Py_tp_new, writer_new},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {0, NULL},
};

static PyType_Spec writer_spec = {
    .name = "cerebro._core.NpyWriter",
    .basicsize = sizeof(writer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = writer_slots,
};

PyDoc_STRVAR(fsync_directory_doc,
             "fsync_directory(path)\n--\n\n"
             "Make names added to or removed from a folder durable.");

static PyObject *
fsync_directory(PyObject *module, PyObject *argument)
{
    PyObject *path = NULL;
    cer_error err = {0};
    cer_status status;

    if (!PyUnicode_FSConverter(argument, &path))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_fsio_sync_directory(PyBytes_AS_STRING(path), &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (status != CER_OK)
        return core_raise(core_state_of_module(module), &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(replace_file_doc,
             "replace_file(path, data)\n--\n\n"
             "Put bytes in the place of a file in one durable step.\n\n"
             "Readers see the old bytes or the new ones, also after a loss of\n"
             "power. On failure (OSError) the old file is untouched.");

static PyObject *
replace_file(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", "data", NULL};
    PyObject *path = NULL;
    Py_buffer data = {0};
    cer_error err = {0};
    cer_status status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&y*:replace_file",
                                     keywords, PyUnicode_FSConverter, &path,
                                     &data))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_fsio_replace(PyBytes_AS_STRING(path), data.buf,
                              (size_t)data.len, &err);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    Py_DECREF(path);
    if (status != CER_OK)
        return core_raise(core_state_of_module(module), &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(publish_files_doc,
             "publish_files(pairs)\n--\n\n"
             "Make complete files durable under their final names.\n\n"
             "pairs: (temporary path, final path) of each. All are synced, "
             "then all are\n"
             "renamed, then their folders are synced. OSError names what "
             "failed; if a file\n"
             "could not be synced, nothing was renamed.");

/* Reads a tuple of pairs; `paths` holds the bytes that the files point to. */
static int
read_files(PyObject *pairs, cer_publish_file *files, PyObject **paths)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);

        if (!PyTuple_Check(pair)) {
            PyErr_SetString(PyExc_TypeError, "pairs must be tuples");
            return -1;
        }
        if (!PyArg_ParseTuple(pair, "O&O&:publish_files", PyUnicode_FSConverter,
                              &paths[2 * i], PyUnicode_FSConverter,
                              &paths[2 * i + 1]))
            return -1;
        files[i].temporary = PyBytes_AS_STRING(paths[2 * i]);
        files[i].path = PyBytes_AS_STRING(paths[2 * i + 1]);
    }
    return 0;
}

static PyObject *
publish_files(PyObject *module, PyObject *argument)
{
    PyObject *pairs = PySequence_Tuple(argument);
    size_t n_files = pairs == NULL ? 0 : (size_t)PyTuple_GET_SIZE(pairs);
    cer_publish_file *files = PyMem_Calloc(n_files + 1, sizeof *files);
    PyObject **paths = PyMem_Calloc(2 * n_files + 1, sizeof *paths);
    PyObject *result = NULL;
    cer_error err = {0};
    cer_status status;

    if (pairs == NULL)
        goto done;
    if (files == NULL || paths == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (read_files(pairs, files, paths) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    status = cer_publish(files, n_files, &err);
    Py_END_ALLOW_THREADS
    if (status == CER_OK)
        result = Py_NewRef(Py_None);
    else
        core_raise(core_state_of_module(module), &err);

done:
    for (size_t i = 0; paths != NULL && i < 2 * n_files; i++)
        Py_XDECREF(paths[i]);
    PyMem_Free(paths);
    PyMem_Free(files);
    Py_XDECREF(pairs);
    return result;
}

static PyMethodDef functions[] = {
    {"fsync_directory", fsync_directory, METH_O, fsync_directory_doc},
    {"replace_file", (PyCFunction)(void (*)(void))replace_file,
     METH_VARARGS | METH_KEYWORDS, replace_file_doc},
    {"publish_files", publish_files, METH_O, publish_files_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_fsio(PyObject *module)
{
    core_state *state = core_state_of_module(module);

    if (core_add_type(module, &writer_spec, &state->npy_writer_type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
