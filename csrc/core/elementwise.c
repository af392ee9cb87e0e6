#include "elementwise.h"

#include <math.h>
#include <string.h>

enum {
    BLOCK = CER_ELEMENTWISE_BLOCK,
    /* VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE, as PyTorch calls it. */
    SQRT_MODE = 0x2 | 0x140000 | 0x100
};

struct cer_elementwise {
    cer_elementwise_sqrt sqrt;
    bool fused, wide;
    size_t n, size;
    size_t *group_end; /* of the call that begins a group: the call after it */
    cer_elementwise_call calls[];
};

#if defined(__x86_64__)
#define HAVE_WIDE 1
#define WIDE __attribute__((target("avx2,fma")))
#else
#define HAVE_WIDE 0
#endif

/* Operands are the same memory as the result or apart from it. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

/* --- arithmetic ------------------------------------------------------------
 */

#define EACH(expression)                                                       \
    do {                                                                       \
        INDEPENDENT                                                            \
        for (size_t i = 0; i < n; i++)                                         \
            out[i] = (expression);                                             \
    } while (0)
#define EACH_FMA(x, y, z)                                                      \
    do {                                                                       \
        if (fused)                                                             \
            EACH(fmaf(x, y, z));                                               \
        else                                                                   \
            EACH((x) * (y) + (z));                                             \
    } while (0)

__attribute__((always_inline)) static inline void
run_call(const cer_elementwise_call *call, size_t at, size_t n, bool fused,
         cer_elementwise_sqrt sqrt)
{
    float *out = call->out + at;
    const float *a = call->in[0] + at, *b = call->in[1] + at;
    const float *c = call->in[2] + at;
    float x = call->value != NULL    ? *call->value
              : call->number != NULL ? (float)*call->number
                                     : 0;

    switch (call->op) {
    case CER_ELEMENTWISE_COPY:
        if (out != a)
            memcpy(out, a, n * sizeof *out);
        break;
    case CER_ELEMENTWISE_FILL:
        EACH(x);
        break;
    case CER_ELEMENTWISE_ADD:
        EACH_FMA(x, b[i], a[i]);
        break;
    case CER_ELEMENTWISE_ADD_NUMBER:
        EACH(a[i] + x);
        break;
    case CER_ELEMENTWISE_MUL:
        EACH(a[i] * b[i]);
        break;
    case CER_ELEMENTWISE_MUL_NUMBER:
        EACH(a[i] * x);
        break;
    case CER_ELEMENTWISE_DIV:
        EACH(a[i] / b[i]);
        break;
    case CER_ELEMENTWISE_DIV_NUMBER:
        EACH(a[i] / x);
        break;
    case CER_ELEMENTWISE_SQRT:
        if (sqrt != NULL)
            sqrt((int64_t)n, a, out, SQRT_MODE);
        else
            for (size_t i = 0; i < n; i++) /* sqrtf may set errno: no vectors */
                out[i] = sqrtf(a[i]);
        break;
    case CER_ELEMENTWISE_LERP: {
        float from_end = x - 1;

        if (fabsf(x) < 0.5F)
            EACH_FMA(x, b[i] - a[i], a[i]);
        else
            EACH_FMA(from_end, b[i] - a[i], b[i]);
        break;
    }
    case CER_ELEMENTWISE_ADDCMUL:
        EACH_FMA(x * b[i], c[i], a[i]);
        break;
    case CER_ELEMENTWISE_ADDCDIV:
        EACH(a[i] + x * b[i] / c[i]);
        break;
    case CER_ELEMENTWISE_RELU:
        EACH(a[i] < 0 ? 0 : a[i]);
        break;
    case CER_ELEMENTWISE_THRESHOLD_BACKWARD:
        EACH(b[i] <= x ? 0 : a[i]);
        break;
    case CER_ELEMENTWISE_COUNT:
        break;
    }
}

__attribute__((always_inline)) static inline void
run_groups(const cer_elementwise *list, bool fused)
{
    for (size_t first = 0, end; first < list->n; first = end) {
        size_t n = list->calls[first].n;

        end = list->group_end[first];
        for (size_t at = 0; at < n; at += BLOCK) {
            size_t size = n - at < BLOCK ? n - at : BLOCK;

            for (size_t i = first; i < end; i++)
                run_call(&list->calls[i], at, size, fused, list->sqrt);
        }
    }
}

__attribute__((always_inline)) static inline void
run_each(const cer_elementwise_call *calls, size_t n, bool fused,
         cer_elementwise_sqrt sqrt)
{
    for (size_t i = 0; i < n; i++)
        run_call(&calls[i], 0, calls[i].n, fused, sqrt);
}

