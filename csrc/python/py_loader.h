/* py_loader.h -- batches of a Loader for other bindings, before they become
 * tensors of a framework. */
#ifndef CER_PY_LOADER_H
#define CER_PY_LOADER_H

#include "lanes.h"
#include "module.h"

/* Whether an object is a Loader with batches in main memory. */
bool py_loader_is_on_host(const core_state *core, PyObject *object);

/* Gets the next batch with one reference, owned by the caller; NULL at the end
 * of the pass. 0, or -1 with an exception. */
int py_loader_take(PyObject *loader, cer_batch **out);

/* Returns the batch as next() does: a dict of tensors, which hold their own
 * references. */
PyObject *py_loader_dict(PyObject *loader, cer_batch *batch);

/* The Loader's part on its device; NULL: there is none, or another object. */
cer_device_loader *py_loader_on_device(const core_state *core,
                                       PyObject *object);
/* Keeps every other call off a Loader on a device, and gives its lane and the
 * stream of its consumer. 1, or -1 with an exception. 0: the consumer is a
 * PyTorch without a table, whose work has another stream than is known here. */
int py_loader_borrow(PyObject *loader, void **stream, cer_lane **out);
/* `last_rows` are those of the last batch that was taken meanwhile, or 0. */
void py_loader_give_back(PyObject *loader, size_t last_rows);

#endif
