/* py_runner.h -- shared by py_runner.c and py_beat.c. */
#ifndef CER_PY_RUNNER_H
#define CER_PY_RUNNER_H

#include "module.h"

#include "beat.h"

/* The page of a BeatPage, valid while the object lives; NULL with an exception
 * if `object` is not a BeatPage. */
cer_beat_page *py_beat_page_get(core_state *core, PyObject *object);

#endif
