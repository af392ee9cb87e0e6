#include "publish.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "check.h"
#include "scratch.h"

/* --- the disk: what was asked of it, and what it refuses ------------------ */
#define MAX_CALLS 1000

static char calls[MAX_CALLS + 1]; /* f: a file or r: renamed, d: a folder */
static int n_calls;
static int fail_sync_at, fail_rename_at; /* 1: the first; 0: none */

static void
note(char what)
{
    if (n_calls < MAX_CALLS)
        calls[n_calls++] = what;
    calls[n_calls] = '\0';
}

static int
counts_down(int *left)
{
    return *left > 0 && --*left == 0;
}

int fsync(int fd);

int
fsync(int fd)
{
    struct stat info;

    note(fstat(fd, &info) == 0 && S_ISDIR(info.st_mode) ? 'd' : 'f');
    if (counts_down(&fail_sync_at)) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

int
rename(const char *from, const char *to)
{
    note('r');
    if (counts_down(&fail_rename_at)) {
        errno = EROFS;
        return -1;
    }
    return (int)syscall(SYS_renameat2, -100, from, -100, to, 0);
}

/* --- files ---------------------------------------------------------------- */
#define MAX_FILES 150

static char names[2 * MAX_FILES][512];
static cer_publish_file files[MAX_FILES];

/* Writes `n` files of different contents and forgets earlier calls. */
static void
make_files(size_t n, const char *stem)
{
    for (size_t i = 0; i < n; i++) {
        char name[64];
        uint8_t byte = (uint8_t)i;

        (void)snprintf(name, sizeof name, "%s%zu.new", stem, i);
        scratch_write(name, &byte, 1);
        (void)snprintf(names[2 * i], sizeof names[0], "%s", scratch(name));
        (void)snprintf(name, sizeof name, "%s%zu", stem, i);
        (void)snprintf(names[2 * i + 1], sizeof names[0], "%s", scratch(name));
        files[i] = (cer_publish_file){names[2 * i], names[2 * i + 1]};
    }
    n_calls = 0;
    calls[0] = '\0';
}

static int
exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static void
all_are_synced_then_renamed_then_their_folder_is_synced(void)
{
    size_t n = MAX_FILES;

    make_files(n, "all-");
    CHECK_EQ_INT(cer_publish(files, n, NULL), CER_OK);
    CHECK_EQ_INT(n_calls, 2 * n + 1);
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = 0;

        CHECK_EQ_INT(calls[i], 'f');
        CHECK_EQ_INT(calls[n + i], 'r');
        CHECK(!exists(files[i].temporary));
        CHECK_EQ_INT(scratch_read(strrchr(files[i].path, '/') + 1, &byte, 1),
                     1);
        CHECK_EQ_INT(byte, (uint8_t)i);
    }
    CHECK_EQ_INT(calls[2 * n], 'd');
}

static void
nothing_is_nothing(void)
{
    n_calls = 0;
    CHECK_EQ_INT(cer_publish(NULL, 0, NULL), CER_OK);
    CHECK_EQ_INT(n_calls, 0);
}

static void
every_folder_is_synced(void)
{
    make_files(2, "far-");
    CHECK_EQ_INT(mkdir(scratch("folder"), 0777), 0);
    files[1].path = scratch("folder/name");
    CHECK_EQ_INT(cer_publish(files, 2, NULL), CER_OK);
    CHECK(strcmp(calls, "ffrrdd") == 0);
    CHECK(exists(scratch("folder/name")));
    CHECK_EQ_INT(unlink(scratch("folder/name")), 0);
}

static void
a_file_that_cannot_be_synced_leaves_all_unpublished(void)
{
    cer_error err = {0};

    make_files(100, "sync-");
    fail_sync_at = 70;
    CHECK_EQ_INT(cer_publish(files, 100, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EIO);
    CHECK(strstr(err.message, "sync-69.new") != NULL);
    CHECK_EQ_INT(n_calls, 70); /* what failed is not tried again */
    for (size_t i = 0; i < 100; i++)
        CHECK(exists(files[i].temporary) && !exists(files[i].path));
}

static void
a_file_that_is_missing_is_named(void)
{
    cer_error err = {0};

    make_files(3, "gone-");
    CHECK_EQ_INT(unlink(files[1].temporary), 0);
    CHECK_EQ_INT(cer_publish(files, 3, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK(strstr(err.message, "gone-1.new") != NULL);
    CHECK_EQ_INT(n_calls, 0);
}

static void
a_rename_that_fails_is_named(void)
{
    cer_error err = {0};

    make_files(3, "name-");
    fail_rename_at = 2;
    CHECK_EQ_INT(cer_publish(files, 3, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EROFS);
    CHECK(strstr(err.message, "name-1.new") != NULL);
    CHECK(strcmp(calls, "fffrr") == 0);
}

static void
a_folder_that_cannot_be_synced_is_an_error(void)
{
    cer_error err = {0};

    make_files(3, "folder-");
    fail_sync_at = 4;
    CHECK_EQ_INT(cer_publish(files, 3, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EIO);
    CHECK(strstr(err.message, scratch_folder) != NULL);
}

CHECK_MAIN(all_are_synced_then_renamed_then_their_folder_is_synced,
           nothing_is_nothing, every_folder_is_synced,
           a_file_that_cannot_be_synced_leaves_all_unpublished,
           a_file_that_is_missing_is_named, a_rename_that_fails_is_named,
           a_folder_that_cannot_be_synced_is_an_error)
