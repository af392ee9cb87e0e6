/* library.h -- shared libraries, loaded on demand.
 *
 * They are never closed, because CUDA's libraries do not support it well. */
#ifndef CER_LIBRARY_H
#define CER_LIBRARY_H

#include "base.h"

#define CER_LIBRARY_PATH_BYTES 1024

/* Opens the first library found by one of the `names`: loaded in this process,
 * in a folder, or by the system's loader. Names are in order of preference;
 * both lists end with NULL. If none is found, *out stays NULL, without an
 * error. CER_DEVICE: one exists but does not load. */
cer_status cer_library_open(const char *const *names,
                            const char *const *folders, void **out,
                            cer_error *err);

/* Opens the library at `path`. */
cer_status cer_library_open_path(const char *path, void **out, cer_error *err);

/* Copies a symbol's address to the function pointer at `function`; false if the
 * library lacks it. */
bool cer_library_symbol(void *library, const char *name, void *function);

/* Gets the file that contains a symbol of the library; empty if unknown. */
void cer_library_path(void *library, const char *name,
                      char path[CER_LIBRARY_PATH_BYTES]);

#endif
