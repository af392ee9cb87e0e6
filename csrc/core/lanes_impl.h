/* lanes_impl.h -- a lane, shared by lanes_run.c (one lane's batches) and
 * lanes.c (whose turn it is). */
#ifndef CER_LANES_IMPL_H
#define CER_LANES_IMPL_H

#include "lanes.h"

typedef enum cer_lane_place {
    CER_LANE_OUT,   /* its owner's */
    CER_LANE_QUEUE, /* waits for its turn */
    CER_LANE_HELD   /* the driving thread's */
} cer_lane_place;

struct cer_lane {
    cer_device_loader *loader;
    cer_device *device;
    size_t n_tensors;
    size_t group_rows;       /* most rows of a group of resident batches */
    cer_device_block pinned; /* the places of each of the groups */
    void *fences[CER_LANE_GROUPS]; /* events after them */
    /* The run. */
    cer_lane_run run;
    void *tables;            /* values, rates and addresses, until uploaded */
    cer_depot_block *memory; /* all that follows is in it */
    cer_row_place *places;   /* of the open group */
    cer_lane_value *values;
    float **rates;
    float *rate_values;
    uint64_t *kept;
    cer_device_ahead ahead; /* the batches after the open group */
    size_t n_groups;        /* opened */
    bool resident;          /* the open group: what it has */
    size_t left, n_rows[CER_LANE_GROUP], first_row;
    size_t done;   /* launches */
    size_t graph;  /* of the last one */
    bool gathered; /* the next batch is in the graph's inputs */
    cer_lane_state state;
    cer_error error;
    /* Under the lock of the lanes. */
    cer_lane_place place;
    cer_lane *next;         /* in the queue */
    bool is_wanted;         /* its owner waits for it */
    uint64_t waiting_since; /* in steps of the driver; 0: it is not */
    /* The driver's. */
    bool awaits_loader; /* not a fence */
};

/* Takes the lane's next batch, which must not be its owner's. WAITING: nothing
 * was done; never with `may_wait`. */
cer_lane_state cer_lane_step(cer_lane *lane, bool may_wait);
/* Sleeps until the fence is done for which the lane waits. An error is for the
 * lane's next step to find. */
void cer_lane_sleep(cer_lane *lane);

void cer_lane_fail(cer_lane *lane);

#endif
