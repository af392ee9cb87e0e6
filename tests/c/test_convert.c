#include "convert.h"

#include <math.h>

#include "check.h"

static uint64_t
bits_from_double(cer_dtype to, double x)
{
    uint64_t bits = 0;

    cer_convert(to, &bits, CER_F64, &x, 1);
    return bits;
}

static double
double_from_bits(cer_dtype from, uint64_t bits)
{
    double x;

    cer_convert(CER_F64, &x, from, &bits, 1);
    return x;
}

static void
float16_has_ieee_values(void)
{
    CHECK_EQ_HEX(bits_from_double(CER_F16, 1.0), 0x3c00);
    CHECK_EQ_HEX(bits_from_double(CER_F16, -2.0), 0xc000);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 65504.0), 0x7bff);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 65519.0), 0x7bff);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 65520.0), 0x7c00);
    CHECK_EQ_HEX(bits_from_double(CER_F16, INFINITY), 0x7c00);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 0x1p-24), 0x0001);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 0x1p-25), 0x0000); /* tie: even */
    CHECK_EQ_HEX(bits_from_double(CER_F16, 0x1.8p-24), 0x0002);
    CHECK_EQ_HEX(bits_from_double(CER_F16, -0.0), 0x8000);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 1 + 0x1p-11), 0x3c00);
    CHECK_EQ_HEX(bits_from_double(CER_F16, 1 + 0x3p-11), 0x3c02);
    CHECK(double_from_bits(CER_F16, 0x0001) == 0x1p-24);
    CHECK(double_from_bits(CER_F16, 0x83ff) == -1023 * 0x1p-24);
    CHECK(double_from_bits(CER_F16, 0xfc00) == -INFINITY);
    CHECK(isnan(double_from_bits(CER_F16, 0x7e00)));
}

/* Round trip of all values. */
static void
half_floats_round_trip(void)
{
    for (uint32_t i = 0; i < 65536; i++) {
        cer_dtype halves[] = {CER_F16, CER_BF16};

        for (int k = 0; k < 2; k++) {
            double x = double_from_bits(halves[k], i);

            if (!isnan(x))
                CHECK_EQ_HEX(bits_from_double(halves[k], x), i);
            else
                CHECK(isnan(double_from_bits(halves[k],
                                             bits_from_double(halves[k], x))));
        }
    }
}

static void
bfloat16_rounds_to_even(void)
{
    CHECK_EQ_HEX(bits_from_double(CER_BF16, 1.0), 0x3f80);
    CHECK_EQ_HEX(bits_from_double(CER_BF16, 1 + 0x1p-8), 0x3f80);
    CHECK_EQ_HEX(bits_from_double(CER_BF16, 1 + 0x3p-8), 0x3f82);
    CHECK_EQ_HEX(bits_from_double(CER_BF16, 3.4e38), 0x7f80);
}

static void
floats_become_the_nearest_integer_in_range(void)
{
    CHECK_EQ_INT((int8_t)bits_from_double(CER_I8, -1.9), -1);
    CHECK_EQ_INT((int8_t)bits_from_double(CER_I8, 127.9), 127);
    CHECK_EQ_INT((int8_t)bits_from_double(CER_I8, 1e9), 127);
    CHECK_EQ_INT((int8_t)bits_from_double(CER_I8, -1e9), -128);
    CHECK_EQ_INT(bits_from_double(CER_U8, -3.0), 0);
    CHECK_EQ_INT(bits_from_double(CER_U8, 255.5), 255);
    CHECK_EQ_INT(bits_from_double(CER_I64, NAN), 0);
    CHECK_EQ_INT(bits_from_double(CER_I64, 1e30), INT64_MAX);
    CHECK_EQ_INT(bits_from_double(CER_I64, -1e30), INT64_MIN);
    CHECK_EQ_HEX(bits_from_double(CER_U64, 1e30), UINT64_MAX);
    CHECK_EQ_HEX(bits_from_double(CER_U64, 0x1p63), UINT64_C(1) << 63);
    CHECK_EQ_INT(bits_from_double(CER_BOOL, 0.5), 1);
    CHECK_EQ_INT(bits_from_double(CER_BOOL, -0.0), 0);
}

static void
integers_wrap_and_widen(void)
{
    int64_t wide[2] = {300, -1};
    uint8_t narrow[2];
    uint64_t large = UINT64_MAX;
    int8_t minus = -5;
    int64_t out;
    float f;
    bool truth;

    cer_convert(CER_U8, narrow, CER_I64, wide, 2);
    CHECK_EQ_INT(narrow[0], 44);
    CHECK_EQ_INT(narrow[1], 255);
    cer_convert(CER_I64, &out, CER_I8, &minus, 1);
    CHECK_EQ_INT(out, -5);
    cer_convert(CER_F32, &f, CER_U64, &large, 1);
    CHECK(f == 0x1p64f);
    cer_convert(CER_BOOL, &truth, CER_I64, &wide[0], 1);
    CHECK(truth);
}

/* More values than fit in one piece, between all types that hold them. */
static void
all_pairs_keep_small_numbers(void)
{
    enum { N = 1300 };
    static uint8_t small[N];
    static uint64_t a[N], b[N];
    static uint8_t back[N];

    for (int i = 0; i < N; i++)
        small[i] = (uint8_t)(i * 7 % 100);
    for (int from = 0; from < CER_DTYPE_COUNT; from++) {
        for (int to = 0; to < CER_DTYPE_COUNT; to++) {
            if (from == CER_C64 || to == CER_C64 || from == CER_BOOL ||
                to == CER_BOOL)
                continue;
            cer_convert((cer_dtype)from, a, CER_U8, small, N);
            cer_convert((cer_dtype)to, b, (cer_dtype)from, a, N);
            cer_convert(CER_U8, back, (cer_dtype)to, b, N);
            CHECK(memcmp(back, small, N) == 0);
        }
    }
}

/* Whole lines and the rest after them, against the general path. */
static void
pixels_become_the_same_floats(void)
{
    enum { N = 200 };
    uint8_t src[N];
    float fast[N + 1], slow[N];

    for (int i = 0; i < N; i++)
        src[i] = (uint8_t)(i * 37);
    for (size_t n = 0; n <= N; n += n < 130 ? 1 : 35) {
        for (size_t i = 0; i < n; i++) {
            int64_t wide = src[i];

            cer_convert(CER_F32, &slow[i], CER_I64, &wide, 1);
        }
        fast[n] = -1;
        cer_convert_pixels(fast, src, src, n);
        CHECK(memcmp(fast, slow, n * sizeof *fast) == 0);
        CHECK(fast[n] == -1);
    }
}

CHECK_MAIN(float16_has_ieee_values, half_floats_round_trip,
           bfloat16_rounds_to_even, floats_become_the_nearest_integer_in_range,
           integers_wrap_and_widen, all_pairs_keep_small_numbers,
           pixels_become_the_same_floats)
