/* watch.c -- see watch.h. */
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#if defined(__linux__)
#define HAVE_INOTIFY 1
#include <sys/inotify.h>
#elif defined(__APPLE__) || defined(__FreeBSD__) || defined(__NetBSD__) ||     \
    defined(__OpenBSD__)
#define HAVE_KQUEUE 1
#include <sys/event.h>
#include <time.h>
#endif

struct cer_watch {
    int fd;     /* of the queue of events; -1 until it is open */
    int folder; /* kqueue: the folder itself */
};

#if defined(HAVE_INOTIFY)

static cer_status
begin(cer_watch *watch, const char *path, cer_error *err)
{
    watch->fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (watch->fd < 0)
        return cer_fail_errno(err, errno, "cannot watch %s", path);
    if (inotify_add_watch(watch->fd, path,
                          IN_MOVED_TO | IN_CLOSE_WRITE | IN_ONLYDIR) < 0)
        return cer_fail_errno(err, errno, "cannot watch %s", path);
    return CER_OK;
}

cer_status
cer_watch_drain(cer_watch *watch, bool *arrived, cer_error *err)
{
    /* Names are not looked at: only that there were some counts. */
    _Alignas(struct inotify_event) char events[4096];
    ssize_t got;

    *arrived = false;
    for (;;) {
        got = read(watch->fd, events, sizeof events);
        if (got > 0)
            *arrived = true;
        else if (got == 0 || errno == EAGAIN)
            return CER_OK;
        else if (errno != EINTR)
            return cer_fail_errno(err, errno, "cannot read a watch");
    }
}

#elif defined(HAVE_KQUEUE)

static cer_status
begin(cer_watch *watch, const char *path, cer_error *err)
{
    struct kevent change;

    watch->folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (watch->folder < 0)
        return cer_fail_errno(err, errno, "cannot watch %s", path);
    watch->fd = kqueue(); /* which no child inherits */
    if (watch->fd < 0)
        return cer_fail_errno(err, errno, "cannot watch %s", path);
    EV_SET(&change, watch->folder, EVFILT_VNODE, EV_ADD | EV_CLEAR, NOTE_WRITE,
           0, NULL);
    if (kevent(watch->fd, &change, 1, NULL, 0, NULL) < 0)
        return cer_fail_errno(err, errno, "cannot watch %s", path);
    return CER_OK;
}

cer_status
cer_watch_drain(cer_watch *watch, bool *arrived, cer_error *err)
{
    const struct timespec at_once = {0, 0};
    struct kevent event;
    int got;

    *arrived = false;
    for (;;) {
        got = kevent(watch->fd, NULL, 0, &event, 1, &at_once);
        if (got > 0)
            *arrived = true;
        else if (got == 0)
            return CER_OK;
        else if (errno != EINTR)
            return cer_fail_errno(err, errno, "cannot read a watch");
    }
}

#else

static cer_status
begin(cer_watch *watch, const char *path, cer_error *err)
{
    (void)watch;
    return cer_fail_errno(err, ENOSYS, "cannot watch %s", path);
}

cer_status
cer_watch_drain(cer_watch *watch, bool *arrived, cer_error *err)
{
    (void)watch;
    *arrived = false;
    return cer_fail_errno(err, ENOSYS, "cannot read a watch");
}

#endif

cer_status
cer_watch_open(const char *path, cer_watch **out, cer_error *err)
{
    cer_watch *watch = cer_alloc(sizeof *watch);
    cer_status status;

    *out = NULL;
    if (watch == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory watching %s", path);
    watch->fd = watch->folder = -1;
    status = begin(watch, path, err);
    if (status == CER_OK)
        *out = watch;
    else
        cer_watch_close(watch);
    return status;
}

int
cer_watch_fd(const cer_watch *watch)
{
    return watch->fd;
}

void
cer_watch_close(cer_watch *watch)
{
    if (watch == NULL)
        return;
    if (watch->fd >= 0)
        (void)close(watch->fd);
    if (watch->folder >= 0)
        (void)close(watch->folder);
    cer_free(watch);
}
