/* py_import.h -- new tensors of NumPy, torch and JAX over the tensors of a
 * state; used by py_unpack.c.
 *
 * Copies have their own memory, filled at the end in one step without the GIL.
 * Views keep the buffer alive. */
#ifndef CER_PY_IMPORT_H
#define CER_PY_IMPORT_H

#include "module.h"

#include "copy.h"
#include "py_exchange.h"
#include "state.h"

/* Since NumPy 2.5 this also declares its table, which module.c defines. */
#ifndef NO_IMPORT_ARRAY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/ndarraytypes.h>

typedef struct py_import_options {
    PyObject *buffer;  /* holds the state; kept alive by views */
    const char *name;  /* for errors */
    py_kind framework; /* for tensors whose own framework is missing */
    bool copy;         /* false: tensors are views of the buffer */
    bool read_only;    /* the buffer is */
    bool trusted;      /* views of a read-only buffer are not written to */
} py_import_options;

typedef struct py_importer {
    const char *name;  /* of the state, for errors */
    py_kind framework; /* for tensors whose own framework is missing */
    bool copy;         /* false: views */
    bool read_only;    /* views must not be written to */
    bool trusted;      /* torch views, which can be written to, are allowed */
    PyObject *keeps;   /* a memoryview of the buffer, for views */
    cer_copy *copies;  /* the copies still to do */
    size_t n_copies;
    PyObject *torch; /* torch.Tensor, once needed */
    const DLPackExchangeAPI *api;
    bool has_torch, torch_known, has_jax, jax_known;
} py_importer;

/* -1: an exception; clear it in either case. */
int py_importer_init(py_importer *in, const py_import_options *options,
                     size_t n_tensors);
void py_importer_clear(py_importer *in);

/* Makes a tensor that was packed from one of `kind`. Its values are undefined
 * until py_importer_fill. */
PyObject *py_import_tensor(py_importer *in, const cer_state_tensor *tensor,
                           py_kind kind);
void py_importer_fill(py_importer *in);

/* Imports torch if it is installed and sets in->has_torch. -1: an exception. */
int py_import_torch(py_importer *in);

/* The NumPy dtype of an element type; bfloat16 needs ml_dtypes. */
PyArray_Descr *py_import_descr(cer_dtype dtype);

#endif
