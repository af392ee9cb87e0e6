/* schedule.h -- decides which trial trains next, on which shard, on which
 * worker.
 *
 * A pure state machine: events in (a worker joined, a unit is done), commands
 * out (run this unit there); the time is an argument. It uses no clock, thread
 * or file, and allocates memory only in cer_schedule_new and the add functions.
 * The same events at the same times give the same commands; ties are broken by
 * number.
 *
 * The driver's loop: report events, take and start commands until none is left,
 * wait for the next event.
 *
 *     cer_schedule_unit_done(s, worker, now, &unit, &err);
 *     while (cer_schedule_next(s, now, &command))
 *         ...start it...
 *
 * A *unit* is one trial over one part of an epoch, once. The parts are called
 * shards here: groups of them or, if every worker reads all, slices of an
 * epoch. Trial t visits the shards of epoch e in the order of cer_visit_shard,
 * or from the first to the last, on any worker; the validation unit follows if
 * eval_cost > 0 (step == shards, shard CER_SHARD_VALIDATION). A trial continues
 * until it has done its `epochs`; then it waits to be extended or dropped.
 *
 * docs/design/schedule.md describes how the next trial and its worker are
 * chosen. */
#ifndef CER_SCHEDULE_H
#define CER_SCHEDULE_H

#include "base.h"

#define CER_SHARD_VALIDATION (-1)
#define CER_NO_SHARD (-2)

/* The most shards, and the most trials to reserve room for: memory for each is
 * allocated at once. */
#define CER_SCHEDULE_MOST (1 << 20)

typedef struct cer_schedule cer_schedule;

typedef struct cer_schedule_options {
    uint32_t shards;       /* 1 to CER_SCHEDULE_MOST */
    const double *weights; /* cost of each shard, e.g. its rows; NULL: all 1 */
    bool exclusive;        /* only its holders run a shard */
    bool stagger;  /* see cer_visit_shard; false: at most two shards open at a
                      time, shared shards only */
    bool in_order; /* every trial visits shards 0, 1, ... in every epoch */
    double eval_cost;     /* weight of the validation unit; 0: none */
    uint32_t live_models; /* models that a worker keeps live; >= 1 */
    uint32_t capacity;    /* trials to reserve room for; not a limit */
} cer_schedule_options;

typedef struct cer_unit {
    uint32_t trial;
    uint32_t epoch;
    uint32_t step;
    uint32_t attempt; /* of this unit, from 0 */
    int64_t shard;    /* or CER_SHARD_VALIDATION */
} cer_unit;

typedef enum cer_command_kind {
    CER_COMMAND_RUN,  /* run `unit` on `worker` */
    CER_COMMAND_LOAD, /* `worker` becomes a holder of unit.shard */
} cer_command_kind;

typedef struct cer_command {
    cer_command_kind kind;
    uint32_t worker;
    cer_unit unit; /* LOAD: only .shard */
} cer_command;

typedef enum cer_trial_status {
    CER_TRIAL_READY,   /* has a unit to run */
    CER_TRIAL_RUNNING, /* a worker runs its unit */
    CER_TRIAL_WAITING, /* has done its epochs and can be extended or dropped; or
                          is held */
    CER_TRIAL_DROPPED,
} cer_trial_status;

cer_status cer_schedule_new(const cer_schedule_options *options,
                            cer_schedule **out, cer_error *err);
void cer_schedule_free(cer_schedule *schedule); /* NULL allowed */

/* Workers are numbered 0, 1, 2 and up in order of arrival; numbers are not
 * reused. The unit of a worker that is removed has failed. */
cer_status cer_schedule_add_worker(cer_schedule *schedule, uint32_t *worker,
                                   cer_error *err);
cer_status cer_schedule_remove_worker(cer_schedule *schedule, uint32_t worker,
                                      cer_error *err);

/* Exclusive placement: makes `workers` the only holders of `shard`. A LOAD
 * command gives a shard without holders (also before the first call) to the
 * worker with the fewest. The validation set can be placed too; until then
 * every worker reads it. */
cer_status cer_schedule_set_holders(cer_schedule *schedule, int64_t shard,
                                    const uint32_t *workers, size_t n,
                                    cer_error *err);

/* Streams from here on are those of trials that a user has added to a running
 * search: somebody waits for them, so they come before all others. */
#define CER_STREAM_OF_USERS (1u << 30)

/* Adds a trial that has done `epoch` epochs and `step` units of the next one;
 * it trains until `epochs` are done. It visits shards as trial `stream` does:
 * usually its own number. */
