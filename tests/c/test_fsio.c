#include "fsio.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "check.h"
#include "scratch.h"

/* --- injected failures: these replace the C library's ---------------- */
/* Every write is interrupted once, then writes at most this many bytes. */
static size_t short_writes;
static int write_interrupted;
static int fail_write_with;
static bool write_takes_nothing;

ssize_t write(int fd, const void *data, size_t len_bytes);

ssize_t
write(int fd, const void *data, size_t len_bytes)
{
    if (write_takes_nothing)
        return 0;
    if (fail_write_with != 0) {
        errno = fail_write_with;
        return -1;
    }
    if (short_writes != 0) {
        write_interrupted = !write_interrupted;
        if (write_interrupted) {
            errno = EINTR;
            return -1;
        }
        if (len_bytes > short_writes)
            len_bytes = short_writes;
    }
    return (ssize_t)syscall(SYS_write, fd, data, len_bytes);
}

/* A file system that cannot reserve blocks, and the room for zeros written
 * instead.
 */
static int fail_reserve_with;
static long room_for_writes = -1; /* in bytes; -1: enough */

int posix_fallocate(int fd, off_t at, off_t len_bytes);

int
posix_fallocate(int fd, off_t at, off_t len_bytes)
{
    if (fail_reserve_with != 0)
        return fail_reserve_with;
    return syscall(SYS_fallocate, fd, 0, at, len_bytes) < 0 ? errno : 0;
}

ssize_t pwrite(int fd, const void *data, size_t len_bytes, off_t at);

ssize_t
pwrite(int fd, const void *data, size_t len_bytes, off_t at)
{
    if (room_for_writes >= 0 && room_for_writes < (long)len_bytes) {
        errno = ENOSPC;
        return -1;
    }
    if (room_for_writes >= 0)
        room_for_writes -= (long)len_bytes;
    return (ssize_t)syscall(SYS_pwrite64, fd, data, len_bytes, at);
}

/* --- reading and writing -------------------------------------------------- */
typedef struct dribble {
    int fd;
    pthread_t reader;
} dribble;

static void
on_signal(int number)
{
    (void)number;
}

/* Sends 26 letters one at a time, each after a signal to the reader. */
static void *
send_letters(void *arg)
{
    dribble *to = arg;

    for (char letter = 'a'; letter <= 'z'; letter++) {
        (void)pthread_kill(to->reader, SIGUSR1);
        CHECK_EQ_INT(syscall(SYS_write, to->fd, &letter, 1), 1);
    }
    (void)close(to->fd);
    return NULL;
}

static void
reading_takes_up_short_counts_and_interruptions(void)
{
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART */
    char letters[32] = "";
    pthread_t sender;
    int ends[2];
    size_t got = 0;

    CHECK_EQ_INT(sigaction(SIGUSR1, &action, NULL), 0);
    CHECK_EQ_INT(pipe(ends), 0);
    dribble to = {ends[1], pthread_self()};
    CHECK_EQ_INT(pthread_create(&sender, NULL, send_letters, &to), 0);
    CHECK_EQ_INT(cer_fsio_read(ends[0], letters, 20, &got, "pipe", NULL),
                 CER_OK);
    CHECK_EQ_INT(got, 20);
    CHECK_EQ_INT(cer_fsio_read(ends[0], letters + 20, 12, &got, "pipe", NULL),
                 CER_OK);
    CHECK_EQ_INT(got, 6); /* the end */
    CHECK_EQ_STR(letters, "abcdefghijklmnopqrstuvwxyz");
    CHECK_EQ_INT(pthread_join(sender, NULL), 0);
    (void)close(ends[0]);
}

static void
writing_takes_up_short_counts_and_interruptions(void)
{
    char data[100], back[200];
    int fd = -1;

    memset(data, 'x', sizeof data);
    data[99] = 'y';
    CHECK_EQ_INT(cer_fsio_create(scratch("short"), &fd, NULL), CER_OK);
    short_writes = 7;
    CHECK_EQ_INT(cer_fsio_write(fd, data, sizeof data, "short", NULL), CER_OK);
    short_writes = 0;
    (void)close(fd);
    CHECK_EQ_INT(scratch_read("short", back, sizeof back), 100);
    CHECK(memcmp(data, back, sizeof data) == 0);
}

