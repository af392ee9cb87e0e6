/* py_exchange.h -- where the elements of anybody's tensor lie.
 *
 * torch tensors are read through the C exchange table of their type (DLPack
 * 1.3) where there is one, NumPy arrays through NumPy's C API, everything else
 * through __dlpack__, with a version where it gives one. Only memory of the
 * host is described, and only what cer_tensor_view_check lets pass. */
#ifndef CER_PY_EXCHANGE_H
#define CER_PY_EXCHANGE_H

#include "module.h"

#include "tensor_view.h"

#define PY_EXCHANGE_TYPES 8

typedef enum py_kind {
    PY_KIND_NONE, /* no tensor */
    PY_KIND_TORCH,
    PY_KIND_NUMPY,
    PY_KIND_JAX,
    PY_KIND_DLPACK,  /* another framework's */
    PY_KIND_REFUSED, /* a torch tensor whose memory is not its value */
} py_kind;

/* "torch", "numpy", "jax" or "dlpack", and back (PY_KIND_NONE: none of them).
 */
const char *py_kind_name(py_kind kind);
py_kind py_kind_of_name(const char *name, size_t len);

/* What is known of a type. */
typedef struct py_source {
    PyTypeObject *type;
    py_kind kind;
    const DLPackExchangeAPI *api; /* NULL: it has none */
    PyObject *is_conj, *is_neg;   /* methods of a torch type with a table */
} py_source;

/* The types met so far; lives on the stack of one call. Zero bytes are a fresh
 * one. When it is full, the last place is used for every other type. */
typedef struct py_exchange {
    py_source sources[PY_EXCHANGE_TYPES];
    size_t n;
} py_exchange;

/* Memory of a tensor, valid while `owner` is held. */
typedef struct py_view {
    PyObject *owner; /* a reference of the view's own */
    cer_tensor_view tensor;
    bool in_place; /* writing to its memory changes the tensor itself */
} py_view;

void py_exchange_clear(py_exchange *exchange);

/* What kind of thing `object` is; NULL with an exception. The result is good
 * until the next call. */
const py_source *py_exchange_find(py_exchange *exchange, PyObject *object);

/* Describes a tensor of a kind other than NONE and REFUSED. -1: an exception
 * whose message goes on from "the tensor ...". Release with py_view_clear. */
int py_exchange_view(const py_source *source, PyObject *object, py_view *out);
void py_view_clear(py_view *view);

/* The exchange table of a type; NULL without an exception if it has none. */
const DLPackExchangeAPI *py_exchange_api(PyTypeObject *type);

#endif
