/* pointwise_step.h -- the kinds of steps in a chain of pointwise.h, with the
 * same numbers on the CPU and in the kernels. */
#ifndef CER_POINTWISE_STEP_H
#define CER_POINTWISE_STEP_H

typedef enum cer_step_kind {
    CER_STEP_CAST,
    CER_STEP_SUBTRACT,
    CER_STEP_MULTIPLY,
    CER_STEP_DIVIDE
} cer_step_kind;

#endif
