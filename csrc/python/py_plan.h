/* py_plan.h -- what a loader is made of, from Python's objects. */
#ifndef CER_PY_PLAN_H
#define CER_PY_PLAN_H

#include "module.h"

#include "loader.h"

/* One column's chain, as cerebro.transforms.compile makes it. */
typedef struct py_plan {
    cer_load_column column;
    cer_op *ops;
    PyObject *name; /* whose text column.name is */
} py_plan;

/* Reads {"name": ..., "ops": [...]} into a zeroed plan, which needs neither
 * afterwards: it may be used without the GIL. 0, or -1 with an exception; free
 * it in either case. */
int py_plan_read(PyObject *column, py_plan *out);
void py_plans_free(py_plan *plans, Py_ssize_t n);

/* Reads (ShardReader, rows); the list `keep` keeps an array of rows alive. 0,
 * or -1 with an exception. */
int py_part_read(core_state *state, PyObject *part, PyObject *keep,
                 cer_part *out);

/* Reads the numbers in the data set of the parts' first rows; as if one
 * followed the other where none are given. 0, or -1 with an exception. */
int py_parts_number(PyObject *first_rows, cer_part *parts, Py_ssize_t n);

#endif
