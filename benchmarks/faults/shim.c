/* shim.c -- intercepts a program's file calls to the C library.
 *
 * The campaign compiles it, preloads it (LD_PRELOAD) into a run's processes and
 * shares a page of memory with them (CEREBRO_FAULTS_SHIM names its file). It
 * handles only files below the page's `root`, in three ways:
 *
 *   counts   operations that change files, of the classes and in the processes
 *            that the page selects; the countdown-th of them is struck;
 *   strikes  halts the process there (SIGSTOP, after notifying the campaign,
 *            which then kills processes of its choice); or makes this
 *            operation, or all from it on, fail or take long; or lets a disk
 *            fill up after a number of bytes;
 *   keeps    the state after a power loss: a file's bytes as of its last sync,
 *            a folder's names as of the folder's last sync. power.py makes
 *            folders from it.
 *
 * A file's copy is named by its inode. A second link to it in the shadow
 * prevents reuse of the inode. Writes through mappings are not seen: a file
 * changed only in that way, like Cerebro's slots, is never synced here. While
 * the shadow is kept, nothing is really synced. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#undef open
#undef open64
#undef openat
#undef openat64
#undef creat

enum {
    CREATE = 1,
    WRITE = 2,
    RESIZE = 4,
    RENAME = 8,
    UNLINK = 16,
    FOLDER = 32,
    SYNC = 64
};
enum { COORDINATOR = 1, WORKER = 2 };
enum { NOTHING, HALT, FAIL_ONCE, FAIL_ON, SHORT, SLOW, LIE };

/* The shared page; shim.py has the same layout. */
struct control {
    _Atomic uint32_t classes; /* operations that count */
    _Atomic uint32_t roles;   /* processes that count */
    _Atomic uint32_t action;
    _Atomic uint32_t error;    /* errno of failures */
    _Atomic uint32_t delay_us; /* of slow operations */
    _Atomic uint32_t struck;   /* strikes so far */
    _Atomic uint32_t shadowed; /* whether the shadow is kept */
    _Atomic uint32_t trouble;  /* errors of the shadow */
    _Atomic int64_t countdown;
    _Atomic int64_t room; /* free bytes of the disk; -1: no limit */
    char root[1024];
    char shadow[1024];
    char events[1024];
};

static struct control *control;
static uint32_t role;

#define REAL(result, name, ...)                                                \
    static result (*real)(__VA_ARGS__);                                        \
    if (real == NULL)                                                          \
    *(void **)&real = dlsym(RTLD_NEXT, #name)

static int
raw_open(const char *path, int flags, int mode)
{
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, mode);
}

static void
raw_close(int fd)
{
    (void)syscall(SYS_close, fd);
}

__attribute__((constructor)) static void
begin(void)
{
    const char *path = getenv("CEREBRO_FAULTS_SHIM");
    char line[4096];
    ssize_t n = 0;
    void *page;
    int fd = path == NULL ? -1 : raw_open(path, O_RDWR, 0);

    if (fd < 0)
        return;
    page =
        mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    raw_close(fd);
    if (page == MAP_FAILED)
        return;
    fd = raw_open("/proc/self/cmdline", O_RDONLY, 0);
    if (fd >= 0) {
        n = (ssize_t)syscall(SYS_read, fd, line, sizeof line);
        raw_close(fd);
    }
    role = n > 0 && memmem(line, (size_t)n, "cerebro._worker", 15) != NULL
               ? WORKER
               : COORDINATOR;
    control = page;
}

/* --- which files ---------------------------------------------------------- */

static int
below_root(const char *path)
{
    size_t n = strlen(control->root);

    return strncmp(path, control->root, n) == 0 &&
           (path[n] == '/' || path[n] == '\0');
}

/* Gets the path of a descriptor; 0 if it is not below `root`. */
static int
path_of_fd(int fd, char *path)
{
    char link[32];
    ssize_t n;

    (void)snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = (ssize_t)syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (n <= 0)
        return 0;
    path[n] = '\0';
    return below_root(path);
}

/* Gets the absolute path of a name; 0 if it is not below `root`. */
static int
path_of_name(int dirfd, const char *name, char *path)
{
    char folder[PATH_MAX];

    if (name == NULL)
        return 0;
    if (name[0] == '/')
        return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX &&
               below_root(path);
    if (dirfd == AT_FDCWD) {
        if (syscall(SYS_getcwd, folder, sizeof folder) < 0)
            return 0;
    } else {
        if (!path_of_fd(dirfd, folder))
            return 0;
    }
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX &&
           below_root(path);
}

