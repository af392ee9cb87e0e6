/* schedule_queue.c -- the units that may start, and the choice among them.
 *
 * Every ready trial is in exactly one of s->queues, heaps over s->nodes.
 *
 * SHARED. Queue 0 holds the trials of known rate by seconds left, queue 1 the
 * others by weight left: their order stays valid while the mean rate, which
 * multiplies the weights, changes. All are also in s->oldest.
 *
 * WAVE. One such pair of queues for each of three lanes (lane l uses pair l %
 * 3), one pair for trials whose validation is next, and one queue per shard for
 * trials that wait for the wave to reach it.
 *
 * EXCLUSIVE. One queue per shard, and one for validation, by work left over the
 * mean rate at the time when the trial was queued. */
#include "schedule_impl.h"

#include <math.h>

/* A trial becomes urgent this many units early. */
#define URGENT_UNITS 1.5
/* A worker stays with its trial if that is at most this many units shorter than
 * the longest: this halves the hops, for 1/1,000 of the makespan. */
#define STAY_UNITS 1.0
/* A rate from n units may be larger by this over the square root of n. */
#define RATE_CAUTION 0.2
/* An unknown rate may be the mean of the known ones plus UNKNOWN_SPREAD times
 * (the largest of them - the mean); and while only n are known, the mean times
 * 1 + (UNKNOWN_FEW / n)^2, at most UNKNOWN_MOST. */
#define UNKNOWN_SPREAD 1.5
#define UNKNOWN_FEW 30.0
#define UNKNOWN_MOST 3.0
/* Work added to that of users' trials: more than any other, even after it is
 * multiplied by a rate. */
#define USERS_WORK 1e12

enum { LANES = 3, EVAL_PAIR = LANES, FIRST_PARKED = 2 * (LANES + 1) };

uint32_t
schedule_n_queues(const cer_schedule *s)
{
    switch (s->mode) {
    case MODE_SHARED:
        return 2;
    case MODE_WAVE:
        return FIRST_PARKED + s->shards;
    case MODE_EXCLUSIVE:
        break;
    }
    return s->shards + 1;
}

static void
push(cer_schedule *s, uint32_t slot, uint32_t queue, double key)
{
    schedule_trial *t = &s->trials[slot];

    if (t->stream >= CER_STREAM_OF_USERS)
        key += USERS_WORK;
    cer_heap_push(&s->queues[queue], s->nodes, slot, key, t->number);
    t->queue = queue;
    if (s->mode == MODE_EXCLUSIVE)
        schedule_set_bit(s->filled, queue, true);
}

/* A rate from few units may be larger than it seems. Overestimating it makes
 * the trial run, which measures the rate; underestimating it could let the
 * trial wait until it has lost all its spare time. */
static double
caution(const schedule_trial *t)
{
    return t->known ? 1.0 + RATE_CAUTION / sqrt((double)t->timed) : 1.0;
}

/* --- pairs of queues: known rate, unknown rate ---------------------------- */

static void
push_pair(cer_schedule *s, uint32_t slot, uint32_t pair)
{
    bool known = s->trials[slot].known;

    /* t->work is in seconds if the rate is known, else in weights. */
    push(s, slot, 2 * pair + (known ? 0 : 1),
         s->trials[slot].work * caution(&s->trials[slot]));
}

/* The trial of a pair with the most work left, at `rate` seconds per weight for
 * unknown rates; NONE if the pair is empty. */
static uint32_t
longest_of_pair(const cer_schedule *s, uint32_t pair, double rate, double *work)
{
    uint32_t known = s->queues[2 * pair], other = s->queues[2 * pair + 1];
    double seconds, weights;

    if (known == NONE && other == NONE)
        return NONE;
    seconds = known == NONE ? -1.0 : s->nodes[known].key;
    weights = other == NONE ? -1.0 : s->nodes[other].key * rate;
    *work = fmax(seconds, weights);
    if (seconds == weights)
        return s->nodes[known].tie < s->nodes[other].tie ? known : other;
    return seconds > weights ? known : other;
}

