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
    const DLPackExchangeAPI *api; /* torch's table, or NULL */
    PyObject *from_dlpack;        /* of JAX, and of torch without a table */
} py_framework;

/* Imports the framework and looks up its functions. 0, or -1 with an exception
 * (ValueError for an unknown name, ImportError). */
int py_framework_init(py_framework *framework, const char *name);
void py_framework_clear(py_framework *framework);

/* Returns a writable tensor of the framework over this memory, without a copy
 * if the framework allows. `block` lives as long as the memory's owner and is
 * not in use. */
PyObject *py_framework_tensor(core_state *state, const py_framework *framework,
                              cer_tensor *tensor, cer_export *block);

/* Stores the framework's current stream of a CUDA device in *stream and sets
 * *known. Leaves both unchanged if the framework names its stream only when it
 * takes a tensor. 0, or -1 with an exception. */
int py_framework_stream(const py_framework *framework, int index, void **stream,
                        bool *known);

#endif
