#include "runner.h"

#include <math.h>

#include "check.h"

/* --- metrics -------------------------------------------------------------- */
static void
metrics_are_weighted(void)
{
    cer_metrics metrics = {0};

    for (int batch = 0; batch < 3; batch++) {
        CHECK_EQ_INT(
            cer_metrics_add(&metrics, "loss", 4, 1.5 * batch, 10, NULL),
            CER_OK);
        CHECK_EQ_INT(cer_metrics_add(&metrics, "acc", 3, 0.25, 4, NULL),
                     CER_OK);
    }
    CHECK_EQ_INT(metrics.n, 2);
    CHECK_EQ_STR(metrics.items[0].name, "loss");
    CHECK(metrics.items[0].sum == 45 && metrics.items[0].weight == 30);
    CHECK(metrics.items[1].sum == 3 && metrics.items[1].weight == 12);
    cer_metrics_clear(&metrics);
    CHECK_EQ_INT(metrics.n, 0);
}

static void
the_first_that_is_not_finite_is_noted(void)
{
    const double values[] = {1, 1e308, (double)INFINITY, (double)NAN};
    cer_metrics metrics = {0};

    for (metrics.batch = 0; metrics.batch < 4; metrics.batch++) {
        CHECK_EQ_INT(cer_metrics_add(&metrics, "loss", 4, values[metrics.batch],
                                     1, NULL),
                     CER_OK);
        CHECK_EQ_INT(cer_metrics_add(&metrics, "acc", 3, 0.5, 1, NULL), CER_OK);
    }
    CHECK_EQ_INT(metrics.items[0].bad_batch, 3);
    CHECK(isinf(metrics.items[0].bad_value));
    CHECK_EQ_INT(metrics.items[1].bad_batch, 0);
    cer_metrics_clear(&metrics);
}

static void
a_value_of_weight_0_does_not_count(void)
{
    cer_metrics metrics = {0};

    CHECK_EQ_INT(cer_metrics_add(&metrics, "loss", 4, (double)NAN, 0, NULL),
                 CER_OK);
    CHECK_EQ_INT(metrics.n, 1); /* but the name does */
    CHECK_EQ_INT(cer_metrics_add(&metrics, "loss", 4, 2, 3, NULL), CER_OK);
    CHECK_EQ_INT(
        cer_metrics_add(&metrics, "loss", 4, (double)INFINITY, 0, NULL),
        CER_OK);
    CHECK(metrics.items[0].sum == 6 && metrics.items[0].weight == 3);
    CHECK_EQ_INT(metrics.items[0].bad_batch, 0);
    cer_metrics_clear(&metrics);
}

static void
metrics_may_come_in_any_order(void)
{
    cer_metrics metrics = {0};
    char name[8];

    for (int i = 0; i < 1000; i++) {
        int n = (i * 7) % 40;

        (void)snprintf(name, sizeof name, "m%d", n);
        CHECK_EQ_INT(cer_metrics_add(&metrics, name, strlen(name), n, 1, NULL),
                     CER_OK);
    }
    CHECK_EQ_INT(metrics.n, 40);
    for (size_t i = 0; i < 40; i++) {
        (void)snprintf(name, sizeof name, "m%d", (int)(i * 7 % 40));
        CHECK_EQ_STR(metrics.items[i].name, name);
        CHECK(metrics.items[i].weight == 25);
    }
    CHECK_EQ_INT(cer_metrics_begin(&metrics, "m3", 2, -1, 2, NULL), CER_OK);
    CHECK_EQ_INT(cer_metrics_add(&metrics, "m3", 2, 2, 3, NULL), CER_OK);
    for (size_t i = 0; i < 40; i++) {
        if (strcmp(metrics.items[i].name, "m3") == 0)
            CHECK(metrics.items[i].sum == 5 && metrics.items[i].weight == 5);
    }
    cer_metrics_clear(&metrics);
}

static double
read_as(cer_dtype dtype, const void *element)
{
    double value = -99;

    CHECK(cer_metric_read(dtype, element, &value));
    return value;
}

static void
elements_are_read(void)
{
    CHECK(read_as(CER_BOOL, &(uint8_t){1}) == 1);
    CHECK(read_as(CER_I8, &(int8_t){-128}) == -128);
    CHECK(read_as(CER_U16, &(uint16_t){65535}) == 65535);
    CHECK(read_as(CER_I32, &(int32_t){INT32_MIN}) == INT32_MIN);
    CHECK(read_as(CER_U64, &(uint64_t){UINT64_MAX}) == 18446744073709551616.0);
    CHECK(read_as(CER_F32, &(float){0.1f}) == (double)0.1f);
    CHECK(read_as(CER_F64, &(double){0.1}) == 0.1);
    CHECK(read_as(CER_BF16, &(uint16_t){0x3f80}) == 1);
    CHECK(read_as(CER_BF16, &(uint16_t){0xff80}) == -(double)INFINITY);
    CHECK(read_as(CER_F16, &(uint16_t){0x3c00}) == 1);
    CHECK(read_as(CER_F16, &(uint16_t){0x0001}) == ldexp(1, -24));
    CHECK(read_as(CER_F16, &(uint16_t){0x7bff}) == 65504);
    CHECK(read_as(CER_F16, &(uint16_t){0xfc00}) == -(double)INFINITY);
    CHECK(isnan(read_as(CER_F16, &(uint16_t){0x7e00})));
    CHECK(signbit(read_as(CER_F16, &(uint16_t){0x8000})));
    CHECK(!cer_metric_read(CER_C64, "12345678", &(double){0}));
}

CHECK_MAIN(metrics_are_weighted, the_first_that_is_not_finite_is_noted,
           a_value_of_weight_0_does_not_count, metrics_may_come_in_any_order,
           elements_are_read)
