/* beat.h -- the page that a worker shares with its coordinator: a heartbeat,
 * progress counts and the cancel flag.
 *
 * A dedicated thread beats, which shows that the process is alive during a long
 * call; the epoch runner counts batches, which shows progress. Words are read
 * without locks and written by one side at a time: the coordinator sets the
 * flag, clears flag and clock before it gives the worker a task, and says which
 * answer it has heard. The page
 * is anonymous memory; its descriptor is inherited.
 *
 * The same thread ends the worker when the coordinator has gone, whatever the
 * worker's other threads do and whatever process holds a copy of its socket.
 *
 * The thread does not survive a fork. In the child the page can still be read,
 * stopping does nothing, and starting is an error. */
#ifndef CER_BEAT_H
#define CER_BEAT_H

#include <stdatomic.h>

#include "base.h"

#define CER_BEAT_BYTES 4096

/* The page itself; one cache line per writer. */
typedef struct cer_beat_page {
    char magic[8]; /* "CERBEAT1" */
    uint64_t unused[7];
    _Atomic uint64_t beats; /* the beating thread */
    uint64_t unused_beats[7];
    _Atomic uint64_t batches, rows; /* the epoch runner, over all tasks */
    _Atomic uint64_t task_began;    /* ns of CLOCK_MONOTONIC; 0: no task */
    uint64_t unused_rows[5];
    _Atomic uint32_t cancel; /* the coordinator */
    uint32_t unused_cancel;
    _Atomic uint64_t heard; /* which answer it has heard last; it may be any
                               number on which both sides agree */
} cer_beat_page;

typedef struct cer_beat cer_beat;

/* Opens the page of a descriptor, which the caller keeps, or makes a page if fd
 * is -1. Errors: CER_INVALID (not such a page), CER_IO, CER_NOMEM. */
cer_status cer_beat_open(int fd, cer_beat **out, cer_error *err);

/* Stops beating and unmaps; closes a descriptor made by open. */
void cer_beat_close(cer_beat *beat); /* NULL allowed */

cer_beat_page *cer_beat_page_of(cer_beat *beat);
int cer_beat_fd(const cer_beat *beat);

/* Starts a thread that beats at once and then every interval_ms until stopped;
 * a second start changes the interval. Start and stop must not overlap.
 *
 * `peer` is the worker's end of the socket to its coordinator, or -1 to watch
 * nothing. When the other end is closed or the parent process has gone, this
 * process is killed, with its process group if it leads one: children of trials
 * die too. A stopped process is continued first (on Linux; elsewhere it dies
 * when it is continued).
 *
 * Errors: CER_INVALID (interval 0; forked), CER_IO. */
cer_status cer_beat_start(cer_beat *beat, uint32_t interval_ms, int peer,
                          cer_error *err);
void cer_beat_stop(cer_beat *beat); /* waits for the thread's end */

/* --- the clock of a task ------------------------------------------------- */

/* Starts the clock of a task; the first `grace` seconds do not count. A second
 * call restarts it. */
void cer_beat_begin_task(cer_beat *beat, double grace);
void cer_beat_end_task(cer_beat *beat);
/* Makes the clock of a running task show `seconds` less, or more if negative:
 * time that does not count, in the middle of the task. */
void cer_beat_postpone_task(cer_beat *beat, double seconds);

/* Gets the time the task has taken, negative during its grace; false if no task
 * runs. Time while the machine is suspended does not count. */
bool cer_beat_task_seconds(const cer_beat *beat, double *seconds);

#endif
