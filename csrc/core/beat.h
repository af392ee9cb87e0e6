/* beat.h -- the page that a worker shares with its coordinator: a sign of life,
 * counts of what has been done, and the flag that cancels.
 *
 * A thread of its own beats, so that the process is known to live while it is
 * inside a long call; the epoch runner counts batches, which says whether it
 * gets on. Words are read without locks, and written by one side at a time: the
 * coordinator sets the flag, and clears flag and clock before it gives the
 * worker a task. The page is memory without a name: its descriptor is
 * inherited.
 *
 * The same thread ends the worker when the coordinator is gone, whatever the
 * worker's other threads are doing and whoever holds a copy of its socket.
 *
 * The thread does not survive a fork. In the child the page can still be read,
 * stopping does nothing, and starting is an error. */
#ifndef CER_BEAT_H
#define CER_BEAT_H

#include <stdatomic.h>

#include "base.h"

#define CER_BEAT_BYTES 4096

/* The page itself; a cache line for each writer. */
typedef struct cer_beat_page {
    char magic[8]; /* "CERBEAT1" */
    uint64_t unused[7];
    _Atomic uint64_t beats; /* the beating thread */
    uint64_t unused_beats[7];
    _Atomic uint64_t batches, rows; /* the epoch runner, since the page began */
    _Atomic uint64_t task_began;    /* ns of CLOCK_MONOTONIC; 0: no task */
    uint64_t unused_rows[5];
    _Atomic uint32_t cancel; /* the coordinator */
} cer_beat_page;

typedef struct cer_beat cer_beat;

/* Opens the page of a descriptor, which stays its owner's, or makes one if fd
 * is -1. Errors: CER_INVALID (no such page), CER_IO, CER_NOMEM. */
cer_status cer_beat_open(int fd, cer_beat **out, cer_error *err);

/* Stops beating, unmaps; closes a descriptor that was made here. */
void cer_beat_close(cer_beat *beat); /* NULL allowed */

cer_beat_page *cer_beat_page_of(cer_beat *beat);
int cer_beat_fd(const cer_beat *beat);

/* Beats at once and then every interval_ms from a thread, until stopped; a
 * second start changes the interval. Start and stop must not overlap.
 *
 * `peer` is the worker's end of the socket to its coordinator, or -1: nobody
 * is watched. When the other end is closed or the parent process is gone, this
 * process is killed, and its whole process group if it leads one: children of
 * trials die too. Should it be stopped at that moment, it is continued first
 * (on Linux; elsewhere it dies when somebody continues it).
 *
 * Errors: CER_INVALID (interval 0; forked), CER_IO. */
cer_status cer_beat_start(cer_beat *beat, uint32_t interval_ms, int peer,
                          cer_error *err);
void cer_beat_stop(cer_beat *beat); /* waits for the thread's end */

/* --- the clock of a task ------------------------------------------------- */

/* The worker has begun a task; the first `grace` seconds are not counted. A
 * second call begins anew. */
void cer_beat_begin_task(cer_beat *beat, double grace);
void cer_beat_end_task(cer_beat *beat);

/* How long the task has taken, negative in its grace; false: there is none.
 * A suspended machine's clock stands still. */
bool cer_beat_task_seconds(const cer_beat *beat, double *seconds);

#endif
