/* kernels_arith.h -- the arithmetic of the kernels and their references: one
 * source for both. Values are passed as raw bits in a uint64_t.
 *
 * The arithmetic is that of convert.c and pointwise.c, operation by operation.
 * A chain runs in one of two modes: FLOAT, if all its types are float32 or
 * convert to it, and WIDE, in the wide types of convert.c. */
#ifndef CER_KERNELS_ARITH_H
#define CER_KERNELS_ARITH_H

#include "convert_value.h"
#include "dtype_list.h"
#include "kernels_args.h"
#include "rng_draw.h"

typedef enum cer_value_mode {
    CER_VALUES_COPY,
    CER_VALUES_TABLE,
    CER_VALUES_FLOAT,
    CER_VALUES_WIDE
} cer_value_mode;

/* n / d.divisor; n is below 2**31. */
CER_SHARED uint32_t
cer_divide(cer_divider d, uint32_t n)
{
    return (CER_MULHI32(n, d.multiplier) + n) >> d.shift;
}

/* --- raw values ----------------------------------------------------------- */

CER_SHARED uint64_t
cer_raw_load(const uint8_t *at, uint32_t bytes)
{
    if (bytes == 4)
        return *(const uint32_t *)(const void *)at;
    if (bytes == 1)
        return *at;
    if (bytes == 2)
        return *(const uint16_t *)(const void *)at;
    return *(const uint64_t *)(const void *)at;
}

CER_SHARED void
cer_raw_store(uint8_t *at, uint32_t bytes, uint64_t raw)
{
    if (bytes == 4)
        *(uint32_t *)(void *)at = (uint32_t)raw;
    else if (bytes == 2)
        *(uint16_t *)(void *)at = (uint16_t)raw;
    else if (bytes == 1)
        *at = (uint8_t)raw;
    else
        *(uint64_t *)(void *)at = raw;
}

/* --- by float32 ----------------------------------------------------------- */

/* Runs the statement for each of n values, after a single switch. */
#define CER_EACH(statement)                                                    \
    for (uint32_t k = 0; k < n; k++)                                           \
    (statement)

CER_SHARED void
cer_floats_of(uint32_t dtype, const uint64_t *raw, float *x, uint32_t n)
{
    switch (dtype) {
    case CER_BOOL:
        CER_EACH(x[k] = raw[k] != 0 ? 1.0f : 0.0f);
        break;
    case CER_I8:
        CER_EACH(x[k] = (float)(int8_t)raw[k]);
        break;
    case CER_I16:
        CER_EACH(x[k] = (float)(int16_t)raw[k]);
        break;
    case CER_I32:
        CER_EACH(x[k] = (float)(int32_t)raw[k]);
        break;
    case CER_I64:
        CER_EACH(x[k] = (float)(int64_t)raw[k]);
        break;
    case CER_F16:
        CER_EACH(x[k] = cer_from_f16((uint16_t)raw[k]));
        break;
    case CER_BF16:
        CER_EACH(x[k] = cer_from_bf16((uint16_t)raw[k]));
        break;
    case CER_F32:
        CER_EACH(x[k] = cer_bits_float((uint32_t)raw[k]));
        break;
    default: /* unsigned */
        CER_EACH(x[k] = (float)raw[k]);
    }
}

CER_SHARED void
cer_floats_raw(uint32_t dtype, const float *x, uint64_t *raw, uint32_t n)
{
    if (dtype == CER_F16)
        CER_EACH(raw[k] = cer_to_f16(x[k]));
    else if (dtype == CER_BF16)
        CER_EACH(raw[k] = cer_to_bf16(x[k]));
    else
        CER_EACH(raw[k] = cer_float_bits(x[k]));
}

/* Rounds to a type, keeping float32. */
CER_SHARED void
cer_floats_round(uint32_t dtype, float *x, uint32_t n)
{
    if (dtype == CER_F16)
        CER_EACH(x[k] = cer_from_f16(cer_to_f16(x[k])));
    else if (dtype == CER_BF16)
        CER_EACH(x[k] = cer_from_bf16(cer_to_bf16(x[k])));
}

CER_SHARED float
cer_single_operand(const cer_kernel_step *s, const uint8_t *constants,
                   uint32_t channel)
{
    const float *all = (const float *)(const void *)(constants + s->offset);

    return s->per_channel ? all[channel] : s->single;
}

