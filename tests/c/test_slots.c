#include "slots.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#ifdef __linux__
#include <sys/ptrace.h>
#endif

#include "check.h"
#include "scratch.h"

static cer_status
commit(cer_slots *slots, uint64_t position, cer_error *err)
{
    cer_hash128 hash;

    return cer_slots_commit(slots, position, &hash, err);
}

/* Packs `nbytes` bytes of `value`. */
static cer_status
pack(cer_slots *slots, uint32_t attempt, uint64_t position, size_t nbytes,
     int value, cer_error *err)
{
    uint8_t *to = NULL;
    cer_status status = cer_slots_begin(slots, attempt, nbytes, &to, err);

    if (status != CER_OK)
        return status;
    memset(to, value, nbytes);
    return commit(slots, position, err);
}

/* Checks that the newest state is at `position` and is `nbytes` of `value`. */
static void
check_newest(cer_slots *slots, uint64_t position, size_t nbytes, int value)
{
    cer_slots_view view;
    size_t same = 0;

    CHECK_EQ_INT(cer_slots_look(slots, NULL, &view, NULL), CER_OK);
    CHECK_EQ_INT(view.info.position, position);
    CHECK_EQ_INT(view.info.nbytes, nbytes);
    while (same < nbytes && view.bytes[same] == value)
        same++;
    CHECK_EQ_INT(same, nbytes);
    cer_slots_map_release(view.map);
}

static cer_slots *
open_slots(const char *name)
{
    cer_slots *slots = NULL;
    cer_error err = {0};

    if (cer_slots_open(scratch(name), true, &slots, &err) != CER_OK)
        CHECK_EQ_STR(err.message, "");
    return slots;
}

static void
commits_flip_between_the_slots(void)
{
    int descriptors = scratch_descriptors();
    cer_slots *slots = open_slots("flip"), *other = open_slots("flip");
    cer_slots_info info;

    CHECK(!cer_slots_committed(slots, &info));
    for (uint64_t p = 1; p <= 9; p++) {
        size_t nbytes = (size_t)(p % 3 + 1) * 5000;

        CHECK_EQ_INT(pack(p % 2 ? slots : other, 3, p, nbytes, (int)p, NULL),
                     CER_OK);
        CHECK(cer_slots_committed(other, &info));
        CHECK_EQ_INT(info.position, p);
        CHECK_EQ_INT(info.attempt, 3);
        check_newest(slots, p, nbytes, (int)p);
        check_newest(other, p, nbytes, (int)p);
    }
    cer_slots_close(slots);
    cer_slots_close(other);
    cer_slots_close(NULL);
    CHECK_EQ_INT(scratch_descriptors(), descriptors);
}

static void
files_are_as_long_as_their_state(void)
{
    static const size_t sizes[] = {100, 5000, 1, 5000, 4096, 4097, 1, 1};
    cer_slots *slots = open_slots("length");
    char buffer[8000];

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK_EQ_INT(pack(slots, 0, i, sizes[i], 'x', NULL), CER_OK);
        CHECK_EQ_INT(scratch_read(i % 2 ? "length.b" : "length.a", buffer,
                                  sizeof buffer),
                     sizes[i]);
    }
    cer_slots_close(slots);
}

