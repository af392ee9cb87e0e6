/* py_hash.c -- XXH3 of any object with a contiguous buffer. */
#include "hash.h"
#include "module.h"

static PyObject *
hash_buffer(PyObject *object, int bits)
{
    Py_buffer view = {0};
    char hex[33];

    if (PyObject_GetBuffer(object, &view, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (bits == 64)
        cer_hash64_hex(cer_hash64(view.buf, (size_t)view.len), hex);
    else
        cer_hash128_hex(cer_hash128_of(view.buf, (size_t)view.len), hex);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyUnicode_FromString(hex);
}

static PyObject *
xxh3_64(PyObject *Py_UNUSED(module), PyObject *object)
{
    return hash_buffer(object, 64);
}

static PyObject *
xxh3_128(PyObject *Py_UNUSED(module), PyObject *object)
{
    return hash_buffer(object, 128);
}

static PyMethodDef functions[] = {
    {"xxh3_64", xxh3_64, METH_O,
     "xxh3_64(buffer)\n--\n\nReturn the XXH3-64 of a C-contiguous buffer as 16 "
     "hexadecimal digits."},
    {"xxh3_128", xxh3_128, METH_O,
     "xxh3_128(buffer)\n--\n\nReturn the XXH3-128 of a C-contiguous buffer as "
     "32 "
     "hexadecimal digits."},
    {NULL, NULL, 0, NULL},
};

int
core_register_hash(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
