/* watch.h -- a descriptor that becomes readable when a file arrives in a
 * folder.
 *
 * inotify on Linux: a file that was renamed into the folder, or written there
 * and closed. kqueue on macOS and the BSDs: any change of the folder's names.
 * Neither sees what another host does on a network file system. What arrived is
 * not told: whoever is woken looks into the folder. Drain first, look then, and
 * nothing is missed. */
#ifndef CER_WATCH_H
#define CER_WATCH_H

#include "base.h"

typedef struct cer_watch cer_watch;

/* Begins to watch; what is in the folder already does not count. Errors: CER_IO
 * (no such folder, no more watches, no such facility), CER_NOMEM. */
cer_status cer_watch_open(const char *path, cer_watch **out, cer_error *err);

/* To wait on for reading; it is never read or closed by the caller. */
int cer_watch_fd(const cer_watch *watch);

/* Takes note of all that has arrived, without waiting, so that the descriptor
 * is not readable any more; *arrived tells whether there was anything. */
cer_status cer_watch_drain(cer_watch *watch, bool *arrived, cer_error *err);

void cer_watch_close(cer_watch *watch); /* NULL allowed */

#endif
