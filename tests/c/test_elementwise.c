/* Operators on float32 tensors: each against its definition, and lists block by
 * block against one call after the other. */
#include "elementwise.h"

#include <math.h>

#include "check.h"
#include "random_values.h"

enum { N = 2500 }; /* three blocks */

static float a[N + 1], b[N + 1], c[N + 1], out[N + 1];
static double number;

static void
fill_all(void)
{
    fill(a, N + 1, 1);
    fill(b, N + 1, 2);
    fill(c, N + 1, 3);
    a[0] = -0.0F;
    a[1] = INFINITY;
    a[2] = NAN;
    b[3] = 0;
}

static float
add(float x, float y, float z, bool fused)
{
    volatile float product = x * y;

    return fused ? fmaf(x, y, z) : product + z;
}

/* The definitions in elementwise.h, for element i. */
static float
expected(cer_elementwise_op op, size_t i, float x, bool fused)
{
    switch (op) {
    case CER_ELEMENTWISE_COPY:
        return a[i];
    case CER_ELEMENTWISE_FILL:
        return x;
    case CER_ELEMENTWISE_ADD:
        return add(x, b[i], a[i], fused);
    case CER_ELEMENTWISE_ADD_NUMBER:
        return a[i] + x;
    case CER_ELEMENTWISE_MUL:
        return a[i] * b[i];
    case CER_ELEMENTWISE_MUL_NUMBER:
        return a[i] * x;
    case CER_ELEMENTWISE_DIV:
        return a[i] / b[i];
    case CER_ELEMENTWISE_DIV_NUMBER:
        return a[i] / x;
    case CER_ELEMENTWISE_SQRT:
        return sqrtf(a[i]);
    case CER_ELEMENTWISE_LERP:
        return fabsf(x) < 0.5F ? add(x, b[i] - a[i], a[i], fused)
                               : add(x - 1, b[i] - a[i], b[i], fused);
    case CER_ELEMENTWISE_ADDCMUL:
        return add(x * b[i], c[i], a[i], fused);
    case CER_ELEMENTWISE_ADDCDIV: {
        volatile float scaled = x * b[i], quotient = scaled / c[i];

        return a[i] + quotient;
    }
    case CER_ELEMENTWISE_RELU:
        return a[i] < 0 ? 0 : a[i];
    case CER_ELEMENTWISE_THRESHOLD_BACKWARD:
        return b[i] <= x ? 0 : a[i];
    case CER_ELEMENTWISE_COUNT:
        break;
    }
    return 0;
}

static bool
same(float one, float two)
{
    return (isnan(one) && isnan(two)) || memcmp(&one, &two, sizeof one) == 0;
}

static void
run_list(const cer_elementwise_call *calls, size_t n, bool fused)
{
    cer_elementwise *list;

    CHECK_EQ_INT(cer_elementwise_new(calls, n, fused, NULL, &list, NULL),
                 CER_OK);
    cer_elementwise_run(list);
    cer_elementwise_free(list);
}

static void
check_operation(cer_elementwise_op op, double x, bool fused)
{
    static const size_t sizes[] = {1, 7, 1024, N};
    size_t wrong = 0;

    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        cer_elementwise_call call = {op,        sizes[s], out,
                                     {a, b, c}, &number,  NULL};

        fill_all();
        out[sizes[s]] = 77;
        number = x;
        run_list(&call, 1, fused);
        for (size_t i = 0; i < sizes[s]; i++)
            wrong += !same(out[i], expected(op, i, (float)x, fused));
        CHECK(out[sizes[s]] == 77);
    }
    CHECK_EQ_INT(wrong, 0);
}

static void
operations_are_what_they_are_defined_as(void)
{
    static const double numbers[] = {0.1, 0.9, -0.25, 1, 0};

    for (int op = 0; op < CER_ELEMENTWISE_COUNT; op++) {
        for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
            check_operation((cer_elementwise_op)op, numbers[i], true);
            check_operation((cer_elementwise_op)op, numbers[i], false);
        }
    }
}

static void
operations_are_found_by_name(void)
{
    cer_elementwise_op op;

    CHECK(cer_elementwise_find("addcdiv", &op));
    CHECK_EQ_INT(op, CER_ELEMENTWISE_ADDCDIV);
    CHECK(!cer_elementwise_find("exp", &op));
}

/* Calls of one size and one of another, in place, one number from a tensor that
 * the list itself changes. */
