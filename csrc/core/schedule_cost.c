/* schedule_cost.c -- the time of units and the work left.
 *
 * A unit of weight w of trial t takes about w * rate(t) * factor(worker). Both
 * are moving averages. The first units of a trial (it builds the model) and of
 * a worker (it starts frameworks, reads cold files) do not count. An unknown
 * rate is taken as the mean of the known ones; therefore the work of trials of
 * unknown rate is summed in weights and multiplied on request. */
#include "schedule_impl.h"

/* The newest of n timed units counts for 1/n, so a rate settles quickly, but
 * for at least this, so it follows changes. */
#define LEAST_GAIN (1.0 / 64.0)

static double
gain(uint32_t *n)
{
    double share = 1.0 / (double)++*n;

    if (share < LEAST_GAIN)
        --*n; /* counting stops here */
    return share > LEAST_GAIN ? share : LEAST_GAIN;
}

double
schedule_mean_rate(const cer_schedule *s)
{
    return s->n_rates == 0 ? 1.0 : s->rate_sum / (double)s->n_rates;
}

double
schedule_unit_weight(const cer_schedule *s, const schedule_trial *t)
{
    int64_t shard = schedule_next_shard(s, t);

    return shard == CER_SHARD_VALIDATION
               ? s->eval_cost
               : s->prefix[shard + 1] - s->prefix[shard];
}

double
schedule_weight_left(const cer_schedule *s, const schedule_trial *t)
{
    double epoch = s->prefix[s->shards] + s->eval_cost;
    double left = s->eval_cost;

    if (t->epoch >= t->epochs)
        return 0.0;
    if (t->step < s->shards) {
        /* From the next shard around to the one where the epoch began. */
        uint32_t next = (uint32_t)schedule_next_shard(s, t);

        left += s->prefix[next + s->shards - t->step] - s->prefix[next];
    }
    return left + (double)(t->epochs - t->epoch - 1) * epoch;
}

void
schedule_account(cer_schedule *s, schedule_trial *t, bool counts)
{
    double *sum = t->work_in_seconds ? &s->work_seconds : &s->work_weights;

    *sum -= t->work;
    t->work = counts ? schedule_weight_left(s, t) : 0.0;
    if (t->known)
        t->work *= t->rate;
    t->work_in_seconds = t->known;
    sum = t->known ? &s->work_seconds : &s->work_weights;
    *sum += t->work;
    /* Clears rounding errors when nothing is left to sum. */
    if (s->n_active == 0)
        s->work_seconds = s->work_weights = 0.0;
}

void
schedule_learn(cer_schedule *s, schedule_worker *w, schedule_trial *t,
               double weight, double seconds)
{
    bool counts = w->warm && t->warm && weight > 0.0 && seconds > 0.0;
    double rate = seconds / weight;

    w->warm = t->warm = true;
    if (!counts)
        return;
    if (!t->known) {
        t->known = true;
        t->rate = rate / w->factor;
        t->timed = 1;
        s->rate_sum += t->rate;
        s->n_rates++;
    } else {
        double change = gain(&t->timed) * (rate / w->factor - t->rate);

        w->factor += gain(&w->timed) * (rate / t->rate - w->factor);
        t->rate += change;
        s->rate_sum += change;
    }
    if (t->rate > s->rate_max)
        s->rate_max = t->rate;
}

double
schedule_mean_work(const cer_schedule *s)
{
    double work = s->work_seconds + schedule_mean_rate(s) * s->work_weights;

    return s->n_present == 0 ? work : work / (double)s->n_present;
}

double
cer_schedule_remaining(const cer_schedule *s, bool *seconds)
{
    double work = s->work_seconds + schedule_mean_rate(s) * s->work_weights;

    *seconds = s->n_rates != 0;
    return work > 0.0 ? work : 0.0;
}
