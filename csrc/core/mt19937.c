#include "mt19937.h"

#include <math.h>
#include <string.h>

enum {
    TABLE = 624,  /* numbers */
    OFFSET = 397, /* between numbers that make a new one */
    /* In the bytes of a state: int32, int32, uint64, and the table as uint64.
     */
    AT_LEFT = 8,
    AT_SEEDED = 12,
    AT_NEXT = 16,
    AT_TABLE = 24
};

typedef struct generator {
    uint32_t left; /* 1 + numbers left in the table */
    uint32_t next; /* the place of the next one */
    uint32_t table[TABLE];
} generator;

#if defined(__x86_64__)
#define HAVE_WIDE 1
#define WIDE __attribute__((target("avx2")))
#else
#define HAVE_WIDE 0
#endif

#define ALWAYS_INLINE __attribute__((always_inline)) static inline

/* --- the generator ---------------------------------------------------------
 */

ALWAYS_INLINE uint32_t
twist(uint32_t one, uint32_t two)
{
    uint32_t mixed =
        (one & UINT32_C(0x80000000)) | (two & UINT32_C(0x7fffffff));

    return mixed >> 1 ^ (two & 1 ? UINT32_C(0x9908b0df) : 0);
}

ALWAYS_INLINE void
make_table(generator *self)
{
    uint32_t *t = self->table;

    for (int i = 0; i < TABLE - OFFSET; i++)
        t[i] = t[i + OFFSET] ^ twist(t[i], t[i + 1]);
    for (int i = TABLE - OFFSET; i < TABLE - 1; i++)
        t[i] = t[i + OFFSET - TABLE] ^ twist(t[i], t[i + 1]);
    t[TABLE - 1] = t[OFFSET - 1] ^ twist(t[TABLE - 1], t[0]);
    self->left = TABLE + 1;
    self->next = 0;
}

ALWAYS_INLINE uint32_t
tempered(uint32_t y)
{
    y ^= y >> 11;
    y ^= y << 7 & UINT32_C(0x9d2c5680);
    y ^= y << 15 & UINT32_C(0xefc60000);
    return y ^ y >> 18;
}

/* Draws up to `most` numbers; returns how many. */
ALWAYS_INLINE size_t
draw(generator *self, uint32_t *out, size_t most)
{
    size_t n;

    if (self->left == 1)
        make_table(self);
    n = self->left - 1 < most ? self->left - 1 : most;
    for (size_t i = 0; i < n; i++)
        out[i] = tempered(self->table[self->next + i]);
    self->left -= (uint32_t)n;
    self->next += (uint32_t)n;
    return n;
}

/* --- Bernoulli draws -------------------------------------------------------
 */

/* PyTorch draws the lower 53 bits of two numbers, the first one on top, and
 * compares them, times 2^-53, with p. */
ALWAYS_INLINE void
run(generator *self, uint64_t below, float *out, size_t n)
{
    uint32_t numbers[TABLE + 1];
    size_t have = 0; /* 1 if a first number has no second one yet */

    while (n != 0) {
        size_t most = n < TABLE / 2 ? 2 * n - have : TABLE, pairs;

        have += draw(self, numbers + have, most);
        pairs = have / 2;
        for (size_t i = 0; i < pairs; i++) {
            uint64_t top = numbers[2 * i] & UINT32_C(0x1fffff);

            out[i] = (top << 32 | numbers[2 * i + 1]) < below ? 1 : 0;
        }
        numbers[0] = numbers[have - 1];
        have %= 2;
        out += pairs;
        n -= pairs;
    }
}

#if HAVE_WIDE
WIDE static void
run_wide(generator *self, uint64_t below, float *out, size_t n)
{
    run(self, below, out, n);
}
#endif

static void
run_narrow(generator *self, uint64_t below, float *out, size_t n)
{
    run(self, below, out, n);
}

static bool
read_state(const uint8_t *state, size_t nbytes, generator *self)
{
    int32_t left, seeded;
    uint64_t next;

    if (nbytes != CER_MT19937_BYTES)
        return false;
    memcpy(&left, state + AT_LEFT, sizeof left);
    memcpy(&seeded, state + AT_SEEDED, sizeof seeded);
    memcpy(&next, state + AT_NEXT, sizeof next);
    /* After seeding, the table has no number left, wherever the next one is. */
    if (seeded != 1 || left < 1 || left > TABLE || next > TABLE ||
        (left > 1 && next != (uint64_t)(TABLE + 1 - left)))
        return false;
    self->left = (uint32_t)left;
    self->next = (uint32_t)next;
    for (size_t i = 0; i < TABLE; i++) {
        uint64_t number;

        memcpy(&number, state + AT_TABLE + i * sizeof number, sizeof number);
        self->table[i] = (uint32_t)number;
    }
    return true;
}

static void
write_state(const generator *self, uint8_t *state)
{
    int32_t left = (int32_t)self->left;
    uint64_t next = self->next;

    memcpy(state + AT_LEFT, &left, sizeof left);
    memcpy(state + AT_NEXT, &next, sizeof next);
    for (size_t i = 0; i < TABLE; i++) {
        uint64_t number = self->table[i];

        memcpy(state + AT_TABLE + i * sizeof number, &number, sizeof number);
    }
}

cer_status
cer_mt19937_bernoulli(void *state, size_t nbytes, double p, float *out,
                      size_t n, cer_error *err)
{
    generator self;
    uint64_t below;

    if (!(p >= 0 && p <= 1))
        return cer_fail(err, CER_INVALID, "%g is not a probability", p);
    if (!read_state(state, nbytes, &self))
        return cer_fail(err, CER_INVALID,
                        "not the state of PyTorch's generator of the CPU");
    below = (uint64_t)ceil(ldexp(p, 53)); /* the integers below p * 2^53 */
#if HAVE_WIDE
    if (__builtin_cpu_supports("avx2"))
        run_wide(&self, below, out, n);
    else
#endif
        run_narrow(&self, below, out, n);
    write_state(&self, state);
    return CER_OK;
}
