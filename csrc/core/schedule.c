/* schedule.c -- the scheduler's trials, workers and events. */
#include "schedule_impl.h"

#include <math.h>
#include <string.h>

/* --- making and freeing --------------------------------------------------- */

static cer_status
check_options(const cer_schedule_options *o, cer_error *err)
{
    if (o->shards == 0 || o->shards > CER_SCHEDULE_MOST)
        return cer_fail(err, CER_INVALID,
                        "a schedule needs 1 to %d shards, not %u: write the "
                        "dataset with fewer",
                        CER_SCHEDULE_MOST, o->shards);
    if (o->capacity > CER_SCHEDULE_MOST)
        return cer_fail(err, CER_INVALID,
                        "a schedule can begin with room for at most %d trials, "
                        "not %u: it grows by itself",
                        CER_SCHEDULE_MOST, o->capacity);
    if (o->live_models == 0)
        return cer_fail(err, CER_INVALID,
                        "live_models must be at least 1, not 0");
    if (!(o->eval_cost >= 0.0 && isfinite(o->eval_cost)))
        return cer_fail(err, CER_INVALID,
                        "eval_cost must be finite and not negative, not %g",
                        o->eval_cost);
    if (o->exclusive && !o->stagger)
        return cer_fail(err, CER_INVALID,
                        "stagger=False needs shards that every worker can "
                        "read; leave out exclusive or stagger=False");
    for (uint32_t i = 0; o->weights != NULL && i < o->shards; i++) {
        if (!(o->weights[i] >= 0.0 && isfinite(o->weights[i])))
            return cer_fail(err, CER_INVALID,
                            "the weight of shard %u must be finite and not "
                            "negative, not %g",
                            i, o->weights[i]);
    }
    return CER_OK;
}

static void
sum_weights(cer_schedule *s, const double *weights)
{
    s->prefix[0] = 0.0;
    for (uint32_t i = 0; i < 2 * s->shards; i++) {
        double weight = weights == NULL ? 1.0 : weights[i % s->shards];

        s->prefix[i + 1] = s->prefix[i] + weight;
    }
}

static bool
alloc_tables(cer_schedule *s)
{
    s->prefix = cer_calloc(2 * (size_t)s->shards + 1, sizeof *s->prefix);
    s->queues = cer_calloc(s->n_queues, sizeof *s->queues);
    if (s->prefix == NULL || s->queues == NULL)
        return false;
    for (uint32_t i = 0; i < s->n_queues; i++)
        s->queues[i] = CER_HEAP_EMPTY;
    s->oldest = CER_HEAP_EMPTY;
    if (s->mode == MODE_WAVE)
        s->wave.parked = cer_calloc(s->shards, sizeof *s->wave.parked);
    if (s->mode == MODE_EXCLUSIVE) {
        s->n_holders = cer_calloc((size_t)s->shards + 1, sizeof *s->n_holders);
        s->filled = cer_calloc(s->held_words, sizeof *s->filled);
    }
    return (s->mode != MODE_WAVE || s->wave.parked != NULL) &&
           (s->mode != MODE_EXCLUSIVE ||
            (s->n_holders != NULL && s->filled != NULL));
}

