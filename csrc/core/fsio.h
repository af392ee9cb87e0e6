/* fsio.h -- whole reads and writes of files, durability and mappings.
 *
 * Every function names the file in its error and reports CER_IO with the errno
 * of the failed call. Interrupted calls and short counts are retried; a caller
 * gets all of its bytes or an error. */
#ifndef CER_FSIO_H
#define CER_FSIO_H

#include "base.h"

/* These functions do not open a file through a symbolic link: a link as the
 * last part of the path is CER_CORRUPT. Parent folders may be links. */

/* Opens a regular file for reading; any other kind of file is an error and
 * never blocks. The caller closes *fd, -1 on failure. */
cer_status cer_fsio_open_read(const char *path, int *fd, cer_error *err);

/* Creates a file and opens it for writing; CER_IO with EEXIST if the name is
 * taken. The caller closes *fd, -1 on failure. */
cer_status cer_fsio_create(const char *path, int *fd, cer_error *err);

/* Creates a file, or truncates it to 0 bytes, and opens it for writing. The
 * caller closes *fd, -1 on failure. */
cer_status cer_fsio_overwrite(const char *path, int *fd, cer_error *err);

/* Truncates an open file to `size_bytes`, which is less than its size. */
cer_status cer_fsio_shorten(int fd, size_t size_bytes, const char *path,
                            cer_error *err);

/* Checks that `path` is a folder: CER_CORRUPT for any symbolic link, CER_IO if
 * it is not a folder or is missing. */
cer_status cer_fsio_check_folder(const char *path, cer_error *err);

/* Reads `len_bytes` or to the end of the file; *got is the number read. */
cer_status cer_fsio_read(int fd, void *data, size_t len_bytes, size_t *got,
                         const char *path, cer_error *err);

/* Writes all bytes or fails; after a failure the contents are undefined. */
cer_status cer_fsio_write(int fd, const void *data, size_t len_bytes,
                          const char *path, cer_error *err);

/* Until this returns CER_OK, a power failure may lose written data. After a
 * failure treat the file as lost: a retry may succeed without the data. */
cer_status cer_fsio_sync(int fd, const char *path, cer_error *err);

/* --- mappings ------------------------------------------------------------ */
typedef struct cer_map {
    uint8_t *data;     /* page-aligned; NULL if the file is empty */
    size_t size_bytes; /* of the file when it was mapped */
    int fd;            /* of a writable mapping; -1 for a read-only one */
} cer_map;

/* A cer_map before it is opened and after it is closed. */
#define CER_MAP_INIT                                                           \
    {                                                                          \
        .data = NULL, .size_bytes = 0, .fd = -1                                \
    }

/* Maps a whole regular file, shared and read-only, and closes the descriptor.
 * Truncating the file later makes access to the lost pages a SIGBUS, so mapped
 * files are immutable. */
cer_status cer_fsio_map_read(const char *path, cer_map *out, cer_error *err);

/* Maps a whole file shared and writable: other processes see the writes, and
 * nothing is lost if this process dies. With `create`, a missing file is
 * created. A smaller file is grown to `size_bytes` (never shrunk) with its
 * blocks reserved, so a full disk is an error here and not a SIGBUS later, if
 * blocks are overwritten in place. Copy-on-write file systems (btrfs, ZFS,
 * reflinked files of XFS) allocate a new block for each overwrite, so there a
 * full disk can still cause a SIGBUS. A failing call removes the file it
 * created. */
cer_status cer_fsio_map_write(const char *path, size_t size_bytes, bool create,
                              cer_map *out, cer_error *err);

/* Grows the file of a writable mapping to `size_bytes`, if it is smaller, and
 * maps all of it; 0 only maps the part that another process has added. `data`
 * may move. On failure file and mapping are unchanged. */
cer_status cer_fsio_map_grow(cer_map *map, size_t size_bytes, const char *path,
                             cer_error *err);

/* Unmaps and closes; *map is CER_MAP_INIT afterwards. */
void cer_fsio_unmap(cer_map *map);

#endif
