#include "pointwise.h"

#include <math.h>
#include <string.h>

#include "convert.h"
#include "pointwise_impl.h"

enum {
    PIECE = 1024,       /* values that pass through all steps together */
    MAX_TABLES = 64,    /* channels that can have a table */
    VALUE_BYTES_MAX = 8 /* of an intermediate value */
};

cer_status
cer_pointwise_new(cer_dtype from, size_t channels, cer_pointwise **out,
                  cer_error *err)
{
    cer_pointwise *chain = cer_calloc(1, sizeof *chain);

    *out = chain;
    if (chain == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a transform");
    chain->from = from;
    chain->channels = channels == 0 ? 1 : channels;
    return CER_OK;
}

void
cer_pointwise_free(cer_pointwise *chain)
{
    if (chain == NULL)
        return;
    for (size_t i = 0; i < chain->n_steps; i++) {
        cer_free(chain->steps[i].operands);
        cer_free(chain->steps[i].period);
    }
    cer_free(chain->table);
    cer_free(chain);
}

cer_dtype
cer_pointwise_dtype_at(const cer_pointwise *chain, size_t at)
{
    return at == 0 ? chain->from : chain->steps[at - 1].dtype;
}

cer_dtype
cer_pointwise_dtype(const cer_pointwise *chain)
{
    return cer_pointwise_dtype_at(chain, chain->n_steps);
}

size_t
cer_pointwise_steps(const cer_pointwise *chain)
{
    return chain->n_steps;
}

/* --- building ------------------------------------------------------------- */

static cer_status
add(cer_pointwise *chain, cer_step_kind kind, cer_dtype dtype,
    const double *operands, size_t n, cer_error *err)
{
    pointwise_step *s = &chain->steps[chain->n_steps];

    if (chain->n_steps == CER_POINTWISE_STEPS)
        return cer_fail(err, CER_INVALID, "too many transforms in one chain");
    s->kind = kind;
    s->dtype = dtype;
    s->n = n;
    if (n != 0) {
        s->operands = cer_calloc(n, sizeof *operands);
        if (s->operands == NULL)
            return cer_fail(err, CER_NOMEM, "out of memory for a transform");
        memcpy(s->operands, operands, n * sizeof *operands);
    }
    chain->n_steps++;
    return CER_OK;
}

cer_status
cer_pointwise_cast(cer_pointwise *chain, cer_dtype to, cer_error *err)
{
    cer_dtype from = cer_pointwise_dtype(chain);

    if (from == to)
        return CER_OK;
    if (from == CER_C64 || to == CER_C64)
        return cer_fail(err, CER_INVALID, "cannot cast %s to %s",
                        cer_dtype_name(from), cer_dtype_name(to));
    return add(chain, CER_STEP_CAST, to, NULL, 0, err);
}

/* Adds one operation with its conversions: to the type of the computation, and
 * back for half floats. */
static cer_status
add_arithmetic(cer_pointwise *chain, cer_step_kind kind, const double *operands,
               size_t n, cer_error *err)
{
    cer_dtype dtype = cer_pointwise_dtype(chain);
    bool half = dtype == CER_F16 || dtype == CER_BF16;
    cer_dtype computed = dtype == CER_F64 ? CER_F64 : CER_F32;
    cer_status status;

    if ((status = cer_pointwise_cast(chain, computed, err)) != CER_OK)
        return status;
    if ((status = add(chain, kind, computed, operands, n, err)) != CER_OK)
        return status;
    return half ? cer_pointwise_cast(chain, dtype, err) : CER_OK;
}

cer_status
cer_pointwise_scale(cer_pointwise *chain, double factor, cer_error *err)
{
    double inverse = factor == 0 ? 0 : nearbyint(1 / factor);

    if (inverse != 0 && 1 / inverse == factor)
        return add_arithmetic(chain, CER_STEP_DIVIDE, &inverse, 1, err);
    return add_arithmetic(chain, CER_STEP_MULTIPLY, &factor, 1, err);
}

cer_status
cer_pointwise_normalize(cer_pointwise *chain, const double *mean,
                        const double *std, size_t n, cer_error *err)
{
    cer_status status;

    if (n != 1 && n != chain->channels)
        return cer_fail(err, CER_INVALID,
                        "%zu means for values of %zu channels", n,
                        chain->channels);
    status = add_arithmetic(chain, CER_STEP_SUBTRACT, mean, n, err);
    return status != CER_OK
               ? status
               : add_arithmetic(chain, CER_STEP_DIVIDE, std, n, err);
}

static void
repeat(const pointwise_step *s, size_t period)
{
    for (size_t i = 0; i < period; i++) {
        double x = s->operands[i % s->n];

        if (s->dtype == CER_F64)
            ((double *)s->period)[i] = x;
        else
            ((float *)s->period)[i] = (float)x;
    }
}

static void run_steps(const cer_pointwise *chain, size_t first, size_t at,
                      uint8_t *dst, const uint8_t *src, size_t n);

static cer_status
build_table(cer_pointwise *chain, bool channels_differ, cer_error *err)
{
    size_t tables = channels_differ ? chain->channels : 1;
    size_t bytes = cer_dtype_size(cer_pointwise_dtype(chain));
    size_t n = chain->channels * 256;
    cer_status status = CER_NOMEM;
    uint8_t *cases = NULL, *results = NULL;

    if (tables > MAX_TABLES)
        return CER_OK;
    if (!channels_differ)
        n = 256;
    cases = cer_alloc(n);
    results = cer_calloc(n, bytes);
    chain->table = cer_calloc(n, bytes);
    if (cases == NULL || results == NULL || chain->table == NULL)
        goto done;
    /* All cases of all channels at once, with channels adjacent. */
    for (size_t i = 0; i < n; i++)
        cases[i] = (uint8_t)(i / tables);
    run_steps(chain, 0, 0, results, cases, n);
    for (size_t i = 0; i < n; i++)
        memcpy(chain->table + (i % tables * 256 + i / tables) * bytes,
               results + i * bytes, bytes);
    chain->tables = tables;
    status = CER_OK;

done:
    cer_free(cases);
    cer_free(results);
    if (status != CER_OK)
        (void)cer_fail(err, status, "out of memory for a transform's table");
    return status;
}

cer_status
cer_pointwise_finish(cer_pointwise *chain, cer_error *err)
{
    bool channels_differ = false;

    for (size_t i = 0; i < chain->n_steps; i++)
        channels_differ = channels_differ || chain->steps[i].n > 1;
    /* If channels do not differ, any length is valid. */
    chain->period = channels_differ ? (PIECE + chain->channels - 1) /
                                          chain->channels * chain->channels
                                    : PIECE;
    for (size_t i = 0; i < chain->n_steps; i++) {
        pointwise_step *s = &chain->steps[i];

        if (s->kind == CER_STEP_CAST)
            continue;
        s->period = cer_calloc(chain->period, cer_dtype_size(s->dtype));
        if (s->period == NULL)
            return cer_fail(err, CER_NOMEM, "out of memory for a transform");
        repeat(s, chain->period);
    }
    if (chain->n_steps == 0 || cer_dtype_size(chain->from) != 1)
        return CER_OK;
    return build_table(chain, channels_differ, err);
}

/* --- running -------------------------------------------------------------- */

#define ARITHMETIC(type)                                                       \
    static void arithmetic_##type(cer_step_kind kind, type *dst,               \
                                  const type *src, const type *operand,        \
                                  size_t n)                                    \
    {                                                                          \
        if (kind == CER_STEP_SUBTRACT) {                                       \
            for (size_t i = 0; i < n; i++)                                     \
                dst[i] = src[i] - operand[i];                                  \
        } else if (kind == CER_STEP_MULTIPLY) {                                \
            for (size_t i = 0; i < n; i++)                                     \
                dst[i] = src[i] * operand[i];                                  \
        } else {                                                               \
            for (size_t i = 0; i < n; i++)                                     \
                dst[i] = src[i] / operand[i];                                  \
        }                                                                      \
    }
