/* schedule_worker.c -- workers: the idle ones, and each one's live models and
 * shards. */
#include "schedule_impl.h"

#include <string.h>

/* --- live models ---------------------------------------------------------- */

static uint32_t
live_position(const schedule_worker *w, uint32_t slot)
{
    uint32_t i = 0;

    while (i < w->n_live && w->live[i] != slot)
        i++;
    return i;
}

static void
forget_live_at(cer_schedule *s, uint32_t worker, uint32_t position)
{
    schedule_worker *w = &s->workers[worker];
    schedule_trial *t = &s->trials[w->live[position]];

    w->n_live--;
    memmove(&w->live[position], &w->live[position + 1],
            (w->n_live - position) * sizeof *w->live);
    if (t->live_worker == worker)
        t->live_worker = NONE;
}

void
schedule_forget_live(cer_schedule *s, uint32_t worker, uint32_t slot)
{
    uint32_t position = live_position(&s->workers[worker], slot);

    if (position < s->workers[worker].n_live)
        forget_live_at(s, worker, position);
}

void
schedule_touch_live(cer_schedule *s, uint32_t worker, uint32_t slot)
{
    schedule_worker *w = &s->workers[worker];
    uint32_t position = live_position(w, slot);

    if (position == w->n_live) {
        if (w->n_live == s->live_models)
            forget_live_at(s, worker, w->n_live - 1);
        position = w->n_live++;
    }
    memmove(&w->live[1], &w->live[0], position * sizeof *w->live);
    w->live[0] = slot;
    s->trials[slot].live_worker = worker;
}

void
schedule_forget_everywhere(cer_schedule *s, uint32_t slot)
{
    for (uint32_t i = 0; i < s->n_workers; i++)
        schedule_forget_live(s, i, slot);
}

cer_status
cer_schedule_forget_live(cer_schedule *s, uint32_t worker, uint32_t trial,
                         cer_error *err)
{
    schedule_worker *w;
    uint32_t slot;
    cer_status status;

    if ((status = schedule_find_worker(s, worker, &w, err)) != CER_OK ||
        (status = schedule_find_trial(s, trial, &slot, err)) != CER_OK)
        return status;
    schedule_forget_live(s, worker, slot);
    return CER_OK;
}

cer_status
cer_schedule_live(const cer_schedule *s, uint32_t worker, uint32_t *trials,
                  size_t room, size_t *n, cer_error *err)
{
    schedule_worker *w;
    cer_status status = schedule_find_worker(s, worker, &w, err);

    if (status != CER_OK)
        return status;
    for (uint32_t i = 0; i < w->n_live && i < room; i++)
        trials[i] = s->trials[w->live[i]].number;
    *n = w->n_live;
    return CER_OK;
}

/* --- placement ------------------------------------------------------------ */

static void
set_holder(cer_schedule *s, schedule_worker *w, uint32_t shard, bool holds)
{
    if (schedule_bit(w->held, shard) == holds)
        return;
    schedule_set_bit(w->held, shard, holds);
    if (holds && s->n_holders[shard]++ == 0)
        s->n_orphans--;
    if (!holds && --s->n_holders[shard] == 0)
        s->n_orphans++;
    if (shard < s->shards)
        w->n_held += holds ? 1 : UINT32_MAX; /* plus or minus one */
}

static cer_status
check_placement(const cer_schedule *s, int64_t shard, const uint32_t *workers,
                size_t n, cer_error *err)
{
    schedule_worker *w;

    if (s->mode != MODE_EXCLUSIVE)
        return cer_fail(err, CER_INVALID,
                        "shards have holders only with exclusive=True");
    if (shard < CER_SHARD_VALIDATION || shard >= (int64_t)s->shards)
        return cer_fail(err, CER_INVALID,
                        "there is no shard %lld: must be from 0 to %u, or -1 "
                        "for the validation set",
                        (long long)shard, s->shards - 1);
    for (size_t i = 0; i < n; i++) {
        cer_status status = schedule_find_worker(s, workers[i], &w, err);

        if (status != CER_OK)
            return status;
    }
    return CER_OK;
}

