/* beat.c -- see beat.h. */
#include "beat.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "CERBEAT1"

_Static_assert(sizeof(cer_beat_page) <= CER_BEAT_BYTES, "the page is a page");

struct cer_beat {
    cer_beat_page *page;
    int fd;
    bool owns_fd;
    bool beating, stop;
    uint32_t interval_ms;
    pthread_t thread;
    pid_t process;        /* that started the thread */
    pthread_mutex_t lock; /* of stop and interval_ms */
    pthread_cond_t wake;
};

#ifdef __linux__
static int
make_memory(void)
{
    return memfd_create("cerebro-beat", 0);
}
#else
/* A temporary file without a name. */
static int
make_memory(void)
{
    char path[] = "/tmp/cerebro-beat-XXXXXX";
    int fd = mkstemp(path);

    if (fd >= 0)
        (void)unlink(path);
    return fd;
}
#endif

static cer_status
make_page(cer_beat *beat, cer_error *err)
{
    beat->fd = make_memory();
    beat->owns_fd = beat->fd >= 0;
    if (beat->fd < 0 || ftruncate(beat->fd, CER_BEAT_BYTES) < 0)
        return cer_fail_errno(err, errno, "cannot make a beat page");
    return CER_OK;
}

static cer_status
map_page(cer_beat *beat, cer_error *err)
{
    struct stat info;
    void *page;

    if (fstat(beat->fd, &info) < 0)
        return cer_fail_errno(err, errno, "cannot look at descriptor %d",
                              beat->fd);
    if (info.st_size < CER_BEAT_BYTES)
        return cer_fail(err, CER_INVALID, "descriptor %d is no beat page",
                        beat->fd);
    page = mmap(NULL, CER_BEAT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
                beat->fd, 0);
    if (page == MAP_FAILED)
        return cer_fail_errno(err, errno, "cannot map a beat page");
    beat->page = page;
    if (beat->owns_fd)
        memcpy(beat->page->magic, MAGIC, 8);
    else if (memcmp(beat->page->magic, MAGIC, 8) != 0)
        return cer_fail(err, CER_INVALID, "descriptor %d is no beat page",
                        beat->fd);
    return CER_OK;
}

/* A condition whose timeouts do not jump with the wall clock. */
static int
init_condition(pthread_cond_t *condition)
{
#ifdef __APPLE__
    return pthread_cond_init(condition, NULL);
#else
    pthread_condattr_t attributes;
    int code = pthread_condattr_init(&attributes);

    if (code != 0)
        return code;
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    code = pthread_cond_init(condition, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    return code;
#endif
}

cer_status
cer_beat_open(int fd, cer_beat **out, cer_error *err)
{
    cer_beat *beat = cer_calloc(1, sizeof *beat);
    cer_status status = CER_OK;
    int code;

    *out = NULL;
    if (beat == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory making a beat page");
    code = init_condition(&beat->wake);
    if (code != 0) {
        cer_free(beat);
        return cer_fail_errno(err, code, "cannot make a beat page");
    }
    (void)pthread_mutex_init(&beat->lock, NULL);
    beat->fd = fd;
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

/* In a child the thread is not there, but the lock may look as if it held it,
 * and the condition as if it waited. */
static bool
forked(const cer_beat *beat)
{
    return beat->beating && beat->process != getpid();
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
    if (!forked(beat)) {
        (void)pthread_cond_destroy(&beat->wake);
        (void)pthread_mutex_destroy(&beat->lock);
    }
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

/* Waits for one interval or for a call; the lock is held. */
static void
wait_interval(cer_beat *beat)
{
    struct timespec time;
    uint32_t seconds = beat->interval_ms / 1000;
    long nanoseconds = (long)(beat->interval_ms % 1000) * 1000000;

#ifdef __APPLE__
    time.tv_sec = (time_t)seconds;
    time.tv_nsec = nanoseconds;
    (void)pthread_cond_timedwait_relative_np(&beat->wake, &beat->lock, &time);
#else
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += (time_t)seconds;
    time.tv_nsec += nanoseconds;
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    (void)pthread_cond_timedwait(&beat->wake, &beat->lock, &time);
#endif
}

static void *
beat_on(void *argument)
{
    cer_beat *beat = argument;

    (void)pthread_mutex_lock(&beat->lock);
    while (!beat->stop) {
        atomic_fetch_add_explicit(&beat->page->beats, 1, memory_order_relaxed);
        wait_interval(beat);
    }
    (void)pthread_mutex_unlock(&beat->lock);
    return NULL;
}

cer_status
cer_beat_start(cer_beat *beat, uint32_t interval_ms, cer_error *err)
{
    sigset_t all, before;
    int code;

    if (interval_ms == 0)
        return cer_fail(err, CER_INVALID, "interval_ms must be at least 1");
    if (forked(beat))
        return cer_fail(err, CER_INVALID,
                        "the thread that beats stayed in the parent process: "
                        "open the page anew after a fork");
    (void)pthread_mutex_lock(&beat->lock);
    beat->interval_ms = interval_ms;
    beat->stop = false;
    (void)pthread_cond_signal(&beat->wake);
    (void)pthread_mutex_unlock(&beat->lock);
    if (beat->beating)
        return CER_OK;
    /* Signals are for the threads that can handle them. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(&beat->thread, NULL, beat_on, beat);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0)
        return cer_fail_errno(err, code, "cannot start a thread");
    beat->beating = true;
    beat->process = getpid();
    return CER_OK;
}

void
cer_beat_stop(cer_beat *beat)
{
    if (!beat->beating || forked(beat))
        return;
    (void)pthread_mutex_lock(&beat->lock);
    beat->stop = true;
    (void)pthread_cond_signal(&beat->wake);
    (void)pthread_mutex_unlock(&beat->lock);
    (void)pthread_join(beat->thread, NULL);
    beat->beating = false;
}
