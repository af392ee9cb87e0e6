/* py_shard.h -- what other files of the binding need of shards. */
#ifndef CER_PY_SHARD_H
#define CER_PY_SHARD_H

#include "module.h"
#include "shard.h"

/* The shard of a ShardReader, borrowed: retain it to outlive the object. NULL
 * with TypeError if `object` is none. */
cer_shard *py_shard_get(core_state *state, PyObject *object);

#endif
