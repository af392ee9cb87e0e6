/* py_replay.h -- Replay: a recorded step that run_unit takes by itself. */
#ifndef CER_PY_REPLAY_H
#define CER_PY_REPLAY_H

#include "batch.h"
#include "module.h"
#include "runner.h"

typedef struct py_replay_value { /* a tensor of one number, or a number */
    const void *data;
    cer_dtype dtype;
    double number;
} py_replay_value;

typedef struct py_replay_metric {
    PyObject *name;
    py_replay_value value, weight;
    bool weighted; /* otherwise the rows are the weight */
} py_replay_metric;

/* Read items of a constructor's lists into zeroed memory. 0, or -1 with an
 * exception; a metric then holds its name. */
int py_replay_read_input(PyObject *item, void *cer_tensor_out);
int py_replay_read_metric(PyObject *item, void *metric_out);
/* Reads a list of tuples into a new array, which counts what it has. */
int py_replay_read_list(PyObject *list, size_t size,
                        int (*read)(PyObject *item, void *out), void *array,
                        size_t *n);

/* Runs within a context manager that make() returns; `enter` and `leave` are
 * the names of its methods. Returns what `run` returns, or -1 with an
 * exception; the first one, if several are raised. */
int py_replay_in_context(PyObject *make, PyObject *enter, PyObject *leave,
                         int (*run)(void *of), void *of);

/* Whether tensors have the same types, shapes and strides. */
bool py_replay_are_alike(const cer_tensor *ones, const cer_tensor *twos,
                         size_t n);

/* Whether an object is a Replay for batches like this one that may run once
 * more: as many columns, of the same types, shapes and strides. Names are not
 * compared, so whoever makes a Replay gives its inputs in the order of the
 * loader's columns. */
bool py_replay_fits(const core_state *core, PyObject *object,
                    const cer_batch *batch);

/* Takes the step on a batch that fits. 0, or -1 with an exception. */
int py_replay_run(PyObject *object, const cer_batch *batch);

/* Adds the step's metrics, of a batch of `rows` rows. 0, or -1 with an
 * exception. */
int py_replay_measure(PyObject *object, cer_metrics *metrics, int64_t rows);

#endif
