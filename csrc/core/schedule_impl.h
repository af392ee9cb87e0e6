/* schedule_impl.h -- shared by the five files of the scheduler; no other file
 * includes it. Each calls only those above it:
 *
 *   schedule_table.c  trials and workers by number, and room for them
 *   schedule_worker.c workers, their live models and their shards
 *   schedule_cost.c   durations: rates, factors, work left
 *   schedule_queue.c  the units that may start, and the choice among them
 *   schedule.c        the events, which change all of these */
#ifndef CER_SCHEDULE_IMPL_H
#define CER_SCHEDULE_IMPL_H

#include "heap.h"
#include "schedule.h"

#define NONE UINT32_MAX /* no trial, no worker, no queue */

/* The three placement modes. */
typedef enum schedule_mode {
    MODE_SHARED,    /* every worker reads every shard */
    MODE_WAVE,      /* the same, with at most two shards open */
    MODE_EXCLUSIVE, /* only its holders run a shard */
} schedule_mode;

typedef struct schedule_trial {
    uint32_t number;
    uint32_t stream; /* in the order of its shards */
    uint32_t epochs;
    uint32_t epoch;
    uint32_t step; /* == shards: the validation unit is next */
    uint32_t attempt;
    uint32_t worker;      /* running its unit, or NONE */
    uint32_t live_worker; /* holding its newest state live, or NONE */
    uint32_t queue;       /* its heap, or NONE; for a free slot, the next one */
    uint8_t status;       /* a cer_trial_status */
    bool ending;          /* dropped while its unit runs */
    bool held;            /* gets no unit until it is released */
    bool warm;            /* its first unit, which is not timed, is over */
    bool known;           /* rate was measured */
    bool in_wave;
    bool work_in_seconds; /* unit of `work` */
    bool forgotten;       /* the slot is free */
    uint32_t timed;       /* units in its rate, counted as far as needed */
    uint64_t lane;        /* next shard of the wave, a running count */
    double rate;          /* seconds per weight on a worker of factor 1 */
    double work;          /* its share in the schedule's sums of work */
} schedule_trial;

typedef struct schedule_worker {
    bool present;
    bool warm;       /* its first unit, which is not timed, is over */
    uint32_t trial;  /* slot of the trial it runs, or NONE */
    int64_t shard;   /* the last one run or loaded, or CER_NO_SHARD */
    double start;    /* of its unit */
    double factor;   /* its time over that of the mean worker */
    uint32_t timed;  /* units in its factor, counted as far as needed */
    uint32_t n_held; /* training shards held; exclusive mode only */
    uint32_t n_live;
    uint32_t *live; /* slots, most recent first; room for live_models */
    uint64_t *held; /* one bit per shard and for the validation set */
} schedule_worker;

/* The wave of mode WAVE. Lanes count the shards through all epochs: lane l is
 * shard l mod shards. The next unit of a member at lane l is on that shard; the
 * slowest members are at `front`, and lanes front and front + 1 are open. */
typedef struct schedule_wave {
    uint64_t front;
    uint32_t members;
    uint32_t at[3]; /* members at lane l are counted in at[l % 3] */
    uint32_t n_parked;
    uint32_t *parked; /* [shards] trials waiting for a shard to open */
} schedule_wave;

struct cer_schedule {
    schedule_mode mode;
    bool stagger;
    uint32_t shards;
    uint32_t live_models;
    double eval_cost;
    double *prefix; /* [2 shards + 1] sums of weights, over two rounds */

    schedule_trial *trials;
    cer_heap_node *nodes; /* by slot; see schedule_queue.c for the heaps */
    cer_heap_node *ages;  /* by slot; heap `oldest`, mode SHARED only */
    uint32_t n_trials;    /* slots used, including free ones */
    uint32_t free_slot;   /* the first of them, or NONE */
    uint32_t capacity;
    uint32_t *index; /* hash table from number to slot; never full */
    uint32_t index_size;
    uint32_t n_active; /* trials that are ready or running */

    uint32_t *queues; /* heaps over nodes */
    uint32_t n_queues;
    uint32_t oldest;
    schedule_wave wave;

    schedule_worker *workers;
    uint32_t n_workers; /* ever added */
    uint32_t n_present;
    uint32_t n_idle;
    uint32_t lowest_idle; /* no idle worker has a lower number */

    uint32_t *n_holders; /* [shards + 1]; exclusive mode only */
    uint64_t *filled;    /* bit q: queue q has trials; exclusive mode only */
    size_t held_words;
    bool eval_placed;   /* false: every worker holds the validation set */
    uint32_t n_orphans; /* shards without holders */