cer_status
cer_schedule_new(const cer_schedule_options *options, cer_schedule **out,
                 cer_error *err)
{
    cer_schedule *s = NULL;
    cer_status status = check_options(options, err);

    *out = NULL;
    if (status != CER_OK)
        return status;
    s = cer_calloc(1, sizeof *s);
    if (s == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a schedule");
    /* One or two shards are never more than two open ones. */
    s->mode = options->exclusive                         ? MODE_EXCLUSIVE
              : options->stagger || options->shards <= 2 ? MODE_SHARED
                                                         : MODE_WAVE;
    s->stagger = options->stagger && !options->in_order;
    s->shards = options->shards;
    s->live_models = options->live_models;
    s->eval_cost = options->eval_cost;
    s->free_slot = NONE;
    s->n_queues = schedule_n_queues(s);
    if (s->mode == MODE_EXCLUSIVE) {
        s->held_words = s->shards / 64 + 1;
        s->n_orphans = s->shards + 1; /* also the validation set */
    }
    if (!alloc_tables(s) ||
        !schedule_reserve(s, options->capacity > 0 ? options->capacity : 1)) {
        status =
            cer_fail(err, CER_NOMEM,
                     "out of memory for a schedule of %u shards and %u trials",
                     options->shards, options->capacity);
        goto done;
    }
    sum_weights(s, options->weights);
    *out = s;
    s = NULL;

done:
    cer_schedule_free(s);
    return status;
}

void
cer_schedule_free(cer_schedule *s)
{
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        cer_free(s->workers[i].live);
        cer_free(s->workers[i].held);
    }
    cer_free(s->workers);
    cer_free(s->trials);
    cer_free(s->nodes);
    cer_free(s->ages);
    cer_free(s->index);
    cer_free(s->queues);
    cer_free(s->wave.parked);
    cer_free(s->n_holders);
    cer_free(s->filled);
    cer_free(s->prefix);
    cer_free(s);
}

size_t
cer_schedule_bytes(const cer_schedule *s)
{
    size_t trial = sizeof *s->trials + sizeof *s->nodes + sizeof *s->ages;
    size_t worker = sizeof *s->workers + s->held_words * sizeof(uint64_t) +
                    s->live_models * sizeof(uint32_t);

    return sizeof *s + s->capacity * trial + s->index_size * sizeof *s->index +
           s->n_workers * worker +
           (2 * (size_t)s->shards + 1) * sizeof *s->prefix +
           s->n_queues * sizeof *s->queues;
}

/* --- a trial's position --------------------------------------------------- */

static cer_unit
unit_of(const cer_schedule *s, const schedule_trial *t)
{
    return (cer_unit){.trial = t->number,
                      .epoch = t->epoch,
                      .step = t->step,
                      .attempt = t->attempt,
                      .shard = schedule_next_shard(s, t)};
}

/* Whether the trial's next unit ends its epoch. */
static bool
ends_epoch(const cer_schedule *s, const schedule_trial *t)
{
    return t->step + 1 == s->shards + (s->eval_cost > 0.0 ? 1 : 0);
}

static void
advance_position(cer_schedule *s, schedule_trial *t)
{
    bool ends = ends_epoch(s, t);

    if (t->step < s->shards)
        schedule_wave_step(s, t);
    t->attempt = 0;
    t->step++;
    if (ends) {
        t->step = 0;
        t->epoch++;
    }
}

/* Puts a trial that is not queued or running into its current status. */
static void
settle(cer_schedule *s, uint32_t slot)
{
    schedule_trial *t = &s->trials[slot];
    bool was_active =
        t->status == CER_TRIAL_READY || t->status == CER_TRIAL_RUNNING;
    bool active = !t->ending && !t->held && t->epoch < t->epochs;

    t->status = t->ending ? CER_TRIAL_DROPPED
                : active  ? CER_TRIAL_READY
                          : CER_TRIAL_WAITING;
    s->n_active = s->n_active + active - was_active;
    schedule_account(s, t, active);
    if (active)
        schedule_enqueue(s, slot);
    else
        schedule_wave_leave(s, t);
}

/* --- trials --------------------------------------------------------------- */

static cer_status
check_position(const cer_schedule *s, uint32_t trial, uint32_t epochs,
               uint32_t epoch, uint32_t step, cer_error *err)
{
    uint32_t last = s->eval_cost > 0.0 ? s->shards : s->shards - 1;

    if (step > last)
        return cer_fail(err, CER_INVALID,
                        "trial %u cannot begin at step %u: the last step of an "
                        "epoch is %u",
                        trial, step, last);
    if (epoch > epochs || (epoch == epochs && step > 0))
        return cer_fail(err, CER_INVALID,
                        "trial %u has begun epoch %u and cannot train for %u",
                        trial, epoch, epochs);
    return CER_OK;
}