/* A begin without a commit leaves the previous state. */
static void
an_unfinished_pack_changes_nothing(void)
{
    cer_slots *slots = open_slots("unfinished");
    uint8_t *to;
    uint64_t first = 1;
    cer_slots_view view;

    CHECK_EQ_INT(pack(slots, 0, 1, 1000, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 1000, 2, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_begin(slots, 0, 9000, &to, NULL), CER_OK);
    memset(to, 3, 4000);
    check_newest(slots, 2, 1000, 2);
    CHECK_EQ_INT(cer_slots_look(slots, &first, &view, NULL), CER_STATE);
    cer_slots_close(slots);
    slots = open_slots("unfinished");
    check_newest(slots, 2, 1000, 2);
    CHECK_EQ_INT(commit(slots, 3, NULL), CER_STATE);
    CHECK_EQ_INT(pack(slots, 0, 3, 9000, 3, NULL), CER_OK);
    check_newest(slots, 3, 9000, 3);
    cer_slots_close(slots);
}

static void
fences_refuse_begins_and_commits(void)
{
    cer_slots *late = open_slots("fence"), *coordinator = open_slots("fence");
    cer_error err = {0};
    uint8_t *to;

    CHECK_EQ_INT(pack(late, 1, 1, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_begin(late, 1, 10, &to, NULL), CER_OK);
    cer_slots_fence(coordinator, 2);
    CHECK_EQ_INT(commit(late, 2, &err), CER_STATE);
    CHECK(strstr(err.message, "attempt 1 may not pack") != NULL);
    CHECK(strstr(err.message, "attempt 2 has begun") != NULL);
    CHECK_EQ_INT(cer_slots_begin(late, 1, 10, &to, NULL), CER_STATE);
    check_newest(coordinator, 1, 10, 1);
    CHECK_EQ_INT(cer_slots_begin(late, 2, 10, &to, NULL), CER_OK);
    cer_slots_fence(coordinator, 1); /* never lowered */
    cer_slots_fence(coordinator, 2); /* not above the begun attempt */
    memset(to, 2, 10);
    CHECK_EQ_INT(commit(late, 2, NULL), CER_OK);
    check_newest(coordinator, 2, 10, 2);
    cer_slots_fence(coordinator, UINT32_MAX);
    CHECK_EQ_INT(cer_slots_begin(late, UINT32_MAX - 1, 10, &to, NULL),
                 CER_STATE);
    CHECK_EQ_INT(pack(late, UINT32_MAX, 3, 10, 3, NULL), CER_OK);
    check_newest(coordinator, 3, 10, 3);
    cer_slots_close(late);
    cer_slots_close(coordinator);
}

static void
two_at_once_are_caught_at_the_commit(void)
{
    cer_slots *one = open_slots("two"), *two = open_slots("two");
    cer_error err = {0};
    uint8_t *to;

    CHECK_EQ_INT(cer_slots_begin(one, 0, 10, &to, NULL), CER_OK);
    CHECK_EQ_INT(pack(two, 0, 1, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(commit(one, 1, &err), CER_STATE);
    CHECK(strstr(err.message, "another process packed") != NULL);
    cer_slots_close(one);
    cer_slots_close(two);
}

/* The position of the state found by a fresh open; 0: no state. */
static uint64_t
sealed_position(const char *name)
{
    cer_slots *slots = open_slots(name);
    cer_slots_view view;
    uint64_t position = 0;

    if (cer_slots_look_sealed(slots, &view)) {
        position = view.info.position;
        cer_slots_map_release(view.map);
    }
    cer_slots_close(slots);
    return position;
}

/* A late writer: it writes half of its bytes after another process has
 * committed, and commits last. The lengths are those of the slot's file before,
 * of the late writer and of the other. */
static void
check_late(const char *name, size_t before, size_t late_bytes, size_t bytes)
{
    cer_slots *late = open_slots(name), *slots = open_slots(name);
    char page_name[32], page[2][4096];
    cer_error err = {0};
    uint8_t *to;

    (void)snprintf(page_name, sizeof page_name, "%s.slots", name);
    CHECK_EQ_INT(pack(late, 1, 1, before, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(late, 1, 2, before, 2, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_begin(late, 1, late_bytes, &to, NULL), CER_OK);
    memset(to, 'L', late_bytes / 2);
    cer_slots_fence(slots, 2);
    CHECK_EQ_INT(pack(slots, 2, 3, bytes, 'N', NULL), CER_OK);
    CHECK_EQ_INT(scratch_read(page_name, page[0], 4096), 4096);
    memset(to + late_bytes / 2, 'L', late_bytes - late_bytes / 2);
    CHECK_EQ_INT(commit(late, 3, &err), CER_STATE);
    CHECK(strstr(err.message, "attempt 1 may not pack") != NULL);
    CHECK_EQ_INT(scratch_read(page_name, page[1], 4096), 4096);
    CHECK(memcmp(page[0], page[1], 4096) == 0);
    check_newest(slots, 3, bytes, 'N');
    check_newest(late, 3, bytes, 'N');
    CHECK_EQ_INT(sealed_position(name), 3);
    CHECK_EQ_INT(pack(slots, 2, 4, bytes, 4, NULL), CER_OK);
    check_newest(late, 4, bytes, 4);
    cer_slots_close(late);
    cer_slots_close(slots);
}

static void
a_late_writer_changes_nothing_that_is_committed(void)
{
    check_late("late0", 5000, 5000, 5000);
    check_late("late1", 5000, 5000, 9000);
    check_late("late2", 5000, 9000, 5000);
    check_late("late3", 5000, 100, 9000);
    check_late("late4", 5000, 5000, 100);
}

/* A stopped writer that resumes finishes writing its record after other
 * processes have continued. They do not use that record. */
/* A late writer that looks before it commits has mapped the newer, shorter file
 * in the place of the one that it wrote. */
static void
a_late_commit_reads_nothing(void)
{
    cer_slots *late = open_slots("reads"), *new = open_slots("reads");
    cer_slots_view view;
    cer_error err = {0};
    uint8_t *to;

    CHECK_EQ_INT(cer_slots_begin(late, 1, 1 << 20, &to, NULL), CER_OK);
    memset(to, 7, 1 << 20);
    CHECK_EQ_INT(pack(new, 1, 1, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_look(late, NULL, &view, NULL), CER_OK);
    cer_slots_map_release(view.map);
    CHECK_EQ_INT(commit(late, 1, &err), CER_STATE);
    CHECK(strstr(err.message, "another process packed") != NULL);
    check_newest(late, 1, 10, 1);
    cer_slots_close(late);
    cer_slots_close(new);
}

static void
a_record_that_was_given_up_is_not_used_again(void)
{
    cer_slots *late = open_slots("place"), *slots = NULL;
    uint8_t *to, record[64], other[64];
    char page[4096];
    int fd;

    CHECK_EQ_INT(pack(late, 1, 1, 100, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(late, 1, 2, 100, 2, NULL), CER_OK);
    CHECK_EQ_INT(scratch_read("place.slots", page, 4096), 4096);
    memcpy(record, page + 192, sizeof record); /* like b's now */
    memset(other, 0xa5, sizeof other);
    for (unsigned round = 1; round <= 30; round++) {
        uint64_t position = round + 2;

        slots = open_slots("place");
        CHECK_EQ_INT(pack(slots, round, position, 100, (int)position, NULL),
                     CER_OK);
        cer_slots_close(slots);
        slots = open_slots("place");
        CHECK_EQ_INT(cer_slots_begin(slots, round, 100, &to, NULL), CER_OK);
        cer_slots_close(slots); /* as if killed */
        slots = open_slots("place");
        check_newest(slots, position, 100, (int)position);
        cer_slots_close(slots);
    }
    slots = open_slots("place");
    CHECK_EQ_INT(pack(slots, 40, 50, 100, 50, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 40, 51, 100, 51, NULL), CER_OK);
    fd = open(scratch("place.slots"), O_WRONLY);
    CHECK_EQ_INT(pwrite(fd, record, sizeof record, 192), 64);
    CHECK_EQ_INT(pwrite(fd, other, sizeof other, 128), 64);
    (void)close(fd);
    check_newest(slots, 51, 100, 51);
    CHECK_EQ_INT(sealed_position("place"), 51);
    CHECK_EQ_INT(cer_slots_revert(slots, 40, 50, NULL), CER_OK);
    check_newest(late, 50, 100, 50);
    cer_slots_close(slots);
    cer_slots_close(late);
}

/* A process is stopped between any two instructions of a pack while another
 * takes over the trial. It cannot change the other's commits. Sanitizers
 * multiply the instructions. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STEPS_ARE_FEW 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define STEPS_ARE_FEW 0
#endif
#endif
#ifndef STEPS_ARE_FEW
#define STEPS_ARE_FEW 1
#endif
#if defined(__linux__) && STEPS_ARE_FEW
static void
remove_step(void)
{
    (void)unlink(scratch("step.a"));
    (void)unlink(scratch("step.b"));
    (void)unlink(scratch("step.slots"));
}

/* Starts a traced process that has opened slots and is about to pack; -1:
 * tracing is not possible here. */
static pid_t
start_late(void)
{
    pid_t child = fork();
    int status = 0;

    if (child == 0) {
        cer_slots *slots = open_slots("step");

        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
            _exit(1);
        (void)raise(SIGSTOP);
        _exit(pack(slots, 1, 3, 90, 'L', NULL) == CER_OK ? 0 : 2);
    }
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    return WIFSTOPPED(status) ? child : -1;
}

/* Runs `steps` instructions; returns how many ran until the process ended. */
static long
step(pid_t child, long steps, int *status)
{
    long done = 0;

    while (done < steps && ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0 &&
           waitpid(child, status, 0) == child && !WIFEXITED(*status))
        done++;
    return done;
}

/* The slots of a trial; `files` of them have been used. */
static cer_slots *
make_step(int files)
{
    cer_slots *slots;

    remove_step();
    slots = open_slots("step");
    for (int position = 3 - files; position < 3; position++)
        CHECK_EQ_INT(pack(slots, 1, (uint64_t)position, 90, position, NULL),
                     CER_OK);
    return slots;
}

static void
check_stopped_after(long steps, int files)
{
    cer_slots *slots = make_step(files);
    pid_t child = start_late();
    int status = 0;

    (void)step(child, steps, &status);
    cer_slots_fence(slots, 2);
    CHECK_EQ_INT(pack(slots, 2, 9, 120, 'N', NULL), CER_OK);
    if (!WIFEXITED(status)) {
        CHECK_EQ_INT(ptrace(PTRACE_DETACH, child, NULL, NULL), 0);
        CHECK_EQ_INT(waitpid(child, &status, 0), child);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) != 1);
    check_newest(slots, 9, 120, 'N');
    CHECK_EQ_INT(sealed_position("step"), 9);
    CHECK_EQ_INT(scratch_read("step.a", (char[200]){0}, 200) +
                     scratch_read("step.b", (char[200]){0}, 200),
                 90 + 120);
    cer_slots_close(slots);
}

static void
a_writer_stopped_anywhere_changes_nothing(void)
{
    enum { SAMPLES = 40 };

    for (int files = 1; files <= 2; files++) {
        cer_slots *slots = make_step(files);
        pid_t child = start_late();
        int status = 0;
        long all;

        cer_slots_close(slots);
        if (child < 0)
            return;
        all = step(child, 1000000, &status);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(all > SAMPLES);
        for (long i = 0; i < SAMPLES; i++)
            check_stopped_after(all * i / SAMPLES, files);
    }
    remove_step();
}
#else
static void
a_writer_stopped_anywhere_changes_nothing(void)
{
}
#endif

/* Written bytes are not a state until head says so. */
static void
what_is_recorded_and_not_committed_is_hidden(void)
{
    cer_slots *slots = open_slots("hidden"), *late = open_slots("hidden");
    uint64_t third = 3;
    cer_slots_view view;
    uint8_t *to, page[4096];
    int fd;

    CHECK_EQ_INT(pack(slots, 1, 2, 10, 2, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_begin(late, 1, 10, &to, NULL), CER_OK);
    memset(to, 3, 10);
    CHECK_EQ_INT(scratch_read("hidden.slots", page, 4096), 4096);
    CHECK_EQ_INT(commit(late, 3, NULL), CER_OK);
    fd = open(scratch("hidden.slots"), O_WRONLY); /* the old head */
    CHECK_EQ_INT(pwrite(fd, page + 64, 8, 64), 8);
    (void)close(fd);
    check_newest(slots, 2, 10, 2);
    CHECK_EQ_INT(sealed_position("hidden"), 2);
    CHECK_EQ_INT(cer_slots_look(slots, &third, &view, NULL), CER_STATE);
    CHECK_EQ_INT(cer_slots_revert(slots, 1, 3, NULL), CER_STATE);
    cer_slots_close(slots);
    cer_slots_close(late);
}

/* Does not delete files by name if the names now belong to a different page. */
static void
a_page_that_has_been_replaced_is_left_alone(void)
{
    cer_slots *late = open_slots("old"), *slots = open_slots("new");
    cer_error err = {0};
    uint8_t *to;

    for (int position = 1; position <= 2; position++)
        CHECK_EQ_INT(pack(late, 1, (uint64_t)position, 5000, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 2, 9, 5000, 9, NULL), CER_OK);
    cer_slots_close(slots);
    CHECK_EQ_INT(rename(scratch("new.a"), scratch("old.a")), 0);
    CHECK_EQ_INT(rename(scratch("new.slots"), scratch("old.slots")), 0);
    CHECK_EQ_INT(cer_slots_begin(late, 1, 10, &to, &err), CER_STATE);
    CHECK(strstr(err.message, "old.slots has been removed") != NULL);
    CHECK_EQ_INT(pack(late, 1, 3, 5000, 3, NULL), CER_OK);
    slots = open_slots("old");
    check_newest(slots, 9, 5000, 9);
    cer_slots_close(slots);
    cer_slots_close(late);
}

/* A commit whose worker died before reporting it is reverted. */
static void
the_state_before_is_made_the_newest_again(void)
{
    cer_slots *slots = open_slots("revert"), *late = open_slots("revert");
    cer_error err = {0};

    CHECK_EQ_INT(cer_slots_revert(slots, 0, 0, &err), CER_STATE);
    CHECK_EQ_INT(pack(slots, 1, 1, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_revert(slots, 1, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_revert(slots, 1, 0, &err), CER_STATE);
    check_newest(slots, 1, 10, 1);
    CHECK_EQ_INT(pack(late, 1, 2, 10, 2, NULL), CER_OK);
    cer_slots_fence(slots, 2);
    CHECK_EQ_INT(cer_slots_revert(late, 1, 1, &err), CER_STATE);
    CHECK(strstr(err.message, "attempt 2 has begun") != NULL);
    CHECK_EQ_INT(cer_slots_revert(slots, 2, 1, NULL), CER_OK);
    check_newest(late, 1, 10, 1);
    CHECK_EQ_INT(cer_slots_revert(slots, 2, 3, &err), CER_STATE);
    CHECK(strstr(err.message, "no committed state of position 3") != NULL);
    CHECK_EQ_INT(pack(slots, 2, 2, 10, 3, NULL), CER_OK);
    check_newest(late, 2, 10, 3);
    cer_slots_close(slots);
    cer_slots_close(late);
}

/* A process killed later, in the middle of a pack, loses nothing. */
static void
a_revert_leaves_a_whole_state_whatever_follows(void)
{
    cer_slots *slots = open_slots("again");
    uint8_t *to;

    CHECK_EQ_INT(pack(slots, 0, 1, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 10, 2, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_revert(slots, 1, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_begin(slots, 1, 10, &to, NULL), CER_OK);
    to[0] = 9;
    cer_slots_close(slots);
    slots = open_slots("again");
    CHECK_EQ_INT(cer_slots_revert(slots, 2, 1, NULL), CER_OK);
    check_newest(slots, 1, 10, 1);
    cer_slots_close(slots);
}

static void
views_outlive_everything(void)
{
    cer_slots *slots = open_slots("views");
    cer_slots_view view;

    CHECK_EQ_INT(pack(slots, 0, 1, 5000, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_look(slots, NULL, &view, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 5000, 2, NULL), CER_OK);
    CHECK_EQ_INT(view.bytes[4999], 1);
    CHECK_EQ_INT(pack(slots, 0, 3, 50000, 3, NULL), CER_OK);
    CHECK_EQ_INT(view.bytes[4999], 3); /* the second pack since the view */
    cer_slots_close(slots);
    CHECK_EQ_INT(view.bytes[0], 3);
    cer_slots_map_release(view.map);
}

/* A view is not truncated, although another process packs shorter states. */
static void
views_of_others_outlive_shorter_states(void)
{
    cer_slots *slots = open_slots("shorter"), *reader = open_slots("shorter");
    cer_slots_view view;
    size_t same = 0;

    CHECK_EQ_INT(pack(slots, 0, 1, 50000, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_look(reader, NULL, &view, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 100, 2, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 3, 100, 3, NULL), CER_OK);
    while (same < 50000 && view.bytes[same] == 1)
        same++;
    CHECK_EQ_INT(same, 50000);
    check_newest(reader, 3, 100, 3);
    cer_slots_map_release(view.map);
    cer_slots_close(slots);
    cer_slots_close(reader);
}

static void
change_byte(const char *name, long at)
{
    FILE *file = fopen(scratch(name), "r+");
    int value;

    CHECK(file != NULL);
    (void)fseek(file, at, SEEK_SET);
    value = fgetc(file);
    (void)fseek(file, at, SEEK_SET);
    (void)fputc(value ^ 1, file);
    (void)fclose(file);
}

static void
what_is_committed_is_believed(void)
{
    cer_slots *slots = open_slots("seal");
    cer_hash128 hash, found;
    cer_slots_view view;
    uint8_t *to;

    CHECK_EQ_INT(sealed_position("seal"), 0);
    for (unsigned position = 1; position <= 3; position++) {
        CHECK_EQ_INT(cer_slots_begin(slots, 0, 5000, &to, NULL), CER_OK);
        memset(to, (int)position, 5000);
        CHECK_EQ_INT(sealed_position("seal"), position - 1);
        CHECK_EQ_INT(cer_slots_commit(slots, position, &hash, NULL), CER_OK);
        CHECK_EQ_INT(sealed_position("seal"), position);
        CHECK_EQ_INT(cer_slots_look(slots, NULL, &view, NULL), CER_OK);
        found = cer_hash128_of(view.bytes, view.info.nbytes);
        CHECK(hash.low == found.low && hash.high == found.high);
        cer_slots_map_release(view.map);
    }
    cer_slots_close(slots);
}

/* Possible results of a power loss: truncated files, stale bytes and records.
 */
static void
what_is_torn_is_not_believed(void)
{
    CHECK_EQ_INT(sealed_position("seal"), 3);
    change_byte("seal.a", 4999);
    CHECK_EQ_INT(sealed_position("seal"), 2);
    change_byte("seal.a", 4999);
    CHECK_EQ_INT(sealed_position("seal"), 3);
    change_byte("seal.slots", 128 + 8); /* the position of a */
    CHECK_EQ_INT(sealed_position("seal"), 2);
    change_byte("seal.slots", 192 + 40); /* the hash of b */
    CHECK_EQ_INT(sealed_position("seal"), 0);
    change_byte("seal.slots", 128 + 8);
    CHECK_EQ_INT(sealed_position("seal"), 3);
    change_byte("seal.slots", 192 + 40);
    CHECK_EQ_INT(truncate(scratch("seal.a"), 4999), 0);
    CHECK_EQ_INT(sealed_position("seal"), 2);
    CHECK_EQ_INT(unlink(scratch("seal.b")), 0);
    CHECK_EQ_INT(sealed_position("seal"), 0);
}

static void
the_highest_attempt_is_known(void)
{
    cer_slots *slots = open_slots("attempt");

    CHECK_EQ_INT(cer_slots_attempt(slots), 0);
    CHECK_EQ_INT(pack(slots, 4, 1, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 7, 2, 10, 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_slots_attempt(slots), 7);
    cer_slots_fence(slots, 9);
    CHECK_EQ_INT(cer_slots_attempt(slots), 9);
    cer_slots_close(slots);
}

static void
the_newest_state_is_saved(void)
{
    cer_slots *slots = open_slots("save");
    struct rlimit limit, small;
    char buffer[8000];

    CHECK_EQ_INT(cer_slots_save(slots, scratch("saved"), NULL), CER_STATE);
    CHECK_EQ_INT(pack(slots, 0, 1, 6000, 'a', NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 5000, 'b', NULL), CER_OK);
    scratch_write("saved", buffer, sizeof buffer);
    CHECK_EQ_INT(cer_slots_save(slots, scratch("saved"), NULL), CER_OK);
    CHECK_EQ_INT(scratch_read("saved", buffer, sizeof buffer), 5000);
    CHECK(buffer[0] == 'b' && buffer[4999] == 'b');
    CHECK_EQ_INT(cer_slots_save(slots, scratch("no/where"), NULL), CER_IO);
    /* A file that cannot grow that far is removed. */
    (void)signal(SIGXFSZ, SIG_IGN);
    (void)getrlimit(RLIMIT_FSIZE, &limit);
    small = limit;
    small.rlim_cur = 1000;
    (void)setrlimit(RLIMIT_FSIZE, &small);
    CHECK_EQ_INT(cer_slots_save(slots, scratch("saved"), NULL), CER_IO);
    CHECK_EQ_INT(pack(slots, 0, 3, 7000, 'c', NULL), CER_IO);
    (void)setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_EQ_INT(scratch_read("saved", buffer, sizeof buffer), -1);
    check_newest(slots, 2, 5000, 'b');
    CHECK_EQ_INT(pack(slots, 0, 3, 7000, 'c', NULL), CER_OK);
    check_newest(slots, 3, 7000, 'c');
    cer_slots_close(slots);
}

static void
pages_are_checked(void)
{
    static uint8_t page[4096];
    cer_slots *slots = NULL;
    cer_error err = {0};

    CHECK_EQ_INT(cer_slots_open(scratch("none"), false, &slots, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    scratch_write("page.slots", page, 100);
    CHECK_EQ_INT(cer_slots_open(scratch("page"), false, &slots, &err),
                 CER_CORRUPT);
    scratch_write("page.slots", page, sizeof page);
    CHECK_EQ_INT(cer_slots_open(scratch("page"), false, &slots, &err),
                 CER_CORRUPT);
    /* The creator was killed before it wrote the version. */
    memcpy(page, "CERSLOTS", 8);
    scratch_write("page.slots", page, sizeof page);
    slots = open_slots("page");
    cer_slots_close(slots);
    for (uint8_t version = 1; version <= 3; version += 2) {
        page[8] = version;
        scratch_write("page.slots", page, sizeof page);
        CHECK_EQ_INT(cer_slots_open(scratch("page"), true, &slots, &err),
                     CER_CORRUPT);
        CHECK(strstr(err.message,
                     version == 1 ? "page.slots has slot version 1, of an "
                                    "earlier Cerebro, and this one reads only "
                                    "version 2: repeat the search"
                                  : "page.slots has slot version 3, of a newer "
                                    "Cerebro, and this one reads only version "
                                    "2: update Cerebro") != NULL);
    }
    page[8] = 2;
    page[64] = 3; /* no such slot */
    scratch_write("page.slots", page, sizeof page);
    CHECK_EQ_INT(cer_slots_open(scratch("page"), true, &slots, &err),
                 CER_CORRUPT);
    CHECK(slots == NULL);
}

/* The missing part may have been the newest record, so a truncated page is not
 * padded with zeros and accepted. */
static void
a_page_cut_anywhere_is_refused(void)
{
    static uint8_t page[4097];
    cer_slots *slots = open_slots("cut");

    CHECK_EQ_INT(pack(slots, 0, 1, 100, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 100, 2, NULL), CER_OK);
    cer_slots_close(slots);
    CHECK_EQ_INT(scratch_read("cut.slots", page, sizeof page), 4096);
    for (size_t len = 0; len <= sizeof page; len++) {
        cer_error err = {0};

        if (len == 4096)
            continue;
        scratch_write("cut.slots", page, len);
        CHECK_EQ_INT(cer_slots_open(scratch("cut"), false, &slots, &err),
                     CER_CORRUPT);
        CHECK(strstr(err.message, "cut.slots is not a commit page") != NULL);
        if (len > 0) /* an empty file is new */
            CHECK_EQ_INT(cer_slots_open(scratch("cut"), true, &slots, NULL),
                         CER_CORRUPT);
        CHECK_EQ_INT(scratch_read("cut.slots", page, sizeof page), len);
    }
    scratch_write("cut.slots", page, 4096);
    slots = open_slots("cut");
    check_newest(slots, 2, 100, 2);
    cer_slots_close(slots);
}

/* Another process has written garbage since the page was checked: a third slot
 * does not exist. */
static void
a_page_that_changes_under_us_is_survived(void)
{
    static uint8_t page[4096];
    cer_slots *slots = open_slots("nonsense");
    cer_slots_info info;
    cer_slots_view view;
    uint8_t *to;
    int fd;

    CHECK_EQ_INT(pack(slots, 0, 1, 100, 1, NULL), CER_OK);
    CHECK_EQ_INT(scratch_read("nonsense.slots", page, sizeof page), 4096);
    /* The record after b's, as if it were a third slot's. */
    memcpy(page + 256, page + 128, 64);
    page[64] |= 3;
    fd = open(scratch("nonsense.slots"), O_WRONLY);
    CHECK_EQ_INT(write(fd, page, sizeof page), 4096);
    (void)close(fd);
    CHECK(!cer_slots_committed(slots, &info));
    CHECK_EQ_INT(cer_slots_look(slots, NULL, &view, NULL), CER_STATE);
    CHECK_EQ_INT(cer_slots_begin(slots, 0, 10, &to, NULL), CER_OK);
    cer_slots_close(slots);
}

static void
check_is_link_error(cer_status status, const cer_error *err, const char *name)
{
    CHECK_EQ_INT(status, CER_CORRUPT);
    CHECK(strstr(err->message, name) != NULL);
    CHECK(strstr(err->message, "symbolic link") != NULL);
}

/* A link's target is neither read nor written. */
static void
links_are_not_followed(void)
{
    cer_slots *slots = open_slots("real"), *other = NULL;
    char victim[8] = "victim";
    cer_error err = {0};

    CHECK_EQ_INT(pack(slots, 0, 1, 100, 1, NULL), CER_OK);
    scratch_write("victim", victim, sizeof victim);
    CHECK_EQ_INT(symlink(scratch("real.slots"), scratch("linked.slots")), 0);
    check_is_link_error(cer_slots_open(scratch("linked"), true, &other, &err),
                        &err, "linked.slots");
    CHECK_EQ_INT(symlink(scratch("victim"), scratch("real.b")), 0);
    check_is_link_error(pack(slots, 0, 2, 100, 2, &err), &err, "real.b");
    CHECK_EQ_INT(symlink(scratch("victim"), scratch("saved-link")), 0);
    check_is_link_error(cer_slots_save(slots, scratch("saved-link"), &err),
                        &err, "saved-link");
    CHECK_EQ_INT(scratch_read("victim", victim, sizeof victim), 8);
    CHECK_EQ_STR(victim, "victim");
    check_newest(slots, 1, 100, 1);
    cer_slots_close(slots);
}

static cer_slots_damage
damage_of(const char *name)
{
    cer_slots_damage damage;

    CHECK_EQ_INT(cer_slots_check(scratch(name), &damage, NULL), CER_OK);
    return damage;
}

static void
check_damage(const char *name, const char *suffix, const char *what)
{
    cer_slots_damage damage = damage_of(name);

    CHECK(damage.suffix != NULL && strcmp(damage.suffix, suffix) == 0);
    CHECK(strstr(damage.what.message, what) != NULL);
    CHECK(!damage.in_use);
}

/* Flips a bit of a file. */
static void
flip(const char *name, size_t at)
{
    uint8_t bytes[5000];
    long size = scratch_read(name, bytes, sizeof bytes);

    CHECK(size > (long)at);
    bytes[at] ^= 1;
    scratch_write(name, bytes, (size_t)size);
}

static void
damage_is_found_where_it_is(void)
{
    int descriptors = scratch_descriptors();
    cer_slots *slots = open_slots("check");
    uint8_t page[4097] = {0}, *to;

    CHECK(damage_of("nowhere").suffix == NULL);
    CHECK(damage_of("check").suffix == NULL); /* no commit yet */
    CHECK_EQ_INT(pack(slots, 0, 1, 100, 1, NULL), CER_OK);
    CHECK_EQ_INT(pack(slots, 0, 2, 100, 2, NULL), CER_OK);
    CHECK(damage_of("check").suffix == NULL);
    flip("check.a", 50); /* the older state */
    check_damage("check", ".a", "checksum differs from its seal");
    CHECK_EQ_INT(cer_slots_begin(slots, 0, 100, &to, NULL), CER_OK);
    CHECK(damage_of("check").suffix == NULL); /* being replaced */
    cer_slots_close(slots);
    flip("check.slots", 128 + 64 + 7); /* no attempt has so many bits */
    check_damage("check", ".slots", "its record of the newest state");
    flip("check.slots", 128 + 64 + 7);
    flip("check.b", 99);
    check_damage("check", ".b", "checksum differs from its seal");
    CHECK_EQ_INT(truncate(scratch("check.b"), 99), 0);
    check_damage("check", ".b", "truncated");
    CHECK_EQ_INT(unlink(scratch("check.b")), 0);
    check_damage("check", ".b", "cannot be read");
    flip("check.slots", 128 + 64);
    check_damage("check", ".slots", "its record of the newest state");
    scratch_write("check.slots", page, 4096); /* not yet begun */
    CHECK(damage_of("check").suffix == NULL);
    scratch_write("check.slots", page, 4097);
    check_damage("check", ".slots", "larger than a commit page");
    scratch_write("check.slots", "CERSLOTS", 8);
    check_damage("check", ".slots", "not a commit page");
    memcpy(page, "CERSLOTS\1", 9);
    scratch_write("check.slots", page, 4096);
    check_damage("check", ".slots", "it has slot version 1, of an earlier");
    CHECK_EQ_INT(unlink(scratch("check.slots")), 0);
    CHECK_EQ_INT(symlink(scratch("victim"), scratch("check.slots")), 0);
    check_damage("check", ".slots", "symbolic link");
    CHECK_EQ_INT(scratch_descriptors(), descriptors);
}

/* Changes unused bytes of a page until it is killed. */
static void
touch_for_ever(const char *path, pid_t parent)
{
    int fd = open(path, O_WRONLY);

    for (uint32_t i = 0; getppid() == parent; i++)
        if (pwrite(fd, &i, sizeof i, 72) != sizeof i)
            break;
    _exit(1);
}

static void
slots_that_change_meanwhile_are_in_use(void)
{
    cer_slots *slots = open_slots("busy");
    pid_t parent = getpid(), child;

    CHECK_EQ_INT(pack(slots, 0, 1, 5000, 1, NULL), CER_OK);
    cer_slots_close(slots);
    flip("busy.a", 0);
    check_damage("busy", ".a", "checksum differs");
    if ((child = fork()) == 0)
        touch_for_ever(scratch("busy.slots"), parent);
    while (!damage_of("busy").in_use)
        continue;
    CHECK_EQ_INT(kill(child, SIGKILL), 0);
    CHECK_EQ_INT(waitpid(child, NULL, 0), child);
    check_damage("busy", ".a", "checksum differs");
}

/* Packs until it or its parent is killed; every byte of the state at position p
 * is p mod 256. */
static void
pack_for_ever(const char *stem, uint64_t position, pid_t parent)
{
    cer_slots *slots;

    if (cer_slots_open(stem, false, &slots, NULL) != CER_OK)
        _exit(1);
    while (getppid() == parent) {
        position++;
        if (pack(slots, 0, position, 30000 + position % 5 * 4096,
                 (int)(position % 256), NULL) != CER_OK)
            _exit(1);
    }
    _exit(1);
}

static void
a_killed_process_leaves_a_whole_state(void)
{
    cer_slots *slots = open_slots("killed");
    cer_slots_info info = {0};
    uint64_t last = 0;
    uint32_t random = 12345;

    for (int round = 0; round < 40; round++) {
        pid_t parent = getpid(), child = fork();

        if (child == 0)
            pack_for_ever(scratch("killed"), last, parent);
        while (!cer_slots_committed(slots, &info) || info.position < last + 3)
            continue;
        random = random * 1664525 + 1013904223;
        for (volatile uint32_t spin = random >> 14; spin > 0; spin--)
            continue;
        CHECK_EQ_INT(kill(child, SIGKILL), 0);
        CHECK_EQ_INT(waitpid(child, NULL, 0), child);
        CHECK(cer_slots_committed(slots, &info));
        CHECK(info.position >= last + 3);
        last = info.position;
        check_newest(slots, last, 30000 + last % 5 * 4096, (int)(last % 256));
    }
    cer_slots_close(slots);
}

CHECK_MAIN(commits_flip_between_the_slots, files_are_as_long_as_their_state,
           an_unfinished_pack_changes_nothing, fences_refuse_begins_and_commits,
           two_at_once_are_caught_at_the_commit,
           the_state_before_is_made_the_newest_again,
           a_revert_leaves_a_whole_state_whatever_follows,
           a_late_writer_changes_nothing_that_is_committed,
           a_late_commit_reads_nothing,
           a_record_that_was_given_up_is_not_used_again,
           a_writer_stopped_anywhere_changes_nothing,
           what_is_recorded_and_not_committed_is_hidden,
           a_page_that_has_been_replaced_is_left_alone,
           views_outlive_everything, views_of_others_outlive_shorter_states,
           what_is_committed_is_believed, what_is_torn_is_not_believed,
           the_highest_attempt_is_known, the_newest_state_is_saved,
           pages_are_checked, a_page_cut_anywhere_is_refused,
           a_page_that_changes_under_us_is_survived, links_are_not_followed,
           damage_is_found_where_it_is, slots_that_change_meanwhile_are_in_use,
           a_killed_process_leaves_a_whole_state)