ARITHMETIC(float)
ARITHMETIC(double)

static void
run_step(const pointwise_step *s, cer_dtype from, void *dst, const void *src,
         size_t at, size_t n)
{
    if (s->kind == CER_STEP_CAST)
        cer_convert(s->dtype, dst, from, src, n);
    else if (s->dtype == CER_F64)
        arithmetic_double(s->kind, dst, src, (const double *)s->period + at, n);
    else
        arithmetic_float(s->kind, dst, src, (const float *)s->period + at, n);
}

/* Runs the steps starting at `first`; `at` is the first value's position in the
 * period. */
static void
run_steps(const cer_pointwise *chain, size_t first, size_t at, uint8_t *dst,
          const uint8_t *src, size_t n)
{
    _Alignas(64) uint8_t buffers[2][PIECE * VALUE_BYTES_MAX];
    size_t in = cer_dtype_size(cer_pointwise_dtype_at(chain, first));
    size_t out = cer_dtype_size(cer_pointwise_dtype(chain));
    size_t m;

    for (size_t i = 0; i < n; i += m, at = (at + m) % chain->period) {
        const uint8_t *values = src + i * in;

        m = n - i < PIECE ? n - i : PIECE;
        m = m < chain->period - at ? m : chain->period - at;
        for (size_t k = first; k < chain->n_steps; k++) {
            uint8_t *to =
                k + 1 == chain->n_steps ? dst + i * out : buffers[k & 1];

            run_step(&chain->steps[k], cer_pointwise_dtype_at(chain, k), to,
                     values, at, m);
            values = to;
        }
        if (first == chain->n_steps)
            memcpy(dst + i * out, values, m * out);
    }
}