#if HAVE_WIDE
static bool
is_wide(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

WIDE static void
run_each_wide(const cer_elementwise_call *calls, size_t n,
              cer_elementwise_sqrt sqrt)
{
    run_each(calls, n, true, sqrt);
}

WIDE static void
run_each_wide_unfused(const cer_elementwise_call *calls, size_t n,
                      cer_elementwise_sqrt sqrt)
{
    run_each(calls, n, false, sqrt);
}

WIDE static void
run_wide(const cer_elementwise *list)
{
    run_groups(list, true);
}

WIDE static void
run_wide_unfused(const cer_elementwise *list)
{
    run_groups(list, false);
}
#endif

void
cer_elementwise_run(const cer_elementwise *list)
{
#if HAVE_WIDE
    if (list->wide) {
        if (list->fused)
            run_wide(list);
        else
            run_wide_unfused(list);
        return;
    }
#endif
    run_groups(list, list->fused);
}

void
cer_elementwise_run_block(const cer_elementwise_call *calls, size_t n,
                          bool fused, cer_elementwise_sqrt sqrt)
{
#if HAVE_WIDE
    if (is_wide()) {
        if (fused)
            run_each_wide(calls, n, sqrt);
        else
            run_each_wide_unfused(calls, n, sqrt);
        return;
    }
#endif
    run_each(calls, n, fused, sqrt);
}

/* --- building --------------------------------------------------------------
 */

typedef struct operation {
    const char *name;
    unsigned tensors;
    bool number;
} operation;

static const operation operations[CER_ELEMENTWISE_COUNT] = {
#define OPERATION(id, name, tensors, number) {name, tensors, number},
    CER_ELEMENTWISE_LIST(OPERATION)
#undef OPERATION
};

bool
cer_elementwise_find(const char *name, cer_elementwise_op *op)
{
    for (unsigned i = 0; i < CER_ELEMENTWISE_COUNT; i++) {
        if (strcmp(operations[i].name, name) == 0) {
            *op = (cer_elementwise_op)i;
            return true;
        }
    }
    return false;
}

bool
cer_elementwise_crosses(const float *a, size_t n_a, const float *b, size_t n_b)
{
    uintptr_t from_a = (uintptr_t)a, from_b = (uintptr_t)b;

    if (a == NULL || b == NULL || (a == b && n_a == n_b))
        return false;
    return from_a < from_b + n_b * sizeof *b &&
           from_b < from_a + n_a * sizeof *a;
}

/* Whether a call's result would change what another reads of other elements. */
static bool
disturbs(const cer_elementwise_call *writer, const cer_elementwise_call *reader)
{
    if (writer->n > 1 &&
        cer_elementwise_crosses(writer->out, writer->n, reader->value, 1))
        return true;
    for (size_t i = 0; i < 3; i++) {
        if (cer_elementwise_crosses(writer->out, writer->n, reader->in[i],
                                    reader->n))
            return true;
    }
    return cer_elementwise_crosses(writer->out, writer->n, reader->out,
                                   reader->n);
}

static cer_status
check(const cer_elementwise_call *call, cer_error *err)
{
    bool complete = call->out != NULL && call->n <= SIZE_MAX / sizeof(float);

    if ((unsigned)call->op >= CER_ELEMENTWISE_COUNT)
        return cer_fail(err, CER_INVALID, "not an operation: %d",
                        (int)call->op);
    for (size_t i = 0; i < operations[call->op].tensors; i++)
        complete = complete && call->in[i] != NULL;
    if (operations[call->op].number)
        complete = complete && (call->number != NULL || call->value != NULL);
    if (!complete)
        return cer_fail(err, CER_INVALID, "%s lacks an operand",
                        operations[call->op].name);
    if (disturbs(call, call))
        return cer_fail(err, CER_INVALID,
                        "an operand of %s overlaps its result",
                        operations[call->op].name);
    return CER_OK;
}

/* Whether `call` may join the calls from `first` on: block by block is then the
 * same as one after the other. */
static bool
joins(const cer_elementwise_call *first, const cer_elementwise_call *call)
{
    for (const cer_elementwise_call *one = first; one < call; one++) {
        if (one->n != call->n || disturbs(one, call) || disturbs(call, one))
            return false;
    }
    return true;
}

/* Divides the list into groups, and gives unread operands an address. */
static void
complete(cer_elementwise *list)
{
    cer_elementwise_call *calls = list->calls;

    for (size_t i = 0, first = 0; i < list->n; i++) {
        list->size += calls[i].n;
        if (!joins(&calls[first], &calls[i]))
            first = i;
        list->group_end[first] = i + 1;
    }
    for (size_t i = 0; i < list->n; i++) {
        for (size_t j = 0; j < 3; j++) {
            if (calls[i].in[j] == NULL)
                calls[i].in[j] = calls[i].out;
        }
    }
}

cer_status
cer_elementwise_new(const cer_elementwise_call *calls, size_t n, bool fused,
                    cer_elementwise_sqrt sqrt, cer_elementwise **out,
                    cer_error *err)
{
    cer_elementwise *list;
    size_t bytes;

    *out = NULL;
    for (size_t i = 0; i < n; i++) {
        cer_status status = check(&calls[i], err);

        if (status != CER_OK)
            return status;
    }
    if (!cer_mul_size(n, sizeof *calls + sizeof *list->group_end, &bytes) ||
        !cer_add_size(bytes, sizeof *list, &bytes) ||
        (list = cer_calloc(1, bytes)) == NULL)
        return cer_fail(err, CER_NOMEM,
                        "out of memory for elementwise operations");
    list->n = n;
    list->group_end = (size_t *)(void *)&list->calls[n];
    list->sqrt = sqrt;
    list->fused = fused;
#if HAVE_WIDE
    list->wide = is_wide();
#endif
    if (n != 0)
        memcpy(list->calls, calls, n * sizeof *calls);
    complete(list);
    *out = list;
    return CER_OK;
}

void
cer_elementwise_free(cer_elementwise *list)
{
    cer_free(list);
}

size_t
cer_elementwise_size(const cer_elementwise *list)
{
    return list->size;
}
