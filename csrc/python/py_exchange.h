/* py_exchange.h -- where the elements of a framework's tensor are in memory.
 *
 * torch tensors are read through the C exchange table of their type (DLPack
 * 1.3) if it has one, NumPy arrays through NumPy's C API, everything else
 * through __dlpack__, versioned if supported. Only host memory is described,
 * and only if cer_tensor_view_check accepts it. */
#ifndef CER_PY_EXCHANGE_H
#define CER_PY_EXCHANGE_H

#include "module.h"

#include "tensor_view.h"

#define PY_EXCHANGE_TYPES 8

typedef enum py_kind {
    PY_KIND_NONE, /* not a tensor */
    PY_KIND_TORCH,
    PY_KIND_NUMPY,
    PY_KIND_JAX,
    PY_KIND_DLPACK,  /* another framework's */
    PY_KIND_REFUSED, /* a torch tensor whose memory is not its value */
} py_kind;

/* "torch", "numpy", "jax" or "dlpack", and back (PY_KIND_NONE if unknown). */
const char *py_kind_name(py_kind kind);
py_kind py_kind_of_name(const char *name, size_t len);

/* How to read tensors of a type. */
typedef struct py_source {
    PyTypeObject *type;
    py_kind kind;
    const DLPackExchangeAPI *api; /* or NULL */
    PyObject *is_conj, *is_neg;   /* methods of a torch type with a table */
} py_source;

/* The types seen so far, on the stack of one call; initialized by zeros. When
 * it is full, further types share the last entry. */
typedef struct py_exchange {
    py_source sources[PY_EXCHANGE_TYPES];
    size_t n;
} py_exchange;

/* Memory of a tensor, valid while `owner` is held. */
typedef struct py_view {
    PyObject *owner; /* a reference held by the view */
    /* If its memory can be replaced in spite of the reference: how to look it
     * up again, for torch. NumPy's arrays are such owners, too. */
    const DLPackExchangeAPI *api;
    cer_tensor_view tensor;
    bool in_place; /* writing to its memory changes the tensor itself */
} py_view;

void py_exchange_clear(py_exchange *exchange);

/* Returns the kind of `object` and how to read it, valid until the next call;
 * NULL with an exception. */
const py_source *py_exchange_find(py_exchange *exchange, PyObject *object);

/* Describes a tensor of a kind other than NONE and REFUSED. -1: an exception
 * whose message continues "the tensor ...". Release with py_view_clear. */
int py_exchange_view(const py_source *source, PyObject *object, py_view *out);
void py_view_clear(py_view *view);

/* Looks up the memory of a view's owner again, without running Python code; its
 * `api` as above. A capsule's memory stays: then *out is unchanged, and the
 * result 0. 1: looked up; -1: an exception. */
int py_exchange_again(const DLPackExchangeAPI *api, PyObject *owner,
                      cer_tensor_view *out);

/* The exchange table of a type; NULL without an exception if it has no table.
 */
const DLPackExchangeAPI *py_exchange_api(PyTypeObject *type);

#endif
