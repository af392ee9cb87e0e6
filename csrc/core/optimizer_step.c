#include "optimizer_step.h"

#include "optimizer_numbers.h"

enum { BLOCK = CER_ELEMENTWISE_BLOCK, MOST_CALLS = 9 };

/* --- what cannot be stepped ------------------------------------------------
 */

static bool
has_nan(const float *values, size_t n)
{
    bool found = false;

    for (size_t i = 0; i < n; i++)
        found |= values[i] != values[i];
    return found;
}

static bool
may_step(const cer_optimizer_tensor *tensor)
{
    const float *parts[] = {tensor->param, tensor->grad, tensor->first,
                            tensor->second};
    size_t n = tensor->n;

    for (size_t i = 0; i < 4; i++) {
        if (parts[i] == NULL)
            continue;
        if (has_nan(parts[i], n) ||
            cer_elementwise_crosses(parts[i], n, tensor->steps, 1))
            return false;
        for (size_t j = 0; j < i; j++) {
            if (cer_elementwise_crosses(parts[i], n, parts[j], n))
                return false;
        }
    }
    return true;
}

bool
cer_optimizer_may_step(const cer_optimizer_tensor *tensors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!may_step(&tensors[i]))
            return false;
    }
    return true;
}

/* --- steps -----------------------------------------------------------------
 */

/* The calls of one block, and what they compute on the way. */
typedef struct chain {
    cer_elementwise_call calls[MOST_CALLS];
    size_t n, size;
    float decayed[BLOCK], other[BLOCK];
} chain;

/* Adds a call; a number that is not read is NULL. */
static void
call(chain *to, cer_elementwise_op op, float *out, const float *a,
     const float *b, const float *c, const double *number)
{
    to->calls[to->n++] = (cer_elementwise_call){
        .op = op,
        .n = to->size,
        .out = out,
        .in = {a, b, c},
        .number = number,
    };
}

/* The numbers of one step, as PyTorch computes them in Python. */
typedef struct numbers {
    double kept, rest1, rest2, step_size, correction; /* Adam */
    double undamped, back;                            /* SGD */
} numbers;

/* PyTorch's _single_tensor_adam, for the elements from `at` on. */
static void
step_adam(const cer_optimizer *its, const cer_optimizer_tensor *tensor,
          const numbers *now, size_t at, chain *block)
{
    float *denominator = block->other;
    float *param = tensor->param + at;
    float *first = tensor->first + at, *second = tensor->second + at;
    const float *grad = tensor->grad + at;

    if (its->decay != 0 && its->decoupled) {
        call(block, CER_ELEMENTWISE_MUL_NUMBER, param, param, param, param,
             &now->kept);
    } else if (its->decay != 0) {
        call(block, CER_ELEMENTWISE_ADD, block->decayed, grad, param, param,
             &its->decay);
        grad = block->decayed;
    }
    call(block, CER_ELEMENTWISE_LERP, first, first, grad, grad, &now->rest1);
    call(block, CER_ELEMENTWISE_MUL_NUMBER, second, second, second, second,
         &its->beta2);
    call(block, CER_ELEMENTWISE_ADDCMUL, second, second, grad, grad,
         &now->rest2);
    call(block, CER_ELEMENTWISE_SQRT, denominator, second, second, second,
         NULL);
    call(block, CER_ELEMENTWISE_DIV_NUMBER, denominator, denominator,
         denominator, denominator, &now->correction);
    call(block, CER_ELEMENTWISE_ADD_NUMBER, denominator, denominator,
         denominator, denominator, &its->eps);
    call(block, CER_ELEMENTWISE_ADDCDIV, param, param, first, denominator,
         &now->step_size);
    cer_elementwise_run_block(block->calls, block->n, its->fused, its->sqrt);
}

/* PyTorch's _single_tensor_sgd, likewise. */
static void
step_sgd(const cer_optimizer *its, const cer_optimizer_tensor *tensor,
         const numbers *now, size_t at, chain *block)
{
    float *ahead = block->other;
    float *param = tensor->param + at;
    const float *grad = tensor->grad + at;

    if (its->decay != 0) {
        call(block, CER_ELEMENTWISE_ADD, block->decayed, grad, param, param,
             &its->decay);
        grad = block->decayed;
    }
    if (its->momentum != 0) {
        float *first = tensor->first + at;

        call(block, CER_ELEMENTWISE_MUL_NUMBER, first, first, first, first,
             &its->momentum);
        call(block, CER_ELEMENTWISE_ADD, first, first, grad, grad,
             &now->undamped);
        if (its->nesterov)
            call(block, CER_ELEMENTWISE_ADD, ahead, grad, first, first,
                 &its->momentum);
        grad = its->nesterov ? ahead : first;
    }
    call(block, CER_ELEMENTWISE_ADD, param, param, grad, grad, &now->back);
    cer_elementwise_run_block(block->calls, block->n, its->fused, its->sqrt);
}

static numbers
numbers_of(const cer_optimizer *its, const cer_optimizer_tensor *tensor)
{
    numbers now = {0};

    if (its->kind == CER_OPTIMIZER_SGD) {
        now.undamped = 1 - its->dampening;
        now.back = -its->lr;
        return now;
    }
    *tensor->steps += 1;
    now.kept = 1 - its->lr * its->decay;
    now.rest1 = 1 - its->beta1;
    now.rest2 = 1 - its->beta2;
    now.step_size = cer_number(CER_NUMBER_STEP_SIZE, its->lr, its->beta1,
                               (double)*tensor->steps);
    now.correction = cer_number(CER_NUMBER_CORRECTION, its->lr, its->beta2,
                                (double)*tensor->steps);
    return now;
}

void
cer_optimizer_step(const cer_optimizer *settings,
                   const cer_optimizer_tensor *tensors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        numbers now = numbers_of(settings, &tensors[i]);

        for (size_t at = 0; at < tensors[i].n; at += BLOCK) {
            size_t left = tensors[i].n - at;
            chain block;

            block.n = 0;
            block.size = left < BLOCK ? left : BLOCK;
            if (settings->kind == CER_OPTIMIZER_ADAM)
                step_adam(settings, &tensors[i], &now, at, &block);
            else
                step_sgd(settings, &tensors[i], &now, at, &block);
        }
    }
}