static void
a_list_is_its_calls_in_turn(void)
{
    static float step[1], twice[N], single[1];
    static const double half = 0.5, one = 1;
    const cer_elementwise_call calls[] = {
        {CER_ELEMENTWISE_MUL_NUMBER, N, a, {a}, &half, NULL},
        {CER_ELEMENTWISE_ADD, N, out, {a, b}, &half, NULL},
        {CER_ELEMENTWISE_ADD_NUMBER, 1, step, {step}, &one, NULL},
        {CER_ELEMENTWISE_MUL_NUMBER, N, twice, {out}, NULL, step},
        {CER_ELEMENTWISE_COPY, 1, single, {twice + N - 1}, NULL, NULL},
        {CER_ELEMENTWISE_ADD_NUMBER, N, twice, {twice}, NULL, single},
    };
    static float before[N];
    cer_elementwise *list;
    size_t wrong = 0;
    float last;

    fill_all();
    memcpy(before, a, sizeof before);
    step[0] = 1;
    CHECK_EQ_INT(cer_elementwise_new(calls, 6, true, NULL, &list, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_elementwise_size(list), 4 * N + 2);
    cer_elementwise_run(list);
    cer_elementwise_free(list);
    CHECK(step[0] == 2);
    last = fmaf(0.5F, b[N - 1], before[N - 1] * 0.5F) * 2;
    for (size_t i = 0; i < N; i++)
        wrong += !same(twice[i], fmaf(0.5F, b[i], before[i] * 0.5F) * 2 + last);
    CHECK_EQ_INT(wrong, 0);
}

/* The second call reads what the first one wrote one element further on: only
 * the whole first call before the second gives this. */
static void
shifted_memory_is_not_run_by_blocks(void)
{
    static const double two = 2;
    const cer_elementwise_call calls[] = {
        {CER_ELEMENTWISE_MUL_NUMBER, N, a, {a}, &two, NULL},
        {CER_ELEMENTWISE_COPY, N - 1, out, {a + 1}, NULL, NULL},
        {CER_ELEMENTWISE_COPY, N - 1, b, {out}, NULL, NULL},
        {CER_ELEMENTWISE_COPY, N - 1, a + 1, {b}, NULL, NULL},
    };
    static float before[N];
    size_t wrong = 0;

    fill_all();
    memcpy(before, a, sizeof before);
    run_list(calls, 4, true);
    for (size_t i = 0; i + 1 < N; i++)
        wrong += !same(b[i], before[i + 1] * 2) || !same(a[i + 1], b[i]);
    CHECK_EQ_INT(wrong, 0);
}

static size_t root_sizes;

static void
root(int64_t n, const float *from, float *to, int64_t mode)
{
    CHECK_EQ_INT(mode, 0x140102);
    root_sizes += (size_t)n;
    for (int64_t i = 0; i < n; i++)
        to[i] = from[i] + 1;
}

static void
a_given_root_is_called(void)
{
    const cer_elementwise_call call = {
        CER_ELEMENTWISE_SQRT, N, out, {b}, NULL, NULL};
    cer_elementwise *list;

    fill_all();
    CHECK_EQ_INT(cer_elementwise_new(&call, 1, true, root, &list, NULL),
                 CER_OK);
    cer_elementwise_run(list);
    cer_elementwise_free(list);
    CHECK_EQ_INT(root_sizes, N);
    CHECK(out[N - 1] == b[N - 1] + 1);
}

static void
check_refused(cer_elementwise_call call, const char *words)
{
    cer_elementwise *list;
    cer_error err = {0};

    CHECK_EQ_INT(cer_elementwise_new(&call, 1, true, NULL, &list, &err),
                 CER_INVALID);
    CHECK(list == NULL && strstr(err.message, words) != NULL);
}

static void
invalid_calls_are_refused(void)
{
    check_refused(
        (cer_elementwise_call){CER_ELEMENTWISE_COUNT, 1, out, {a}, NULL, NULL},
        "not an operation");
    check_refused(
        (cer_elementwise_call){CER_ELEMENTWISE_MUL, 1, out, {a}, NULL, NULL},
        "lacks an operand");
    check_refused(
        (cer_elementwise_call){CER_ELEMENTWISE_FILL, 1, out, {a}, NULL, NULL},
        "lacks an operand");
    check_refused(
        (cer_elementwise_call){CER_ELEMENTWISE_COPY, N, a + 1, {a}, NULL, NULL},
        "overlaps");
    check_refused(
        (cer_elementwise_call){
            CER_ELEMENTWISE_MUL_NUMBER, N, a, {a}, NULL, a + 5},
        "overlaps");
}

CHECK_MAIN(operations_are_what_they_are_defined_as,
           operations_are_found_by_name, a_list_is_its_calls_in_turn,
           shifted_memory_is_not_run_by_blocks, a_given_root_is_called,
           invalid_calls_are_refused)
