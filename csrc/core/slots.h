/* slots.h -- the two slots in which a trial's state lives between units.
 *
 *     <stem>.a, <stem>.b   states (state.h), each exactly as long as its state:
 *                          whenever committed, valid safetensors files; longer
 *                          only while the packing process views a longer one
 *     <stem>.slots         the commit page, 4096 bytes:
 *         0    "CERSLOTS", then a 64-bit version (1)
 *         64   head: bits 63..32 the fence, 31..2 the number of commits (it
 *              wraps), 1..0 the newest slot: 0 none, 1 a, 2 b
 *         128  record of a: attempt, position, length in bytes, XXH3-64 of
 *              these three and the slot; then its seal: the XXH3-128 of the
 *              state (low, high), XXH3-64 of all before; 64 bits each
 *         192  record of b
 *
 * All are mapped shared, so what a process has written outlives it. A unit
 * packs into the slot that is not the newest: its record is made invalid, the
 * bytes are written, the seal, the record, and then head is flipped by one
 * compare-and-swap. Killed at any moment, head names a whole state: processes
 * die between two stores, not within one.
 *
 * Raising the fence changes the same word, so a commit is either before it or
 * refused: attempts of one trial must therefore grow. One process at a time
 * packs; a second one is caught only when it commits, so the first is to be
 * reaped before.
 *
 * Nothing is synced: after a loss of power the files may hold anything, pages
 * of different ages or zeros. A *seal* beside the record is the hash of the
 * state's bytes; no commit is without. Whoever goes on with a trial that
 * another process left believes only what its seal confirms.
 *
 * The files are the slots' own: a symbolic link in the place of one is refused,
 * for what is packed would be written to where it points. */
#ifndef CER_SLOTS_H
#define CER_SLOTS_H

#include "base.h"
#include "hash.h"

typedef struct cer_slots cer_slots;

/* A committed state. */
typedef struct cer_slots_info {
    uint64_t position; /* the caller's, e.g. units done */
    uint32_t attempt;
    size_t nbytes;
} cer_slots_info;

/* Opens the slots of a trial. `create` makes what is not there; without it a
 * missing page is an error. Errors: CER_IO, CER_CORRUPT, CER_NOMEM. */
cer_status cer_slots_open(const char *stem, bool create, cer_slots **out,
                          cer_error *err);
void cer_slots_close(cer_slots *slots); /* NULL allowed; views stay valid */

/* Begins and commits of attempts lower than `attempt` fail from now on, in
 * every process. Never lowers the fence. */
void cer_slots_fence(cer_slots *slots, uint32_t attempt);

/* The highest attempt that has fenced or packed, 0 if none has. */
uint32_t cer_slots_attempt(const cer_slots *slots);

/* The newest whole state; false: there is none. */
bool cer_slots_committed(const cer_slots *slots, cer_slots_info *out);

/* Begins a pack: *to has room for nbytes, to be written before the commit.
 * Whoever begins and fails just leaves it. Errors: CER_STATE (fenced), CER_IO
 * (the disk is full), CER_NOMEM. */
cer_status cer_slots_begin(cer_slots *slots, uint32_t attempt, size_t nbytes,
                           uint8_t **to, cer_error *err);

/* Seals what was begun last with its hash, *hash, and commits it. Errors:
 * CER_STATE (fenced since, or another process has committed). */
cer_status cer_slots_commit(cer_slots *slots, uint64_t position,
                            cer_hash128 *hash, cer_error *err);

/* Makes the state before the newest the newest again, if it is the one at
 * `position`; nothing if the newest is. For a worker that committed and died
 * before it could say so: by one compare-and-swap, so that whoever is killed
 * here leaves a whole state too. Errors: CER_STATE (fenced; no such state). */
cer_status cer_slots_revert(cer_slots *slots, uint32_t attempt,
                            uint64_t position, cer_error *err);

/* --- views --------------------------------------------------------------- */
typedef struct cer_slots_map cer_slots_map; /* counts its users, atomically */

typedef struct cer_slots_view {
    const uint8_t *bytes;
    cer_slots_info info;
    cer_slots_map *map; /* release with cer_slots_map_release */
} cer_slots_view;

/* The bytes of the committed state at *position, or of the newest with NULL.
 * They stay mapped until released, and unchanged until the second pack from
 * now. Errors: CER_STATE (there is none), CER_CORRUPT, CER_IO, CER_NOMEM. */
cer_status cer_slots_look(cer_slots *slots, const uint64_t *position,
                          cer_slots_view *out, cer_error *err);
void cer_slots_map_release(cer_slots_map *map);

/* The state with the highest position whose bytes are those that were sealed;
 * false: neither slot holds one. Reads all of a state to be sure. */
bool cer_slots_look_sealed(cer_slots *slots, cer_slots_view *out);

/* Writes the newest committed state to a file, in the place of one that is
 * there; it is removed again if that fails. Not synced. Errors as above. */
cer_status cer_slots_save(cer_slots *slots, const char *path, cer_error *err);

#endif
