/* Watching a folder: what wakes, what does not, and nothing is left open. */
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>

#include "check.h"
#include "scratch.h"

/* Whether the watch is readable now. */
static bool
readable(const cer_watch *watch)
{
    struct pollfd item = {.fd = cer_watch_fd(watch), .events = POLLIN};

    return poll(&item, 1, 0) == 1 && (item.revents & POLLIN) != 0;
}

static bool
drained(cer_watch *watch)
{
    bool arrived = false;

    CHECK_EQ_INT(cer_watch_drain(watch, &arrived, NULL), CER_OK);
    return arrived;
}

static cer_watch *
open_watch(void)
{
    cer_watch *watch = NULL;

    (void)scratch("");
    CHECK_EQ_INT(cer_watch_open(scratch_folder, &watch, NULL), CER_OK);
    return watch;
}

static void
a_file_renamed_into_the_folder_wakes(void)
{
    cer_watch *watch;

    scratch_write(".one", "x", 1);
    watch = open_watch();
    CHECK(!readable(watch));
    CHECK(!drained(watch));
    CHECK_EQ_INT(rename(scratch(".one"), scratch("one")), 0);
    CHECK(readable(watch));
    CHECK(readable(watch)); /* until it is drained */
    CHECK(drained(watch));
    CHECK(!readable(watch));
    CHECK(!drained(watch));
    cer_watch_close(watch);
}

static void
a_file_written_and_closed_wakes(void)
{
    cer_watch *watch = open_watch();

    scratch_write("two", "x", 1);
    CHECK(readable(watch));
    CHECK(drained(watch));
    cer_watch_close(watch);
}

/* More than one read's worth, and more than the queue may hold. */
static void
one_drain_takes_any_number(void)
{
    cer_watch *watch = open_watch();

    for (int i = 0; i < 20000; i++) {
        if (rename(scratch(i % 2 ? "b" : "two"), scratch(i % 2 ? "two" : "b")))
            CHECK(false);
    }
    CHECK(readable(watch));
    CHECK(drained(watch));
    CHECK(!readable(watch));
    cer_watch_close(watch);
}

static void
reading_and_removing_do_not_wake(void)
{
    cer_watch *watch;
    char byte;

    scratch_write("three", "x", 1);
    watch = open_watch();
    CHECK_EQ_INT(scratch_read("three", &byte, 1), 1);
    CHECK(!readable(watch));
    CHECK_EQ_INT(unlink(scratch("three")), 0);
#ifdef __linux__ /* elsewhere every change of names wakes */
    CHECK(!readable(watch));
#endif
    cer_watch_close(watch);
}

static void
two_watches_of_one_folder_both_wake(void)
{
    cer_watch *first = open_watch(), *second = open_watch();

    scratch_write("four", "x", 1);
    CHECK(drained(first));
    CHECK(readable(second));
    CHECK(drained(second));
    cer_watch_close(first);
    cer_watch_close(second);
}

static void
what_is_no_folder_is_refused(void)
{
    cer_watch *watch = NULL;
    cer_error err = {0};
    int before;

    scratch_write("five", "x", 1);
    before = scratch_descriptors();
    CHECK_EQ_INT(cer_watch_open(scratch("missing"), &watch, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK(strstr(err.message, "missing") != NULL);
    CHECK_EQ_INT(cer_watch_open(scratch("five"), &watch, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOTDIR);
    CHECK(watch == NULL);
    CHECK_EQ_INT(scratch_descriptors(), before);
}

static void
closing_gives_everything_back(void)
{
    int before = scratch_descriptors();
    cer_watch *watch = open_watch();
    int fd = cer_watch_fd(watch);

    CHECK(scratch_descriptors() > before);
    CHECK_EQ_INT(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
    cer_watch_close(watch);
    CHECK_EQ_INT(scratch_descriptors(), before);
    cer_watch_close(NULL);
}

CHECK_MAIN(a_file_renamed_into_the_folder_wakes,
           a_file_written_and_closed_wakes, one_drain_takes_any_number,
           reading_and_removing_do_not_wake,
           two_watches_of_one_folder_both_wake, what_is_no_folder_is_refused,
           closing_gives_everything_back)