/* --- the wave ------------------------------------------------------------- */

static uint32_t
lane_pair(uint64_t lane)
{
    return (uint32_t)(lane % LANES);
}

static uint32_t
wave_shard(const cer_schedule *s, const schedule_trial *t)
{
    return t->step % s->shards;
}

static void
wave_join(cer_schedule *s, uint32_t slot, uint64_t lane)
{
    schedule_trial *t = &s->trials[slot];

    t->in_wave = true;
    t->lane = lane;
    s->wave.members++;
    s->wave.at[lane % LANES]++;
    push_pair(s, slot, t->step == s->shards ? EVAL_PAIR : lane_pair(lane));
}

/* Lets in the trials that waited for the shard of `lane`. */
static void
wave_open(cer_schedule *s, uint64_t lane)
{
    uint32_t shard = (uint32_t)(lane % s->shards);
    uint32_t queue = FIRST_PARKED + shard;

    while (s->queues[queue] != NONE) {
        uint32_t slot = s->queues[queue];

        schedule_dequeue(s, slot);
        wave_join(s, slot, lane);
    }
}

void
schedule_wave_start(cer_schedule *s)
{
    uint32_t best = 0, most = 0;

    if (s->wave.members > 0 || s->wave.n_parked == 0)
        return;

    for (uint32_t shard = 0; shard < s->shards; shard++) {
        uint32_t next = (shard + 1) % s->shards;
        uint32_t n = s->wave.parked[shard] + s->wave.parked[next];

        if (s->wave.parked[shard] > 0 && n > most) {
            most = n;
            best = shard;
        }
    }
    s->wave.front = best;
    wave_open(s, s->wave.front);
    wave_open(s, s->wave.front + 1);
}

/* Advances the front past lanes without members. */
static void
wave_advance(cer_schedule *s)
{
    schedule_wave *wave = &s->wave;

    while (wave->members > 0 && wave->at[wave->front % LANES] == 0) {
        wave->front++;
        wave_open(s, wave->front + 1);
    }
}

void
schedule_wave_step(cer_schedule *s, schedule_trial *t)
{
    if (!t->in_wave)
        return;
    s->wave.at[t->lane % LANES]--;
    t->lane++;
    s->wave.at[t->lane % LANES]++;
    wave_advance(s);
}

void
schedule_wave_leave(cer_schedule *s, schedule_trial *t)
{
    if (!t->in_wave)
        return;
    t->in_wave = false;
    s->wave.members--;
    s->wave.at[t->lane % LANES]--;
    wave_advance(s);
}

static void
wave_enqueue(cer_schedule *s, uint32_t slot)
{
    schedule_trial *t = &s->trials[slot];
    uint32_t shard = wave_shard(s, t);
    uint64_t front = s->wave.front;

    if (t->in_wave) {
        push_pair(s, slot,
                  t->step == s->shards ? EVAL_PAIR : lane_pair(t->lane));
    } else if (s->wave.members > 0 && shard == front % s->shards) {
        wave_join(s, slot, front);
    } else if (s->wave.members > 0 && shard == (front + 1) % s->shards) {
        wave_join(s, slot, front + 1);
    } else {
        s->wave.parked[shard]++;
        s->wave.n_parked++;
        push(s, slot, FIRST_PARKED + shard, 0.0);
    }
}

static uint32_t
wave_choose(const cer_schedule *s)
{
    uint32_t pairs[] = {EVAL_PAIR, lane_pair(s->wave.front),
                        lane_pair(s->wave.front + 1)};
    uint32_t slot = NONE;
    double work;

    if (s->wave.members == 0)
        return NONE;
    for (int i = 0; i < LANES && slot == NONE; i++)
        slot = longest_of_pair(s, pairs[i], schedule_mean_rate(s), &work);
    return slot;
}

/* --- adding and removing -------------------------------------------------- */

