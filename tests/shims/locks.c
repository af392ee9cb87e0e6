/* locks.c -- a process's view (LD_PRELOAD) of a file system with odd locks.
 *
 * LOCKS  "granted": every lock is granted to everybody, as over NFS mounted
 * "nolock" a number: every lock fails with this errno  */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

static int
answer(struct flock *lock)
{
    const char *locks = getenv("LOCKS");

    if (strcmp(locks, "granted") != 0) {
        errno = atoi(locks);
        return -1;
    }
    if (lock != NULL)
        lock->l_type = F_UNLCK;
    return 0;
}

static int
call(const char *name, int fd, int command, void *argument)
{
    int (*next)(int, int, ...);

    if (getenv("LOCKS") != NULL) {
        if (command == F_GETLK || command == F_OFD_GETLK)
            return answer(argument);
        if (command == F_SETLK || command == F_SETLKW ||
            command == F_OFD_SETLK || command == F_OFD_SETLKW)
            return answer(NULL);
    }
    *(void **)&next = dlsym(RTLD_NEXT, name);
    return next(fd, command, argument);
}

#define WRAP(name)                                                             \
    int name(int fd, int command, ...)                                         \
    {                                                                          \
        va_list rest;                                                          \
        void *argument;                                                        \
                                                                               \
        va_start(rest, command);                                               \
        argument = va_arg(rest, void *);                                       \
        va_end(rest);                                                          \
        return call(#name, fd, command, argument);                             \
    }

WRAP(fcntl)
WRAP(fcntl64)

int
flock(int fd, int operation)
{
    int (*next)(int, int);

    if (getenv("LOCKS") != NULL)
        return answer(NULL);
    *(void **)&next = dlsym(RTLD_NEXT, "flock");
    return next(fd, operation);
}
