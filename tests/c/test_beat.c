#include "beat.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"
#include "scratch.h"

/* Waits for `n` more beats of the thread. */
static void
wait_for_beats(cer_beat *beat, uint64_t n)
{
    cer_beat_page *page = cer_beat_page_of(beat);
    uint64_t until = atomic_load(&page->beats) + n;

    while (atomic_load(&page->beats) < until)
        continue;
}

static void
a_page_is_shared_by_its_descriptor(void)
{
    int before = scratch_descriptors();
    cer_beat *beat, *other;

    CHECK_EQ_INT(cer_beat_open(-1, &beat, NULL), CER_OK);
    CHECK_EQ_INT(cer_beat_open(cer_beat_fd(beat), &other, NULL), CER_OK);
    CHECK_EQ_INT(cer_beat_fd(beat), cer_beat_fd(other));
    atomic_store(&cer_beat_page_of(beat)->cancel, 1);
    CHECK_EQ_INT(atomic_load(&cer_beat_page_of(other)->cancel), 1);
    atomic_store(&cer_beat_page_of(beat)->heard, UINT64_MAX);
    CHECK(atomic_load(&cer_beat_page_of(other)->heard) == UINT64_MAX);
    CHECK_EQ_INT(cer_beat_start(other, 1, -1, NULL), CER_OK);
    wait_for_beats(beat, 3);
    cer_beat_close(other);
    cer_beat_close(beat);
    cer_beat_close(NULL);
    CHECK_EQ_INT(scratch_descriptors(), before);
}

#ifdef __linux__
static bool is_old_kernel; /* predates the flags for executable memory */

int memfd_create(const char *name, unsigned flags);

int
memfd_create(const char *name, unsigned flags)
{
    if (is_old_kernel && (flags & ~(MFD_CLOEXEC | MFD_ALLOW_SEALING)) != 0) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_memfd_create, name, flags);
}

static void
check_page(bool old_kernel)
{
    cer_beat *beat, *other;
    int fd;

    is_old_kernel = old_kernel;
    CHECK_EQ_INT(cer_beat_open(-1, &beat, NULL), CER_OK);
    is_old_kernel = false;
    fd = cer_beat_fd(beat);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_EQ_INT(ftruncate(fd, 0), -1);
    CHECK_EQ_INT(errno, EPERM);
    CHECK_EQ_INT(cer_beat_open(fd, &other, NULL), CER_OK);
    cer_beat_close(other);
    cer_beat_close(beat);
}
#endif

static void
no_worker_can_cut_a_page_off(void)
{
#ifdef __linux__
    check_page(false);
    check_page(true);
#endif
}

static void
beating_starts_and_stops(void)
{
    cer_error err = {0};
    cer_beat *beat;
    uint64_t beats;

    CHECK_EQ_INT(cer_beat_open(-1, &beat, NULL), CER_OK);
    cer_beat_stop(beat);
    CHECK_EQ_INT(cer_beat_start(beat, 0, -1, &err), CER_INVALID);
    CHECK_EQ_INT(cer_beat_start(beat, 1, -1, NULL), CER_OK);
    wait_for_beats(beat, 2);
    cer_beat_stop(beat);
    beats = atomic_load(&cer_beat_page_of(beat)->beats);
    CHECK_EQ_INT(cer_beat_start(beat, 3600000, -1, NULL), CER_OK);
    wait_for_beats(beat, 0);
    CHECK_EQ_INT(cer_beat_start(beat, 1, -1, NULL), CER_OK); /* wakes it */
    wait_for_beats(beat, 2);
    cer_beat_stop(beat);
    CHECK(atomic_load(&cer_beat_page_of(beat)->beats) > beats);
    cer_beat_close(beat);
}

static void
a_forked_child_has_no_thread(void)
{
    int code = -1;
    cer_beat *beat;
    pid_t child;

    CHECK_EQ_INT(cer_beat_open(-1, &beat, NULL), CER_OK);
    CHECK_EQ_INT(cer_beat_start(beat, 1, -1, NULL), CER_OK);
    wait_for_beats(beat, 2);
    child = fork();
    if (child == 0) {
        cer_error err = {0};
        bool told = cer_beat_start(beat, 1, -1, &err) == CER_INVALID &&
                    strstr(err.message, "after a fork") != NULL;

        alarm(20); /* none of these may wait for the thread */
        cer_beat_stop(beat);
        cer_beat_close(beat);
        _exit(told ? 0 : 1);
    }
    CHECK(waitpid(child, &code, 0) == child && code == 0);
    wait_for_beats(beat, 2);
    cer_beat_close(beat);
}

