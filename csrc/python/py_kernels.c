/* py_kernels.c -- one kernel by hand: rows of a device's memory gathered, for
 * benchmarks and tests. Loaders launch theirs from C. */
#include "kernels.h"
#include "py_device.h"

/* What PyArg's formats for unsigned numbers do not: look at the range. */
typedef struct number {
    const char *name;
    PyObject *given;
    uint64_t value;
} number;

static int
read_numbers(number *numbers, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t most = numbers[i].value;

        if (core_read_number(numbers[i].given, numbers[i].name, most,
                             &numbers[i].value) < 0)
            return -1;
    }
    return 0;
}

PyDoc_STRVAR(
    gather_rows_doc,
    "gather_rows(device, dst, src, row_bytes, rows, n_rows, stream=0)\n--\n\n"
    "Copy row rows[i] of `src` to row i of `dst`, by kernel, on a stream.\n\n"
    "`dst`, `src` and `rows` (uint32) are addresses of the device's memory\n"
    "and `stream` is a cudaStream_t: nothing is looked at, and all of it has\n"
    "to stay until the stream is done.");

static PyObject *
gather_rows(PyObject *module, PyObject *args)
{
    enum { DST, SRC, ROW_BYTES, ROWS, N_ROWS, STREAM, N_NUMBERS };
    number n[N_NUMBERS] = {
        {"dst", NULL, UINTPTR_MAX},     {"src", NULL, UINTPTR_MAX},
        {"row_bytes", NULL, INT32_MAX}, {"rows", NULL, UINTPTR_MAX},
        {"n_rows", NULL, UINT32_MAX},   {"stream", NULL, UINTPTR_MAX},
    };
    core_state *state = core_state_of_module(module);
    PyObject *object;
    cer_device *device;
    cer_kernel_call call;
    cer_error err = {0};
    cer_status status;

    if (!PyArg_ParseTuple(args, "OOOOOO|O:gather_rows", &object, &n[DST].given,
                          &n[SRC].given, &n[ROW_BYTES].given, &n[ROWS].given,
                          &n[N_ROWS].given, &n[STREAM].given) ||
        (device = py_device_get(state, object)) == NULL ||
        read_numbers(n, N_NUMBERS) < 0)
        return NULL;
    if (n[STREAM].given == NULL)
        n[STREAM].value = 0;
    status = cer_kernel_rows(
        (void *)(uintptr_t)n[DST].value, (const void *)(uintptr_t)n[SRC].value,
        (size_t)n[ROW_BYTES].value, (const uint32_t *)(uintptr_t)n[ROWS].value,
        (size_t)n[N_ROWS].value, &call, &err);
    if (status == CER_OK) {
        Py_BEGIN_ALLOW_THREADS
        status = cer_kernel_launch(device, &call,
                                   (void *)(uintptr_t)n[STREAM].value, &err);
        Py_END_ALLOW_THREADS
    }
    if (status != CER_OK)
        return core_raise(state, &err);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"gather_rows", gather_rows, METH_VARARGS, gather_rows_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_kernels(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
