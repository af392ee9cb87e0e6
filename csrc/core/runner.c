/* runner.c -- see runner.h. */
#include "runner.h"

#include <math.h>
#include <string.h>

void
cer_metrics_clear(cer_metrics *metrics)
{
    for (size_t i = 0; i < metrics->n; i++)
        cer_free(metrics->items[i].name);
    cer_free(metrics->items);
    memset(metrics, 0, sizeof *metrics);
}

static bool
has_name(const cer_metric *metric, const char *name, size_t len)
{
    return metric->name_len == len && memcmp(metric->name, name, len) == 0;
}

/* Appends a metric with zero sums; NULL: out of memory. */
static cer_metric *
append(cer_metrics *metrics, const char *name, size_t len)
{
    char *copy = cer_alloc(len + 1);
    cer_metric *metric;

    if (copy == NULL)
        return NULL;
    if (metrics->n == metrics->capacity) {
        size_t capacity = metrics->capacity == 0 ? 8 : metrics->capacity * 2;
        cer_metric *grown =
            cer_realloc(metrics->items, capacity * sizeof *metric);

        if (grown == NULL) {
            cer_free(copy);
            return NULL;
        }
        metrics->items = grown;
        metrics->capacity = capacity;
    }
    memcpy(copy, name, len);
    copy[len] = '\0';
    metric = &metrics->items[metrics->n++];
    *metric = (cer_metric){.name = copy, .name_len = len};
    return metric;
}

static cer_metric *
find(cer_metrics *metrics, const char *name, size_t len)
{
    for (size_t tried = 0; tried < metrics->n; tried++) {
        size_t i = (metrics->next + tried) % metrics->n;

        if (has_name(&metrics->items[i], name, len)) {
            metrics->next = i + 1;
            return &metrics->items[i];
        }
    }
    return append(metrics, name, len);
}

cer_status
cer_metrics_begin(cer_metrics *metrics, const char *name, size_t name_len,
                  double sum, double weight, cer_error *err)
{
    cer_metric *metric = find(metrics, name, name_len);

    if (metric == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory summing metrics");
    metric->sum = sum;
    metric->weight = weight;
    return CER_OK;
}

cer_status
cer_metrics_add(cer_metrics *metrics, const char *name, size_t name_len,
                double value, double weight, cer_error *err)
{
    cer_metric *metric = find(metrics, name, name_len);

    if (metric == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory summing metrics");
    if (weight == 0) /* a mean over nothing is often NaN, as 0 / 0 */
        return CER_OK;
    metric->sum += value * weight;
    metric->weight += weight;
    if (!isfinite(value * weight) && metric->bad_batch == 0) {
        metric->bad_batch = metrics->batch + 1;
        metric->bad_value = value;
    }
    return CER_OK;
}

/* --- reading ------------------------------------------------------------- */
static double
half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31;
    double fraction = bits & 1023;
    double value = exponent == 31
                       ? (fraction != 0 ? (double)NAN : (double)INFINITY)
                   : exponent == 0 ? ldexp(fraction, -24)
                                   : ldexp(fraction + 1024, exponent - 25);

    return (bits & 0x8000) != 0 ? -value : value;
}

static double
bfloat_value(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return (double)value;
}

bool
cer_metric_read(cer_dtype dtype, const void *element, double *out)
{
#define READ(type)                                                             \
    {                                                                          \
        type value;                                                            \
        memcpy(&value, element, sizeof value);                                 \
        *out = (double)value;                                                  \
        return true;                                                           \
    }
    uint16_t bits;

    switch (dtype) {
    case CER_BOOL:
    case CER_U8:
        READ(uint8_t)
    case CER_I8:
        READ(int8_t)
    case CER_I16:
        READ(int16_t)
    case CER_U16:
        READ(uint16_t)
    case CER_I32:
        READ(int32_t)
    case CER_U32:
        READ(uint32_t)
    case CER_I64:
        READ(int64_t)
    case CER_U64:
        READ(uint64_t)
    case CER_F32:
        READ(float)
    case CER_F64:
        READ(double)
    case CER_F16:
    case CER_BF16:
        memcpy(&bits, element, sizeof bits);
        *out = dtype == CER_F16 ? half_value(bits) : bfloat_value(bits);
        return true;
    default:
        return false;
    }
#undef READ
}
