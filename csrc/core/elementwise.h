/* elementwise.h -- operators on float32 tensors, one after the other.
 *
 * Every operation rounds as PyTorch's does, so a list of calls has the bits of
 * PyTorch's operators called in turn. Consecutive calls on tensors of the same
 * size run block by block: a block passes through all of them while it is in
 * the cache. Nothing is merged or reordered within an element. */
#ifndef CER_ELEMENTWISE_H
#define CER_ELEMENTWISE_H

#include "base.h"

/* x: the call's number; `fma` is one rounding if the list is fused, else two.
 *   id, name, tensors read, takes a number */
#define CER_ELEMENTWISE_LIST(X)                                                \
    X(COPY, "copy", 1, 0)             /* a */                                  \
    X(FILL, "fill", 0, 1)             /* x */                                  \
    X(ADD, "add", 2, 1)               /* fma(x, b, a) */                       \
    X(ADD_NUMBER, "add_number", 1, 1) /* a + x */                              \
    X(MUL, "mul", 2, 0)               /* a * b */                              \
    X(MUL_NUMBER, "mul_number", 1, 1) /* a * x */                              \
    X(DIV, "div", 2, 0)               /* a / b */                              \
    X(DIV_NUMBER, "div_number", 1, 1) /* a / x */                              \
    X(SQRT, "sqrt", 1, 0)                                                      \
    X(LERP, "lerp", 2, 1)       /* fma(x, b - a, a); from 0.5: from b */       \
    X(ADDCMUL, "addcmul", 3, 1) /* fma(x * b, c, a) */                         \
    X(ADDCDIV, "addcdiv", 3, 1) /* a + x * b / c */                            \
    X(RELU, "relu", 1, 0)       /* a, 0 if a is negative */                    \
    X(THRESHOLD_BACKWARD, "threshold_backward", 2, 1) /* a, 0 if b <= x */

enum { CER_ELEMENTWISE_BLOCK = 1024 }; /* elements that stay in the cache */

typedef enum cer_elementwise_op {
#define CER_ELEMENTWISE_ENUM(id, name, tensors, number) CER_ELEMENTWISE_##id,
    CER_ELEMENTWISE_LIST(CER_ELEMENTWISE_ENUM)
#undef CER_ELEMENTWISE_ENUM
        CER_ELEMENTWISE_COUNT
} cer_elementwise_op;

typedef struct cer_elementwise_call {
    cer_elementwise_op op;
    size_t n; /* elements of each tensor */
    float *out;
    const float *in[3];
    /* Where the number is when the list runs: one of these, or NULL. */
    const double *number;
    const float *value;
} cer_elementwise_call;

/* Intel's vmsSqrt, which PyTorch calls where it is built with MKL. */
typedef void (*cer_elementwise_sqrt)(int64_t n, const float *a, float *out,
                                     int64_t mode);

typedef struct cer_elementwise cer_elementwise;

/* Finds an operation by its name; false if the name is unknown. */
bool cer_elementwise_find(const char *name, cer_elementwise_op *op);

/* Whether two tensors share memory, but not element by element; NULL is none.
 */
bool cer_elementwise_crosses(const float *a, size_t n_a, const float *b,
                             size_t n_b);

/* Makes a list, which copies `calls` but not their memory. sqrt: NULL for the
 * correctly rounded one. Errors: CER_NOMEM; CER_INVALID if an operand is
 * missing or overlaps the call's result without being the same memory. */
cer_status cer_elementwise_new(const cer_elementwise_call *calls, size_t n,
                               bool fused, cer_elementwise_sqrt sqrt,
                               cer_elementwise **out, cer_error *err);
void cer_elementwise_free(cer_elementwise *list); /* NULL allowed */

void cer_elementwise_run(const cer_elementwise *list);

/* Runs calls on at most CER_ELEMENTWISE_BLOCK elements each, one after the
 * other, without a list. All operands have an address, also unread ones. */
void cer_elementwise_run_block(const cer_elementwise_call *calls, size_t n,
                               bool fused, cer_elementwise_sqrt sqrt);

/* Elements that all calls together write: a measure of the time they take. */
size_t cer_elementwise_size(const cer_elementwise *list);

#endif
