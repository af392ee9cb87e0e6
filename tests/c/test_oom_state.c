/* Every allocation of states, slots, metrics and beat pages fails in turn. */
#include "beat.h"
#include "check.h"
#include "failing_alloc.h"
#include "runner.h"
#include "scratch.h"
#include "slots.h"
#include "state_files.h"

typedef cer_status (*attempt)(cer_error *err);

/* Runs `action` with its 1st, 2nd, ... allocation failing until no allocation
 * fails. Every failure is CER_NOMEM with a message and leaks nothing. */
static void
fail_every_allocation(attempt action, int at_least)
{
    int n = 0;

    for (;;) {
        size_t live = failing_alloc_live();
        int descriptors = scratch_descriptors();
        cer_error err = {0};
        cer_status status;

        failing_alloc_arm((size_t)++n);
        status = action(&err);
        CHECK_EQ_INT(failing_alloc_live(), live);
        CHECK_EQ_INT(scratch_descriptors(), descriptors);
        if (!failing_alloc_triggered()) {
            CHECK_EQ_INT(status, CER_OK);
            break;
        }
        CHECK_EQ_INT(status, CER_NOMEM);
        CHECK(strncmp(err.message, "out of memory", 13) == 0);
    }
    failing_alloc_arm(0);
    CHECK(n > at_least);
}

static uint8_t bytes[1024];
static size_t nbytes;

static cer_status
write_one(cer_error *err)
{
    return write_state(bytes, &nbytes, err);
}

static cer_status
open_one(cer_error *err)
{
    cer_state state;
    cer_status status = cer_state_open(bytes, nbytes, "x", &state, err);

    if (status == CER_OK)
        cer_state_close(&state);
    return status;
}

static void
writing_and_reading_a_state(void)
{
    fail_every_allocation(write_one, 7);
    CHECK_EQ_INT(write_one(NULL), CER_OK);
    fail_every_allocation(open_one, 5);
}

static cer_status
use_slots(cer_error *err)
{
    cer_slots *slots;
    cer_slots_damage damage;
    cer_slots_view view;
    cer_hash128 hash;
    uint8_t *to;
    cer_status status = cer_slots_open(scratch("oom"), true, &slots, err);

    if (status != CER_OK)
        return status;
    status = cer_slots_begin(slots, 0, 100, &to, err);
    if (status == CER_OK)
        status = cer_slots_commit(slots, 1, &hash, err);
    if (status == CER_OK)
        status = cer_slots_look(slots, NULL, &view, err);
    if (status == CER_OK)
        cer_slots_map_release(view.map);
    if (status == CER_OK)
        status = cer_slots_check(scratch("oom"), &damage, err);
    cer_slots_close(slots);
    return status;
}

static void
using_slots(void)
{
    (void)scratch("");
    fail_every_allocation(use_slots, 9);
}

static cer_status
add_metrics(cer_error *err)
{
    cer_metrics metrics = {0};
    cer_status status = CER_OK;
    char name[2] = "a";

    for (; status == CER_OK && name[0] < 'n'; name[0]++)
        status = cer_metrics_add(&metrics, name, 1, 1, 1, err);
    cer_metrics_clear(&metrics);
    return status;
}

static cer_status
open_page(cer_error *err)
{
    cer_beat *beat;
    cer_status status = cer_beat_open(-1, &beat, err);

    cer_beat_close(beat);
    return status;
}

static void
running_a_unit(void)
{
    fail_every_allocation(add_metrics, 13);
    fail_every_allocation(open_page, 1);
}

CHECK_MAIN(writing_and_reading_a_state, using_slots, running_a_unit)
