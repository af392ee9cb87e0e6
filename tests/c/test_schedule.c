/* The scheduler: single decisions, and random searches that check the
 * invariants at every step. */
#include "check.h"
#include "rng.h"
#include "schedule.h"

#include <stdlib.h>

static cer_error err;

#define OK(call) CHECK_EQ_INT(call, CER_OK)

static cer_schedule *
make(uint32_t shards, uint32_t workers, uint32_t trials, uint32_t epochs)
{
    cer_schedule_options options = {
        .shards = shards, .stagger = true, .live_models = 2};
    cer_schedule *s = NULL;
    uint32_t worker;

    OK(cer_schedule_new(&options, &s, &err));
    for (uint32_t i = 0; i < workers; i++) {
        OK(cer_schedule_add_worker(s, &worker, &err));
        CHECK_EQ_INT(worker, i);
    }
    for (uint32_t i = 0; i < trials; i++)
        OK(cer_schedule_add_trial(s, i, i, epochs, 0, 0, &err));
    return s;
}

/* --- single decisions ----------------------------------------------------- */

static void
test_oldest_trial_first_and_it_stays_on_its_worker(void)
{
    cer_schedule *s = make(4, 2, 20, 3);
    cer_command c;
    cer_unit unit;

    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.unit.trial, 0);
    CHECK_EQ_INT(c.worker, 0);
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.unit.trial, 1);
    CHECK_EQ_INT(c.worker, 1);
    CHECK_EQ_INT(c.unit.shard, 1);
    CHECK(!cer_schedule_next(s, 0.0, &c));
    for (uint32_t step = 1; step < 4; step++) {
        OK(cer_schedule_unit_done(s, 1, step, &unit, &err));
        CHECK_EQ_INT(unit.step, step - 1);
        CHECK(cer_schedule_next(s, step, &c));
        CHECK_EQ_INT(c.unit.trial, 1);
        CHECK_EQ_INT(c.worker, 1);
        CHECK_EQ_INT(c.unit.shard, (1 + step) % 4);
    }
    cer_schedule_free(s);
}

/* Two workers become idle at once: the trial goes to the worker with its live
 * state, else with its shard warm, else to the lowest number. */
static void
test_choice_of_the_worker(void)
{
    cer_schedule *s = make(2, 3, 0, 0);
    cer_command c;

    OK(cer_schedule_add_trial(s, 4, 4, 9, 0, 0, &err)); /* shards 0, 1 */
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.worker, 0);
    OK(cer_schedule_add_trial(s, 5, 5, 9, 0, 0, &err)); /* shards 1, 0 */
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.worker, 1);
    OK(cer_schedule_unit_done(s, 0, 1.0, NULL, &err));
    OK(cer_schedule_drop_trial(s, 4, &err));
    OK(cer_schedule_unit_done(s, 1, 1.0, NULL, &err));
    /* Trial 5 is live on worker 1, though worker 0 has its shard warm. */
    CHECK(cer_schedule_next(s, 1.0, &c));
    CHECK_EQ_INT(c.unit.shard, 0);
    CHECK_EQ_INT(c.worker, 1);
    /* It begins epoch 1 at shard 0, which both have warm. It fails there, so it
     * is live nowhere and the lowest number is chosen. */
    OK(cer_schedule_unit_failed(s, 1, 2.0, NULL, &err));
    CHECK(cer_schedule_next(s, 2.0, &c));
    CHECK_EQ_INT(c.unit.attempt, 1);
    CHECK_EQ_INT(c.worker, 0);
    /* Trial 7 begins at shard 1, which no idle worker has warm. */
    OK(cer_schedule_add_trial(s, 7, 7, 9, 0, 0, &err));
    CHECK(cer_schedule_next(s, 2.0, &c));
    CHECK_EQ_INT(c.worker, 1);
    CHECK_EQ_INT(c.unit.shard, 1);
    cer_schedule_free(s);
}

