/* schedule.h -- which trial trains on which shard on which worker, next.
 *
 * A pure state machine: events in (a worker came, a unit is done), commands
 * out (run this unit there), and the time is an argument. No clock, thread or
 * file; memory is taken only in cer_schedule_new and the add functions, never
 * in a step. The same events at the same times give the same commands, and
 * ties are broken by number.
 *
 * The driver's loop: tell what happened, then take commands until there is
 * none, start them, wait for something to happen.
 *
 *     cer_schedule_unit_done(s, worker, now, &unit, &err);
 *     while (cer_schedule_next(s, now, &command))
 *         ...start it...
 *
 * A *unit* is one trial over one shard, once. Trial t visits the shards of
 * epoch e in the order of cer_visit_shard, whoever runs it; after them comes
 * the validation unit if eval_cost > 0 (step == shards, shard
 * CER_SHARD_VALIDATION). A trial goes on from epoch to epoch until it has done
 * its `epochs`; then it waits to be extended or dropped.
 *
 * How the next trial and its worker are chosen: docs/design/schedule.md. */
#ifndef CER_SCHEDULE_H
#define CER_SCHEDULE_H

#include "base.h"

#define CER_SHARD_VALIDATION (-1)
#define CER_NO_SHARD (-2)

typedef struct cer_schedule cer_schedule;

typedef struct cer_schedule_options {
    uint32_t shards;       /* >= 1 */
    const double *weights; /* cost of each shard, e.g. its rows; NULL: all 1 */
    bool exclusive;        /* a shard is run only by its holders */
    bool stagger;          /* see cer_visit_shard; false: at most two shards
                              are open at a time, shared shards only */
    double eval_cost;      /* weight of the validation unit; 0: none */
    uint32_t live_models;  /* models that a worker keeps alive; >= 1 */
    uint32_t capacity;     /* trials to reserve room for; more may come */
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
    CER_COMMAND_LOAD, /* `worker` is a holder of unit.shard from now on */
} cer_command_kind;

typedef struct cer_command {
    cer_command_kind kind;
    uint32_t worker;
    cer_unit unit; /* LOAD: only .shard */
} cer_command;

typedef enum cer_trial_status {
    CER_TRIAL_READY,   /* has a unit to run */
    CER_TRIAL_RUNNING, /* a worker runs its unit */
    CER_TRIAL_WAITING, /* has done its epochs, to be extended or dropped; or
                          is held */
    CER_TRIAL_DROPPED,
} cer_trial_status;

cer_status cer_schedule_new(const cer_schedule_options *options,
                            cer_schedule **out, cer_error *err);
void cer_schedule_free(cer_schedule *schedule); /* NULL allowed */

/* Workers are numbered 0, 1, ... in the order they come; numbers are not used
 * again. A worker that leaves loses its unit (see unit_lost). */
cer_status cer_schedule_add_worker(cer_schedule *schedule, uint32_t *worker,
                                   cer_error *err);
cer_status cer_schedule_remove_worker(cer_schedule *schedule, uint32_t worker,
                                      cer_error *err);

/* Exclusive placement: makes `workers` the only holders of `shard`. A shard
 * without holders (also before the first call) is given to the worker with
 * the fewest by a LOAD command. The validation set can be placed too;
 * until it is, every worker reads it. */
cer_status cer_schedule_set_holders(cer_schedule *schedule, int64_t shard,
                                    const uint32_t *workers, size_t n,
                                    cer_error *err);

/* A trial that has done `epoch` epochs and `step` units of the next one; it
 * trains until `epochs` are done. */
cer_status cer_schedule_add_trial(cer_schedule *schedule, uint32_t trial,
                                  uint32_t epochs, uint32_t epoch,
                                  uint32_t step, cer_error *err);
/* Sets how many epochs the trial does; no fewer than it has begun. */
cer_status cer_schedule_extend_trial(cer_schedule *schedule, uint32_t trial,
                                     uint32_t epochs, cer_error *err);
/* Ends a trial. A unit of it that is running stays the worker's until
 * unit_done, unit_failed or unit_lost. */
cer_status cer_schedule_drop_trial(cer_schedule *schedule, uint32_t trial,
                                   cer_error *err);
/* Gives the room of a dropped trial to those to come: it is as if it had never
 * been added, except for what was learnt from it. */
cer_status cer_schedule_forget_trial(cer_schedule *schedule, uint32_t trial,
                                     cer_error *err);
/* A trial that is held gets no further unit until it is released; one that is
 * running ends first. It stays where it is, as a trial that is waiting. */
cer_status cer_schedule_hold_trial(cer_schedule *schedule, uint32_t trial,
                                   cer_error *err);
cer_status cer_schedule_release_trial(cer_schedule *schedule, uint32_t trial,
                                      cer_error *err);
/* Takes a trial that does not run back to an earlier position: the states
 * after it are lost. */
cer_status cer_schedule_rewind_trial(cer_schedule *schedule, uint32_t trial,
                                     uint32_t epoch, uint32_t step,
                                     cer_error *err);

/* Gives the next command and notes it as carried out; false when nothing can
 * start now. */
bool cer_schedule_next(cer_schedule *schedule, double now,
                       cer_command *command);

/* The unit of `worker` ended, and its worker is idle. done: the trial goes on
 * to its next unit. failed, lost: the same unit again with the next attempt
 * number; the worker's live model of it is gone. They differ in what they say:
 * failed means the unit itself went wrong, lost that nothing is known.
 * *unit (may be NULL) is the unit that ended. */
cer_status cer_schedule_unit_done(cer_schedule *schedule, uint32_t worker,
                                  double now, cer_unit *unit, cer_error *err);
cer_status cer_schedule_unit_failed(cer_schedule *schedule, uint32_t worker,
                                    double now, cer_unit *unit, cer_error *err);
cer_status cer_schedule_unit_lost(cer_schedule *schedule, uint32_t worker,
                                  double now, cer_unit *unit, cer_error *err);

/* The worker dropped its live model of a trial (nothing if it had none). */
cer_status cer_schedule_forget_live(cer_schedule *schedule, uint32_t worker,
                                    uint32_t trial, cer_error *err);
/* Writes the trials whose models the worker is expected to keep alive, the
 * most recently used first, at most `room`; *n is how many there are. */
cer_status cer_schedule_live(const cer_schedule *schedule, uint32_t worker,
                             uint32_t *trials, size_t room, size_t *n,
                             cer_error *err);

cer_status cer_schedule_status(const cer_schedule *schedule, uint32_t trial,
                               cer_trial_status *status, cer_error *err);
/* The next unit of a trial, or the one that is running. */
cer_status cer_schedule_position(const cer_schedule *schedule, uint32_t trial,
                                 cer_unit *unit, cer_error *err);

/* True when no trial is ready or running. */
bool cer_schedule_finished(const cer_schedule *schedule);
/* Work left to the trials' next decisions, in seconds on one worker, units in
 * flight counted whole; in weights (*seconds false) until a unit was timed. */
double cer_schedule_remaining(const cer_schedule *schedule, bool *seconds);
/* How many workers were ever added: their numbers are below this. */
uint32_t cer_schedule_workers(const cer_schedule *schedule);
bool cer_schedule_idle(const cer_schedule *schedule, uint32_t worker);
/* Bytes held, for tests and benchmarks. */
size_t cer_schedule_bytes(const cer_schedule *schedule);

#endif
