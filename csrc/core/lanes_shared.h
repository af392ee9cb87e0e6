/* lanes_shared.h -- the work of a lane between two launches of its graph, for
 * the kernel in csrc/cuda/kernels.cu and for its reference on the CPU. */
#ifndef CER_LANES_SHARED_H
#define CER_LANES_SHARED_H

#include "base_shared.h"

/* A number that the graph computes: an element of 1, 2, 4 or 8 bytes. */
typedef struct cer_lane_value {
    const void *from;
    uint64_t bytes;
} cer_lane_value;

/* An item is a value of the step before, kept as it is in the low bytes of
 * kept[i], or then a learning rate for the next step. */
typedef struct cer_lane_args {
    const cer_lane_value *values; /* n_values of them */
    uint64_t *kept;
    float *const *rates; /* where the graph reads them */
    const float *next;
    uint64_t items;
    uint64_t n_values;
} cer_lane_args;

CER_SHARED void
cer_lane_between(const cer_lane_args *a, uint64_t i)
{
    if (i >= a->n_values) {
        *a->rates[i - a->n_values] = a->next[i - a->n_values];
        return;
    }
    switch (a->values[i].bytes) {
    case 1:
        a->kept[i] = *(const uint8_t *)a->values[i].from;
        break;
    case 2:
        a->kept[i] = *(const uint16_t *)a->values[i].from;
        break;
    case 4:
        a->kept[i] = *(const uint32_t *)a->values[i].from;
        break;
    default:
        a->kept[i] = *(const uint64_t *)a->values[i].from;
    }
}

#endif