/* A trial that a user has added comes first and stays, with little work, too.
 */
static void
test_users_trial_goes_before_all_others(void)
{
    const bool exclusive[] = {false, true};

    for (int i = 0; i < 2; i++) {
        cer_schedule_options options = {.shards = 2,
                                        .stagger = true,
                                        .exclusive = exclusive[i],
                                        .live_models = 2};
        cer_schedule *s = NULL;
        cer_command c;
        uint32_t worker, units = 0;

        OK(cer_schedule_new(&options, &s, &err));
        OK(cer_schedule_add_worker(s, &worker, &err));
        for (int64_t shard = 0; exclusive[i] && shard < 2; shard++)
            OK(cer_schedule_set_holders(s, shard, &worker, 1, &err));
        for (uint32_t trial = 0; trial < 5; trial++)
            OK(cer_schedule_add_trial(s, trial, trial, 30, 0, 0, &err));
        OK(cer_schedule_add_trial(s, 5, CER_STREAM_OF_USERS, 2, 0, 0, &err));
        while (units < 4) {
            CHECK(cer_schedule_next(s, units, &c));
            CHECK_EQ_INT(c.unit.trial, 5);
            OK(cer_schedule_unit_done(s, c.worker, ++units, NULL, &err));
        }
        CHECK(cer_schedule_next(s, units, &c));
        CHECK(c.unit.trial < 5);
        cer_schedule_free(s);
    }
}

/* A trial with as much work left as each worker's share must start now, however
 * new it is. */
static void
test_urgent_trial_goes_before_older_ones(void)
{
    cer_schedule *s = make(2, 2, 3, 1);
    cer_command c;

    OK(cer_schedule_add_trial(s, 3, 3, 20, 0, 0, &err));
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.unit.trial, 3);
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.unit.trial, 0);
    cer_schedule_free(s);
}

static void
test_live_models_are_the_recently_used(void)
{
    cer_schedule *s = make(1, 1, 3, 1);
    uint32_t live[4];
    cer_command c;
    size_t n;

    for (int i = 0; i < 3; i++) {
        CHECK(cer_schedule_next(s, i, &c));
        OK(cer_schedule_unit_done(s, 0, i + 1, NULL, &err));
    }
    OK(cer_schedule_live(s, 0, live, 4, &n, &err));
    CHECK_EQ_INT(n, 2);
    CHECK_EQ_INT(live[0], 2);
    CHECK_EQ_INT(live[1], 1);
    OK(cer_schedule_forget_live(s, 0, 2, &err));
    OK(cer_schedule_live(s, 0, live, 4, &n, &err));
    CHECK_EQ_INT(n, 1);
    CHECK_EQ_INT(live[0], 1);
    OK(cer_schedule_drop_trial(s, 1, &err));
    OK(cer_schedule_live(s, 0, live, 4, &n, &err));
    CHECK_EQ_INT(n, 0);
    cer_schedule_free(s);
}

static void
test_orphaned_shards_are_loaded_by_the_worker_with_the_fewest(void)
{
    cer_schedule_options options = {
        .shards = 5, .stagger = true, .exclusive = true, .live_models = 1};
    static const uint32_t first[] = {0}, both[] = {0, 1};
    cer_schedule *s = NULL;
    uint32_t worker;
    cer_command c;

    OK(cer_schedule_new(&options, &s, &err));
    CHECK(!cer_schedule_next(s, 0.0, &c)); /* no worker can load a shard */
    for (int i = 0; i < 3; i++)
        OK(cer_schedule_add_worker(s, &worker, &err));
    for (int64_t shard = 0; shard < 3; shard++)
        OK(cer_schedule_set_holders(s, shard, first, 1, &err));
    OK(cer_schedule_set_holders(s, 3, both, 2, &err));
    /* Shard 4 has never had a holder: worker 2 has no shard. */
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.kind, CER_COMMAND_LOAD);
    CHECK_EQ_INT(c.worker, 2);
    CHECK_EQ_INT(c.unit.shard, 4);
    CHECK(!cer_schedule_next(s, 0.0, &c));
    /* Shard 3 still has worker 1. */
    OK(cer_schedule_remove_worker(s, 0, &err));
    for (int64_t shard = 0; shard < 3; shard++) {
        CHECK(cer_schedule_next(s, 0.0, &c));
        CHECK_EQ_INT(c.unit.shard, shard);
        CHECK_EQ_INT(c.worker, 1 + shard % 2);
    }
    CHECK(!cer_schedule_next(s, 0.0, &c));
    /* Every worker holds the validation set until it is placed. */
    OK(cer_schedule_set_holders(s, CER_SHARD_VALIDATION, NULL, 0, &err));
    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(c.kind, CER_COMMAND_LOAD);
    CHECK_EQ_INT(c.unit.shard, CER_SHARD_VALIDATION);
    cer_schedule_free(s);
}