cer_status
cer_schedule_add_trial(cer_schedule *s, uint32_t trial, uint32_t stream,
                       uint32_t epochs, uint32_t epoch, uint32_t step,
                       cer_error *err)
{
    cer_status status = check_position(s, trial, epochs, epoch, step, err);
    uint32_t slot = s->free_slot;

    if (status != CER_OK)
        return status;
    if (s->index[schedule_index_position(s, trial)] != NONE)
        return cer_fail(err, CER_INVALID, "trial %u already exists", trial);
    if (slot == NONE) {
        slot = s->n_trials;
        if (!schedule_reserve(s, slot + 1))
            return cer_fail(err, CER_NOMEM, "out of memory for trial %u",
                            trial);
        s->n_trials++;
    } else {
        s->free_slot = s->trials[slot].queue;
    }
    s->trials[slot] = (schedule_trial){.number = trial,
                                       .stream = stream,
                                       .epochs = epochs,
                                       .epoch = epoch,
                                       .step = step,
                                       .worker = NONE,
                                       .live_worker = NONE,
                                       .queue = NONE,
                                       .status = CER_TRIAL_WAITING};
    s->index[schedule_index_position(s, trial)] = slot;
    settle(s, slot);
    return CER_OK;
}

cer_status
cer_schedule_extend_trial(cer_schedule *s, uint32_t trial, uint32_t epochs,
                          cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);
    schedule_trial *t;
    uint32_t begun;

    if (status != CER_OK)
        return status;
    t = &s->trials[slot];
    if (t->status == CER_TRIAL_DROPPED || t->ending)
        return cer_fail(err, CER_INVALID, "trial %u was dropped", trial);
    begun = t->epoch + (t->step > 0 || t->status == CER_TRIAL_RUNNING);
    if (epochs < begun)
        return cer_fail(err, CER_INVALID,
                        "trial %u has begun %u epochs and cannot train for %u",
                        trial, begun, epochs);
    t->epochs = epochs;
    if (t->status == CER_TRIAL_RUNNING) {
        schedule_account(s, t, !t->held);
    } else {
        if (t->queue != NONE)
            schedule_dequeue(s, slot);
        settle(s, slot);
    }
    return CER_OK;
}

cer_status
cer_schedule_drop_trial(cer_schedule *s, uint32_t trial, cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);
    schedule_trial *t;

    if (status != CER_OK)
        return status;
    t = &s->trials[slot];
    t->ending = true;
    if (t->status == CER_TRIAL_RUNNING) {
        schedule_account(s, t, false);
        return CER_OK;
    }
    if (t->queue != NONE)
        schedule_dequeue(s, slot);
    settle(s, slot);
    schedule_forget_everywhere(s, slot);
    return CER_OK;
}

cer_status
cer_schedule_forget_trial(cer_schedule *s, uint32_t trial, cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);
    schedule_trial *t;

    if (status != CER_OK)
        return status;
    t = &s->trials[slot];
    if (t->status != CER_TRIAL_DROPPED)
        return cer_fail(err, CER_INVALID, "trial %u was not dropped", trial);
    schedule_index_remove(s, schedule_index_position(s, trial));
    t->forgotten = true;
    t->queue = s->free_slot;
    s->free_slot = slot;
    return CER_OK;
}

static cer_status
set_held(cer_schedule *s, uint32_t trial, bool held, cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);
    schedule_trial *t;

    if (status != CER_OK)
        return status;
    t = &s->trials[slot];
    if (t->status == CER_TRIAL_DROPPED || t->ending)
        return cer_fail(err, CER_INVALID, "trial %u was dropped", trial);
    t->held = held;
    if (t->status == CER_TRIAL_RUNNING) {
        schedule_account(s, t, !held);
        return CER_OK;
    }
    if (t->queue != NONE)
        schedule_dequeue(s, slot);
    settle(s, slot);
    return CER_OK;
}

