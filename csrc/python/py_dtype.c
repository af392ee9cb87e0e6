/* py_dtype.c -- element types and shapes between the core and NumPy. */
#define NO_IMPORT_ARRAY
#include "py_dtype.h"

#include <numpy/arrayobject.h>

int
py_dtype_number(cer_dtype dtype)
{
    static const int numbers[CER_DTYPE_COUNT] = {
        [CER_BOOL] = NPY_BOOL,   [CER_I8] = NPY_INT8,
        [CER_I16] = NPY_INT16,   [CER_I32] = NPY_INT32,
        [CER_I64] = NPY_INT64,   [CER_U8] = NPY_UINT8,
        [CER_U16] = NPY_UINT16,  [CER_U32] = NPY_UINT32,
        [CER_U64] = NPY_UINT64,  [CER_F16] = NPY_FLOAT16,
        [CER_BF16] = NPY_UINT16, [CER_F32] = NPY_FLOAT32,
        [CER_F64] = NPY_FLOAT64, [CER_C64] = NPY_COMPLEX64,
    };

    return numbers[dtype];
}

int
py_dtype_read_shape(PyObject *shape, const char *what, uint32_t max_dims,
                    size_t *out, uint32_t *n_dims)
{
    PyObject *sizes = PySequence_Tuple(shape);
    Py_ssize_t n;
    int result = -1;

    if (sizes == NULL)
        return -1;
    n = PyTuple_GET_SIZE(sizes);
    if (n > (Py_ssize_t)max_dims) {
        PyErr_Format(PyExc_ValueError,
                     "%s: rows of %zd dimensions; at most %u are supported",
                     what, n, (unsigned)max_dims);
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t size =
            PyNumber_AsSsize_t(PyTuple_GET_ITEM(sizes, i), PyExc_OverflowError);

        if (size == -1 && PyErr_Occurred())
            goto done;
        if (size < 0) {
            PyErr_Format(PyExc_ValueError, "%s: a size of %zd in its shape",
                         what, size);
            goto done;
        }
        out[i] = (size_t)size;
    }
    *n_dims = (uint32_t)n;
    result = 0;

done:
    Py_DECREF(sizes);
    return result;
}