const void *
cer_pointwise_table(const cer_pointwise *chain, size_t *tables)
{
    *tables = chain->tables;
    return chain->table;
}

#define LOOKUP(type)                                                           \
    static void lookup_##type(void *dst, ptrdiff_t dst_step,                   \
                              const uint8_t *src, ptrdiff_t src_step,          \
                              size_t n, const void *table)                     \
    {                                                                          \
        const type *t = table;                                                 \
        type *d = dst;                                                         \
        if (dst_step == 1 && src_step == 1) {                                  \
            for (size_t i = 0; i < n; i++)                                     \
                d[i] = t[src[i]];                                              \
        } else {                                                               \
            for (size_t i = 0; i < n; i++, d += dst_step, src += src_step)     \
                *d = t[*src];                                                  \
        }                                                                      \
    }
LOOKUP(uint8_t)
LOOKUP(uint16_t)
LOOKUP(uint32_t)
LOOKUP(uint64_t)

void
cer_pointwise_lookup(size_t bytes, void *dst, ptrdiff_t dst_step,
                     const uint8_t *src, ptrdiff_t src_step, size_t n,
                     const void *table)
{
    if (bytes == 4)
        lookup_uint32_t(dst, dst_step, src, src_step, n, table);
    else if (bytes == 2)
        lookup_uint16_t(dst, dst_step, src, src_step, n, table);
    else if (bytes == 8)
        lookup_uint64_t(dst, dst_step, src, src_step, n, table);
    else
        lookup_uint8_t(dst, dst_step, src, src_step, n, table);
}

bool
cer_pointwise_makes_floats(const cer_pointwise *chain)
{
    return chain->n_steps == 1 && chain->steps[0].kind == CER_STEP_CAST &&
           chain->from == CER_U8 && chain->steps[0].dtype == CER_F32;
}

void
cer_pointwise_run(const cer_pointwise *chain, void *dst, const void *src,
                  size_t n)
{
    size_t bytes = cer_dtype_size(cer_pointwise_dtype(chain));
    size_t tables = chain->tables;

    if (chain->table == NULL || cer_pointwise_makes_floats(chain)) {
        run_steps(chain, 0, 0, dst, src, n);
        return;
    }
    for (size_t c = 0; c < tables && c < n; c++)
        cer_pointwise_lookup(bytes, (uint8_t *)dst + c * bytes,
                             (ptrdiff_t)tables, (const uint8_t *)src + c,
                             (ptrdiff_t)tables, (n - c + tables - 1) / tables,
                             chain->table + c * 256 * bytes);
}

void
cer_pointwise_constant(const cer_pointwise *chain, size_t at, double value,
                       void *dst)
{
    cer_dtype dtype = cer_pointwise_dtype_at(chain, at);
    size_t bytes = cer_dtype_size(cer_pointwise_dtype(chain));
    _Alignas(8) uint8_t filled[PIECE * VALUE_BYTES_MAX];
    size_t in = cer_dtype_size(dtype);

    /* int64 and uint64 have values that a double cannot represent, but a pad
     * value is given as a double. complex64 pads only with 0. */
    memset(filled, 0, sizeof filled);
    for (size_t i = 0; i < PIECE && dtype != CER_C64; i++)
        cer_convert(dtype, filled + i * in, CER_F64, &value, 1);
    for (size_t c = 0; c < chain->channels; c += PIECE) {
        size_t m = chain->channels - c < PIECE ? chain->channels - c : PIECE;

        run_steps(chain, at, c % chain->period, (uint8_t *)dst + c * bytes,
                  filled, m);
    }
}
