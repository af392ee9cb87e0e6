/* runner.h -- what the epoch runner keeps while one trial trains on one shard:
 * weighted sums of its metrics.
 *
 * A metric's value is a mean over a batch. Sums are float64 and added in batch
 * order, so that equal batches give equal bits. */
#ifndef CER_RUNNER_H
#define CER_RUNNER_H

#include "base.h"
#include "dtype.h"

typedef struct cer_metric {
    char *name; /* UTF-8, terminated */
    size_t name_len;
    double sum, weight; /* sum of value x weight, sum of weight */
    int64_t
        bad_batch;    /* 1 + the first batch that gave no finite number, or 0 */
    double bad_value; /* what it gave */
} cer_metric;

/* In the order in which they first appeared. Zero bytes are a fresh one. */
typedef struct cer_metrics {
    cer_metric *items;
    size_t n, capacity;
    size_t next;   /* where the metric after the last one added is expected */
    int64_t batch; /* of what is added now; its owner counts */
} cer_metrics;

void cer_metrics_clear(cer_metrics *metrics);

/* Adds value x weight to the sum of a metric and weight to its weight; NaN and
 * infinities as they are, and the first of them is noted. Metrics that come in
 * the same order every time are found at once. Errors: CER_NOMEM. */
cer_status cer_metrics_add(cer_metrics *metrics, const char *name,
                           size_t name_len, double value, double weight,
                           cer_error *err);

/* Begins a metric at these sums, for going on from earlier units. */
cer_status cer_metrics_begin(cer_metrics *metrics, const char *name,
                             size_t name_len, double sum, double weight,
                             cer_error *err);

/* One element as a float64; false for complex ones. */
bool cer_metric_read(cer_dtype dtype, const void *element, double *out);

#endif
