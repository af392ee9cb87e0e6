/* py_optimizer_step.c -- optimizer_step(): a step of Adam, AdamW or SGD.
 *
 * Tensors are addresses here; the caller keeps their memory alive. */
#define NO_IMPORT_ARRAY
#include "module.h"

#include "optimizer_step.h"

enum {
    ADDRESSES = 5, /* of a parameter, its gradient and its state */
    WITHOUT_GIL = 65536
};

/* Reads the numbers of tensor `i` of a flat list. */
static int
read_tensor(PyObject *list, Py_ssize_t i, cer_optimizer_tensor *out)
{
    uintptr_t read[1 + ADDRESSES];

    for (Py_ssize_t j = 0; j <= ADDRESSES; j++) {
        PyObject *item = PyList_GET_ITEM(list, i * (1 + ADDRESSES) + j);

        read[j] = (uintptr_t)PyLong_AsUnsignedLongLong(item);
        if (read[j] == (uintptr_t)-1 && PyErr_Occurred())
            return -1;
    }
    *out = (cer_optimizer_tensor){
        .n = read[0],
        .param = (float *)read[1],
        .grad = (const float *)read[2],
        .first = (float *)read[3],
        .second = (float *)read[4],
        .steps = (float *)read[5],
    };
    return 0;
}

static int
read_settings(PyObject *tuple, cer_optimizer *out)
{
    unsigned long long sqrt;
    int is_sgd, decoupled, nesterov, fused;

    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "settings must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "pddddddd(ppp)K", &is_sgd, &out->lr,
                          &out->decay, &out->beta1, &out->beta2, &out->eps,
                          &out->momentum, &out->dampening, &decoupled,
                          &nesterov, &fused, &sqrt))
        return -1;
    out->kind = is_sgd ? CER_OPTIMIZER_SGD : CER_OPTIMIZER_ADAM;
    out->decoupled = decoupled != 0;
    out->nesterov = nesterov != 0;
    out->fused = fused != 0;
    out->sqrt = (cer_elementwise_sqrt)(uintptr_t)sqrt;
    return 0;
}

/* Whether the core reads and writes only memory that the tensor has. */
static bool
is_complete(const cer_optimizer *settings, const cer_optimizer_tensor *tensor)
{
    bool complete = tensor->param != NULL && tensor->grad != NULL;

    if (settings->kind == CER_OPTIMIZER_ADAM)
        return complete && tensor->first != NULL && tensor->second != NULL &&
               tensor->steps != NULL;
    return complete && (settings->momentum == 0 || tensor->first != NULL);
}

/* Steps or, if `tries`, only asks whether a step may be made: 1, 0 or -1. */
static int
run_group(PyObject *group, bool tries)
{
    PyObject *settings_tuple, *list;
    cer_optimizer settings = {0};

    if (!PyArg_ParseTuple(group, "OO!", &settings_tuple, &PyList_Type, &list) ||
        read_settings(settings_tuple, &settings) < 0)
        return -1;
    if (PyList_GET_SIZE(list) % (1 + ADDRESSES) != 0) {
        PyErr_SetString(PyExc_ValueError, "a tensor lacks a number");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) / (1 + ADDRESSES); i++) {
        cer_optimizer_tensor tensor;
        bool may = true;

        if (read_tensor(list, i, &tensor) < 0)
            return -1;
        if (!is_complete(&settings, &tensor)) {
            PyErr_SetString(PyExc_ValueError, "a tensor lacks an address");
            return -1;
        }
        if (tensor.n < WITHOUT_GIL) {
            if (tries)
                may = cer_optimizer_may_step(&tensor, 1);
            else
                cer_optimizer_step(&settings, &tensor, 1);
        } else {
            Py_BEGIN_ALLOW_THREADS
            if (tries)
                may = cer_optimizer_may_step(&tensor, 1);
            else
                cer_optimizer_step(&settings, &tensor, 1);
            Py_END_ALLOW_THREADS
        }
        if (!may)
            return 0;
    }
    return 1;
}

static PyObject *
optimizer_step(PyObject *module, PyObject *groups)
{
    (void)module;
    if (!PyTuple_Check(groups)) {
        PyErr_SetString(PyExc_TypeError, "groups must be a tuple");
        return NULL;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); i++) {
            int done = run_group(PyTuple_GET_ITEM(groups, i), pass == 0);

            if (done < 0)
                return NULL;
            if (done == 0)
                Py_RETURN_FALSE;
        }
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"optimizer_step", optimizer_step, METH_O,
     "optimizer_step(groups)\n--\n\n"
     "Make a step of Adam, AdamW or SGD over float32 tensors.\n\n"
     "A group is (settings, tensors). Settings are (is_sgd, lr, weight_decay,\n"
     "beta1, beta2, eps, momentum, dampening, (decoupled, nesterov, fused),\n"
     "address of vmsSqrt or 0). Tensors are a flat list: for each one its\n"
     "number of elements and the addresses of parameter, gradient, first\n"
     "moment or momentum, second moment and count of steps, or 0.\n\n"
     "Returns False, and changes nothing, if a tensor holds NaN or overlaps\n"
     "another one."},
    {NULL, NULL, 0, NULL},
};

int
core_register_optimizer_step(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
