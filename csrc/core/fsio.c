#include "fsio.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Linux transfers at most 2 GiB - 4 KiB per call; macOS fails at 2 GiB. */
#define MAX_PER_CALL ((size_t)1 << 30)

static int
open_file(const char *path, int flags)
{
    int fd;

    do
        fd = open(path, flags | O_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Reports why a file could not be opened. For a link, O_NOFOLLOW reports "too
 * many links" (with O_DIRECTORY, "not a directory"), which does not help. */
static cer_status
fail_open(cer_error *err, int os_errno, const char *what, const char *path)
{
    if (os_errno == ELOOP)
        return cer_fail(err, CER_CORRUPT,
                        "%s is a symbolic link, which is not followed here: "
                        "replace it with the file itself",
                        path);
    return cer_fail_errno(err, os_errno, "cannot %s %s", what, path);
}

static void
close_fd(int fd)
{
    /* Not retried after EINTR: the descriptor is already closed. fsync has
     * reported any error of the data. */
    if (fd >= 0)
        (void)close(fd);
}

/* The size of an open regular file; `path` for the error. */
static cer_status
regular_size(int fd, const char *path, size_t *size_bytes, cer_error *err)
{
    struct stat info;

    if (fstat(fd, &info) < 0)
        return cer_fail_errno(err, errno, "cannot inspect %s", path);
    if (!S_ISREG(info.st_mode))
        return cer_fail_errno(err, S_ISDIR(info.st_mode) ? EISDIR : EINVAL,
                              "cannot open %s, which is not a regular file",
                              path);
    if ((uint64_t)info.st_size > (uint64_t)PTRDIFF_MAX)
        return cer_fail_errno(err, EFBIG, "cannot open %s", path);
    *size_bytes = (size_t)info.st_size;
    return CER_OK;
}

/* As cer_fsio_open_read, and gets the file's size. Non-blocking, so that a pipe
 * in place of the file does not hang. */
static cer_status
open_regular(const char *path, int *fd, size_t *size_bytes, cer_error *err)
{
    cer_status status;

    *fd = open_file(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
    if (*fd < 0)
        return fail_open(err, errno, "open", path);
    status = regular_size(*fd, path, size_bytes, err);
    if (status != CER_OK) {
        close_fd(*fd);
        *fd = -1;
    }
    return status;
}

cer_status
cer_fsio_open_read(const char *path, int *fd, cer_error *err)
{
    size_t size_bytes;

    return open_regular(path, fd, &size_bytes, err);
}

cer_status
cer_fsio_create(const char *path, int *fd, cer_error *err)
{
    *fd = open_file(path, O_WRONLY | O_CREAT | O_EXCL);
    return *fd < 0 ? cer_fail_errno(err, errno, "cannot create %s", path)
                   : CER_OK;
}

cer_status
cer_fsio_overwrite(const char *path, int *fd, cer_error *err)
{
    size_t size_bytes;
    cer_status status;

    *fd = open_file(path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
    if (*fd < 0)
        return fail_open(err, errno, "create", path);
    status = regular_size(*fd, path, &size_bytes, err);
    if (status == CER_OK && size_bytes > 0)
        status = cer_fsio_shorten(*fd, 0, path, err);
    if (status != CER_OK) {
        close_fd(*fd);
        *fd = -1;
    }
    return status;
}

cer_status
cer_fsio_shorten(int fd, size_t size_bytes, const char *path, cer_error *err)
{
    int result;

    do
        result = ftruncate(fd, (off_t)size_bytes);
    while (result < 0 && errno == EINTR);
    return result < 0 ? cer_fail_errno(err, errno, "cannot truncate %s", path)
                      : CER_OK;
}

cer_status
cer_fsio_check_folder(const char *path, cer_error *err)
{
    struct stat info;

    if (lstat(path, &info) < 0)
        return cer_fail_errno(err, errno, "cannot open folder %s", path);
    if (S_ISLNK(info.st_mode))
        return fail_open(err, ELOOP, "open", path);
    if (!S_ISDIR(info.st_mode))
        return cer_fail_errno(err, ENOTDIR, "cannot open folder %s", path);
    return CER_OK;
}

cer_status
cer_fsio_read(int fd, void *data, size_t len_bytes, size_t *got,
              const char *path, cer_error *err)
{
    size_t done = 0;

    while (done < len_bytes) {
        size_t left = len_bytes - done;
        ssize_t n = read(fd, (char *)data + done,
                         left < MAX_PER_CALL ? left : MAX_PER_CALL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cer_fail_errno(err, errno, "cannot read %s", path);
        if (n == 0)
            break;
        done += (size_t)n;
    }
    *got = done;
    return CER_OK;
}

cer_status
cer_fsio_write(int fd, const void *data, size_t len_bytes, const char *path,
               cer_error *err)
{
    size_t done = 0;

    while (done < len_bytes) {
        size_t left = len_bytes - done;
        ssize_t n = write(fd, (const char *)data + done,
                          left < MAX_PER_CALL ? left : MAX_PER_CALL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) /* 0 would be retried forever */
            return cer_fail_errno(err, n < 0 ? errno : EIO, "cannot write %s",
                                  path);
        done += (size_t)n;
    }
    return CER_OK;
}

static int
sync_fd(int fd)
{
    int result;

    do {
#ifdef F_FULLFSYNC
        /* macOS: fsync stops at the drive's cache. */
        result = fcntl(fd, F_FULLFSYNC);
        if (result < 0 && errno != EINTR)
            result = fsync(fd);
#else
        result = fsync(fd);
#endif
    } while (result < 0 && errno == EINTR);
    return result;
}

cer_status
cer_fsio_sync(int fd, const char *path, cer_error *err)
{
    if (sync_fd(fd) < 0)
        return cer_fail_errno(err, errno, "cannot sync %s to disk", path);
    return CER_OK;
}

/* mmap of a whole file; an empty one has no pages and gives NULL. */
static cer_status
map_all(int fd, size_t size_bytes, int protection, const char *path,
        uint8_t **data, cer_error *err)
{
    void *pages = NULL;

    if (size_bytes != 0)
        pages = mmap(NULL, size_bytes, protection, MAP_SHARED, fd, 0);
    if (pages == MAP_FAILED)
        return cer_fail_errno(err, errno, "cannot map %s", path);
    *data = pages;
    return CER_OK;
}

cer_status
cer_fsio_map_read(const char *path, cer_map *out, cer_error *err)
{
    cer_map map = CER_MAP_INIT;
    int fd;
    cer_status status = open_regular(path, &fd, &map.size_bytes, err);

    *out = map;
    if (status != CER_OK)
        return status;
    status = map_all(fd, map.size_bytes, PROT_READ, path, &map.data, err);
    if (status == CER_OK)
        *out = map;
    close_fd(fd);
    return status;
}

#ifdef __APPLE__
/* No posix_fallocate: ask for the blocks, then set the size. */
static int
reserve(int fd, size_t old_bytes, size_t new_bytes)
{
    fstore_t store = {.fst_flags = F_ALLOCATEALL,
                      .fst_posmode = F_PEOFPOSMODE,
                      .fst_length = (off_t)(new_bytes - old_bytes)};

    if (fcntl(fd, F_PREALLOCATE, &store) < 0 ||
        ftruncate(fd, (off_t)new_bytes) < 0)
        return errno;
    return 0;
}
#else
/* Allocates blocks by writing zeros if the file system cannot reserve them. */
static int
write_zeros(int fd, size_t at, size_t end)
{
    static const char zeros[4096];

    while (at < end) {
        size_t left = end - at;
        ssize_t n = pwrite(fd, zeros, left < sizeof zeros ? left : sizeof zeros,
                           (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : EIO;
        at += (size_t)n;
    }
    return 0;
}

static int
reserve(int fd, size_t old_bytes, size_t new_bytes)
{
    int code;

    do
        code = posix_fallocate(fd, (off_t)old_bytes,
                               (off_t)(new_bytes - old_bytes));
    while (code == EINTR);
    /* E.g. NFS before 4.2: glibc then writes zeros, musl does not. */
    if (code == EOPNOTSUPP || code == EINVAL)
        code = write_zeros(fd, old_bytes, new_bytes);
    return code;
}
#endif

/* Makes the file at least `size_bytes` long; *size_bytes becomes its length. A
 * failure removes the added bytes. */
static cer_status
grow_file(int fd, const char *path, size_t *size_bytes, cer_error *err)
{
    size_t now = 0, wanted = *size_bytes;
    cer_status status = regular_size(fd, path, &now, err);
    int code;

    if (status != CER_OK)
        return status;
    *size_bytes = now;
    if (now >= wanted)
        return CER_OK;
    if (wanted > (size_t)PTRDIFF_MAX)
        return cer_fail_errno(err, EFBIG, "cannot grow %s", path);
    code = reserve(fd, now, wanted);
    if (code != 0) {
        (void)cer_fsio_shorten(fd, now, path, NULL); /* best effort */
        return cer_fail_errno(err, code, "cannot grow %s to %zu bytes", path,
                              wanted);
    }
    *size_bytes = wanted;
    return CER_OK;
}

/* Non-blocking, for files that are not regular; these are rejected later. */
#define MAP_FLAGS (O_RDWR | O_NOFOLLOW | O_NONBLOCK)

cer_status
cer_fsio_map_write(const char *path, size_t size_bytes, bool create,
                   cer_map *out, cer_error *err)
{
    cer_map map = CER_MAP_INIT;
    cer_status status;
    bool created = false;

    *out = map;
    map.fd = open_file(path, MAP_FLAGS);
    if (map.fd < 0 && errno == ENOENT && create) {
        map.fd = open_file(path, MAP_FLAGS | O_CREAT | O_EXCL);
        created = map.fd >= 0;
        if (!created && errno == EEXIST) /* a different process just made it */
            map.fd = open_file(path, MAP_FLAGS);
    }
    if (map.fd < 0)
        return fail_open(err, errno, "open", path);
    status = cer_fsio_map_grow(&map, size_bytes, path, err);
    if (status == CER_OK) {
        *out = map;
    } else {
        close_fd(map.fd);
        if (created)
            (void)unlink(path);
    }
    return status;
}

cer_status
cer_fsio_map_grow(cer_map *map, size_t size_bytes, const char *path,
                  cer_error *err)
{
    uint8_t *data = NULL;
    cer_status status = grow_file(map->fd, path, &size_bytes, err);

    if (status != CER_OK || size_bytes == map->size_bytes)
        return status;
    /* Maps before it unmaps, so that a failure leaves the old mapping. The
     * pages are the file's: nothing is copied. */
    status =
        map_all(map->fd, size_bytes, PROT_READ | PROT_WRITE, path, &data, err);
    if (status != CER_OK)
        return status;
    if (map->data != NULL)
        (void)munmap(map->data, map->size_bytes);
    map->data = data;
    map->size_bytes = size_bytes;
    return CER_OK;
}

void
cer_fsio_unmap(cer_map *map)
{
    if (map->data != NULL)
        (void)munmap(map->data, map->size_bytes);
    close_fd(map->fd);
    *map = (cer_map)CER_MAP_INIT;
}
