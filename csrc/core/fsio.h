/* fsio.h -- files: whole reads and writes, durability and mappings.
 *
 * Every function names the file in its error and gives CER_IO with the errno
 * of the call that failed. Interrupted calls and short counts are taken up
 * again; a caller sees all of its bytes or an error. */
#ifndef CER_FSIO_H
#define CER_FSIO_H

#include "base.h"

/* Where these functions open a file for reading or writing, its name must be
 * the file's own: a symbolic link in its place is CER_CORRUPT. Folders on the
 * way to it may be links. */

/* Opens a regular file for reading; anything else in its place is an error and
 * never waited for. The caller closes *fd, -1 on failure. */
cer_status cer_fsio_open_read(const char *path, int *fd, cer_error *err);

/* Makes a new file and opens it for writing; CER_IO with EEXIST if there is
 * anything of that name. The caller closes *fd, -1 on failure. */
cer_status cer_fsio_create(const char *path, int *fd, cer_error *err);

/* Opens a file for writing from its beginning, empty: made if it is not there.
 * The caller closes *fd, -1 on failure. */
cer_status cer_fsio_overwrite(const char *path, int *fd, cer_error *err);

/* Makes an open file `size_bytes` long, which is less than it has. */
cer_status cer_fsio_shorten(int fd, size_t size_bytes, const char *path,
                            cer_error *err);

/* Whether `path` is a folder and no symbolic link to one: CER_CORRUPT for any
 * link, CER_IO for what is no folder or is not there. */
cer_status cer_fsio_check_folder(const char *path, cer_error *err);

/* Reads until `len_bytes` are there or the file ends; *got says how many. */
cer_status cer_fsio_read(int fd, void *data, size_t len_bytes, size_t *got,
                         const char *path, cer_error *err);

/* Writes all of it, or fails; what a failed write left behind is undefined. */
cer_status cer_fsio_write(int fd, const void *data, size_t len_bytes,
                          const char *path, cer_error *err);

/* Until this returns CER_OK nothing written is safe from a loss of power.
 * After a failure the file is to be treated as lost: a second try may succeed
 * without the data. */
cer_status cer_fsio_sync(int fd, const char *path, cer_error *err);

/* --- mappings ------------------------------------------------------------ */
typedef struct cer_map {
    uint8_t *data;     /* page-aligned; NULL if the file is empty */
    size_t size_bytes; /* of the file when it was mapped */
    int fd;            /* of a writable mapping; -1 for a read-only one */
} cer_map;

/* What a cer_map is before it is opened and after it is closed. */
#define CER_MAP_INIT                                                           \
    {                                                                          \
        .data = NULL, .size_bytes = 0, .fd = -1                                \
    }

/* Maps a whole regular file, shared and read-only. The descriptor is closed
 * again. Truncating the file later makes access to the lost pages a SIGBUS:
 * mapped files are immutable. */
cer_status cer_fsio_map_read(const char *path, cer_map *out, cer_error *err);

/* Maps a whole file shared and writable, so that other processes see what is
 * written and a death of this one loses nothing. It is made if it is not there
 * and `create` is given, and grown to `size_bytes` if it is smaller (never
 * shrunk), with its blocks reserved: a full disk is an error here and not a
 * SIGBUS later, where a block is overwritten in its place. Copy-on-write file
 * systems (btrfs, ZFS, reflinked files of XFS) take a new block for what is
 * overwritten, so there a full disk can still be a SIGBUS. A file made by a
 * failing call is removed again. */
cer_status cer_fsio_map_write(const char *path, size_t size_bytes, bool create,
                              cer_map *out, cer_error *err);

/* Grows the file of a writable mapping to `size_bytes`, if it is smaller, and
 * maps all of it; with 0 it only takes up what another process has added.
 * `data` may move. On failure file and mapping are as before. */
cer_status cer_fsio_map_grow(cer_map *map, size_t size_bytes, const char *path,
                             cer_error *err);

/* Unmaps and closes; *map is CER_MAP_INIT afterwards. */
void cer_fsio_unmap(cer_map *map);

#endif
