/* beat.c -- see beat.h. */
#include "beat.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "thread.h"

#define MAGIC "CERBEAT1"

#ifdef POLLRDHUP
#define HUNG_UP (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)
#define ASKED POLLRDHUP
#else
#define HUNG_UP (POLLHUP | POLLERR | POLLNVAL)
#define ASKED 0 /* the other events are always reported */
#endif

_Static_assert(sizeof(cer_beat_page) <= CER_BEAT_BYTES, "the page is a page");

struct cer_beat {
    cer_beat_page *page;
    int fd;
    bool owns_fd;
    bool beating;
    pthread_t thread;
    pid_t process; /* the process that started the thread */
    pid_t parent;  /* parent of that process */
    int peer;
    int wake[2]; /* a pipe: a byte in it ends the thread's wait */
    atomic_bool stop;
    _Atomic uint32_t interval_ms;
};

#ifdef __linux__
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

/* Kernels before 6.3 lack NOEXEC_SEAL; later ones may require it. */
static int
make_memory(void)
{
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int fd = memfd_create("cerebro-beat", flags | MFD_NOEXEC_SEAL);

    if (fd < 0 && errno == EINVAL)
        fd = memfd_create("cerebro-beat", flags);
    return fd;
}

/* Reading a truncated page would kill the process. */
static int
seal_memory(int fd)
{
    return fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
}
#else
/* An unlinked temporary file. */
static int
make_memory(void)
{
    char path[] = "/tmp/cerebro-beat-XXXXXX";
    int fd = mkstemp(path);

    if (fd >= 0)
        (void)unlink(path);
    return fd;
}

static int
seal_memory(int fd)
{
    (void)fd;
    return 0;
}
#endif

static cer_status
make_page(cer_beat *beat, cer_error *err)
{
    beat->fd = make_memory();
    beat->owns_fd = beat->fd >= 0;
    if (beat->fd < 0 || ftruncate(beat->fd, CER_BEAT_BYTES) < 0 ||
        seal_memory(beat->fd) < 0)
        return cer_fail_errno(err, errno, "cannot make a beat page");
    return CER_OK;
}

static cer_status
map_page(cer_beat *beat, cer_error *err)
{
    struct stat info;
    void *page;

    if (fstat(beat->fd, &info) < 0)
        return cer_fail_errno(err, errno, "cannot inspect descriptor %d",
                              beat->fd);
    if (info.st_size < CER_BEAT_BYTES)
        return cer_fail(err, CER_INVALID, "descriptor %d is not a beat page",
                        beat->fd);
    page = mmap(NULL, CER_BEAT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
                beat->fd, 0);
    if (page == MAP_FAILED)
        return cer_fail_errno(err, errno, "cannot map a beat page");
    beat->page = page;
    if (beat->owns_fd)
        memcpy(beat->page->magic, MAGIC, 8);
    else if (memcmp(beat->page->magic, MAGIC, 8) != 0)
        return cer_fail(err, CER_INVALID, "descriptor %d is not a beat page",
                        beat->fd);
    return CER_OK;
}