static void
test_a_trial_goes_back(void)
{
    cer_schedule *s = make(2, 1, 1, 1);
    cer_command c;
    cer_unit unit;

    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(cer_schedule_rewind_trial(s, 0, 0, 0, &err), CER_INVALID);
    OK(cer_schedule_unit_done(s, 0, 1.0, &unit, &err));
    CHECK_EQ_INT(cer_schedule_rewind_trial(s, 0, 0, 2, &err), CER_INVALID);
    OK(cer_schedule_rewind_trial(s, 0, 0, 0, &err));
    CHECK(cer_schedule_next(s, 1.0, &c));
    CHECK_EQ_INT(c.unit.epoch, 0);
    CHECK_EQ_INT(c.unit.step, 0);
    CHECK_EQ_INT(c.unit.attempt, 1);
    cer_schedule_free(s);
}

static void
test_a_held_trial_goes_on_where_it_was(void)
{
    cer_schedule *s = make(2, 1, 2, 1);
    cer_trial_status status;
    cer_command c;
    cer_unit unit;

    CHECK(cer_schedule_next(s, 0.0, &c));
    OK(cer_schedule_hold_trial(s, 0, &err));
    OK(cer_schedule_hold_trial(s, 1, &err));
    OK(cer_schedule_status(s, 0, &status, &err));
    CHECK_EQ_INT(status, CER_TRIAL_RUNNING);
    OK(cer_schedule_unit_failed(s, 0, 1.0, &unit, &err));
    OK(cer_schedule_status(s, 0, &status, &err));
    CHECK_EQ_INT(status, CER_TRIAL_WAITING);
    CHECK(cer_schedule_finished(s));
    CHECK(!cer_schedule_next(s, 1.0, &c));
    OK(cer_schedule_release_trial(s, 0, &err));
    CHECK(cer_schedule_next(s, 1.0, &c));
    CHECK_EQ_INT(c.unit.trial, 0);
    CHECK_EQ_INT(c.unit.attempt, 1);
    CHECK_EQ_INT(cer_schedule_hold_trial(s, 7, &err), CER_INVALID);
    OK(cer_schedule_drop_trial(s, 1, &err));
    CHECK_EQ_INT(cer_schedule_release_trial(s, 1, &err), CER_INVALID);
    cer_schedule_free(s);
}

static void
test_a_dropped_trial_keeps_its_worker_until_its_unit_ends(void)
{
    cer_schedule *s = make(2, 1, 2, 1);
    cer_trial_status status;
    cer_command c;
    cer_unit unit;

    CHECK(cer_schedule_next(s, 0.0, &c));
    OK(cer_schedule_drop_trial(s, 0, &err));
    OK(cer_schedule_status(s, 0, &status, &err));
    CHECK_EQ_INT(status, CER_TRIAL_RUNNING);
    CHECK(!cer_schedule_next(s, 0.0, &c));
    OK(cer_schedule_unit_failed(s, 0, 1.0, &unit, &err));
    CHECK_EQ_INT(unit.trial, 0);
    OK(cer_schedule_status(s, 0, &status, &err));
    CHECK_EQ_INT(status, CER_TRIAL_DROPPED);
    CHECK(cer_schedule_next(s, 1.0, &c));
    CHECK_EQ_INT(c.unit.trial, 1);
    OK(cer_schedule_drop_trial(s, 1, &err));
    CHECK(!cer_schedule_finished(s)); /* its unit is still running */
    OK(cer_schedule_remove_worker(s, 0, &err));
    CHECK(cer_schedule_finished(s));
    cer_schedule_free(s);
}