static void
what_is_no_page_is_refused(void)
{
    cer_error err = {0};
    cer_beat *beat;
    char zeros[CER_BEAT_BYTES] = "";
    FILE *file;

    CHECK_EQ_INT(cer_beat_open(250, &beat, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EBADF);
    scratch_write("short", "x", 1);
    file = fopen(scratch("short"), "r+b");
    CHECK_EQ_INT(cer_beat_open(fileno(file), &beat, &err), CER_INVALID);
    (void)fclose(file);
    scratch_write("zeros", zeros, sizeof zeros);
    file = fopen(scratch("zeros"), "r+b");
    CHECK_EQ_INT(cer_beat_open(fileno(file), &beat, &err), CER_INVALID);
    CHECK(beat == NULL);
    (void)fclose(file);
}

static void
a_task_has_a_clock(void)
{
    double seconds, later;
    cer_beat *beat, *other;

    CHECK_EQ_INT(cer_beat_open(-1, &beat, NULL), CER_OK);
    CHECK_EQ_INT(cer_beat_open(cer_beat_fd(beat), &other, NULL), CER_OK);
    CHECK(!cer_beat_task_seconds(other, &seconds));
    cer_beat_begin_task(beat, 0);
    CHECK(cer_beat_task_seconds(other, &seconds));
    CHECK(seconds >= 0 && seconds < 3600);
    do
        CHECK(cer_beat_task_seconds(other, &later));
    while (later == seconds);
    CHECK(later > seconds);
    cer_beat_begin_task(beat, 3600);
    CHECK(cer_beat_task_seconds(other, &seconds));
    CHECK(seconds > -3600.5 && seconds < 0);
    cer_beat_end_task(beat);
    CHECK(!cer_beat_task_seconds(other, &seconds));
    cer_beat_close(other);
    cer_beat_close(beat);
}

/* --- the coordinator exits ------------------------------------------------ */
enum { CLOSES, DIES, DIES_OF_STOPPED };

/* The worker: leads a group, has a child process, watches `peer`. Both hold
 * `alive` open; a byte on it reports that the watch has begun. */
static void
be_worker(int peer, int alive, bool stops)
{
    cer_beat *beat;

    (void)setsid();
    if (cer_beat_open(-1, &beat, NULL) != CER_OK ||
        cer_beat_start(beat, 5, peer, NULL) != CER_OK)
        _exit(1);
    if (!stops) /* a stopped one may not have beaten yet */
        wait_for_beats(beat, 2);
    if (fork() != 0)
        (void)!write(alive, "x", 1);
    if (stops)
        (void)kill(getpid(), SIGSTOP);
    for (;;)
        (void)pause();
}

/* The coordinator: starts the worker. On `go` it exits, or closes its end and
 * stays. */
static void
be_coordinator(int how, const int *go, int alive)
{
    int sockets[2];
    int code;
    pid_t worker;
    char byte;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) < 0)
        _exit(1);
    worker = fork();
    if (worker == 0) {
        (void)close(go[0]);
        /* A fork of the coordinator would keep its end open like this. */
        if (how == CLOSES)
            (void)close(sockets[0]);
        be_worker(sockets[1], alive, how == DIES_OF_STOPPED);
    }
    (void)close(alive);
    if (how == DIES_OF_STOPPED)
        (void)waitpid(worker, &code, WUNTRACED);
    (void)!write(go[1], "s", 1);
    (void)!read(go[1], &byte, 1);
    if (how != CLOSES)
        _exit(0);
    (void)close(sockets[0]);
    _exit(waitpid(worker, &code, 0) == worker && WIFSIGNALED(code) ? 0 : 1);
}

static void
check_end_of_worker(int how)
{
    int alive[2], go[2], code = -1;
    char byte;
    pid_t coordinator;

    CHECK(pipe(alive) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, go) == 0);
    coordinator = fork();
    if (coordinator == 0) {
        (void)close(alive[0]);
        be_coordinator(how, go, alive[1]);
    }
    (void)close(alive[1]);
    (void)alarm(60);
    CHECK_EQ_INT(read(alive[0], &byte, 1), 1); /* the worker is watching */
    CHECK_EQ_INT(read(go[0], &byte, 1), 1);
    (void)!write(go[0], "g", 1);
    CHECK_EQ_INT(read(alive[0], &byte, 1), 0); /* it and its child are gone */
    CHECK(waitpid(coordinator, &code, 0) == coordinator && code == 0);
    (void)alarm(0);
    (void)close(alive[0]);
    (void)close(go[0]);
    (void)close(go[1]);
}

static void
a_worker_ends_when_its_socket_does(void)
{
    check_end_of_worker(CLOSES);
}

static void
a_worker_ends_with_its_parent_whoever_holds_the_socket(void)
{
    check_end_of_worker(DIES);
}

static void
a_stopped_worker_ends_too(void)
{
#ifdef __linux__
    check_end_of_worker(DIES_OF_STOPPED);
#endif
}

CHECK_MAIN(a_page_is_shared_by_its_descriptor, no_worker_can_cut_a_page_off,
           beating_starts_and_stops, a_forked_child_has_no_thread,
           what_is_no_page_is_refused, a_task_has_a_clock,
           a_worker_ends_when_its_socket_does,
           a_worker_ends_with_its_parent_whoever_holds_the_socket,
           a_stopped_worker_ends_too)