cer_status
cer_schedule_hold_trial(cer_schedule *s, uint32_t trial, cer_error *err)
{
    return set_held(s, trial, true, err);
}

cer_status
cer_schedule_release_trial(cer_schedule *s, uint32_t trial, cer_error *err)
{
    return set_held(s, trial, false, err);
}

cer_status
cer_schedule_status(const cer_schedule *s, uint32_t trial,
                    cer_trial_status *out, cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);

    if (status == CER_OK)
        *out = (cer_trial_status)s->trials[slot].status;
    return status;
}

cer_status
cer_schedule_position(const cer_schedule *s, uint32_t trial, cer_unit *unit,
                      cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);

    if (status == CER_OK)
        *unit = unit_of(s, &s->trials[slot]);
    return status;
}

bool
cer_schedule_finished(const cer_schedule *s)
{
    return s->n_active == 0;
}

cer_status
cer_schedule_rewind_trial(cer_schedule *s, uint32_t trial, uint32_t epoch,
                          uint32_t step, cer_error *err)
{
    uint32_t slot;
    cer_status status = schedule_find_trial(s, trial, &slot, err);
    schedule_trial *t;

    if (status != CER_OK)
        return status;
    t = &s->trials[slot];
    if (t->status == CER_TRIAL_DROPPED || t->status == CER_TRIAL_RUNNING)
        return cer_fail(err, CER_INVALID, "trial %u is running or was dropped",
                        trial);
    if (epoch > t->epoch || (epoch == t->epoch && step > t->step))
        return cer_fail(err, CER_INVALID,
                        "trial %u is at epoch %u, step %u and cannot go back "
                        "to epoch %u, step %u",
                        trial, t->epoch, t->step, epoch, step);
    status = check_position(s, trial, t->epochs, epoch, step, err);
    if (status != CER_OK)
        return status;
    if (t->queue != NONE)
        schedule_dequeue(s, slot);
    schedule_wave_leave(s, t);
    schedule_forget_everywhere(s, slot);
    t->epoch = epoch;
    t->step = step;
    t->attempt++;
    settle(s, slot);
    return CER_OK;
}

/* --- steps ---------------------------------------------------------------- */

/* The worker begins the trial's next unit, which is returned. */
static cer_unit
begin(cer_schedule *s, uint32_t worker, uint32_t slot, double now)
{
    cer_unit unit = unit_of(s, &s->trials[slot]);

    schedule_touch_live(s, worker, slot);
    s->workers[worker].start = now;
    if (unit.shard != CER_SHARD_VALIDATION)
        s->workers[worker].shard = unit.shard;
    return unit;
}

bool
cer_schedule_next(cer_schedule *s, double now, cer_command *command)
{
    uint32_t slot, worker;

    if (s->n_orphans > 0 && s->n_present > 0) {
        schedule_adopt_orphan(s, command);
        return true;
    }
    if (s->mode == MODE_WAVE)
        schedule_wave_start(s);
    if (!schedule_choose(s, &slot, &worker))
        return false;
    schedule_dequeue(s, slot);
    s->trials[slot].status = CER_TRIAL_RUNNING;
    s->trials[slot].worker = worker;
    s->workers[worker].trial = slot;
    schedule_leave_idle(s);
    command->kind = CER_COMMAND_RUN;
    command->worker = worker;
    command->unit = begin(s, worker, slot, now);
    return true;
}

