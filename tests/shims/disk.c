/* disk.c -- intercepts a process's disk calls (LD_PRELOAD): records their order
 * and makes calls fail.
 *
 * DISK_TRACE   a file that gets one line per call: "fsync /run/states/0.new"
 * DISK_FAIL    "fsync:-wal:2:5": the second fsync of a path that contains "-wal"
 *              fails with errno 5, and every later one; DISK_ARM: only once this
 *              file exists are calls counted
 *
 * fdatasync counts as fsync, pwrite as write, unlinkat as unlink.  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_int calls;

static void
trace(const char *name, const char *path)
{
    const char *file = getenv("DISK_TRACE");
    char line[PATH_MAX + 32];
    int fd, length;

    if (file == NULL)
        return;
    length = snprintf(line, sizeof line, "%s %s\n", name, path);
    fd = open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) {
        (void)!syscall(SYS_write, fd, line, (size_t)length);
        close(fd);
    }
}

/* The errno with which the call must fail, or 0. */
static int
failure(const char *name, const char *path)
{
    const char *rule = getenv("DISK_FAIL"), *arm = getenv("DISK_ARM");
    char call[16], part[256];
    int from, code;

    if (rule == NULL ||
        sscanf(rule, "%15[^:]:%255[^:]:%d:%d", call, part, &from, &code) != 4 ||
        strcmp(call, name) != 0 || strstr(path, part) == NULL ||
        (arm != NULL && access(arm, F_OK) != 0))
        return 0;
    return atomic_fetch_add(&calls, 1) + 1 >= from ? code : 0;
}

/* 0: proceed; -1: errno is set. */
static int
enter(const char *name, const char *path)
{
    int code = failure(name, path);

    trace(code != 0 ? "failed" : name, path);
    if (code != 0)
        errno = code;
    return code != 0 ? -1 : 0;
}

static int
enter_fd(const char *name, int fd)
{
    char link[64], path[PATH_MAX];
    ssize_t length;

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    if (path[0] != '/' ||
        (strncmp(path, "/dev/", 5) == 0 && strncmp(path, "/dev/shm/", 9) != 0))
        return 0;
    return enter(name, path);
}

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

int
fsync(int fd)
{
    return enter_fd("fsync", fd) < 0 ? -1 : NEXT(int (*)(int), "fsync")(fd);
}

int
fdatasync(int fd)
{
    return enter_fd("fsync", fd) < 0 ? -1 : NEXT(int (*)(int), "fdatasync")(fd);
}

ssize_t
write(int fd, const void *data, size_t size)
{
    return enter_fd("write", fd) < 0
               ? -1
               : NEXT(ssize_t(*)(int, const void *, size_t), "write")(fd, data,
                                                                      size);
}

ssize_t
pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    return enter_fd("write", fd) < 0
               ? -1
               : NEXT(ssize_t(*)(int, const void *, size_t, off64_t),
                      "pwrite64")(fd, data, size, offset);
}

ssize_t
pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return pwrite64(fd, data, size, offset);
}

int
rename(const char *from, const char *to)
{
    return enter("rename", from) < 0
               ? -1
               : NEXT(int (*)(const char *, const char *), "rename")(from, to);
}

int
unlink(const char *path)
{
    return enter("unlink", path) < 0
               ? -1
               : NEXT(int (*)(const char *), "unlink")(path);
}