static double
exclusive_key(const cer_schedule *s, const schedule_trial *t)
{
    double rate = t->known ? t->rate / schedule_mean_rate(s) : 1.0;

    return schedule_weight_left(s, t) * rate * caution(t);
}

static uint32_t
exclusive_queue(const cer_schedule *s, const schedule_trial *t)
{
    int64_t shard = schedule_next_shard(s, t);

    return shard == CER_SHARD_VALIDATION ? s->shards : (uint32_t)shard;
}

static void
exclusive_enqueue(cer_schedule *s, uint32_t slot)
{
    schedule_trial *t = &s->trials[slot];

    push(s, slot, exclusive_queue(s, t), exclusive_key(s, t));
}

void
schedule_enqueue(cer_schedule *s, uint32_t slot)
{
    switch (s->mode) {
    case MODE_SHARED:
        push_pair(s, slot, 0);
        cer_heap_push(&s->oldest, s->ages, slot, 0.0, s->trials[slot].number);
        break;
    case MODE_WAVE:
        wave_enqueue(s, slot);
        break;
    case MODE_EXCLUSIVE:
        exclusive_enqueue(s, slot);
        break;
    }
}

void
schedule_dequeue(cer_schedule *s, uint32_t slot)
{
    uint32_t queue = s->trials[slot].queue;

    cer_heap_remove(&s->queues[queue], s->nodes, slot);
    s->trials[slot].queue = NONE;
    if (s->mode == MODE_SHARED)
        cer_heap_remove(&s->oldest, s->ages, slot);
    if (s->mode == MODE_WAVE && queue >= FIRST_PARKED) {
        s->wave.parked[queue - FIRST_PARKED]--;
        s->wave.n_parked--;
    }
    if (s->mode == MODE_EXCLUSIVE && s->queues[queue] == NONE)
        schedule_set_bit(s->filled, queue, false);
}

/* --- the choice ----------------------------------------------------------- */

/* The highest likely value of an unknown rate. A long trial discovered late
 * delays the whole search, so each of the last trials runs early for a unit or
 * two, until its rate is known. */
static double
cautious_rate(const cer_schedule *s)
{
    double mean = schedule_mean_rate(s);
    double few;

    if (s->n_rates == 0)
        return mean;
    few = UNKNOWN_FEW / (double)s->n_rates;
    few = fmin(1.0 + few * few, UNKNOWN_MOST);
    return fmax(mean + UNKNOWN_SPREAD * (s->rate_max - mean), mean * few);
}

static bool
is_idle(const schedule_worker *w)
{
    return w->present && w->trial == NONE;
}

/* The trial that an idle worker ran last and could continue; NONE if other
 * workers run it or it has no work. */
static uint32_t
live_on_idle(const cer_schedule *s)
{
    for (uint32_t i = s->lowest_idle; i < s->n_workers; i++) {
        const schedule_worker *w = &s->workers[i];

        if (is_idle(w) && w->n_live > 0 &&
            s->trials[w->live[0]].live_worker == i &&
            s->trials[w->live[0]].queue != NONE)
            return w->live[0];
    }
    return NONE;
}

/* Urgent trials first, longest first; else the oldest. A trial becomes urgent
 * shortly before its work left equals the mean work left per worker: from then
 * on it needs a worker all the time, and may have to wait for one. */
static uint32_t
shared_choose(const cer_schedule *s)
{
    double work = 0.0, unit = s->prefix[s->shards] / (double)s->shards;
    uint32_t slot = longest_of_pair(s, 0, cautious_rate(s), &work);
    uint32_t stays;

    if (slot == NONE)
        return slot;
    unit *=
        s->trials[slot].known ? s->trials[slot].rate : schedule_mean_rate(s);
    if (work + URGENT_UNITS * unit < schedule_mean_work(s))
        return s->oldest;
    stays = live_on_idle(s);
    if (stays != NONE && s->trials[stays].known &&
        s->nodes[stays].key + STAY_UNITS * unit >= work)
        return stays;
    return slot;
}

