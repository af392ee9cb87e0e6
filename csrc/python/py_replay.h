/* py_replay.h -- Replay: a recorded step that run_unit takes by itself. */
#ifndef CER_PY_REPLAY_H
#define CER_PY_REPLAY_H

#include "batch.h"
#include "module.h"
#include "runner.h"

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