/* A window of trials moves over many numbers, spread so that index slots
 * collide. Trials are not mixed up, and entries are reused. */
static void
test_forgotten_trials_leave_their_room(void)
{
    enum { WINDOW = 50, COUNT = 20000 };
    cer_schedule *s = make(2, 1, 0, 1);
    uint32_t window[WINDOW];
    size_t bytes = 0;
    cer_rng rng;

    cer_rng_seed(&rng, 7, CER_RNG_SPACE, 0, 0);
    for (uint32_t n = 0; n < COUNT; n++) {
        uint32_t number = n * 64 + (uint32_t)cer_rng_below(&rng, 64);
        uint32_t at = (uint32_t)cer_rng_below(&rng, WINDOW);
        cer_unit unit;

        if (n < WINDOW) {
            at = n;
        } else {
            OK(cer_schedule_drop_trial(s, window[at], &err));
            OK(cer_schedule_forget_trial(s, window[at], &err));
            CHECK_EQ_INT(cer_schedule_forget_trial(s, window[at], &err),
                         CER_INVALID);
        }
        window[at] = number;
        OK(cer_schedule_add_trial(s, number, number, n % 9 + 1, n % 9, 0,
                                  &err));
        for (uint32_t i = 0; n >= WINDOW && i < WINDOW; i++) {
            OK(cer_schedule_position(s, window[i], &unit, &err));
            CHECK_EQ_INT(unit.trial, window[i]);
        }
        if (n == WINDOW)
            bytes = cer_schedule_bytes(s);
    }
    CHECK_EQ_INT(cer_schedule_bytes(s), bytes);
    cer_schedule_free(s);
}

