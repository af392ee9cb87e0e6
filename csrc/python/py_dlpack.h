/* py_dlpack.h -- the core's tensors as tensors of a framework. */
#ifndef CER_PY_DLPACK_H
#define CER_PY_DLPACK_H

#include "module.h"
#include "tensor.h"

typedef enum framework_kind {
    FRAMEWORK_DLPACK, /* our own Tensor */
    FRAMEWORK_NUMPY,
    FRAMEWORK_TORCH,
    FRAMEWORK_JAX,
} framework_kind;

typedef struct py_framework {
    framework_kind kind;
    const DLPackExchangeAPI *api; /* torch's table; NULL: it has none */
    PyObject *from_dlpack;        /* torch's without a table, and JAX's */
} py_framework;

/* Finds what is needed of the framework and imports it. 0, or -1 with an
 * exception (ValueError for an unknown name, ImportError). */
int py_framework_init(py_framework *framework, const char *name);
void py_framework_clear(py_framework *framework);

/* An object of the framework for this memory, writable, without a copy where
 * the framework allows. `block` lives as long as the memory's owner and is not
 * in use. */
PyObject *py_framework_tensor(core_state *state, const py_framework *framework,
                              cer_tensor *tensor, cer_export *block);

/* The stream of a CUDA device that the framework puts its work on now, in
 * *stream, and *known; where the framework is one that says so later, when it
 * takes a tensor, both stay as they are. 0, or -1 with an exception. */
int py_framework_stream(const py_framework *framework, int index, void **stream,
                        bool *known);

#endif
