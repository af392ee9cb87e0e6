/* Each conversion goes through one of three wide types, in pieces that stay in
 * the first-level cache: 13 read loops and 39 write loops replace one loop for
 * each of 169 pairs. uint8 to float32, for images, has a dedicated loop: the
 * wide type would take longer than everything else. */
#include "convert.h"

#include <string.h>

#include "convert_value.h"

enum { PIECE = 512, LINE = 64 };

typedef union wide {
    int64_t i[PIECE];
    uint64_t u[PIECE];
    double f[PIECE];
} wide;

typedef enum wide_kind { WIDE_INT, WIDE_UINT, WIDE_FLOAT } wide_kind;

/* --- reading -------------------------------------------------------------- */

#define LOAD(name, type, member, expression)                                   \
    static void load_##name(wide *w, const void *src, size_t n)                \
    {                                                                          \
        const type *s = src;                                                   \
        for (size_t k = 0; k < n; k++)                                         \
            w->member[k] = (expression);                                       \
    }
LOAD(boolean, uint8_t, i, s[k] != 0)
LOAD(i8, int8_t, i, s[k])
LOAD(i16, int16_t, i, s[k])
LOAD(i32, int32_t, i, s[k])
LOAD(i64, int64_t, i, s[k])
LOAD(u8, uint8_t, i, s[k])
LOAD(u16, uint16_t, i, s[k])
LOAD(u32, uint32_t, i, s[k])
LOAD(u64, uint64_t, u, s[k])
LOAD(f16, uint16_t, f, (double)cer_from_f16(s[k]))
LOAD(bf16, uint16_t, f, (double)cer_from_bf16(s[k]))
LOAD(f32, float, f, (double)s[k])
LOAD(f64, double, f, s[k])

/* --- writing -------------------------------------------------------------- */

#define STORE_AS(name, type, member, expression)                               \
    static void store_##name##_##member(void *dst, const wide *w, size_t n)    \
    {                                                                          \
        type *d = dst;                                                         \
        for (size_t k = 0; k < n; k++)                                         \
            d[k] = (expression);                                               \
    }
#define STORE_INTEGER(name, type)                                              \
    STORE_AS(name, type, i, (type)w->i[k])                                     \
    STORE_AS(name, type, u, (type)w->u[k])                                     \
    STORE_AS(name, type, f, cer_clamp_##name(w->f[k]))
#define STORE_BY(name, type, via)                                              \
    STORE_AS(name, type, i, via(w->i[k]))                                      \
    STORE_AS(name, type, u, via(w->u[k]))                                      \
    STORE_AS(name, type, f, via(w->f[k]))
#define IS_TRUE(x) ((x) != 0)
#define AS_F16(x) cer_to_f16((float)(x))
#define AS_BF16(x) cer_to_bf16((float)(x))
#define AS_F32(x) ((float)(x))
#define AS_F64(x) ((double)(x))
STORE_INTEGER(i8, int8_t)
STORE_INTEGER(i16, int16_t)
STORE_INTEGER(i32, int32_t)
STORE_INTEGER(i64, int64_t)
STORE_INTEGER(u8, uint8_t)
STORE_INTEGER(u16, uint16_t)
STORE_INTEGER(u32, uint32_t)
STORE_INTEGER(u64, uint64_t)
STORE_BY(boolean, uint8_t, IS_TRUE)
STORE_BY(f16, uint16_t, AS_F16)
STORE_BY(bf16, uint16_t, AS_BF16)
STORE_BY(f32, float, AS_F32)
STORE_BY(f64, double, AS_F64)

typedef struct converter {
    wide_kind kind; /* type that `load` writes */
    void (*load)(wide *w, const void *src, size_t n);
    void (*store[3])(void *dst, const wide *w, size_t n);
} converter;

#define CONVERTER(name, kind)                                                  \
    {                                                                          \
        kind, load_##name,                                                     \
        {                                                                      \
            store_##name##_i, store_##name##_u, store_##name##_f               \
        }                                                                      \
    }

static const converter converters[CER_DTYPE_COUNT] = {
    [CER_BOOL] = CONVERTER(boolean, WIDE_INT),
    [CER_I8] = CONVERTER(i8, WIDE_INT),
    [CER_I16] = CONVERTER(i16, WIDE_INT),
    [CER_I32] = CONVERTER(i32, WIDE_INT),
    [CER_I64] = CONVERTER(i64, WIDE_INT),
    [CER_U8] = CONVERTER(u8, WIDE_INT),
    [CER_U16] = CONVERTER(u16, WIDE_INT),
    [CER_U32] = CONVERTER(u32, WIDE_INT),
    [CER_U64] = CONVERTER(u64, WIDE_UINT),
    [CER_F16] = CONVERTER(f16, WIDE_FLOAT),
    [CER_BF16] = CONVERTER(bf16, WIDE_FLOAT),
    [CER_F32] = CONVERTER(f32, WIDE_FLOAT),
    [CER_F64] = CONVERTER(f64, WIDE_FLOAT),
};

void
cer_convert_pixels(float *restrict dst, const uint8_t *restrict src,
                   const uint8_t *next, size_t n)
{
    size_t k = 0;

    for (; k + LINE <= n; k += LINE) {
        __builtin_prefetch(next + k, 0, 2); /* into L2: L1 has no room */
        for (size_t i = k; i < k + LINE; i++)
            dst[i] = (float)src[i];
    }
    for (; k < n; k++)
        dst[k] = (float)src[k];
}

void
cer_convert(cer_dtype to, void *dst, cer_dtype from, const void *src, size_t n)
{
    size_t to_bytes = cer_dtype_size(to), from_bytes = cer_dtype_size(from);
    const converter *reader = &converters[from];
    wide w;

    if (to == from) {
        memcpy(dst, src, n * to_bytes);
        return;
    }
    if (from == CER_U8 && to == CER_F32) {
        cer_convert_pixels(dst, src, src, n);
        return;
    }
    for (size_t k = 0; k < n; k += PIECE) {
        size_t m = n - k < PIECE ? n - k : PIECE;

        reader->load(&w, (const uint8_t *)src + k * from_bytes, m);
        converters[to].store[reader->kind]((uint8_t *)dst + k * to_bytes, &w,
                                           m);
    }
}
