/* schedule_table.c -- trials and workers by number, memory for them, and a
 * trial's next shard. */
#include "rng.h"
#include "schedule_impl.h"

#include <string.h>

/* --- finding trials and workers ------------------------------------------- */

/* A number's position in the index, unless taken by an earlier number. */
static uint32_t
index_home(const cer_schedule *s, uint32_t number)
{
    return (number * UINT32_C(0x9e3779b1)) & (s->index_size - 1);
}

uint32_t
schedule_index_position(const cer_schedule *s, uint32_t number)
{
    uint32_t at = index_home(s, number);

    while (s->index[at] != NONE && s->trials[s->index[at]].number != number)
        at = (at + 1) & (s->index_size - 1);
    return at;
}

void
schedule_index_remove(cer_schedule *s, uint32_t hole)
{
    uint32_t mask = s->index_size - 1;

    s->index[hole] = NONE;
    for (uint32_t at = (hole + 1) & mask; s->index[at] != NONE;
         at = (at + 1) & mask) {
        uint32_t home = index_home(s, s->trials[s->index[at]].number);

        if (((at - home) & mask) < ((at - hole) & mask))
            continue; /* its probing starts after the hole */
        s->index[hole] = s->index[at];
        s->index[at] = NONE;
        hole = at;
    }
}

cer_status
schedule_find_trial(const cer_schedule *s, uint32_t number, uint32_t *slot,
                    cer_error *err)
{
    *slot = s->index[schedule_index_position(s, number)];
    if (*slot == NONE)
        return cer_fail(err, CER_INVALID, "there is no trial %u", number);
    return CER_OK;
}

cer_status
schedule_find_worker(const cer_schedule *s, uint32_t number,
                     schedule_worker **worker, cer_error *err)
{
    *worker = NULL;
    if (number >= s->n_workers || !s->workers[number].present)
        return cer_fail(err, CER_INVALID, "there is no worker %u", number);
    *worker = &s->workers[number];
    return CER_OK;
}

bool
schedule_grow(void *array_at, size_t count, size_t size)
{
    void **array = array_at;
    size_t bytes;
    void *larger;

    if (!cer_mul_size(count, size, &bytes))
        return false;
    larger = cer_realloc(*array, bytes);
    if (larger == NULL)
        return false;
    *array = larger;
    return true;
}

static bool
grow_index(cer_schedule *s, uint32_t capacity)
{
    uint32_t size = 16;
    uint32_t *index;

    while (size < 2 * capacity)
        size *= 2;
    index = cer_alloc(size * sizeof *index);
    if (index == NULL)
        return false;
    cer_free(s->index);
    s->index = index;
    s->index_size = size;
    memset(index, 0xff, size * sizeof *index); /* NONE */
    for (uint32_t i = 0; i < s->n_trials; i++) {
        if (!s->trials[i].forgotten)
            index[schedule_index_position(s, s->trials[i].number)] = i;
    }
    return true;
}

bool
schedule_reserve(cer_schedule *s, uint32_t wanted)
{
    uint32_t capacity = s->capacity;

    if (wanted <= capacity)
        return true;
    if (wanted > UINT32_MAX / 8)
        return false;
    if (capacity > 0)
        wanted = wanted > 2 * capacity ? wanted : 2 * capacity;
    if (!schedule_grow(&s->trials, wanted, sizeof *s->trials) ||
        !schedule_grow(&s->nodes, wanted, sizeof *s->nodes) ||
        !schedule_grow(&s->ages, wanted, sizeof *s->ages) ||
        !grow_index(s, wanted))
        return false;
    s->capacity = wanted;
    return true;
}

/* --- a trial's position --------------------------------------------------- */

int64_t
schedule_next_shard(const cer_schedule *s, const schedule_trial *t)
{
    if (t->step == s->shards)
        return CER_SHARD_VALIDATION;
    return cer_visit_shard(t->stream, t->epoch, t->step, s->shards, s->stagger);
}