cer_status
cer_beat_open(int fd, cer_beat **out, cer_error *err)
{
    cer_beat *beat = cer_calloc(1, sizeof *beat);
    cer_status status = CER_OK;

    *out = NULL;
    if (beat == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory making a beat page");
    beat->fd = fd;
    beat->peer = beat->wake[0] = beat->wake[1] = -1;
    if (fd < 0)
        status = make_page(beat, err);
    if (status == CER_OK)
        status = map_page(beat, err);
    if (status == CER_OK)
        *out = beat;
    else
        cer_beat_close(beat);
    return status;
}

/* A forked child does not have the thread and shares the parent's pipe. */
static bool
forked(const cer_beat *beat)
{
    return beat->beating && beat->process != getpid();
}

static void
close_pipe(cer_beat *beat)
{
    for (int i = 0; i < 2; i++) {
        if (beat->wake[i] >= 0)
            (void)close(beat->wake[i]);
        beat->wake[i] = -1;
    }
}

void
cer_beat_close(cer_beat *beat)
{
    if (beat == NULL)
        return;
    cer_beat_stop(beat);
    if (beat->page != NULL)
        (void)munmap(beat->page, CER_BEAT_BYTES);
    if (beat->owns_fd)
        (void)close(beat->fd);
    close_pipe(beat);
    cer_free(beat);
}

cer_beat_page *
cer_beat_page_of(cer_beat *beat)
{
    return beat->page;
}

int
cer_beat_fd(const cer_beat *beat)
{
    return beat->fd;
}

/* --- the thread ---------------------------------------------------------- */

/* Kills this process, and its process group if it leads one. */
static void
die(void)
{
    if (getpgrp() == getpid())
        (void)kill(0, SIGKILL);
    (void)kill(getpid(), SIGKILL);
}

/* Waits for one interval, a wake-up, or the end of the coordinator. */
static void
wait_interval(cer_beat *beat)
{
    struct pollfd fds[2] = {{.fd = beat->wake[0], .events = POLLIN},
                            {.fd = beat->peer, .events = ASKED}};
    uint32_t interval = atomic_load(&beat->interval_ms);
    char bytes[64];

    (void)poll(fds, beat->peer >= 0 ? 2 : 1,
               interval > INT32_MAX ? INT32_MAX : (int)interval);
    if ((fds[0].revents & POLLIN) != 0)
        (void)!read(beat->wake[0], bytes, sizeof bytes);
    /* Copies of the coordinator's socket may outlive it in its forks: the
     * parent's process id then reveals its end, one beat later. */
    if (beat->peer >= 0 &&
        ((fds[1].revents & HUNG_UP) != 0 || getppid() != beat->parent))
        die();
}

static void *
beat_on(void *argument)
{
    cer_beat *beat = argument;

    while (!atomic_load(&beat->stop)) {
        atomic_fetch_add_explicit(&beat->page->beats, 1, memory_order_relaxed);
        wait_interval(beat);
    }
    return NULL;
}

static void
wake_thread(cer_beat *beat)
{
    (void)!write(beat->wake[1], "", 1); /* a full pipe wakes it as well */
}

static cer_status
open_pipe(cer_beat *beat, cer_error *err)
{
    if (beat->wake[0] >= 0)
        return CER_OK;
    if (pipe(beat->wake) < 0) {
        beat->wake[0] = beat->wake[1] = -1;
        return cer_fail_errno(err, errno, "cannot make a pipe");
    }
    for (int i = 0; i < 2; i++) {
        (void)fcntl(beat->wake[i], F_SETFD, FD_CLOEXEC);
        (void)fcntl(beat->wake[i], F_SETFL, O_NONBLOCK);
    }
    return CER_OK;
}

static cer_status
start_thread(cer_beat *beat, cer_error *err)
{
    int code;

    atomic_store(&beat->stop, false);
    beat->process = getpid();
    beat->parent = getppid();
#ifdef __linux__
    /* A stopped process runs no thread that could notice the end, so it is
     * continued when its parent ends. (The kernel means the thread that forked;
     * continuing too early is harmless.) Not by the new thread: the process may
     * be stopped before that runs. */
    if (beat->peer >= 0)
        (void)prctl(PR_SET_PDEATHSIG, SIGCONT);
#endif
    code = cer_thread_start(&beat->thread, beat_on, beat);
    if (code != 0)
        return cer_fail_errno(err, code, "cannot start a thread");
    beat->beating = true;
    return CER_OK;
}

cer_status
cer_beat_start(cer_beat *beat, uint32_t interval_ms, int peer, cer_error *err)
{
    cer_status status;

    if (interval_ms == 0)
        return cer_fail(err, CER_INVALID, "interval_ms must be at least 1");
    if (forked(beat))
        return cer_fail(err, CER_INVALID,
                        "the beat thread stayed in the parent process: "
                        "open the page again after a fork");
    atomic_store(&beat->interval_ms, interval_ms);
    if (beat->beating) {
        wake_thread(beat);
        return CER_OK;
    }
    beat->peer = peer;
    status = open_pipe(beat, err);
    return status == CER_OK ? start_thread(beat, err) : status;
}

void
cer_beat_stop(cer_beat *beat)
{
    if (!beat->beating || forked(beat))
        return;
    atomic_store(&beat->stop, true);
    wake_thread(beat);
    (void)pthread_join(beat->thread, NULL);
    beat->beating = false;
}

/* --- the clock of a task ------------------------------------------------- */
static int64_t
now_ns(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void
cer_beat_begin_task(cer_beat *beat, double grace)
{
    uint64_t began = (uint64_t)(now_ns() + (int64_t)(grace * 1e9));

    atomic_store(&beat->page->task_began, began);
}

void
cer_beat_end_task(cer_beat *beat)
{
    atomic_store(&beat->page->task_began, 0);
}

void
cer_beat_postpone_task(cer_beat *beat, double seconds)
{
    uint64_t began = atomic_load(&beat->page->task_began);

    if (began != 0)
        atomic_store(&beat->page->task_began,
                     (uint64_t)((int64_t)began + (int64_t)(seconds * 1e9)));
}

bool
cer_beat_task_seconds(const cer_beat *beat, double *seconds)
{
    uint64_t began = atomic_load(&beat->page->task_began);

    *seconds = began == 0 ? 0 : (double)(now_ns() - (int64_t)began) * 1e-9;
    return began != 0;
}
