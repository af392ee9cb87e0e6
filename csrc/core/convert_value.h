/* convert_value.h -- conversion of single values for convert.c and the kernels:
 * half floats, and floats truncated to integers. */
#ifndef CER_CONVERT_VALUE_H
#define CER_CONVERT_VALUE_H

#include "base_shared.h"

/* --- half floats ---------------------------------------------------------- */

CER_SHARED uint16_t
cer_to_bf16(float x)
{
    uint32_t bits = cer_float_bits(x);

    if (x != x)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

CER_SHARED float
cer_from_bf16(uint16_t x)
{
    return cer_bits_float((uint32_t)x << 16);
}

CER_SHARED uint16_t
cer_to_f16(float x)
{
    uint32_t bits = cer_float_bits(x);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t rest = bits & 0x7fffffff;

    if (rest > 0x7f800000) /* NaN */
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) /* rounds to more than 65504 */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* subnormal: the addition does the rounding */
        float shifted = cer_bits_float(rest) + 0.5f;

        return (uint16_t)(sign |
                          (cer_float_bits(shifted) - cer_float_bits(0.5f)));
    }
    rest += 0xfff + ((rest >> 13) & 1); /* ties to even */
    return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}

CER_SHARED float
cer_from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    uint32_t rest = (uint32_t)(x & 0x7fff) << 13;

    if (rest >= 0x0f800000) /* infinity and NaN */
        return cer_bits_float(sign | (rest + 0x70000000));
    if (rest >= 0x00800000)
        return cer_bits_float(sign | (rest + 0x38000000));
    return cer_bits_float(sign | cer_float_bits((float)(x & 0x3ff) * 0x1p-24f));
}

/* --- floats to integers: truncated, then clamped -------------------------- */

#define CER_CLAMP(name, type, low, max, above)                                 \
    CER_SHARED type cer_clamp_##name(double x)                                 \
    {                                                                          \
        if (!(x > (low)))                                                      \
            return x != x ? 0 : (type)(low);                                   \
        return x >= (above) ? (type)(max) : (type)x;                           \
    }
CER_CLAMP(i8, int8_t, -0x1p7, 127, 0x1p7)
CER_CLAMP(i16, int16_t, -0x1p15, 32767, 0x1p15)
CER_CLAMP(i32, int32_t, -0x1p31, 2147483647, 0x1p31)
CER_CLAMP(i64, int64_t, -0x1p63, 9223372036854775807, 0x1p63)
CER_CLAMP(u8, uint8_t, 0.0, 255, 0x1p8)
CER_CLAMP(u16, uint16_t, 0.0, 65535, 0x1p16)
CER_CLAMP(u32, uint32_t, 0.0, 4294967295u, 0x1p32)
CER_CLAMP(u64, uint64_t, 0.0, 18446744073709551615u, 0x1p64)
#undef CER_CLAMP

#endif
