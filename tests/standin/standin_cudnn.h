/* standin_cudnn.h -- the part of cuDNN 9 that csrc/cuda/cudnn_conv.c calls, on
 * the stand-in for the CUDA runtime. Descriptors are recorded and checked;
 * convolutions are computed in host memory, by definition and immediately (so
 * streams must not be deferred).
 *
 * It proposes five engines, in this order: a nondeterministic one, one that
 * computes in TF32, one that rejects every shape, and, only for the fallback
 * heuristic, one that needs a terabyte of workspace and the right one. Running
 * any other engine is a fault.
 *
 * Environment: STANDIN_CUDNN_VERSION (91300).   */
#ifndef STANDIN_CUDNN_H
#define STANDIN_CUDNN_H

#include "standin.h"

/* The nth call from now (1: the next) of any function that can fail returns an
 * error; 0: no failure. Destroying still succeeds. */
STANDIN_API void standin_cudnn_fail(unsigned nth);
STANDIN_API bool standin_cudnn_failed(void); /* the armed call was reached */

/* Handles and descriptors that are not destroyed. */
STANDIN_API size_t standin_cudnn_left(void);

/* Calls that cuDNN does not allow: their number, and the last one. */
STANDIN_API unsigned standin_cudnn_faults(void);
STANDIN_API const char *standin_cudnn_fault(void);

STANDIN_API unsigned standin_cudnn_executed(void); /* convolutions */

#endif
