/* py_orders.h -- gives access to the orders inside an Orders. */
#ifndef CER_PY_ORDERS_H
#define CER_PY_ORDERS_H

#include "module.h"
#include "order.h"

/* Returns the orders without a reference, or NULL with a TypeError. */
cer_orders *py_orders_get(core_state *state, PyObject *object);

#endif
