/* A step of Adam, AdamW or SGD against its definition, element by element. */
#include "optimizer_step.h"

#include <math.h>

#include "check.h"
#include "random_values.h"

enum { N = 2500 }; /* three blocks */

static float param[N], grad[N], first[N], second[N], steps[1];
static float before[4][N];

static void
fill_all(void)
{
    fill(param, N, 1);
    fill(grad, N, 2);
    fill(first, N, 3);
    fill(second, N, 4);
    for (size_t i = 0; i < N; i++)
        second[i] = fabsf(second[i]);
    steps[0] = 3;
    memcpy(before[0], param, sizeof param);
    memcpy(before[1], grad, sizeof grad);
    memcpy(before[2], first, sizeof first);
    memcpy(before[3], second, sizeof second);
}

static cer_optimizer_tensor
whole(void)
{
    return (cer_optimizer_tensor){
        .n = N,
        .param = param,
        .grad = grad,
        .first = first,
        .second = second,
        .steps = steps,
    };
}

/* Products and sums round twice. */
static float
mul_add(float x, float y, float z)
{
    volatile float product = x * y;

    return product + z;
}

static void
check_adam(bool decoupled)
{
    cer_optimizer settings = {
        .kind = CER_OPTIMIZER_ADAM,
        .lr = 0.01,
        .decay = 0.1,
        .beta1 = 0.9,
        .beta2 = 0.999,
        .eps = 1e-8,
        .decoupled = decoupled,
    };
    cer_optimizer_tensor tensor = whole();
    float kept = (float)(1 - 0.01 * 0.1), rest1 = (float)(1 - 0.9);
    float rest2 = (float)(1 - 0.999), size = (float)-(0.01 / (1 - pow(0.9, 4)));
    float correction = (float)pow(1 - pow(0.999, 4), 0.5);

    fill_all();
    tensor = whole();
    CHECK(cer_optimizer_may_step(&tensor, 1));
    cer_optimizer_step(&settings, &tensor, 1);
    CHECK(steps[0] == 4);
    for (size_t i = 0; i < N; i++) {
        float p = before[0][i], g = before[1][i], m = before[2][i];
        float v = before[3][i] * 0.999F, denominator;

        if (decoupled)
            p *= kept;
        else
            g = mul_add(0.1F, p, g);
        m = mul_add(rest1, g - m, m);
        v = mul_add(rest2 * g, g, v);
        denominator = sqrtf(v) / correction + 1e-8F;
        CHECK(first[i] == m);
        CHECK(second[i] == v);
        CHECK(param[i] == p + size * m / denominator);
        CHECK(grad[i] == before[1][i]);
    }
}

static void
test_adam(void)
{
    check_adam(false);
    check_adam(true);
}

static void
test_sgd(void)
{
    cer_optimizer settings = {
        .kind = CER_OPTIMIZER_SGD,
        .lr = 0.1,
        .decay = 0.01,
        .momentum = 0.9,
        .nesterov = true,
    };
    cer_optimizer_tensor tensor;

    fill_all();
    tensor = whole();
    tensor.second = tensor.steps = NULL;
    cer_optimizer_step(&settings, &tensor, 1);
    for (size_t i = 0; i < N; i++) {
        float p = before[0][i], g = mul_add(0.01F, p, before[1][i]);
        float m = mul_add(1, g, before[2][i] * 0.9F);

        CHECK(first[i] == m);
        CHECK(param[i] == mul_add(-0.1F, mul_add(0.9F, m, g), p));
    }
}

static void
test_plain_sgd_needs_no_state(void)
{
    cer_optimizer settings = {.kind = CER_OPTIMIZER_SGD, .lr = 0.5};
    cer_optimizer_tensor tensor;

    fill_all();
    tensor = whole();
    tensor.first = tensor.second = tensor.steps = NULL;
    cer_optimizer_step(&settings, &tensor, 1);
    for (size_t i = 0; i < N; i++)
        CHECK(param[i] == mul_add(-0.5F, grad[i], before[0][i]));
}

static void
test_what_may_not_step(void)
{
    cer_optimizer_tensor tensor;

    fill_all();
    tensor = whole();
    first[N - 1] = NAN;
    CHECK(!cer_optimizer_may_step(&tensor, 1));
    fill_all();
    grad[7] = INFINITY; /* has its own bits */
    CHECK(cer_optimizer_may_step(&tensor, 1));
    tensor.n = N - 1;
    tensor.grad = param + 1;
    CHECK(!cer_optimizer_may_step(&tensor, 1));
    tensor.grad = param;
    CHECK(cer_optimizer_may_step(&tensor, 1));
    tensor.steps = &second[4];
    CHECK(!cer_optimizer_may_step(&tensor, 1));
}

CHECK_MAIN(test_adam, test_sgd, test_plain_sgd_needs_no_state,
           test_what_may_not_step)
