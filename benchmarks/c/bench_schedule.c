/* bench_schedule.c -- events per second of the scheduler, in C alone.
 *
 *     bench_schedule TRIALS WORKERS EPOCHS SHARDS MODE
 *
 * MODE is shared, two-open or exclusive. An event is the end of a unit and the
 * resulting commands. Prints events, seconds and bytes per trial. */
#include "rng.h"
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double
seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Units of about 1 second, with costs varying twofold; workers finish in turn.
 */
static unsigned long
run(cer_schedule *s, uint32_t workers, uint32_t *queue)
{
    unsigned long events = 0, first = 0, last = 0;
    cer_command command;
    double now = 0.0;

    for (;;) {
        while (cer_schedule_next(s, now, &command)) {
            if (command.kind == CER_COMMAND_RUN)
                queue[last++ % workers] = command.worker;
        }
        if (first == last)
            return events;
        now += 1.0 / workers;
        (void)cer_schedule_unit_done(s, queue[first++ % workers], now, NULL,
                                     NULL);
        events++;
    }
}

int
main(int argc, char **argv)
{
    cer_schedule_options options = {.stagger = true, .live_models = 8};
    uint32_t trials, workers, epochs, worker, *queue;
    cer_schedule *s = NULL;
    unsigned long events;
    double start;
    size_t empty;

    if (argc != 6) {
        fprintf(stderr,
                "usage: bench_schedule TRIALS WORKERS EPOCHS SHARDS MODE\n");
        return 2;
    }
    trials = (uint32_t)atoi(argv[1]);
    workers = (uint32_t)atoi(argv[2]);
    epochs = (uint32_t)atoi(argv[3]);
    options.shards = (uint32_t)atoi(argv[4]);
    options.exclusive = strcmp(argv[5], "exclusive") == 0;
    options.stagger = strcmp(argv[5], "two-open") != 0;
    options.capacity = 1;
    queue = calloc(workers, sizeof *queue);
    if (queue == NULL || cer_schedule_new(&options, &s, NULL) != CER_OK)
        return 1;
    empty = cer_schedule_bytes(s);
    for (uint32_t i = 0; i < workers; i++)
        (void)cer_schedule_add_worker(s, &worker, NULL);
    for (uint32_t i = 0; i < trials; i++)
        (void)cer_schedule_add_trial(s, i, i, epochs, 0, 0, NULL);
    start = seconds();
    events = run(s, workers, queue);
    printf("%lu %.6f %.1f\n", events, seconds() - start,
           (double)(cer_schedule_bytes(s) - empty) / trials);
    cer_schedule_free(s);
    free(queue);
    return 0;
}