cer_status cer_schedule_add_trial(cer_schedule *schedule, uint32_t trial,
                                  uint32_t stream, uint32_t epochs,
                                  uint32_t epoch, uint32_t step,
                                  cer_error *err);
/* Sets the trial's number of epochs, at least as many as it has begun. */
cer_status cer_schedule_extend_trial(cer_schedule *schedule, uint32_t trial,
                                     uint32_t epochs, cer_error *err);
/* Ends a trial. The worker keeps a running unit of it until unit_done,
 * unit_failed. */
cer_status cer_schedule_drop_trial(cer_schedule *schedule, uint32_t trial,
                                   cer_error *err);
/* Frees a dropped trial's slot for new trials, as if it had never been added;
 * the rates learned from it remain. */
cer_status cer_schedule_forget_trial(cer_schedule *schedule, uint32_t trial,
                                     cer_error *err);
/* Holds a trial: it gets no further unit until it is released, and a running
 * unit ends first. It keeps its position, as a waiting trial does. */
cer_status cer_schedule_hold_trial(cer_schedule *schedule, uint32_t trial,
                                   cer_error *err);
cer_status cer_schedule_release_trial(cer_schedule *schedule, uint32_t trial,
                                      cer_error *err);
/* Moves a trial that is not running back to an earlier position: the states
 * after it are lost. */
cer_status cer_schedule_rewind_trial(cer_schedule *schedule, uint32_t trial,
                                     uint32_t epoch, uint32_t step,
                                     cer_error *err);

/* Gets the next command and records it as started; false if nothing can start
 * now. */
bool cer_schedule_next(cer_schedule *schedule, double now,
                       cer_command *command);

/* Whether the worker should go on with the trial that it runs when its unit is
 * done, without waiting for commands: the trial's next unit is of the same
 * epoch, and the worker would be given it if the running one ended now. *unit
 * is that unit. A driver may tell the worker in advance, and then reports
 * unit_continued instead of unit_done. */
cer_status cer_schedule_next_here(const cer_schedule *schedule, uint32_t worker,
                                  bool *stays, cer_unit *unit, cer_error *err);

/* The unit of `worker` ended, and its worker is idle. done: the trial continues
 * with its next unit. failed, also if the outcome is unknown: the unit is
 * retried with the next attempt number, and the worker's live model of the
 * trial is gone. *unit (may be NULL) is the unit that ended. */
cer_status cer_schedule_unit_done(cer_schedule *schedule, uint32_t worker,
                                  double now, cer_unit *unit, cer_error *err);
cer_status cer_schedule_unit_failed(cer_schedule *schedule, uint32_t worker,
                                    double now, cer_unit *unit, cer_error *err);

/* The unit of `worker` is done, and the worker has begun the trial's next unit
 * (see cer_schedule_next_here), even if the trial was held or dropped in the
 * meantime. *unit (may be NULL) is the unit that ended. */
cer_status cer_schedule_unit_continued(cer_schedule *schedule, uint32_t worker,
                                       double now, cer_unit *unit,
                                       cer_error *err);

/* The worker dropped its live model of a trial; no effect if it had none. */
cer_status cer_schedule_forget_live(cer_schedule *schedule, uint32_t worker,
                                    uint32_t trial, cer_error *err);
/* Writes at most `room` trials whose models the worker is expected to keep
 * live, most recently used first; *n is their total number. */
cer_status cer_schedule_live(const cer_schedule *schedule, uint32_t worker,
                             uint32_t *trials, size_t room, size_t *n,
                             cer_error *err);

cer_status cer_schedule_status(const cer_schedule *schedule, uint32_t trial,
                               cer_trial_status *status, cer_error *err);
/* Gets a trial's running unit, or its next one. */
cer_status cer_schedule_position(const cer_schedule *schedule, uint32_t trial,
                                 cer_unit *unit, cer_error *err);

/* Whether no trial is ready or running. */
bool cer_schedule_finished(const cer_schedule *schedule);
/* Work left until the trials' next decisions, in seconds on one worker, with
 * running units counted whole; in weights (*seconds false) until a unit was
 * timed. */
double cer_schedule_remaining(const cer_schedule *schedule, bool *seconds);
/* The number of workers ever added: their numbers are below this. */
uint32_t cer_schedule_workers(const cer_schedule *schedule);
bool cer_schedule_idle(const cer_schedule *schedule, uint32_t worker);
/* Bytes held, for tests and benchmarks. */
size_t cer_schedule_bytes(const cer_schedule *schedule);

#endif
