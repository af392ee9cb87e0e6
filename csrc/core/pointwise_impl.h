/* pointwise_impl.h -- the struct that pointwise.c makes of a chain;
 * kernels_plan.c reads it to run the chain on a device. No other file includes
 * it. */
#ifndef CER_POINTWISE_IMPL_H
#define CER_POINTWISE_IMPL_H

#include "pointwise.h"
#include "pointwise_step.h"

enum { CER_POINTWISE_STEPS = 256 }; /* one call adds up to six */

typedef struct pointwise_step {
    cer_step_kind kind;
    cer_dtype dtype;  /* after the step; arithmetic: float32 or float64 */
    double *operands; /* arithmetic: n of them */
    size_t n;         /* 1 or channels */
    void *period;     /* the operands as `dtype`, repeated to chain->period */
} pointwise_step;

struct cer_pointwise {
    cer_dtype from;
    size_t channels;
    size_t period; /* a multiple of the channels, at least PIECE */
    size_t n_steps;
    size_t tables;
    uint8_t *table;
    pointwise_step steps[CER_POINTWISE_STEPS];
};

#endif
