/* The scheduler out of memory: constructors fail cleanly, existing objects stay
 * usable, and steps never allocate. */
#include "check.h"
#include "failing_alloc.h"
#include "schedule.h"

enum { TRIALS = 40, WORKERS = 3 };

static const cer_schedule_options modes[] = {
    {.shards = 5, .stagger = true, .live_models = 2, .eval_cost = 1.0},
    {.shards = 5, .stagger = false, .live_models = 2},
    {.shards = 5, .stagger = true, .exclusive = true, .live_models = 2},
};
enum { N_MODES = sizeof modes / sizeof modes[0] };

static void
test_new(void)
{
    for (int mode = 0; mode < N_MODES; mode++) {
        for (size_t nth = 1;; nth++) {
            cer_schedule *s = NULL;
            cer_error err;
            cer_status status;

            failing_alloc_arm(nth);
            status = cer_schedule_new(&modes[mode], &s, &err);
            if (!failing_alloc_triggered()) {
                CHECK_EQ_INT(status, CER_OK);
                cer_schedule_free(s);
                CHECK_EQ_INT(failing_alloc_live(), 0);
                break;
            }
            CHECK_EQ_INT(status, CER_NOMEM);
            CHECK(s == NULL);
            CHECK_EQ_INT(failing_alloc_live(), 0);
        }
    }
    failing_alloc_arm(0);
}

/* Adds with each allocation failing in turn, retrying until it succeeds. */
static void
add_stubbornly(cer_schedule *s)
{
    for (uint32_t n = 0; n < TRIALS + WORKERS; n++) {
        cer_status status = CER_NOMEM;

        for (size_t nth = 1; status != CER_OK; nth++) {
            uint32_t worker;

            failing_alloc_arm(nth);
            status = n < TRIALS ? cer_schedule_add_trial(s, n, n, 2, 0, 0, NULL)
                                : cer_schedule_add_worker(s, &worker, NULL);
            CHECK(status == CER_OK || failing_alloc_triggered());
        }
    }
    failing_alloc_arm(0);
}

static void
test_adding_and_steps(void)
{
    for (int mode = 0; mode < N_MODES; mode++) {
        cer_schedule *s = NULL;
        cer_command c;
        uint32_t running[WORKERS], n = 0, units = 0;
        uint32_t steps = modes[mode].shards + (modes[mode].eval_cost > 0.0);

        CHECK_EQ_INT(cer_schedule_new(&modes[mode], &s, NULL), CER_OK);
        add_stubbornly(s);
        failing_alloc_arm(1); /* no allocations from here on */
        do {
            while (cer_schedule_next(s, units, &c)) {
                if (c.kind == CER_COMMAND_RUN)
                    running[n++] = c.worker;
            }
            while (n > 0) {
                CHECK_EQ_INT(cer_schedule_unit_done(s, running[--n],
                                                    units + 1.0, NULL, NULL),
                             CER_OK);
                units++;
            }
        } while (!cer_schedule_finished(s));
        CHECK(!failing_alloc_triggered());
        failing_alloc_arm(0);
        CHECK_EQ_INT(units, TRIALS * 2 * steps);
        cer_schedule_free(s);
        CHECK_EQ_INT(failing_alloc_live(), 0);
    }
}

CHECK_MAIN(test_new, test_adding_and_steps)
