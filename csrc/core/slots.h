/* slots.h -- the two slots that hold a trial's state between units.
 *
 *     <stem>.a, <stem>.b   states (state.h), each file as long as its state;
 *                          valid safetensors files once committed
 *     <stem>.slots         the commit page, 4096 bytes:
 *         0    "CERSLOTS", then a 64-bit version (2)
 *         16   files: count of the numbers given to new files
 *         64   head: bits 63..32 the fence, 31..13 the count of changes (it
 *              wraps), 12..8 the place of b's record, 7..3 the place of a's,
 *              2 set while a pack is begun, not committed, 1..0 the newest
 *              slot: 0 none, 1 a, 2 b
 *         128  31 places with two records each, of a and of b: attempt,
 *              position, length in bytes, XXH3-64 of these three and the slot;
 *              then its seal: the XXH3-128 of the state (low, high), XXH3-64 of
 *              all before; then the number of the slot's file, 0 for the first;
 *              64 bits each
 *
 * A page of any other version is refused.
 *
 * All are mapped shared, so a process's writes outlive it. A unit packs into
 * the slot that is not the newest. Every decisive step is one compare-and-swap
 * of head:
 *
 *   begin   claims the slot. Its old state is then gone and its record
 *           hidden. Next the record is made invalid and the file gets its
 *           length; the caller writes the bytes.
 *   commit  reads head, writes seal and record, which are still hidden, and
 *           makes the slot the newest.
 *   revert  makes the other slot the newest, if it holds a state.
 *   fence   rejects lower attempts. Attempts of one trial must increase.
 *
 * So these steps are totally ordered: a pack begun before another process's
 * begin, commit or revert is rejected at its commit. If a process is killed at
 * any moment, head names a complete state: processes die between two stores,
 * not within one.
 *
 * A process presumed dead may write later. One that was stopped after its begin
 * has one place of the record and one file. A begin that finds a different
 * process's unfinished pack therefore takes the record at the next place and
 * replaces the slot's file by a new one: the late writer continues in an
 * unlinked file and a record that head does not name. A rejected commit changes
 * nothing that is committed. Three failures remain possible:
 *
 *   - The places wrap around. If a process is stopped within commit, between
 *     its read of head and its stores to the record, while 31 packs of this
 *     slot in a row are abandoned, it writes to a record in use. Look finds
 *     the record or its seal damaged.
 *   - A begin that must make a new file reads head, then unlinks the old file.
 *     If it is stopped between the two, presumed dead, and continued after
 *     another process has committed, it unlinks that process's file. Look
 *     reports this to processes that have not mapped it; the previous state
 *     remains valid.
 *   - Two processes pack at the same time, with attempts that are not fenced.
 *     The one that began first is rejected. Only one process may pack at a
 *     time, so the first must be reaped before.
 *
 * None of these passes a mixture of two states as a state.
 *
 * A slot's file is never truncated, because views in other processes would
 * cause a SIGBUS: a shorter state gets a new file too.
 *
 * Nothing is synced: after a power failure the files may hold zeros or pages of
 * different ages. A *seal* beside the record is the hash of the state's bytes;
 * every commit has one. A process that resumes another process's trial trusts
 * only states that match their seals.
 *
 * A symbolic link in place of one of the files is rejected, because a pack
 * would write to its target. */
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

/* Opens the slots of a trial. `create` creates missing files; without it a
 * missing page is an error. Errors: CER_IO, CER_CORRUPT, CER_NOMEM. */
cer_status cer_slots_open(const char *stem, bool create, cer_slots **out,
                          cer_error *err);
void cer_slots_close(cer_slots *slots); /* NULL allowed; views stay valid */

/* Makes begins and commits of attempts lower than `attempt` fail in every
 * process. Never lowers the fence. */
void cer_slots_fence(cer_slots *slots, uint32_t attempt);

/* The highest attempt that has fenced or packed, 0 if none has. */
uint32_t cer_slots_attempt(const cer_slots *slots);

/* Gets the newest complete state; false if there is none. */
bool cer_slots_committed(const cer_slots *slots, cer_slots_info *out);

/* Begins a pack: *to has room for nbytes, to be written before the next call
 * that takes these slots. Nothing of a pack is read before its claim is
 * checked: the slot may belong to another process by then, with a shorter file.
 * A pack may simply be abandoned. Errors: CER_STATE (fenced; another process
 * began meanwhile; the page was removed), CER_IO (the disk is full), CER_NOMEM.
 */
cer_status cer_slots_begin(cer_slots *slots, uint32_t attempt, size_t nbytes,
                           uint8_t **to, cer_error *err);

/* Seals the last pack begun with its hash, *hash, and commits it. Errors:
 * CER_STATE (fenced since, or another process began, committed or reverted);
 * committed states are then unchanged. */
cer_status cer_slots_commit(cer_slots *slots, uint64_t position,
                            cer_hash128 *hash, cer_error *err);

/* Makes the previous state the newest again, if it is at `position`; does
 * nothing if the newest is. For a worker that died between commit and report.
 * It is one compare-and-swap, so a process killed here also leaves a complete
 * state. Errors: CER_STATE (fenced; no state at `position`). */
cer_status cer_slots_revert(cer_slots *slots, uint32_t attempt,
                            uint64_t position, cer_error *err);

/* --- views --------------------------------------------------------------- */
typedef struct cer_slots_map cer_slots_map; /* counts its users, atomically */

typedef struct cer_slots_view {
    const uint8_t *bytes;
    cer_slots_info info;
    cer_slots_map *map; /* release with cer_slots_map_release */
} cer_slots_view;

/* Gets the bytes of the committed state at *position, or of the newest if NULL.
 * They stay mapped until released, whatever other processes do, and unchanged
 * until the second pack from now. Errors: CER_STATE (no such state),
 * CER_CORRUPT, CER_IO, CER_NOMEM. */
cer_status cer_slots_look(cer_slots *slots, const uint64_t *position,
                          cer_slots_view *out, cer_error *err);
void cer_slots_map_release(cer_slots_map *map);

/* Gets the state with the highest position whose bytes match its seal; false if
 * neither slot holds one. Reads the whole state to check it. */
bool cer_slots_look_sealed(cer_slots *slots, cer_slots_view *out);

/* Writes the newest committed state to a file and replaces an existing one; on
 * failure the file is removed. Not synced. Errors as above. */
cer_status cer_slots_save(cer_slots *slots, const char *path, cer_error *err);

/* --- checking ------------------------------------------------------------ */
typedef struct cer_slots_damage {
    const char *suffix; /* of the damaged file: ".a", ".b" or ".slots"; NULL: no
                           damage */
    bool in_use;        /* the page changed meanwhile: this may not be damage */
    cer_error what;     /* its message describes the damage */
} cer_slots_damage;

/* Compares a trial's slots with their records and seals; changes nothing. Bytes
 * that do not match a record are damage only if the page is unchanged
 * afterwards: head changes before a slot is written. Missing slots are not
 * damaged. Errors: CER_NOMEM. */
cer_status cer_slots_check(const char *stem, cer_slots_damage *out,
                           cer_error *err);

#endif
