/* py_elementwise.c -- Elementwise: a list of operators on float32 tensors.
 *
 * Tensors are addresses here; the caller keeps their memory alive. */
#define NO_IMPORT_ARRAY
#include "py_elementwise.h"

#include "elementwise.h"

enum {
    WITHOUT_GIL = 65536 /* elements; shorter lists are done before another
                           thread would have taken the GIL */
};

typedef struct elementwise_object {
    PyObject_HEAD
    cer_elementwise *list;
    Py_buffer numbers;
} elementwise_object;

/* Reads (name, n, out, a, b, c, number, value). */
static int
read_call(elementwise_object *self, PyObject *item, cer_elementwise_call *call)
{
    unsigned long long out, in[3], value;
    Py_ssize_t n, number;
    const char *name;

    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a call must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(item, "snKKKKnK", &name, &n, &out, &in[0], &in[1],
                          &in[2], &number, &value))
        return -1;
    if (!cer_elementwise_find(name, &call->op)) {
        PyErr_Format(PyExc_ValueError, "unknown operation '%s'", name);
        return -1;
    }
    if (n < 0 || number >= self->numbers.shape[0]) {
        PyErr_SetString(PyExc_ValueError,
                        "an operation's size or number is out of range");
        return -1;
    }
    call->n = (size_t)n;
    call->out = (float *)(uintptr_t)out;
    for (int i = 0; i < 3; i++)
        call->in[i] = (const float *)(uintptr_t)in[i];
    call->number =
        number < 0 ? NULL : (const double *)self->numbers.buf + number;
    call->value = (const float *)(uintptr_t)value;
    return 0;
}

static int
make_list(elementwise_object *self, PyObject *tuple, int fused,
          cer_elementwise_sqrt sqrt)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    cer_elementwise_call *calls = cer_calloc((size_t)n + 1, sizeof *calls);
    cer_error err = {0};
    int result = -1;

    if (calls == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (read_call(self, PyTuple_GET_ITEM(tuple, i), &calls[i]) < 0)
            goto done;
    }
    if (cer_elementwise_new(calls, (size_t)n, fused != 0, sqrt, &self->list,
                            &err) != CER_OK)
        core_raise(core_state_of((PyObject *)self), &err);
    else
        result = 0;

done:
    cer_free(calls);
    return result;
}

static PyObject *
elementwise_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"calls", "numbers", "fused", "sqrt", NULL};
    PyObject *calls, *numbers, *tuple;
    elementwise_object *self;
    unsigned long long sqrt;
    int fused;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOpK:Elementwise", keywords,
                                     &calls, &numbers, &fused, &sqrt))
        return NULL;
    self = (elementwise_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if ((tuple = core_tuple(calls, "calls must be a list of tuples")) == NULL)
        goto fail;
    if (PyObject_GetBuffer(numbers, &self->numbers,
                           PyBUF_FORMAT | PyBUF_ND | PyBUF_WRITABLE) < 0)
        goto fail;
    /* Without a format, a buffer is one of bytes. */
    if (self->numbers.ndim != 1 || self->numbers.format == NULL ||
        strcmp(self->numbers.format, "d") != 0) {
        PyErr_SetString(PyExc_TypeError, "numbers must be an array of float64");
        goto fail;
    }
    if (make_list(self, tuple, fused, (cer_elementwise_sqrt)(uintptr_t)sqrt) <
        0)
        goto fail;
    Py_DECREF(tuple);
    return (PyObject *)self;

fail:
    Py_XDECREF(tuple);
    Py_DECREF(self);
    return NULL;
}

static void
elementwise_dealloc(PyObject *object)
{
    elementwise_object *self = (elementwise_object *)object;
    PyTypeObject *type = Py_TYPE(object);

    cer_elementwise_free(self->list);
    if (self->numbers.obj != NULL)
        PyBuffer_Release(&self->numbers);
    type->tp_free(object);
    Py_DECREF(type);
}

bool
py_elementwise_check(const core_state *core, PyObject *object)
{
    return Py_TYPE(object) == core->elementwise_type;
}

int
py_elementwise_run(PyObject *object)
{
    const cer_elementwise *list = ((elementwise_object *)object)->list;

    if (cer_elementwise_size(list) < WITHOUT_GIL) {
        cer_elementwise_run(list);
    } else {
        Py_BEGIN_ALLOW_THREADS
        cer_elementwise_run(list);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

static PyObject *
elementwise_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {NULL};

    if ((kwargs != NULL || PyTuple_GET_SIZE(args) != 0) &&
        !PyArg_ParseTupleAndKeywords(args, kwargs, ":Elementwise", keywords))
        return NULL;
    py_elementwise_run(object);
    Py_RETURN_NONE;
}

static PyType_Slot elementwise_slots[] = {
    {Py_tp_doc,
     "Elementwise(calls, numbers, fused, sqrt)\n--\n\n"
     "Operators on float32 tensors; called, it runs them.\n\n"
     "A call is (name, elements, result, first, second, third operand,\n"
     "index in `numbers` or -1, tensor of one number): tensors are addresses\n"
     "of memory that must outlive this object, or 0. `numbers` is a writable\n"
     "array of float64, read whenever the calls run. `fused`: multiply and\n"
     "add round once. `sqrt`: the address of vmsSqrt, or 0."},
    {Py_tp_new, elementwise_new},
    {Py_tp_dealloc, elementwise_dealloc},
    {Py_tp_call, elementwise_call},
    {0, NULL},
};

static PyType_Spec elementwise_spec = {
    .name = "cerebro._core.Elementwise",
    .basicsize = sizeof(elementwise_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = elementwise_slots,
};

int
core_register_elementwise(PyObject *module)
{
    return core_add_type(module, &elementwise_spec,
                         &core_state_of_module(module)->elementwise_type);
}