cer_status
cer_schedule_set_holders(cer_schedule *s, int64_t shard,
                         const uint32_t *workers, size_t n, cer_error *err)
{
    cer_status status = check_placement(s, shard, workers, n, err);
    uint32_t bit = shard < 0 ? s->shards : (uint32_t)shard;

    if (status != CER_OK)
        return status;
    if (shard < 0)
        s->eval_placed = true;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        if (s->workers[i].present)
            set_holder(s, &s->workers[i], bit, false);
    }
    for (size_t i = 0; i < n; i++)
        set_holder(s, &s->workers[workers[i]], bit, true);
    return CER_OK;
}

void
schedule_adopt_orphan(cer_schedule *s, cer_command *command)
{
    uint32_t shard = 0, worker = NONE;

    while (s->n_holders[shard] > 0)
        shard++;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        if (s->workers[i].present &&
            (worker == NONE ||
             s->workers[i].n_held < s->workers[worker].n_held))
            worker = i;
    }
    set_holder(s, &s->workers[worker], shard, true);
    command->kind = CER_COMMAND_LOAD;
    command->worker = worker;
    command->unit = (cer_unit){
        .shard = shard == s->shards ? CER_SHARD_VALIDATION : (int64_t)shard};
}

/* --- workers -------------------------------------------------------------- */

void
schedule_become_idle(cer_schedule *s, uint32_t worker)
{
    s->workers[worker].trial = NONE;
    s->n_idle++;
    if (worker < s->lowest_idle)
        s->lowest_idle = worker;
}

void
schedule_leave_idle(cer_schedule *s)
{
    s->n_idle--;
    while (s->lowest_idle < s->n_workers &&
           (!s->workers[s->lowest_idle].present ||
            s->workers[s->lowest_idle].trial != NONE))
        s->lowest_idle++;
}

cer_status
cer_schedule_add_worker(cer_schedule *s, uint32_t *worker, cer_error *err)
{
    schedule_worker w = {.present = true,
                         .trial = NONE,
                         .shard = CER_NO_SHARD,
                         .factor = 1.0,
                         .timed = 1};
    cer_status status = CER_OK;

    w.live = cer_alloc(s->live_models * sizeof *w.live);
    if (s->held_words > 0)
        w.held = cer_calloc(s->held_words, sizeof *w.held);
    if (w.live == NULL || (s->held_words > 0 && w.held == NULL) ||
        s->n_workers == INT32_MAX ||
        !schedule_grow(&s->workers, (size_t)s->n_workers + 1, sizeof w)) {
        status = cer_fail(err, CER_NOMEM, "out of memory for worker %u",
                          s->n_workers);
        goto done;
    }
    *worker = s->n_workers++;
    s->workers[*worker] = w;
    s->n_present++;
    schedule_become_idle(s, *worker);
    if (s->mode == MODE_EXCLUSIVE && !s->eval_placed)
        set_holder(s, &s->workers[*worker], s->shards, true);
    w.live = NULL;
    w.held = NULL;

done:
    cer_free(w.live);
    cer_free(w.held);
    return status;
}

uint32_t
cer_schedule_workers(const cer_schedule *s)
{
    return s->n_workers;
}

bool
cer_schedule_idle(const cer_schedule *s, uint32_t worker)
{
    return worker < s->n_workers && s->workers[worker].present &&
           s->workers[worker].trial == NONE;
}

void
schedule_remove(cer_schedule *s, uint32_t worker)
{
    schedule_worker *w = &s->workers[worker];

    while (w->n_live > 0)
        forget_live_at(s, worker, w->n_live - 1);
    for (uint32_t i = 0; i <= s->shards && s->mode == MODE_EXCLUSIVE; i++)
        set_holder(s, w, i, false);
    w->present = false;
    s->n_present--;
    schedule_leave_idle(s); /* no longer idle */
}
