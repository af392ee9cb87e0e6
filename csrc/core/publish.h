/* publish.h -- files that become durable under their final names, many at once.
 *
 * A row of the run store names a state; it may be written only when the state
 * survives a loss of power. Files of one commit are published together: the
 * disk is told of all of them before the first is waited for. */
#ifndef CER_PUBLISH_H
#define CER_PUBLISH_H

#include "base.h"

typedef struct cer_publish_file {
    const char *temporary; /* a complete file, not known to be durable */
    const char *path;      /* its name from now on */
} cer_publish_file;

/* Syncs the files, renames them, then syncs the folders they are in; in this
 * order for all together. Renamed files take the place of what has their name.
 *
 * CER_IO names what failed. If a sync of a file failed, nothing was renamed,
 * and that file is lost: a second sync may succeed without the data. If a
 * rename or the sync of a folder failed, some files may have their final name,
 * but none is known to be durable under it. */
cer_status cer_publish(const cer_publish_file *files, size_t n_files,
                       cer_error *err);

#endif
