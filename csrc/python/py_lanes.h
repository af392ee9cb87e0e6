/* py_lanes.h -- GraphReplay: a step in a CUDA graph, which run_unit takes
 * without Python for many batches in succession; and RunMetrics, their
 * numbers. */
#ifndef CER_PY_LANES_H
#define CER_PY_LANES_H

#include "beat.h"
#include "module.h"
#include "runner.h"

/* Takes the next batches of a Loader on a device for which a list has
 * GraphReplays, as many as there are in succession. 1: *out is a new
 * RunMetrics; 0: the next batch has none; -1: an exception. */
int py_lanes_run(core_state *core, PyObject *loader, PyObject *replays,
                 cer_beat_page *page, PyObject **out);

bool py_run_metrics_check(const core_state *core, PyObject *object);
Py_ssize_t py_run_metrics_batches(PyObject *object);
/* Adds the metrics of one of the batches, and says its rows. 0, or -1 with an
 * exception. */
int py_run_metrics_add(PyObject *object, Py_ssize_t batch, cer_metrics *metrics,
                       int64_t *rows);

#endif
