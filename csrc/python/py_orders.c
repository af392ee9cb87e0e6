/* py_orders.c -- Orders: the orders of rows that loaders share. */
#define NO_IMPORT_ARRAY
#include "py_orders.h"

typedef struct orders_object {
    PyObject_HEAD
    cer_orders *orders;
} orders_object;

PyDoc_STRVAR(orders_doc,
             "Orders()\n--\n\n"
             "The orders of rows that loaders share: each is made once, and\n"
             "the last few stay.");

static PyObject *
orders_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {NULL};
    orders_object *self;
    cer_error err = {0};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Orders", keywords))
        return NULL;
    self = (orders_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    if (cer_orders_new(&self->orders, &err) != CER_OK) {
        core_raise(core_state_of((PyObject *)self), &err);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void
orders_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    cer_orders_release(((orders_object *)object)->orders);
    type->tp_free(object);
    Py_DECREF(type);
}

cer_orders *
py_orders_get(core_state *state, PyObject *object)
{
    if (Py_TYPE(object) == state->orders_type)
        return ((orders_object *)object)->orders;
    PyErr_Format(PyExc_TypeError, "orders must be an Orders, not %s",
                 Py_TYPE(object)->tp_name);
    return NULL;
}

static PyType_Slot orders_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)orders_doc},
    {Py_tp_new, orders_new},
    {Py_tp_dealloc, orders_dealloc},
    {0, NULL},
};

static PyType_Spec orders_spec = {
    .name = "cerebro._core.Orders",
    .basicsize = sizeof(orders_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = orders_slots,
};

int
core_register_orders(PyObject *module)
{
    return core_add_type(module, &orders_spec,
                         &core_state_of_module(module)->orders_type);
}
