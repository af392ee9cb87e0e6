/* library.h -- shared libraries that are looked for when they are needed.
 *
 * Nothing is ever closed again: CUDA's libraries do not take it well. */
#ifndef CER_LIBRARY_H
#define CER_LIBRARY_H

#include "base.h"

#define CER_LIBRARY_PATH_BYTES 1024

/* Opens the first that there is of: a library of one of the `names` that this
 * process has loaded already; one in a folder; one that the system's loader
 * finds. Names are in the order of preference; both lists end with NULL. *out
 * stays NULL, without an error, where there is none. CER_DEVICE: one is there
 * and does not load. */
cer_status cer_library_open(const char *const *names,
                            const char *const *folders, void **out,
                            cer_error *err);

/* Opens the library at `path`. */
cer_status cer_library_open_path(const char *path, void **out, cer_error *err);

/* Copies a symbol's address to the function pointer at `function`; false where
 * the library lacks it. */
bool cer_library_symbol(void *library, const char *name, void *function);

/* The file that a symbol of the library is in; empty where nobody knows. */
void cer_library_path(void *library, const char *name,
                      char path[CER_LIBRARY_PATH_BYTES]);

#endif
