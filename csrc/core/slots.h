/* slots.h -- the two slots in which a trial's state lives between units.
 *
 *     <stem>.a, <stem>.b   states (state.h), each exactly as long as its state:
 *                          whenever committed, valid safetensors files
 *     <stem>.slots         the commit page, 4096 bytes:
 *         0    "CERSLOTS", then a 64-bit version (2)
 *         16   files: numbers given to new files so far
 *         64   head: bits 63..32 the fence, 31..13 the number of changes (it
 *              wraps), 12..8 the place of b's record, 7..3 the place of a's,
 *              2 whether a pack has begun and is not committed, 1..0 the newest
 *              slot: 0 none, 1 a, 2 b
 *         128  31 places with two records each, of a and of b: attempt,
 *              position, length in bytes, XXH3-64 of these three and the slot;
 *              then its seal: the XXH3-128 of the state (low, high), XXH3-64 of
 *              all before; then the number of the slot's file, 0 for the first;
 *              64 bits each
 *
 * In version 1, bits 31..2 of head were a count and only place 0 was in use. A
 * page of version 1 becomes one of version 2 when it is opened.
 *
 * All are mapped shared, so what a process has written outlives it. A unit
 * packs into the slot that is not the newest. Every step that counts is one
 * compare-and-swap of head:
 *
 *   begin   claims the slot. From here on the state that it held is gone and
 *           its record is hidden, whatever it says. Then the record is made
 *           invalid and the file gets its length; the caller writes the bytes.
 *   commit  looks at head, writes seal and record, which are hidden still, and
 *           makes the slot the newest.
 *   revert  makes the other slot the newest, if it holds a state.
 *   fence   refuses lower attempts. Attempts of one trial must grow.
 *
 * So each is before or after any other, and what was begun before another's
 * begin, commit or revert is refused at its commit. Killed at any moment, head
 * names a whole state: processes die between two stores, not within one.
 *
 * A process may be taken for dead and write later. One that was stopped after
 * its begin has the record at one place and one file. A begin that finds a pack
 * of another process unfinished therefore takes the record at the next place
 * and puts a new file in the place of the slot's: the late writer goes on in a
 * file without a name and a record that head does not name. A refused commit
 * changes nothing that is committed. What stays possible:
 *
 *   - The places go round. A process that was stopped within commit, between
 *     its look at head and its stores to the record, while 31 packs of this
 *     slot were given up one after the other, writes to a record in use. Look
 *     finds the record or its seal damaged.
 *   - A begin that has to make a new file looks at head, then removes the name
 *     of the old one. Stopped between the two, taken for dead, and continued
 *     after another process has committed, it removes that one's file. Look
 *     says so to who has not mapped it yet; the state before stands.
 *   - Two processes pack at the same time, with attempts that are not fenced.
 *     The one that began first is refused; one process at a time packs, so the
 *     first is to be reaped before.
 *
 * In none of these is a mixture of two states taken for a state.
 *
 * A slot's file is never made shorter, for then views in other processes would
 * end in a SIGBUS: a shorter state gets a new file too.
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
 * Whoever begins and fails just leaves it. Errors: CER_STATE (fenced; another
 * process has begun meanwhile; the page has been removed), CER_IO (the disk is
 * full), CER_NOMEM. */
cer_status cer_slots_begin(cer_slots *slots, uint32_t attempt, size_t nbytes,
                           uint8_t **to, cer_error *err);

/* Seals what was begun last with its hash, *hash, and commits it. Errors:
 * CER_STATE (fenced since, or another process has begun, committed or
 * reverted); then nothing that is committed has changed. */
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
 * They stay mapped until released, whatever other processes do, and unchanged
 * until the second pack from now. Errors: CER_STATE (there is none),
 * CER_CORRUPT, CER_IO, CER_NOMEM. */
cer_status cer_slots_look(cer_slots *slots, const uint64_t *position,
                          cer_slots_view *out, cer_error *err);
void cer_slots_map_release(cer_slots_map *map);

/* The state with the highest position whose bytes are those that were sealed;
 * false: neither slot holds one. Reads all of a state to be sure. */
bool cer_slots_look_sealed(cer_slots *slots, cer_slots_view *out);

/* Writes the newest committed state to a file, in the place of one that is
 * there; it is removed again if that fails. Not synced. Errors as above. */
cer_status cer_slots_save(cer_slots *slots, const char *path, cer_error *err);

/* --- checking ------------------------------------------------------------ */
typedef struct cer_slots_damage {
    const char *suffix; /* of the damaged file: ".a", ".b" or ".slots"; NULL:
                           none is */
    bool in_use; /* the page has changed meanwhile: this may not be a damage */
    cer_error what; /* its message says what is wrong with the file */
} cer_slots_damage;

/* Compares the slots of a trial with their records and seals and changes
 * nothing. Bytes that do not fit a record are a damage only if the page is the
 * same afterwards: head changes before a slot is written to. Slots that are
 * gone are not damaged. Errors: CER_NOMEM. */
cer_status cer_slots_check(const char *stem, cer_slots_damage *out,
                           cer_error *err);

#endif
