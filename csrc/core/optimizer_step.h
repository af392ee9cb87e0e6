/* optimizer_step.h -- a step of Adam, AdamW or SGD over float32 tensors in host
 * memory, with the bits of PyTorch's operators called one after the other.
 *
 * A block of a tensor passes through all operators while it is in the cache. */
#ifndef CER_OPTIMIZER_STEP_H
#define CER_OPTIMIZER_STEP_H

#include "base.h"
#include "elementwise.h"

typedef enum cer_optimizer_kind {
    CER_OPTIMIZER_ADAM,
    CER_OPTIMIZER_SGD
} cer_optimizer_kind;

/* The settings of a parameter group. A decay of 0 leaves the decay out. */
typedef struct cer_optimizer {
    cer_optimizer_kind kind;
    double lr, decay;
    double beta1, beta2, eps;   /* Adam */
    double momentum, dampening; /* SGD; a momentum of 0 leaves it out */
    bool decoupled;             /* Adam: decay the weights, as AdamW does */
    bool nesterov;              /* SGD */
    bool fused;                 /* multiply and add round once */
    cer_elementwise_sqrt sqrt;  /* NULL: the correctly rounded one */
} cer_optimizer;

/* A parameter, its gradient, and its state in the optimizer. */
typedef struct cer_optimizer_tensor {
    size_t n; /* elements of each of these */
    float *param;
    const float *grad;
    float *first;  /* Adam: the first moment; SGD: the momentum; or NULL */
    float *second; /* Adam: the second moment; else NULL */
    float *steps;  /* Adam: one number, the count of steps; else NULL */
} cer_optimizer_tensor;

/* Whether a step has PyTorch's bits: no tensor overlaps another without being
 * the same memory, and none holds NaN, whose bits depend on the order of
 * operands. Changes nothing. */
bool cer_optimizer_may_step(const cer_optimizer_tensor *tensors, size_t n);

/* Makes one step: every tensor in turn. Call it only after
 * cer_optimizer_may_step has returned true. */
void cer_optimizer_step(const cer_optimizer *settings,
                        const cer_optimizer_tensor *tensors, size_t n);

#endif