/* --- strikes -------------------------------------------------------------- */

static void
halt(const char *what, const char *path)
{
    char line[512];
    int fd = raw_open(control->events, O_WRONLY, 0);
    int n = snprintf(line, sizeof line, "halt %d %s %s\n", (int)getpid(), what,
                     path + strlen(control->root));

    if (n >= (int)sizeof line)
        n = (int)sizeof line - 1, line[n - 1] = '\n';
    if (fd >= 0) {
        (void)!syscall(SYS_write, fd, line, (size_t)n);
        raw_close(fd);
    }
    (void)syscall(SYS_kill, getpid(), SIGSTOP);
}

/* Counts an operation; returns the errno with which it fails, or 0. Sets
 * *halved if it is to be half done: a write writes half, a sync only pretends.
 */
static int
count(uint32_t class, const char *what, const char *path, int *halved)
{
    uint32_t action = control->action;
    int64_t left;

    if ((control->classes & class) == 0 || (control->roles & role) == 0)
        return 0;
    left = atomic_fetch_sub(&control->countdown, 1);
    if (left > 1 ||
        (left < 1 && action != FAIL_ON && action != SLOW && action != LIE))
        return 0;
    atomic_fetch_add(&control->struck, 1);
    switch (action) {
    case HALT:
        halt(what, path);
        return 0;
    case SLOW: {
        struct timespec time = {.tv_sec = control->delay_us / 1000000,
                                .tv_nsec =
                                    (long)(control->delay_us % 1000000) * 1000};

        (void)syscall(SYS_nanosleep, &time, NULL);
        return 0;
    }
    case SHORT:
    case LIE:
        if (halved != NULL)
            *halved = 1;
        return 0;
    case FAIL_ONCE:
    case FAIL_ON:
        return (int)control->error;
    default:
        return 0;
    }
}

/* Takes bytes from a disk that fills up; returns how many were free. */
static size_t
take_room(size_t wanted)
{
    int64_t room = control->room;

    while (room >= 0) {
        int64_t taken = (uint64_t)room < wanted ? room : (int64_t)wanted;

        if (atomic_compare_exchange_weak(&control->room, &room, room - taken)) {
            if ((size_t)taken < wanted)
                atomic_fetch_add(&control->struck, 1);
            return (size_t)taken;
        }
    }
    return wanted;
}

/* --- the state after a power loss ----------------------------------------- */

static void
trouble(void)
{
    atomic_fetch_add(&control->trouble, 1);
}

/* Opens a record under a temporary name; -1 on failure. */
static int
open_record(const char *kind, unsigned long long inode, char *temporary,
            char *final)
{
    int fd;

    (void)snprintf(final, PATH_MAX, "%s/%s/%llu", control->shadow, kind, inode);
    (void)snprintf(temporary, PATH_MAX, "%s/%s/.%llu-%ld", control->shadow,
                   kind, inode, (long)syscall(SYS_gettid));
    fd = raw_open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0)
        trouble();
    return fd;
}

static void
append(int fd, const void *data, size_t n)
{
    if (syscall(SYS_write, fd, data, n) != (long)n)
        trouble();
}

static void
close_record(int fd, const char *temporary, const char *final)
{
    raw_close(fd);
    if (syscall(SYS_renameat, AT_FDCWD, temporary, AT_FDCWD, final) < 0)
        trouble();
}

/* Gives a file a second name, so that its inode is not reused. A file without
 * any name left is skipped: it cannot be found again. */
static void
hold(int fd, unsigned long long inode)
{
    char link[PATH_MAX], self[32];

    (void)snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    (void)snprintf(link, sizeof link, "%s/inodes/%llu", control->shadow, inode);
    if (syscall(SYS_linkat, AT_FDCWD, self, AT_FDCWD, link, AT_SYMLINK_FOLLOW) <
            0 &&
        errno != EEXIST && errno != ENOENT)
        trouble();
}

