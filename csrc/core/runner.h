/* runner.h -- the epoch runner's records while one trial trains on one part of
 * an epoch: weighted sums of its metrics.
 *
 * A metric's value is a mean over a batch. Sums are float64 and added in batch
 * order, so equal batches give equal bits. */
#ifndef CER_RUNNER_H
#define CER_RUNNER_H

#include "base.h"
#include "dtype.h"

typedef struct cer_metric {
    char *name; /* UTF-8, terminated */
    size_t name_len;
    double sum, weight; /* sum of value x weight, sum of weight */
    int64_t
        bad_batch;    /* 1 + the first batch whose value was not finite, or 0 */
    double bad_value; /* that batch's value */
} cer_metric;

/* In order of first appearance. Zero bytes are an empty set. */
typedef struct cer_metrics {
    cer_metric *items;
    size_t n, capacity;
    size_t next;   /* expected index of the next metric */
    int64_t batch; /* current batch; counted by the owner */
} cer_metrics;

void cer_metrics_clear(cer_metrics *metrics);

/* Adds value x weight to the sum of a metric and weight to its weight; NaN and
 * infinity are added too, and the first of them is recorded. A value of weight
 * 0 does not count, whatever it is. Metrics that always come in the same order
 * are found at once. Errors: CER_NOMEM. */
cer_status cer_metrics_add(cer_metrics *metrics, const char *name,
                           size_t name_len, double value, double weight,
                           cer_error *err);

/* Starts a metric with these sums, to continue from earlier units. */
cer_status cer_metrics_begin(cer_metrics *metrics, const char *name,
                             size_t name_len, double sum, double weight,
                             cer_error *err);

/* Reads one element as a float64; returns false for a complex one. */
bool cer_metric_read(cer_dtype dtype, const void *element, double *out);

#endif