/* The first trial that the worker may run, if it comes before `best`. */
static uint32_t
first_held(const cer_schedule *s, const schedule_worker *w, uint32_t best)
{
    for (size_t i = 0; i < s->held_words; i++) {
        for (uint64_t bits = w->held[i] & s->filled[i]; bits != 0;
             bits &= bits - 1) {
            uint32_t queue =
                (uint32_t)(64 * i) + (uint32_t)__builtin_ctzll(bits);
            uint32_t slot = s->queues[queue];

            if (best == NONE ||
                cer_heap_before(&s->nodes[slot], &s->nodes[best]))
                best = slot;
        }
    }
    return best;
}

static uint32_t
exclusive_choose(const cer_schedule *s)
{
    uint32_t best = NONE;

    for (uint32_t w = s->lowest_idle; w < s->n_workers; w++) {
        if (is_idle(&s->workers[w]))
            best = first_held(s, &s->workers[w], best);
    }
    return best;
}

/* Of the idle workers that may run the trial: the one that has the state live,
 * else one that has the shard warm, else the lowest number. */
static uint32_t
choose_worker(const cer_schedule *s, const schedule_trial *t)
{
    int64_t shard = schedule_next_shard(s, t);
    uint32_t found = NONE;
    bool warm = false;

    for (uint32_t i = s->lowest_idle; i < s->n_workers; i++) {
        const schedule_worker *w = &s->workers[i];

        if (!is_idle(w) ||
            (s->mode == MODE_EXCLUSIVE && !schedule_bit(w->held, t->queue)))
            continue;
        if (i == t->live_worker)
            return i;
        if (found == NONE || (!warm && w->shard == shard)) {
            found = i;
            warm = w->shard == shard;
        }
    }
    return found;
}

bool
schedule_choose(const cer_schedule *s, uint32_t *slot, uint32_t *worker)
{
    if (s->n_idle == 0)
        return false;
    switch (s->mode) {
    case MODE_SHARED:
        *slot = shared_choose(s);
        break;
    case MODE_WAVE:
        *slot = wave_choose(s);
        break;
    case MODE_EXCLUSIVE:
        *slot = exclusive_choose(s);
        break;
    }
    if (*slot == NONE)
        return false;
    *worker = choose_worker(s, &s->trials[*slot]);
    return true;
}

/* --- the choice to stay --------------------------------------------------- */

/* As shared_choose, with the trial among the waiting ones. */
static bool
shared_stays(const cer_schedule *s, const schedule_trial *after)
{
    double cautious = cautious_rate(s), work = 0.0;
    double unit = s->prefix[s->shards] / (double)s->shards;
    double own = schedule_weight_left(s, after) * caution(after) *
                 (after->known ? after->rate : cautious);

    if (longest_of_pair(s, 0, cautious, &work) == NONE)
        return true;
    unit *= after->known ? after->rate : schedule_mean_rate(s);
    if (fmax(own, work) + URGENT_UNITS * unit < schedule_mean_work(s))
        return after->number < s->trials[s->oldest].number;
    return own + (after->known ? STAY_UNITS * unit : 0.0) >= work;
}

static bool
exclusive_stays(const cer_schedule *s, const schedule_worker *w,
                const schedule_trial *after)
{
    uint32_t first = first_held(s, w, NONE);

    return schedule_bit(w->held, exclusive_queue(s, after)) &&
           (first == NONE || exclusive_key(s, after) >= s->nodes[first].key);
}

bool
schedule_stays(const cer_schedule *s, const schedule_worker *w,
               const schedule_trial *after)
{
    switch (s->mode) {
    case MODE_SHARED:
        return shared_stays(s, after);
    case MODE_WAVE: /* the trial's next shard may not be open yet */
        return false;
    case MODE_EXCLUSIVE:
        break;
    }
    return exclusive_stays(s, w, after);
}