    double work_seconds; /* left in trials of known rate */
    double work_weights; /* left in the others */
    double rate_sum;     /* over trials of known rate, also ended ones */
    double rate_max;
    uint64_t n_rates;
};

static inline bool
schedule_bit(const uint64_t *bits, uint32_t i)
{
    return (bits[i / 64] >> (i % 64) & 1) != 0;
}

static inline void
schedule_set_bit(uint64_t *bits, uint32_t i, bool on)
{
    uint64_t bit = UINT64_C(1) << (i % 64);

    bits[i / 64] = on ? bits[i / 64] | bit : bits[i / 64] & ~bit;
}

/* --- schedule_table.c ----------------------------------------------------- */

cer_status schedule_find_trial(const cer_schedule *s, uint32_t number,
                               uint32_t *slot, cer_error *err);
cer_status schedule_find_worker(const cer_schedule *s, uint32_t number,
                                schedule_worker **worker, cer_error *err);
/* The position of a trial's number in the index, or the free position for
 * it. */
uint32_t schedule_index_position(const cer_schedule *s, uint32_t number);
/* Empties a position and moves up the entries that it had displaced. */
void schedule_index_remove(cer_schedule *s, uint32_t hole);
/* Makes *array_at (of any type) hold `count` elements of `size` bytes; false,
 * with the array unchanged, if out of memory. */
bool schedule_grow(void *array_at, size_t count, size_t size);
/* Makes room for `wanted` trials in all, at least doubling it; false if out of
 * memory. */
bool schedule_reserve(cer_schedule *s, uint32_t wanted);
/* The shard of the trial's next unit, or CER_SHARD_VALIDATION. */
int64_t schedule_next_shard(const cer_schedule *s, const schedule_trial *t);

/* --- schedule_worker.c ---------------------------------------------------- */

void schedule_become_idle(cer_schedule *s, uint32_t worker);
/* An idle worker was given a unit, or left. */
void schedule_leave_idle(cer_schedule *s);
/* The worker is about to run the trial: its model becomes the most recent, and
 * its state is live nowhere else. */
void schedule_touch_live(cer_schedule *s, uint32_t worker, uint32_t slot);
void schedule_forget_live(cer_schedule *s, uint32_t worker, uint32_t slot);
void schedule_forget_everywhere(cer_schedule *s, uint32_t slot);
/* Removes an idle worker with its live models and its shards. */
void schedule_remove(cer_schedule *s, uint32_t worker);
/* Gives a shard without holders to the worker with the fewest shards. */
void schedule_adopt_orphan(cer_schedule *s, cer_command *command);

/* --- schedule_cost.c ------------------------------------------------------ */

/* Seconds per weight: the trial's, or the mean of the known ones. */
double schedule_mean_rate(const cer_schedule *s);
/* Weight of the trial's remaining units. */
double schedule_weight_left(const cer_schedule *s, const schedule_trial *t);
double schedule_unit_weight(const cer_schedule *s, const schedule_trial *t);
/* Updates the sums of work; `counts` is false for trials without work. */
void schedule_account(cer_schedule *s, schedule_trial *t, bool counts);
/* Learns from a training unit of `weight` that took `seconds`. */
void schedule_learn(cer_schedule *s, schedule_worker *w, schedule_trial *t,
                    double weight, double seconds);
/* Work left per worker, in the unit of schedule_mean_rate. */
double schedule_mean_work(const cer_schedule *s);

/* --- schedule_queue.c ----------------------------------------------------- */

uint32_t schedule_n_queues(const cer_schedule *s);
/* Add a ready trial to its queue; remove it. */
void schedule_enqueue(cer_schedule *s, uint32_t slot);
void schedule_dequeue(cer_schedule *s, uint32_t slot);
/* Starts an empty wave where most of the waiting trials can join; called before
 * choosing, so that trials added together begin together. */
void schedule_wave_start(cer_schedule *s);
/* The trial did a training unit; the trial has no work now. Only the wave
 * changes; the trial must not be in a queue. */
void schedule_wave_step(cer_schedule *s, schedule_trial *t);
void schedule_wave_leave(cer_schedule *s, schedule_trial *t);
/* Chooses the next trial to start and its worker; false if none can start. */
bool schedule_choose(const cer_schedule *s, uint32_t *slot, uint32_t *worker);
/* Whether the worker would be given the trial that it runs, if that were at the
 * position of `after` and had to be chosen among the waiting ones. */
bool schedule_stays(const cer_schedule *s, const schedule_worker *w,
                    const schedule_trial *after);

#endif
