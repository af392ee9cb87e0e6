/* fuzz.h -- what all fuzzers share.
 *
 * A fuzzer is one function that takes any bytes. It gives them to the core, and
 * where the core takes them for good, it checks what must hold then: FUZZ_CHECK
 * ends the program like an error that a sanitizer has found. */
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

/* Bytes in a block of exactly their size, so that a read past the end is found.
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

/* A refusal has a message, and says what file it is about. */
static inline void
fuzz_check_error(const cer_error *err, const char *name)
{
    FUZZ_CHECK(err->message[0] != '\0');
    FUZZ_CHECK(memchr(err->message, '\0', sizeof err->message) != NULL);
    FUZZ_CHECK(name == NULL || strstr(err->message, name) != NULL);
}

#endif