/* Ends a worker's unit: fills *unit and gets the trial's slot. */
static cer_status
end_unit(const cer_schedule *s, uint32_t worker, cer_unit *unit, uint32_t *slot,
         cer_error *err)
{
    schedule_worker *w;
    cer_status status = schedule_find_worker(s, worker, &w, err);

    *slot = NONE;
    if (status != CER_OK)
        return status;
    if (w->trial == NONE)
        return cer_fail(err, CER_INVALID, "worker %u is not running a unit",
                        worker);
    *slot = w->trial;
    if (unit != NULL)
        *unit = unit_of(s, &s->trials[w->trial]);
    return CER_OK;
}

/* Frees the trial's worker and settles the trial. */
static void
release(cer_schedule *s, uint32_t worker, uint32_t slot)
{
    schedule_become_idle(s, worker);
    s->trials[slot].worker = NONE;
    settle(s, slot);
    if (s->trials[slot].ending)
        schedule_forget_everywhere(s, slot);
}

/* The worker has done the trial's unit: learns from it, and moves on. */
static void
complete(cer_schedule *s, uint32_t worker, uint32_t slot, double now)
{
    schedule_worker *w = &s->workers[worker];
    schedule_trial *t = &s->trials[slot];

    if (t->step < s->shards)
        schedule_learn(s, w, t, schedule_unit_weight(s, t), now - w->start);
    advance_position(s, t);
}

cer_status
cer_schedule_unit_done(cer_schedule *s, uint32_t worker, double now,
                       cer_unit *unit, cer_error *err)
{
    uint32_t slot;
    cer_status status = end_unit(s, worker, unit, &slot, err);

    if (status != CER_OK)
        return status;
    complete(s, worker, slot, now);
    release(s, worker, slot);
    return CER_OK;
}

cer_status
cer_schedule_next_here(const cer_schedule *s, uint32_t worker, bool *stays,
                       cer_unit *unit, cer_error *err)
{
    uint32_t slot;
    cer_status status = end_unit(s, worker, NULL, &slot, err);
    schedule_trial after;

    *stays = false;
    if (status != CER_OK)
        return status;
    after = s->trials[slot];
    if (after.ending || after.held || ends_epoch(s, &after))
        return CER_OK;
    after.step++;
    after.attempt = 0;
    *unit = unit_of(s, &after);
    *stays = schedule_stays(s, &s->workers[worker], &after);
    return CER_OK;
}

cer_status
cer_schedule_unit_continued(cer_schedule *s, uint32_t worker, double now,
                            cer_unit *unit, cer_error *err)
{
    uint32_t slot;
    cer_status status = end_unit(s, worker, unit, &slot, err);
    schedule_trial *t;

    if (status != CER_OK)
        return status;
    t = &s->trials[slot];
    if (ends_epoch(s, t) || s->mode == MODE_WAVE)
        return cer_fail(err, CER_INVALID,
                        "worker %u cannot continue with trial %u: its unit %s",
                        worker, t->number,
                        s->mode == MODE_WAVE ? "waits for its shard to open"
                                             : "is the last of an epoch");
    complete(s, worker, slot, now);
    schedule_account(s, t, !t->ending && !t->held);
    (void)begin(s, worker, slot, now);
    return CER_OK;
}

cer_status
cer_schedule_unit_failed(cer_schedule *s, uint32_t worker, double now,
                         cer_unit *unit, cer_error *err)
{
    uint32_t slot;
    cer_status status = end_unit(s, worker, unit, &slot, err);

    (void)now;
    if (status != CER_OK)
        return status;
    schedule_forget_live(s, worker, slot);
    s->trials[slot].attempt++;
    release(s, worker, slot);
    return CER_OK;
}

cer_status
cer_schedule_remove_worker(cer_schedule *s, uint32_t worker, cer_error *err)
{
    schedule_worker *w;
    cer_status status = schedule_find_worker(s, worker, &w, err);

    if (status != CER_OK)
        return status;
    if (w->trial != NONE)
        (void)cer_schedule_unit_failed(s, worker, 0, NULL, NULL);
    schedule_remove(s, worker);
    return CER_OK;
}
