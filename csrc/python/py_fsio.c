/* py_fsio.c -- NpyWriter: rows streamed into a new .npy file. */
#define NO_IMPORT_ARRAY
#include "module.h"

#include <numpy/arrayobject.h>

#include "hash.h"
#include "npy.h"
#include "npy_writer.h"
#include "py_dtype.h"

typedef struct writer_object {
    PyObject_HEAD
    cer_npy_writer *writer; /* NULL: closed or aborted */
    bool busy;              /* a thread is working without the GIL */
    cer_dtype dtype;
    uint32_t n_dims;
    size_t row_shape[CER_NPY_MAX_DIMS - 1];
    PyObject *path;
} writer_object;

PyDoc_STRVAR(
    writer_doc,
    "NpyWriter(path, dtype, row_shape, rows)\n--\n\n"
    "Streams rows into one new .npy file and hashes them on the way.\n\n"
    "The file must not exist and is valid only after close() returns. A\n"
    "writer that fails, is aborted or is garbage-collected deletes its\n"
    "file, but not in a forked child. Raises OSError (FileExistsError, no "
    "space, ...) naming the\n"
    "file.");

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
    self->path = path; /* owned by the object from here on */
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

/* Reserves the writer for this thread, for use without the GIL. */
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

/* Deletes the file unless it was closed. */
static void
drop(writer_object *self)
{
    cer_npy_writer_free(self->writer);
    self->writer = NULL;
}

/* Releases the writer. A failed write ends it; a rejected argument does not. */
static void
release(writer_object *self, cer_status status)
{
    self->busy = false;
    if (status != CER_OK && status != CER_INVALID)
        drop(self);
}

/* Returns the rows, contiguous and checked for the writer's type and shape; a
 * new reference. */
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
        PyErr_Format(
            PyExc_ValueError,
            "%s: rows have a different dtype (%S) or shape than declared",
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
     "write(array)\n--\n\n"
     "Append rows: an array of shape (n, *row_shape) and the writer's\n"
     "dtype (uint16 for bfloat16). Contiguous arrays are not copied."},
    {"close", writer_close, METH_NOARGS,
     "close()\n--\n\n"
     "Make the file durable and return (size in bytes, XXH3-64 in "
     "hexadecimal).\n\n"
     "Raises ValueError if rows are missing, OSError if writing fails."},
    {"abort", writer_abort, METH_NOARGS,
     "abort()\n--\n\n"
     "Delete the file; does nothing after close()."},
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

int
core_register_fsio(PyObject *module)
{
    return core_add_type(module, &writer_spec,
                         &core_state_of_module(module)->npy_writer_type);
}
