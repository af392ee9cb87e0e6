/* py_shard.h -- ShardReader for the other files of the binding. */
#ifndef CER_PY_SHARD_H
#define CER_PY_SHARD_H

#include "module.h"
#include "shard.h"

/* The shard of a ShardReader, borrowed: retain it to outlive the object. NULL
 * with TypeError if `object` is not a ShardReader. */
cer_shard *py_shard_get(core_state *state, PyObject *object);

#endif
