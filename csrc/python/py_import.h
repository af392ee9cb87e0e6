/* py_import.h -- new tensors of NumPy, torch and JAX over the tensors of a
 * state; used by py_unpack.c.
 *
 * Copies get memory of their own, which is filled at the end, all at once and
 * without the GIL. Views keep the buffer alive. */
#ifndef CER_PY_IMPORT_H
#define CER_PY_IMPORT_H

#include "module.h"

#include "copy.h"
#include "py_exchange.h"
#include "state.h"

/* From NumPy 2.5 on this declares its table too, which module.c defines. */
#ifndef NO_IMPORT_ARRAY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/ndarraytypes.h>

typedef struct py_import_options {
    PyObject *buffer;  /* whose bytes the state is in; kept alive by views */
    const char *name;  /* for errors */
    py_kind framework; /* for tensors whose own framework is not there */
    bool copy;         /* false: tensors are views of the buffer */
    bool read_only;    /* the buffer is */
    bool trusted;      /* views of a read-only buffer are not written to */
} py_import_options;

typedef struct py_importer {
    const char *name;  /* of the state, for errors */
    py_kind framework; /* for tensors whose own is not there */
    bool copy;         /* false: views */
    bool read_only;    /* views must not be written to */
    bool trusted;      /* torch views, which can be, are given all the same */
    PyObject *keeps;   /* of views: a memoryview of the buffer */
    cer_copy *copies;  /* what is still to be filled */
    size_t n_copies;
    PyObject *torch; /* torch.Tensor, once it was needed */
    const DLPackExchangeAPI *api;
    bool has_torch, torch_known, has_jax, jax_known;
} py_importer;

/* -1: an exception; clear it all the same. */
int py_importer_init(py_importer *in, const py_import_options *options,
                     size_t n_tensors);
void py_importer_clear(py_importer *in);

/* A tensor that was packed from one of `kind`. Its values are undefined until
 * py_importer_fill. */
PyObject *py_import_tensor(py_importer *in, const cer_state_tensor *tensor,
                           py_kind kind);
void py_importer_fill(py_importer *in);

/* Imports torch if it is there: in->has_torch. -1: an exception. */
int py_import_torch(py_importer *in);

/* NumPy's description of an element type; bfloat16 needs ml_dtypes. */
PyArray_Descr *py_import_descr(cer_dtype dtype);

#endif
