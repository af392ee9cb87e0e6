/* check.h -- the C core's complete test framework.
 *
 * A test program is a list of functions run by CHECK_MAIN. A failed check
 * prints both sides and its location; the program continues and exits 1 at the
 * end. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static int check_failures;

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            check_failures++;                                                  \
            fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__,   \
                    __func__, #condition);                                     \
        }                                                                      \
    } while (0)

#define CHECK_EQ_INT(left, right)                                              \
    do {                                                                       \
        int64_t left_ = (int64_t)(left), right_ = (int64_t)(right);            \
        if (left_ != right_) {                                                 \
            check_failures++;                                                  \
            fprintf(                                                           \
                stderr,                                                        \
                "%s:%d: %s: %s is %" PRId64 ", expected %s = %" PRId64 "\n",   \
                __FILE__, __LINE__, __func__, #left, left_, #right, right_);   \
        }                                                                      \
    } while (0)

#define CHECK_EQ_HEX(left, right)                                              \
    do {                                                                       \
        uint64_t left_ = (left), right_ = (right);                             \
        if (left_ != right_) {                                                 \
            check_failures++;                                                  \
            fprintf(stderr,                                                    \
                    "%s:%d: %s: %s is 0x%016" PRIx64                           \
                    ", expected 0x%016" PRIx64 "\n",                           \
                    __FILE__, __LINE__, __func__, #left, left_, right_);       \
        }                                                                      \
    } while (0)

#define CHECK_EQ_STR(left, right)                                              \
    do {                                                                       \
        const char *left_ = (left), *right_ = (right);                         \
        if (strcmp(left_, right_) != 0) {                                      \
            check_failures++;                                                  \
            fprintf(stderr, "%s:%d: %s: %s is \"%s\", expected \"%s\"\n",      \
                    __FILE__, __LINE__, __func__, #left, left_, right_);       \
        }                                                                      \
    } while (0)

typedef void (*check_test)(void);

#define CHECK_MAIN(...)                                                        \
    int main(void)                                                             \
    {                                                                          \
        static const check_test tests[] = {__VA_ARGS__};                       \
        size_t n = sizeof tests / sizeof tests[0];                             \
        for (size_t i = 0; i < n; i++)                                         \
            tests[i]();                                                        \
        printf("%s: %zu tests, %d failures\n", __FILE__, n, check_failures);   \
        return check_failures != 0;                                            \
    }

#endif
