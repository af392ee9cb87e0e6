/* py_mt19937.c -- draw_bernoulli: dropout's random numbers, with PyTorch's
 * bits.
 *
 * A tensor is an address here; the caller keeps its memory alive. */
#define NO_IMPORT_ARRAY
#include "module.h"
#include "mt19937.h"

/* Draws into `out`, and advances the state in a tensor of bytes. */
static int
draw(PyObject *module, PyObject *state, double p, float *out, size_t n)
{
    PyObject *address = NULL, *nbytes = NULL;
    void *bytes;
    size_t size;
    cer_error err = {0};
    int result = -1;

    address = PyObject_CallMethod(state, "data_ptr", NULL);
    nbytes = PyObject_CallMethod(state, "numel", NULL);
    if (address == NULL || nbytes == NULL)
        goto done;
    bytes = PyLong_AsVoidPtr(address);
    size = PyLong_AsSize_t(nbytes);
    if (PyErr_Occurred())
        goto done;
    if (cer_mt19937_bernoulli(bytes, size, p, out, n, &err) != CER_OK) {
        core_raise(core_state_of_module(module), &err);
        goto done;
    }
    result = 0;

done:
    Py_XDECREF(address);
    Py_XDECREF(nbytes);
    return result;
}

PyDoc_STRVAR(
    draw_bernoulli_doc,
    "draw_bernoulli(get_state, set_state, address, n, p, /)\n--\n\n"
    "Set each of n float32 numbers to 1 with probability p, else to 0.\n\n"
    "The bits are those of Tensor.bernoulli_(p) with the generator whose\n"
    "methods are `get_state` and `set_state`. ValueError: it is not\n"
    "PyTorch's generator of the CPU, or p is not a probability.");

/* The GIL is kept, so that no other thread draws from the generator between its
 * get_state() and set_state(). */
static PyObject *
draw_bernoulli(PyObject *module, PyObject *args)
{
    PyObject *get_state, *set_state, *state = NULL, *result = NULL;
    unsigned long long address;
    Py_ssize_t n;
    double p;

    if (!PyArg_ParseTuple(args, "OOKnd:draw_bernoulli", &get_state, &set_state,
                          &address, &n, &p))
        return NULL;
    if (n < 0) {
        PyErr_SetString(PyExc_ValueError, "n is negative");
        return NULL;
    }
    state = PyObject_CallNoArgs(get_state);
    if (state != NULL &&
        draw(module, state, p, (float *)(uintptr_t)address, (size_t)n) == 0)
        result = PyObject_CallOneArg(set_state, state);
    Py_XDECREF(state);
    Py_XDECREF(result);
    if (result == NULL)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"draw_bernoulli", draw_bernoulli, METH_VARARGS, draw_bernoulli_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_mt19937(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