static void
keep_file(int fd, unsigned long long inode)
{
    char temporary[PATH_MAX], final[PATH_MAX], self[32], block[65536];
    int from = fd, to = open_record("files", inode, temporary, final);
    off_t at = 0;
    ssize_t n;

    if (to < 0)
        return;
    hold(fd, inode);
    /* Reads through the same descriptor: closing a different one of this file
     * would release the process's locks on it. */
    n = (ssize_t)syscall(SYS_pread64, from, block, sizeof block, at);
    if (n < 0 && errno == EBADF) {
        (void)snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
        from = raw_open(self, O_RDONLY, 0);
        n = (ssize_t)syscall(SYS_pread64, from, block, sizeof block, at);
    }
    for (; n > 0; at += n) {
        append(to, block, (size_t)n);
        n = (ssize_t)syscall(SYS_pread64, from, block, sizeof block, at + n);
    }
    if (n < 0)
        trouble();
    if (from != fd && from >= 0)
        raw_close(from);
    close_record(to, temporary, final);
}

/* Records a folder's entry as it is now; it may be gone already. */
static void
keep_name(int to, int folder, const char *name)
{
    char line[PATH_MAX];
    struct stat info;
    /* O_PATH: closing it releases no locks. */
    int n, fd = (int)syscall(SYS_openat, folder, name,
                             O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);

    if (fd < 0)
        return;
    if (fstat(fd, &info) == 0 && info.st_nlink > 0) {
        if (!S_ISDIR(info.st_mode))
            hold(fd, (unsigned long long)info.st_ino);
        n = snprintf(line, sizeof line, "%c %llu %s\n",
                     S_ISDIR(info.st_mode) ? 'd' : 'f',
                     (unsigned long long)info.st_ino, name);
        append(to, line, (size_t)n);
    }
    raw_close(fd);
}

