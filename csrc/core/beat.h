/* beat.h -- the page that a worker shares with its coordinator: a sign of life,
 * counts of what has been done, and the flag that cancels.
 *
 * A thread of its own beats, so that the process is known to live while it is
 * inside a long call; the epoch runner counts batches, which says whether it
 * gets on. Every word has one writer and is read without locks. The page is
 * memory without a name: its descriptor is inherited.
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
    uint64_t unused_rows[6];
    _Atomic uint32_t cancel; /* the coordinator; the worker clears it */
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
 * second start changes the interval. Start and stop must not overlap. Errors:
 * CER_INVALID (0; forked), CER_IO. */
cer_status cer_beat_start(cer_beat *beat, uint32_t interval_ms, cer_error *err);
void cer_beat_stop(cer_beat *beat); /* waits for the thread's end */

#endif