CER_SHARED void
cer_floats_step(const cer_kernel_step *s, const uint8_t *constants,
                const uint32_t *channel, float *x, uint32_t n)
{
    switch (s->kind) {
    case CER_STEP_CAST:
        cer_floats_round(s->dtype, x, n);
        break;
    case CER_STEP_SUBTRACT:
        CER_EACH(x[k] = x[k] - cer_single_operand(s, constants, channel[k]));
        break;
    case CER_STEP_MULTIPLY:
        CER_EACH(x[k] = x[k] * cer_single_operand(s, constants, channel[k]));
        break;
    default:
        CER_EACH(x[k] = x[k] / cer_single_operand(s, constants, channel[k]));
    }
}

/* --- by the wide types ---------------------------------------------------- */

typedef union cer_wide {
    int64_t i;
    uint64_t u;
    double f;
} cer_wide;

CER_SHARED uint32_t
cer_is_float(uint32_t dtype)
{
    return dtype >= CER_F16 && dtype <= CER_F64;
}

CER_SHARED cer_wide
cer_wide_of(uint32_t dtype, uint64_t raw)
{
    cer_wide w;

    switch (dtype) {
    case CER_BOOL:
        w.i = raw != 0;
        break;
    case CER_I8:
        w.i = (int8_t)raw;
        break;
    case CER_I16:
        w.i = (int16_t)raw;
        break;
    case CER_I32:
        w.i = (int32_t)raw;
        break;
    case CER_F16:
        w.f = (double)cer_from_f16((uint16_t)raw);
        break;
    case CER_BF16:
        w.f = (double)cer_from_bf16((uint16_t)raw);
        break;
    case CER_F32:
        w.f = (double)cer_bits_float((uint32_t)raw);
        break;
    default: /* 64 bits, or unsigned */
        w.u = raw;
    }
    return w;
}

CER_SHARED uint64_t
cer_wide_raw(uint32_t dtype, cer_wide w)
{
    switch (dtype) {
    case CER_F16:
        return cer_to_f16((float)w.f);
    case CER_BF16:
        return cer_to_bf16((float)w.f);
    case CER_F32:
        return cer_float_bits((float)w.f);
    default:
        return w.u;
    }
}

/* Wraps a 64-bit integer to a narrower type. */
CER_SHARED int64_t
cer_wrap(uint32_t dtype, uint64_t x)
{
    switch (dtype) {
    case CER_I8:
        return (int8_t)x;
    case CER_I16:
        return (int16_t)x;
    case CER_I32:
        return (int32_t)x;
    case CER_U8:
        return (uint8_t)x;
    case CER_U16:
        return (uint16_t)x;
    case CER_U32:
        return (uint32_t)x;
    default:
        return (int64_t)x;
    }
}

CER_SHARED int64_t
cer_cut(uint32_t dtype, double x)
{
    switch (dtype) {
    case CER_I8:
        return cer_clamp_i8(x);
    case CER_I16:
        return cer_clamp_i16(x);
    case CER_I32:
        return cer_clamp_i32(x);
    case CER_I64:
        return cer_clamp_i64(x);
    case CER_U8:
        return cer_clamp_u8(x);
    case CER_U16:
        return cer_clamp_u16(x);
    case CER_U32:
        return cer_clamp_u32(x);
    default:
        return (int64_t)cer_clamp_u64(x);
    }
}

CER_SHARED cer_wide
cer_wide_cast(uint32_t to, uint32_t from, cer_wide w)
{
    uint32_t is_float = cer_is_float(from);
    cer_wide result;

    if (to == CER_BOOL) {
        result.i = is_float ? w.f != 0 : w.u != 0;
    } else if (to == CER_F64) {
        result.f = is_float ? w.f : from == CER_U64 ? (double)w.u : (double)w.i;
    } else if (cer_is_float(to)) {
        float x = is_float          ? (float)w.f
                  : from == CER_U64 ? (float)w.u
                                    : (float)w.i;

        cer_floats_round(to, &x, 1);
        result.f = (double)x;
    } else {
        result.i = is_float ? cer_cut(to, w.f) : cer_wrap(to, w.u);
    }
    return result;
}

CER_SHARED double
cer_wide_apply(uint32_t kind, uint32_t dtype, double x, double operand)
{
    float y = (float)x, z = (float)operand; /* float32 in a double: exact */

    switch (kind) {
    case CER_STEP_SUBTRACT:
        return dtype == CER_F64 ? x - operand : (double)(y - z);
    case CER_STEP_MULTIPLY:
        return dtype == CER_F64 ? x * operand : (double)(y * z);
    default:
        return dtype == CER_F64 ? x / operand : (double)(y / z);
    }
}

CER_SHARED double
cer_double_operand(const cer_kernel_step *s, const uint8_t *constants,
                   uint32_t channel)
{
    const void *all = constants + s->offset;

    if (s->dtype == CER_F32)
        return cer_single_operand(s, constants, channel);
    return s->per_channel ? ((const double *)all)[channel] : s->operand;
}