static void
errors_name_the_file_and_keep_the_errno(void)
{
    cer_error err = {0};
    char byte = 0;
    size_t got;
    int fd = open("/dev/full", O_WRONLY);

    if (fd >= 0) { /* Linux */
        CHECK_EQ_INT(cer_fsio_write(fd, &byte, 1, "the/file", &err), CER_IO);
        CHECK_EQ_INT(err.os_errno, ENOSPC);
        CHECK_EQ_STR(err.message,
                     "cannot write the/file: No space left on device");
        (void)close(fd);
    }
    CHECK_EQ_INT(cer_fsio_read(-1, &byte, 1, &got, "the/file", &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EBADF);
    CHECK_EQ_INT(cer_fsio_sync(-1, "the/file", &err), CER_IO);
    CHECK_EQ_STR(err.message,
                 "cannot sync the/file to disk: Bad file descriptor");
}

static void
only_regular_files_are_read(void)
{
    cer_error err = {0};
    int fd = 7;

    CHECK_EQ_INT(mkfifo(scratch("fifo"), 0600), 0);
    CHECK_EQ_INT(cer_fsio_open_read(scratch("fifo"), &fd, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EINVAL);
    CHECK_EQ_INT(fd, -1);
    CHECK_EQ_INT(cer_fsio_open_read(scratch(""), &fd, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EISDIR);
    CHECK_EQ_INT(cer_fsio_open_read(scratch("none"), &fd, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK_EQ_INT(unlink(scratch("fifo")), 0);
}

/* --- mappings ------------------------------------------------------------- */
static void
maps_for_reading(void)
{
    cer_map map = CER_MAP_INIT;
    int descriptors = scratch_descriptors();

    scratch_write("data", "0123456789", 10);
    CHECK_EQ_INT(cer_fsio_map_read(scratch("data"), &map, NULL), CER_OK);
    CHECK_EQ_INT(map.size_bytes, 10);
    CHECK_EQ_INT(map.fd, -1);
    CHECK(memcmp(map.data, "0123456789", 10) == 0);
    CHECK_EQ_INT(scratch_descriptors(), descriptors);
    cer_fsio_unmap(&map);
    CHECK(map.data == NULL && map.size_bytes == 0);
    cer_fsio_unmap(&map); /* a second time does nothing */

    scratch_write("empty", "", 0);
    CHECK_EQ_INT(cer_fsio_map_read(scratch("empty"), &map, NULL), CER_OK);
    CHECK(map.data == NULL && map.size_bytes == 0);
    cer_fsio_unmap(&map);
}

static void
what_cannot_be_mapped_is_named(void)
{
    cer_map map;
    cer_error err = {0};

    CHECK_EQ_INT(cer_fsio_map_read(scratch("none"), &map, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK(strstr(err.message, "/none") != NULL);
    CHECK_EQ_INT(map.fd, -1);
    CHECK_EQ_INT(cer_fsio_map_read(scratch_folder, &map, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EISDIR);
    CHECK_EQ_INT(cer_fsio_map_write(scratch("none"), 10, false, &map, &err),
                 CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK_EQ_INT(cer_fsio_map_write(scratch("no/where"), 10, true, &map, &err),
                 CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK(map.data == NULL && map.fd == -1);
}

static void
writable_mappings_are_shared_and_grow(void)
{
    cer_map one, two;
    char back[8] = "";
    const char *path = scratch("slot");

    CHECK_EQ_INT(cer_fsio_map_write(path, 5, true, &one, NULL), CER_OK);
    CHECK_EQ_INT(one.size_bytes, 5);
    CHECK_EQ_INT(cer_fsio_map_write(path, 0, false, &two, NULL), CER_OK);
    CHECK_EQ_INT(two.size_bytes, 5);
    memcpy(one.data, "hello", 5);
    CHECK(memcmp(two.data, "hello", 5) == 0);
    CHECK_EQ_INT(scratch_read("slot", back, sizeof back), 5);
    CHECK_EQ_STR(back, "hello");

    CHECK_EQ_INT(cer_fsio_map_grow(&one, 100000, path, NULL), CER_OK);
    CHECK_EQ_INT(one.size_bytes, 100000);
    CHECK(memcmp(one.data, "hello", 5) == 0);
    CHECK_EQ_INT(one.data[99999], 0);
    one.data[99999] = 42;
    CHECK_EQ_INT(cer_fsio_map_grow(&two, 0, path, NULL), CER_OK);
    CHECK_EQ_INT(two.size_bytes, 100000);
    CHECK_EQ_INT(two.data[99999], 42);
    CHECK_EQ_INT(cer_fsio_map_grow(&two, 50, path, NULL), CER_OK);
    CHECK_EQ_INT(two.size_bytes, 100000); /* never shrunk */
    cer_fsio_unmap(&one);
    cer_fsio_unmap(&two);

    CHECK_EQ_INT(cer_fsio_map_write(path, 10, true, &one, NULL), CER_OK);
    CHECK_EQ_INT(one.size_bytes, 100000);
    CHECK(memcmp(one.data, "hello", 5) == 0);
    cer_fsio_unmap(&one);
}

static void
an_empty_writable_mapping_can_grow(void)
{
    cer_map map;

    CHECK_EQ_INT(cer_fsio_map_write(scratch("nil"), 0, true, &map, NULL),
                 CER_OK);
    CHECK(map.data == NULL && map.fd >= 0);
    CHECK_EQ_INT(cer_fsio_map_grow(&map, 1, scratch("nil"), NULL), CER_OK);
    map.data[0] = 1;
    cer_fsio_unmap(&map);
}

/* A full disk is an error, not a signal: blocks are allocated before mapping.
 */
static void
a_disk_without_room_is_an_error(void)
{
    struct rlimit old_limit, limit;
    cer_map map;
    cer_error err = {0};
    struct stat info;
    int files;

    CHECK_EQ_INT(cer_fsio_map_write(scratch("kept"), 4096, true, &map, NULL),
                 CER_OK);
    map.data[4095] = 7;
    files = scratch_files();
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ_INT(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    limit = old_limit;
    limit.rlim_cur = 8192;
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_EQ_INT(cer_fsio_map_grow(&map, 16384, scratch("kept"), &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EFBIG);
    CHECK(strstr(err.message, "/kept to 16384 bytes") != NULL);
    CHECK_EQ_INT(map.size_bytes, 4096);
    CHECK_EQ_INT(map.data[4095], 7);
    CHECK_EQ_INT(stat(scratch("kept"), &info), 0);
    CHECK_EQ_INT(info.st_size, 4096);
    cer_fsio_unmap(&map);
    CHECK_EQ_INT(cer_fsio_map_write(scratch("never"), 16384, true, &map, &err),
                 CER_IO);
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
    CHECK_EQ_INT(scratch_files(), files); /* it removed its new file */
    CHECK(map.data == NULL && map.fd == -1);
}

/* Blocks that cannot be reserved are written. */
static void
a_file_system_that_reserves_nothing(void)
{
    static const int codes[] = {EOPNOTSUPP, EINVAL};

    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        const char *path = scratch("written");
        cer_map map;
        cer_error err = {0};
        struct stat info;

        fail_reserve_with = codes[i];
        CHECK_EQ_INT(cer_fsio_map_write(path, 10000, true, &map, NULL), CER_OK);
        CHECK_EQ_INT(stat(path, &info), 0);
        CHECK_EQ_INT(info.st_size, 10000);
        CHECK(info.st_blocks * 512 >= 10000); /* no hole */
        map.data[9999] = 7;
        CHECK_EQ_INT(cer_fsio_map_grow(&map, 20000, path, NULL), CER_OK);
        CHECK_EQ_INT(map.data[9999], 7);
        CHECK_EQ_INT(map.data[19999], 0);
        room_for_writes = 5000;
        CHECK_EQ_INT(cer_fsio_map_grow(&map, 30000, path, &err), CER_IO);
        room_for_writes = -1;
        fail_reserve_with = 0;
        CHECK_EQ_INT(err.os_errno, ENOSPC);
        CHECK_EQ_INT(stat(path, &info), 0);
        CHECK_EQ_INT(info.st_size, 20000); /* the extension is truncated */
        cer_fsio_unmap(&map);
        CHECK_EQ_INT(unlink(path), 0);
    }
}

static void
impossible_sizes_are_refused(void)
{
    cer_map map;
    cer_error err = {0};

    CHECK_EQ_INT(
        cer_fsio_map_write(scratch("huge"), SIZE_MAX, true, &map, &err),
        CER_IO);
    CHECK_EQ_INT(err.os_errno, EFBIG);
    CHECK_EQ_INT(access(scratch("huge"), F_OK), -1);
}

/* --- links ---------------------------------------------------------------- */
static void
check_link_refused(cer_status status, const cer_error *err)
{
    CHECK_EQ_INT(status, CER_CORRUPT);
    CHECK(strstr(err->message, "link is a symbolic link") != NULL);
}

static void
links_are_followed_only_on_the_way(void)
{
    cer_error err = {0};
    cer_map map;
    int fd;

    CHECK_EQ_INT(mkdir(scratch("folder"), 0700), 0);
    scratch_write("folder/file", "text", 4);
    CHECK_EQ_INT(symlink("folder/file", scratch("link")), 0);
    CHECK_EQ_INT(symlink("folder", scratch("folder-link")), 0);
    check_link_refused(cer_fsio_open_read(scratch("link"), &fd, &err), &err);
    CHECK_EQ_INT(fd, -1);
    check_link_refused(cer_fsio_overwrite(scratch("link"), &fd, &err), &err);
    CHECK_EQ_INT(fd, -1);
    check_link_refused(cer_fsio_map_read(scratch("link"), &map, &err), &err);
    check_link_refused(cer_fsio_map_write(scratch("link"), 9, true, &map, &err),
                       &err);
    check_link_refused(cer_fsio_check_folder(scratch("folder-link"), &err),
                       &err);
    CHECK_EQ_INT(cer_fsio_map_read(scratch("folder-link/file"), &map, NULL),
                 CER_OK);
    cer_fsio_unmap(&map);
    CHECK_EQ_INT(cer_fsio_check_folder(scratch("folder"), NULL), CER_OK);
    CHECK_EQ_INT(cer_fsio_check_folder(scratch("folder/file"), &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOTDIR);
    CHECK_EQ_INT(cer_fsio_check_folder(scratch("nowhere"), &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK_EQ_INT(unlink(scratch("folder/file")), 0);
}

static void
overwriting_makes_and_empties(void)
{
    char text[8];
    cer_error err = {0};
    int fd = -1;

    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(cer_fsio_overwrite(scratch("over"), &fd, NULL), CER_OK);
        CHECK_EQ_INT(cer_fsio_write(fd, "abcdef", 6 - (size_t)i, "x", NULL),
                     CER_OK);
        (void)close(fd);
        CHECK_EQ_INT(scratch_read("over", text, sizeof text), 6 - i);
    }
    fd = open(scratch("over"), O_WRONLY);
    CHECK_EQ_INT(cer_fsio_shorten(fd, 2, "over", NULL), CER_OK);
    (void)close(fd);
    CHECK_EQ_INT(scratch_read("over", text, sizeof text), 2);
    CHECK_EQ_INT(cer_fsio_shorten(-1, 2, "over", &err), CER_IO);
    /* Opening a pipe without a reader would block forever. */
    CHECK_EQ_INT(mkfifo(scratch("pipe"), 0600), 0);
    CHECK_EQ_INT(cer_fsio_overwrite(scratch("pipe"), &fd, &err), CER_IO);
    CHECK_EQ_INT(fd, -1);
}

/* A write that returns 0 would be retried forever. */
static void
a_write_of_nothing_is_an_error(void)
{
    cer_error err = {0};

    write_takes_nothing = true;
    CHECK_EQ_INT(cer_fsio_write(1, "x", 1, "file", &err), CER_IO);
    write_takes_nothing = false;
    CHECK_EQ_INT(err.os_errno, EIO);
}

CHECK_MAIN(reading_takes_up_short_counts_and_interruptions,
           writing_takes_up_short_counts_and_interruptions,
           errors_name_the_file_and_keep_the_errno, only_regular_files_are_read,
           maps_for_reading, what_cannot_be_mapped_is_named,
           writable_mappings_are_shared_and_grow,
           an_empty_writable_mapping_can_grow, a_disk_without_room_is_an_error,
           a_file_system_that_reserves_nothing, impossible_sizes_are_refused,
           links_are_followed_only_on_the_way, overwriting_makes_and_empties,
           a_write_of_nothing_is_an_error)
