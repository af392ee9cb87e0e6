/* py_plan.h -- reads a loader's plan and parts from Python objects. */
#ifndef CER_PY_PLAN_H
#define CER_PY_PLAN_H

#include "module.h"

#include "loader.h"

/* One column's chain, as made by cerebro.transforms.compile. */
typedef struct py_plan {
    cer_load_column column;
    cer_op *ops;
    PyObject *name;   /* owns the text of column.name */
    PyObject *source; /* owns that of column.source; may be NULL */
} py_plan;

/* Reads {"name": ..., "ops": [...], "channels_last": bool, "source": ...}, of
 * which the last two may be missing, into a zeroed plan, which can then be used
 * without the GIL and without the dict. 0, or -1 with an exception; free it in
 * either case. */
int py_plan_read(PyObject *column, py_plan *out);
void py_plans_free(py_plan *plans, Py_ssize_t n);

/* Reads (ShardReader, rows), with the running sums of the weights and the sum
 * before them if there are weights; arrays are added to the list `keep`. 0, or
 * -1 with an exception. */
int py_part_read(core_state *state, PyObject *part, PyObject *keep,
                 cer_part *out);

/* Reads the dataset's row number of each part's first row; without numbers,
 * the parts are consecutive. 0, or -1 with an exception. */
int py_parts_number(PyObject *first_rows, cer_part *parts, Py_ssize_t n);

#endif