/* Long and rarely used: one copy for all kernels. */
CER_SHARED_CALL uint64_t
cer_wide_chain(const cer_kernel_values *v, uint32_t channel, uint64_t raw)
{
    uint32_t dtype = v->from;
    cer_wide w = cer_wide_of(dtype, raw);

    CER_ROLLED
    for (uint32_t i = 0; i < v->n_steps; i++) {
        const cer_kernel_step *s = &v->steps[i];

        if (s->kind == CER_STEP_CAST)
            w = cer_wide_cast(s->dtype, dtype, w);
        else
            w.f = cer_wide_apply(s->kind, s->dtype, w.f,
                                 cer_double_operand(s, v->constants, channel));
        dtype = s->dtype;
    }
    return cer_wide_raw(dtype, w);
}

/* --- transforming n values -------------------------------------------------
 */

/* `table` points to the copy of the tables that is fastest to read. */
CER_SHARED void
cer_values_make(cer_value_mode mode, const cer_kernel_values *v,
                const uint8_t *table, const uint32_t *channel, uint64_t *raw,
                uint32_t n)
{
    float x[CER_KERNEL_GROUP];

    if (mode == CER_VALUES_TABLE) {
        for (uint32_t k = 0; k < n; k++) {
            uint32_t at = (v->tables > 1 ? channel[k] : 0) * 256;

            at = (at + (uint32_t)raw[k]) * v->out_bytes;
            raw[k] = cer_raw_load(table + at, v->out_bytes);
        }
    } else if (mode == CER_VALUES_FLOAT) {
        cer_floats_of(v->from, raw, x, n);
        CER_ROLLED
        for (uint32_t i = 0; i < v->n_steps; i++)
            cer_floats_step(&v->steps[i], v->constants, channel, x, n);
        cer_floats_raw(v->to, x, raw, n);
    } else if (mode == CER_VALUES_WIDE) {
        for (uint32_t k = 0; k < n; k++)
            raw[k] = cer_wide_chain(v, channel[k], raw[k]);
    }
}

/* The padding's value after the chain. */
CER_SHARED uint64_t
cer_fill_raw(const cer_kernel_values *v, uint32_t fill, uint32_t channel)
{
    uint32_t at = fill * v->by_channels.divisor + channel;

    return cer_raw_load(v->constants + v->fills + at * v->out_bytes,
                        v->out_bytes);
}

/* --- crops and flips ------------------------------------------------------ */

/* The draws for an image: each crop's start, as an offset from the result to
 * the source; for each flip, whether it is done, in x. */
typedef struct cer_drawn {
    int32_t y[CER_KERNEL_MOVES], x[CER_KERNEL_MOVES];
} cer_drawn;

CER_SHARED int32_t
cer_draw_offset(const cer_kernel_move *m, uint32_t axis, uint64_t rng[4])
{
    uint32_t room = m->in[axis] + 2 * m->padding[axis] - m->out[axis];
    uint32_t at = room / 2;

    if (m->random)
        at = (uint32_t)cer_draw_below(rng, (uint64_t)room + 1);
    return (int32_t)at - (int32_t)m->padding[axis];
}

/* `number` is the row's in the dataset. */
CER_SHARED_CALL void
cer_draw_moves(const cer_image_args *a, uint64_t number, cer_drawn *out)
{
    uint64_t rng[4] = {0, 0, 0, 0};

    if (a->draws)
        cer_draw_seed(rng, a->seed, CER_RNG_TRANSFORM, a->epoch, number);
    CER_ROLLED
    for (uint32_t i = 0; i < a->n_moves; i++) {
        const cer_kernel_move *m = &a->moves[i];

        if (m->flip) {
            out->x[i] = cer_draw_double(rng) < m->probability;
        } else {
            out->y[i] = cer_draw_offset(m, 0, rng);
            out->x[i] = cer_draw_offset(m, 1, rng);
        }
    }
}

/* Maps a pixel of the result back to the source. Returns 0, or 1 + the fill's
 * index if a crop padded there; the last such crop counts. */
CER_SHARED uint32_t
cer_find_pixel(const cer_image_args *a, const cer_drawn *d, int32_t *y,
               int32_t *x)
{
    CER_ROLLED
    for (uint32_t i = a->n_moves; i-- > 0;) {
        const cer_kernel_move *m = &a->moves[i];

        if (m->flip) {
            if (d->x[i])
                *x = (int32_t)m->in[1] - 1 - *x;
            continue;
        }
        *y += d->y[i];
        *x += d->x[i];
        if ((uint32_t)*y >= m->in[0] || (uint32_t)*x >= m->in[1])
            return m->fill + 1u;
    }
    return 0;
}

#endif
