/* fuzz.h -- shared by all fuzzers.
 *
 * A fuzzer is one function that takes any bytes and passes them to the core. If
 * the core accepts them, it checks the invariants: FUZZ_CHECK ends the program
 * like a sanitizer error. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition)                                                  \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__,       \
                    #condition);                                               \
            abort();                                                           \
        }                                                                      \
    } while (0)

/* Copies bytes to a block of exactly their size, so that a read past the end is
 * found.
 */
static inline uint8_t *
fuzz_copy(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size == 0 ? 1 : size);

    FUZZ_CHECK(copy != NULL);
    if (size != 0)
        memcpy(copy, data, size);
    return copy;
}

/* An error has a message that names the file. */
static inline void
fuzz_check_error(const cer_error *err, const char *name)
{
    FUZZ_CHECK(err->message[0] != '\0');
    FUZZ_CHECK(memchr(err->message, '\0', sizeof err->message) != NULL);
    FUZZ_CHECK(name == NULL || strstr(err->message, name) != NULL);
}

#endif
