/* py_loader.h -- what other files of the binding need of Loader. */
#ifndef CER_PY_LOADER_H
#define CER_PY_LOADER_H

#include "module.h"

int py_loader_check(core_state *state, PyObject *object);

/* The next batch as a dict; NULL without an exception at the end of the pass,
 * with one after a failure. */
PyObject *py_loader_next(PyObject *loader);

/* Rows of the batch given last, and batches and rows of the pass. */
size_t py_loader_last_rows(PyObject *loader);
size_t py_loader_batches(PyObject *loader);
size_t py_loader_rows(PyObject *loader);

#endif
