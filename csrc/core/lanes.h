/* lanes.h -- units whose steps are CUDA graphs, run batch by batch without
 * Python.
 *
 * A lane is one unit's way through the device: a loader, a stream, and captured
 * steps, each for batches of one size. A run is some batches in succession that
 * all have a graph. For each of them, in stream order:
 *
 *   gather   the kernels write the batch straight into the graph's inputs;
 *            batches that are streamed or already staged are copied there
 *   launch   the graph
 *   keep     a small kernel stores the step's numbers in the run's array, and
 *            writes the learning rates of the next step
 *
 * Places of rows (8 bytes each) go to the device for several batches at once,
 * a group. An event after each group bounds how far the host is ahead and says
 * when the group's pinned memory may be filled again. Nothing else orders the
 * batches of a lane: they are on one stream. The numbers are read once, at the
 * end of the run.
 *
 * The lanes of a process are driven by one thread, in turn, a batch each: the
 * first of their owners that comes. When its own lane needs it, it hands over
 * to another owner. What a lane's owner must do itself -- batches that are
 * gathered on the host, launches that need Python -- it does between. A lane's
 * failure or cancellation concerns only that lane. */
#ifndef CER_LANES_H
#define CER_LANES_H

#include "beat.h"
#include "device_loader.h"
#include "lanes_shared.h"

enum {
    CER_LANE_GROUP = 8,  /* batches whose places are uploaded together */
    CER_LANE_GROUPS = 4, /* that the host may be ahead */
    CER_LANE_MOST = 4096 /* batches in a run */
};

typedef struct cer_lane cer_lane;

/* A captured step for batches of `n_rows` rows. */
typedef struct cer_lane_graph {
    size_t n_rows;
    void *graph;         /* a cudaGraphExec_t; NULL: the owner launches */
    void *const *inputs; /* one address per tensor of a batch */
    const cer_lane_value *values; /* the run's n_values, in device memory */
} cer_lane_graph;

/* All arrays stay the caller's, unchanged, until the run has ended. */
typedef struct cer_lane_run {
    void *stream; /* the unit's */
    size_t n;     /* batches, from 1 to CER_LANE_MOST; each fits a graph */
    const cer_lane_graph *graphs;
    size_t n_graphs;
    size_t n_values;    /* numbers of a step */
    void *const *rates; /* addresses of float32 in device memory */
    size_t n_rates;
    const float *rate_values; /* n x n_rates, before each launch; NULL: they
                                 stay as they are */
    cer_beat_page *page;      /* counts, and the cancel flag; or NULL */
} cer_lane_run;

/* The memory and events of one unit at a time, for batches of this loader,
 * which must outlive it. Errors: CER_NOMEM, CER_DEVICE, CER_INVALID in a forked
 * child; there, freeing does nothing. */
cer_status cer_lane_new(cer_device_loader *loader, cer_lane **out,
                        cer_error *err);
void cer_lane_free(cer_lane *lane); /* NULL allowed; not during a run */

/* Begins a run over the loader's next batches; the loader must not be used
 * otherwise until the run has ended. On failure no run has begun. Errors:
 * CER_NOMEM, CER_DEVICE. */
cer_status cer_lane_begin(cer_lane *lane, const cer_lane_run *run,
                          cer_error *err);

typedef enum cer_lane_state {
    CER_LANE_GOING,   /* may be driven by any thread */
    CER_LANE_WAITING, /* the same, but not now: too far ahead */
    CER_LANE_OWNERS,  /* its owner must take the next batch */
    CER_LANE_QUEUED,  /* all its work is enqueued */
    CER_LANE_FAILED,  /* see cer_lane_end */
} cer_lane_state;

cer_lane_state cer_lane_state_of(const cer_lane *lane);

/* The owner's batch. It gathers; then either the graph is launched and true
 * returned, or, if the owner launches it, *launch is the graph's index and
 * false is returned: then the owner launches it on the run's stream and calls
 * cer_lane_launched. Waits if the host is too far ahead. */
bool cer_lane_take(cer_lane *lane, size_t *launch);
void cer_lane_launched(cer_lane *lane);

/* Ends a run. Waits for the run's work and, unless it failed or was given up,
 * copies the numbers, n_values for each of its batches, to `kept`. Nothing
 * remains on the stream, nor does any memory of the run. *done is the number of
 * launches. Errors: the failure of the run, CER_CANCELLED. */
cer_status cer_lane_end(cer_lane *lane, uint64_t *kept, size_t *done,
                        cer_error *err);

/* --- driving ---------------------------------------------------------------
 */

typedef struct cer_lanes cer_lanes;

cer_status cer_lanes_new(cer_lanes **out, cer_error *err);
void cer_lanes_free(cer_lanes *lanes); /* NULL allowed; no lane is in it */

/* Drives all lanes, or lets another thread drive, until this lane is none of
 * GOING and WAITING, or `ms` milliseconds have passed: then others still drive
 * it, until cer_lanes_leave. The caller is the lane's owner. */
cer_lane_state cer_lanes_drive(cer_lanes *lanes, cer_lane *lane, unsigned ms);
/* Waits until no other thread drives the lane. Allowed at any time. */
void cer_lanes_leave(cer_lanes *lanes, cer_lane *lane);

#endif
