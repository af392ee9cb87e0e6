/* standin_cudnn.h -- as much of cuDNN 9 as csrc/cuda/cudnn_conv.c calls, over
 * the stand-in for the CUDA runtime: descriptors are written down and checked,
 * and convolutions computed in host memory, from their definition, as soon as
 * they are asked for (so streams must not be deferred).
 *
 * It proposes five engines, in this order: one that is not deterministic, one
 * that computes in TF32, one that refuses every shape, and, only where it is
 * asked for a fallback, one that wants a terabyte to work in and the one that
 * should be taken; running another is a fault.
 *
 * Environment: STANDIN_CUDNN_VERSION (91300). */
#ifndef STANDIN_CUDNN_H
#define STANDIN_CUDNN_H

#include "standin.h"

/* The nth call from now (1: the next) of any function that can fail gives an
 * error; 0: none does. Destroying succeeds all the same. */
STANDIN_API void standin_cudnn_fail(unsigned nth);
STANDIN_API bool standin_cudnn_failed(void); /* the armed call was reached */

/* Handles and descriptors that are not destroyed. */
STANDIN_API size_t standin_cudnn_left(void);

/* What callers did that cuDNN does not allow, and the last of it. */
STANDIN_API unsigned standin_cudnn_faults(void);
STANDIN_API const char *standin_cudnn_fault(void);

STANDIN_API unsigned standin_cudnn_executed(void); /* convolutions */

#endif