static void
keep_folder(int fd, unsigned long long inode)
{
    char temporary[PATH_MAX], final[PATH_MAX];
    int to = open_record("folders", inode, temporary, final);
    int again = (int)syscall(SYS_openat, fd, ".",
                             O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *folder = again < 0 ? NULL : fdopendir(again);
    struct dirent *entry;

    if (folder == NULL)
        trouble();
    while (folder != NULL && (entry = readdir(folder)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            keep_name(to, again, entry->d_name);
    if (folder != NULL)
        (void)closedir(folder);
    if (to >= 0)
        close_record(to, temporary, final);
}

/* Returns 1 if a sync has been handled. */
static int
keep(int fd)
{
    struct stat info;

    if (!control->shadowed || fstat(fd, &info) < 0)
        return 0;
    if (S_ISDIR(info.st_mode))
        keep_folder(fd, (unsigned long long)info.st_ino);
    else
        keep_file(fd, (unsigned long long)info.st_ino);
    return 1;
}

/* --- the calls ------------------------------------------------------------ */

static int
may(uint32_t class, const char *what, int dirfd, const char *name)
{
    char path[PATH_MAX];
    int error;

    if (control == NULL || !path_of_name(dirfd, name, path))
        return 1;
    error = count(class, what, path, NULL);
    if (error == 0)
        return 1;
    errno = error;
    return 0;
}

#define MODE(flags, last)                                                      \
    mode_t mode = 0;                                                           \
    if (((flags)&O_CREAT) != 0 || ((flags)&O_TMPFILE) == O_TMPFILE) {          \
        va_list list;                                                          \
        va_start(list, last);                                                  \
        mode = va_arg(list, mode_t);                                           \
        va_end(list);                                                          \
    }

static int
may_open(int dirfd, const char *name, int flags)
{
    int changes =
        (flags & (O_CREAT | O_TRUNC)) != 0 || (flags & O_ACCMODE) != O_RDONLY;

    return !changes || may(CREATE, "open", dirfd, name);
}

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...)                                 \
    {                                                                          \
        MODE(flags, flags)                                                     \
        REAL(int, name, const char *, int, ...);                               \
        return may_open(AT_FDCWD, path, flags) ? real(path, flags, mode) : -1; \
    }
#define OPENAT(name)                                                           \
    int name(int dirfd, const char *path, int flags, ...)                      \
    {                                                                          \
        MODE(flags, flags)                                                     \
        REAL(int, name, int, const char *, int, ...);                          \
        return may_open(dirfd, path, flags) ? real(dirfd, path, flags, mode)   \
                                            : -1;                              \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);

int
__open_2(const char *path, int flags)
{
    REAL(int, __open_2, const char *, int);
    return may_open(AT_FDCWD, path, flags) ? real(path, flags) : -1;
}

int
__open64_2(const char *path, int flags)
{
    REAL(int, __open64_2, const char *, int);
    return may_open(AT_FDCWD, path, flags) ? real(path, flags) : -1;
}

/* Returns how much of a write to do: `n`, less, or -1 with errno. */
static ssize_t
writable(int fd, size_t n)
{
    char path[PATH_MAX];
    int error, halved = 0;
    size_t room;

    if (control == NULL || !path_of_fd(fd, path))
        return (ssize_t)n;
    error = count(WRITE, "write", path, &halved);
    if (error != 0) {
        errno = error;
        return -1;
    }
    if (halved && n > 1)
        n /= 2;
    room = take_room(n);
    if (room == 0 && n > 0) {
        errno = ENOSPC;
        return -1;
    }
    return (ssize_t)room;
}

ssize_t
write(int fd, const void *data, size_t n)
{
    REAL(ssize_t, write, int, const void *, size_t);
    ssize_t m = writable(fd, n);

    return m < 0 ? -1 : real(fd, data, (size_t)m);
}

#define PWRITE(name, offset_t)                                                 \
    ssize_t name(int fd, const void *data, size_t n, offset_t at)              \
    {                                                                          \
        REAL(ssize_t, name, int, const void *, size_t, offset_t);              \
        ssize_t m = writable(fd, n);                                           \
        return m < 0 ? -1 : real(fd, data, (size_t)m, at);                     \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

static int
may_resize(int fd, off64_t length)
{
    char path[PATH_MAX];
    struct stat info;
    int error;

    if (control == NULL || !path_of_fd(fd, path))
        return 0;
    error = count(RESIZE, "resize", path, NULL);
    if (error == 0 && control->room >= 0 && fstat(fd, &info) == 0 &&
        length > info.st_size) {
        size_t more = (size_t)(length - info.st_size);

        if (take_room(more) < more)
            error = ENOSPC;
    }
    return error;
}

#define TRUNCATE(name, offset_t)                                               \
    int name(int fd, offset_t length)                                          \
    {                                                                          \
        REAL(int, name, int, offset_t);                                        \
        int error = may_resize(fd, length);                                    \
        if (error != 0) {                                                      \
            errno = error;                                                     \
            return -1;                                                         \
        }                                                                      \
        return real(fd, length);                                               \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define ALLOCATE(name, offset_t)                                               \
    int name(int fd, offset_t at, offset_t n)                                  \
    {                                                                          \
        REAL(int, name, int, offset_t, offset_t);                              \
        int error = may_resize(fd, at + n);                                    \
        return error != 0 ? error : real(fd, at, n);                           \
    }
ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int
rename(const char *from, const char *to)
{
    REAL(int, rename, const char *, const char *);
    return may(RENAME, "rename", AT_FDCWD, to) ? real(from, to) : -1;
}

int
renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    REAL(int, renameat, int, const char *, int, const char *);
    return may(RENAME, "rename", to_dir, to) ? real(from_dir, from, to_dir, to)
                                             : -1;
}

int
unlink(const char *path)
{
    REAL(int, unlink, const char *);
    return may(UNLINK, "unlink", AT_FDCWD, path) ? real(path) : -1;
}

int
unlinkat(int dirfd, const char *path, int flags)
{
    REAL(int, unlinkat, int, const char *, int);
    return may(UNLINK, "unlink", dirfd, path) ? real(dirfd, path, flags) : -1;
}

int
mkdir(const char *path, mode_t mode)
{
    REAL(int, mkdir, const char *, mode_t);
    return may(FOLDER, "mkdir", AT_FDCWD, path) ? real(path, mode) : -1;
}

int
mkdirat(int dirfd, const char *path, mode_t mode)
{
    REAL(int, mkdirat, int, const char *, mode_t);
    return may(FOLDER, "mkdir", dirfd, path) ? real(dirfd, path, mode) : -1;
}

#define SYNCS(name)                                                            \
    int name(int fd)                                                           \
    {                                                                          \
        char path[PATH_MAX];                                                   \
        REAL(int, name, int);                                                  \
        if (control != NULL && path_of_fd(fd, path)) {                         \
            int lies = 0, error = count(SYNC, "sync", path, &lies);            \
            if (error != 0) {                                                  \
                errno = error;                                                 \
                return -1;                                                     \
            }                                                                  \
            if (lies || keep(fd))                                              \
                return 0;                                                      \
        }                                                                      \
        return real(fd);                                                       \
    }
SYNCS(fsync)
SYNCS(fdatasync)