static void
test_only_dropped_trials_are_forgotten(void)
{
    cer_schedule *s = make(2, 1, 2, 1);
    cer_command c;
    cer_unit unit;

    CHECK(cer_schedule_next(s, 0.0, &c));
    CHECK_EQ_INT(cer_schedule_forget_trial(s, 1, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "trial 1 was not dropped");
    OK(cer_schedule_drop_trial(s, 0, &err)); /* its unit is running */
    CHECK_EQ_INT(cer_schedule_forget_trial(s, 0, &err), CER_INVALID);
    OK(cer_schedule_unit_done(s, 0, 1.0, &unit, &err));
    OK(cer_schedule_forget_trial(s, 0, &err));
    CHECK_EQ_INT(cer_schedule_drop_trial(s, 0, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "there is no trial 0");
    OK(cer_schedule_add_trial(s, 0, 0, 1, 0, 0, &err));
    CHECK(cer_schedule_next(s, 1.0, &c));
    CHECK_EQ_INT(c.unit.trial, 0);
    CHECK_EQ_INT(c.unit.step, 0);
    cer_schedule_free(s);
}

static void
test_wrong_arguments_are_refused(void)
{
    cer_schedule_options options = {.shards = 0, .live_models = 1};
    static const double bad[] = {1.0, -1.0};
    cer_schedule *s = NULL;
    cer_unit unit;

    CHECK_EQ_INT(cer_schedule_new(&options, &s, &err), CER_INVALID);
    options.shards = CER_SCHEDULE_MOST + 1;
    CHECK_EQ_INT(cer_schedule_new(&options, &s, &err), CER_INVALID);
    CHECK(strstr(err.message, "1 to 1048576 shards, not 1048577") != NULL);
    options.shards = 2;
    options.capacity = CER_SCHEDULE_MOST + 1;
    CHECK_EQ_INT(cer_schedule_new(&options, &s, &err), CER_INVALID);
    CHECK(strstr(err.message, "at most 1048576 trials") != NULL);
    options.capacity = 1;
    options.weights = bad;
    CHECK_EQ_INT(cer_schedule_new(&options, &s, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "the weight of shard 1 must be finite and not "
                              "negative, not -1");
    options.weights = NULL;
    options.exclusive = true;
    CHECK_EQ_INT(cer_schedule_new(&options, &s, NULL), CER_INVALID);
    CHECK(s == NULL);

    s = make(2, 1, 1, 1);
    CHECK_EQ_INT(cer_schedule_add_trial(s, 0, 0, 1, 0, 0, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "trial 0 already exists");
    CHECK_EQ_INT(cer_schedule_add_trial(s, 1, 1, 1, 0, 2, &err), CER_INVALID);
    CHECK_EQ_INT(cer_schedule_add_trial(s, 1, 1, 1, 2, 0, &err), CER_INVALID);
    CHECK_EQ_INT(cer_schedule_add_trial(s, 1, 1, 1, 1, 1, &err), CER_INVALID);
    CHECK_EQ_INT(cer_schedule_unit_done(s, 0, 0.0, &unit, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "worker 0 is not running a unit");
    CHECK_EQ_INT(cer_schedule_unit_done(s, 1, 0.0, &unit, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "there is no worker 1");
    CHECK_EQ_INT(cer_schedule_set_holders(s, 0, NULL, 0, &err), CER_INVALID);
    CHECK_EQ_INT(cer_schedule_extend_trial(s, 7, 1, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "there is no trial 7");
    cer_schedule_free(s);
}

/* --- random searches ------------------------------------------------------ */

enum { MAX_TRIALS = 40, MAX_WORKERS = 24, MAX_SHARDS = 12 };

typedef struct search {
    cer_schedule *s;
    cer_schedule_options options;
    cer_rng rng;
    uint32_t n_workers;
    uint32_t present;
    bool there[MAX_WORKERS];
    bool busy[MAX_WORKERS];
    bool stays[MAX_WORKERS]; /* it begins `next` when its unit is done */
    cer_unit next[MAX_WORKERS];
    bool holds[MAX_WORKERS][MAX_SHARDS + 1];
    double ends[MAX_WORKERS];
    cer_unit unit[MAX_WORKERS];
    uint32_t n_trials;
    uint32_t epochs[MAX_TRIALS];
    uint32_t done[MAX_TRIALS];     /* units in all epochs */
    uint32_t attempts[MAX_TRIALS]; /* of the next unit */
    bool running[MAX_TRIALS];
    double cost[MAX_TRIALS];
} search;

static uint32_t
steps_of(const search *r)
{
    return r->options.shards + (r->options.eval_cost > 0.0);
}

static void
join(search *r)
{
    uint32_t worker;

    if (r->n_workers == MAX_WORKERS)
        return;
    OK(cer_schedule_add_worker(r->s, &worker, &err));
    CHECK_EQ_INT(worker, r->n_workers);
    r->there[r->n_workers++] = true;
    r->present++;
}

static void
check_run(search *r, const cer_command *c)
{
    uint32_t trial = c->unit.trial, steps = steps_of(r);

    CHECK(r->there[c->worker] && !r->busy[c->worker]);
    CHECK(trial < r->n_trials && !r->running[trial]);
    CHECK_EQ_INT(c->unit.epoch, r->done[trial] / steps);
    CHECK_EQ_INT(c->unit.step, r->done[trial] % steps);
    CHECK_EQ_INT(c->unit.attempt, r->attempts[trial]);
    CHECK(c->unit.epoch < r->epochs[trial]);
    if (c->unit.step == r->options.shards) {
        CHECK_EQ_INT(c->unit.shard, CER_SHARD_VALIDATION);
        return;
    }
    CHECK_EQ_INT(c->unit.shard,
                 cer_visit_shard(trial, c->unit.epoch, c->unit.step,
                                 r->options.shards, r->options.stagger));
    CHECK(!r->options.exclusive || r->holds[c->worker][c->unit.shard]);
}

/* An exclusive shard is used only once at a time, and without stagger at most
 * two shards are open. */
static void
check_shards(const search *r)
{
    uint32_t users[MAX_SHARDS] = {0}, open = 0;

    for (uint32_t w = 0; w < r->n_workers; w++) {
        if (r->busy[w] && r->unit[w].shard != CER_SHARD_VALIDATION)
            users[r->unit[w].shard]++;
    }
    for (uint32_t i = 0; i < r->options.shards; i++) {
        open += users[i] > 0;
        CHECK(!r->options.exclusive || users[i] <= 1);
    }
    CHECK(r->options.stagger || r->options.shards <= 2 || open <= 2);
}

static double
unit_end(search *r, uint32_t trial, double now)
{
    return now + r->cost[trial] * (0.9 + 0.2 * cer_rng_double(&r->rng));
}

static void
take_commands(search *r, double now)
{
    cer_command c;

    while (cer_schedule_next(r->s, now, &c)) {
        if (c.kind == CER_COMMAND_LOAD) {
            CHECK(r->there[c.worker] && c.unit.shard >= 0);
            for (uint32_t w = 0; w < r->n_workers; w++)
                CHECK(!r->there[w] || !r->holds[w][c.unit.shard]);
            r->holds[c.worker][c.unit.shard] = true;
            continue;
        }
        check_run(r, &c);
        r->busy[c.worker] = true;
        r->running[c.unit.trial] = true;
        r->unit[c.worker] = c.unit;
        r->ends[c.worker] = unit_end(r, c.unit.trial, now);
        check_shards(r);
    }
}

/* The busy worker whose unit ends first, or MAX_WORKERS. */
static uint32_t
next_end(const search *r)
{
    uint32_t first = MAX_WORKERS;

    for (uint32_t w = 0; w < r->n_workers; w++) {
        if (r->busy[w] && (first == MAX_WORKERS || r->ends[w] < r->ends[first]))
            first = w;
    }
    return first;
}

/* Queues the next units of some workers. */
static void
queue_units(search *r)
{
    for (uint32_t w = 0; w < r->n_workers; w++) {
        if (!r->busy[w] || r->stays[w] || cer_rng_below(&r->rng, 3) == 0)
            continue;
        OK(cer_schedule_next_here(r->s, w, &r->stays[w], &r->next[w], &err));
        CHECK(r->options.stagger || r->options.shards <= 2 || !r->stays[w]);
        if (!r->stays[w])
            continue;
        CHECK_EQ_INT(r->next[w].trial, r->unit[w].trial);
        CHECK_EQ_INT(r->next[w].epoch, r->unit[w].epoch);
        CHECK_EQ_INT(r->next[w].step, r->unit[w].step + 1);
        CHECK_EQ_INT(r->next[w].attempt, 0);
    }
}

static void
go_on(search *r, uint32_t worker, double now)
{
    cer_command c = {
        .kind = CER_COMMAND_RUN, .worker = worker, .unit = r->next[worker]};
    uint32_t trial = r->unit[worker].trial;
    cer_unit unit;

    OK(cer_schedule_unit_continued(r->s, worker, now, &unit, &err));
    CHECK_EQ_INT(unit.trial, trial);
    CHECK_EQ_INT(unit.step, r->unit[worker].step);
    r->done[trial]++;
    r->attempts[trial] = 0;
    r->busy[worker] = r->running[trial] = r->stays[worker] = false;
    check_run(r, &c);
    r->busy[worker] = r->running[trial] = true;
    r->unit[worker] = c.unit;
    r->ends[worker] = unit_end(r, trial, now);
    check_shards(r);
}

static void
end_unit(search *r, uint32_t worker, double now)
{
    uint32_t trial = r->unit[worker].trial;
    uint64_t luck = cer_rng_below(&r->rng, 40);
    cer_unit unit;

    if (luck > 3 && r->stays[worker]) {
        go_on(r, worker, now);
        return;
    }
    r->stays[worker] = false;

    if (luck == 0 && r->present > 1) {
        OK(cer_schedule_remove_worker(r->s, worker, &err));
        r->there[worker] = false;
        r->present--;
        memset(r->holds[worker], 0, sizeof r->holds[worker]);
    } else if (luck == 1 || luck == 2) {
        OK(cer_schedule_unit_failed(r->s, worker, now, &unit, &err));
    } else {
        OK(cer_schedule_unit_done(r->s, worker, now, &unit, &err));
        CHECK_EQ_INT(unit.trial, trial);
        r->done[trial]++;
    }
    r->attempts[trial] = luck <= 2 && (luck > 0 || !r->there[worker])
                             ? r->attempts[trial] + 1
                             : 0;
    r->busy[worker] = false;
    r->running[trial] = false;
    if (luck == 3)
        join(r);
}

static void
begin_search(search *r, uint64_t seed)
{
    memset(r, 0, sizeof *r);
    cer_rng_seed(&r->rng, seed, CER_RNG_SPACE, 0, 0);
    r->options.shards = 1 + (uint32_t)cer_rng_below(&r->rng, MAX_SHARDS);
    r->options.exclusive = seed % 3 == 1;
    r->options.stagger = seed % 3 != 2;
    r->options.eval_cost = cer_rng_below(&r->rng, 2) ? 0.0 : 0.5;
    r->options.live_models = 1 + (uint32_t)cer_rng_below(&r->rng, 3);
    OK(cer_schedule_new(&r->options, &r->s, &err));
    for (uint64_t n = 1 + cer_rng_below(&r->rng, 9); n > 0; n--)
        join(r);
    r->n_trials = 1 + (uint32_t)cer_rng_below(&r->rng, MAX_TRIALS);
    for (uint32_t i = 0; i < r->n_trials; i++) {
        r->epochs[i] = 1 + (uint32_t)cer_rng_below(&r->rng, 3);
        r->done[i] = (uint32_t)cer_rng_below(&r->rng, steps_of(r));
        r->cost[i] = 1.0 + 9.0 * cer_rng_double(&r->rng);
        OK(cer_schedule_add_trial(r->s, i, i, r->epochs[i], 0, r->done[i],
                                  &err));
    }
}

static void
test_random_searches(void)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        double now = 0.0;
        uint32_t worker;
        search r;

        begin_search(&r, seed);
        take_commands(&r, now);
        queue_units(&r);
        while ((worker = next_end(&r)) < MAX_WORKERS) {
            now = r.ends[worker];
            end_unit(&r, worker, now);
            take_commands(&r, now);
            queue_units(&r);
        }
        CHECK(cer_schedule_finished(r.s));
        for (uint32_t i = 0; i < r.n_trials; i++)
            CHECK_EQ_INT(r.done[i], r.epochs[i] * steps_of(&r));
        cer_schedule_free(r.s);
    }
}

CHECK_MAIN(test_oldest_trial_first_and_it_stays_on_its_worker,
           test_choice_of_the_worker, test_users_trial_goes_before_all_others,
           test_urgent_trial_goes_before_older_ones,
           test_live_models_are_the_recently_used,
           test_orphaned_shards_are_loaded_by_the_worker_with_the_fewest,
           test_a_trial_goes_back, test_a_held_trial_goes_on_where_it_was,
           test_a_dropped_trial_keeps_its_worker_until_its_unit_ends,
           test_forgotten_trials_leave_their_room,
           test_only_dropped_trials_are_forgotten,
           test_wrong_arguments_are_refused, test_random_searches)
