#include "publish.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fsio.h"

#define MAX_OPEN 64

/* Has the disk begin to write, so that files are not waited for one by one. It
 * promises nothing, and what it cannot do, the sync does. */
static void
begin_writing(int fd)
{
#ifdef SYNC_FILE_RANGE_WRITE
    (void)sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
#else
    (void)fd;
#endif
}

/* Syncs at most MAX_OPEN files. */
static cer_status
sync_files(const cer_publish_file *files, size_t n_files, cer_error *err)
{
    int fds[MAX_OPEN];
    size_t n_open = 0;
    cer_status status = CER_OK;

    for (; status == CER_OK && n_open < n_files; n_open++) {
        status = cer_fsio_open_read(files[n_open].temporary, &fds[n_open], err);
        if (status != CER_OK)
            break;
        if (n_files > 1)
            begin_writing(fds[n_open]);
    }
    for (size_t i = 0; i < n_open; i++) {
        if (status == CER_OK)
            status = cer_fsio_sync(fds[i], files[i].temporary, err);
        (void)close(fds[i]);
    }
    return status;
}

/* Whether two paths are in the same folder. */
static bool
are_neighbours(const char *one, const char *other)
{
    const char *end = strrchr(one, '/'), *other_end = strrchr(other, '/');

    if (end == NULL || other_end == NULL)
        return end == other_end;
    return end - one == other_end - other &&
           memcmp(one, other, (size_t)(end - one)) == 0;
}

static cer_status
sync_folder_of(const char *path, cer_error *err)
{
    char *folder = cer_fsio_parent(path);
    cer_status status;

    if (folder == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory publishing %s", path);
    status = cer_fsio_sync_directory(folder, err);
    cer_free(folder);
    return status;
}

cer_status
cer_publish(const cer_publish_file *files, size_t n_files, cer_error *err)
{
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < n_files; i += MAX_OPEN)
        status = sync_files(
            files + i, n_files - i < MAX_OPEN ? n_files - i : MAX_OPEN, err);
    for (size_t i = 0; status == CER_OK && i < n_files; i++)
        if (rename(files[i].temporary, files[i].path) < 0)
            status = cer_fail_errno(err, errno, "cannot rename %s to %s",
                                    files[i].temporary, files[i].path);
    for (size_t i = 0; status == CER_OK && i < n_files; i++)
        if (i == 0 || !are_neighbours(files[i - 1].path, files[i].path))
            status = sync_folder_of(files[i].path, err);
    return status;
}
