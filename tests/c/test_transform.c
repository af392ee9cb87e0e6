#include "transform.h"

#include <stdlib.h>

#include "check.h"
#include "rng.h"

enum { H = 5, W = 4, C = 3, ROWS = 6 };

static uint8_t images[ROWS][H][W][C];

static const cer_column image_column = {.name = "img",
                                        .dtype = CER_U8,
                                        .ndim = 3,
                                        .shape = {H, W, C},
                                        .row_bytes = H * W * C,
                                        .data = (const uint8_t *)images};

static void
fill_images(void)
{
    uint8_t *at = (uint8_t *)images;

    for (size_t i = 0; i < sizeof images; i++)
        at[i] = (uint8_t)(1 + i % 255);
}

static cer_transform *
new_transform(const cer_column *column, const cer_op *ops, size_t n)
{
    cer_transform *t;
    cer_error err = {0};

    if (cer_transform_new(column, ops, n, &t, &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return t;
}

static void
run(const cer_transform *t, void *dst, const cer_column *column,
    const uint32_t *rows, size_t n, uint64_t epoch)
{
    cer_row_key key = {.seed = 5, .epoch = epoch, .first_row = 100};
    void *scratch = cer_aligned_alloc(cer_transform_scratch_bytes(t) + 1);

    cer_transform_rows(t, dst, column->data, rows, n, &key, scratch);
    cer_aligned_free(scratch);
}

static void
nothing_is_a_copy(void)
{
    static const uint32_t rows[] = {3, 0};
    uint8_t out[2][H * W * C];
    cer_transform *t = new_transform(&image_column, NULL, 0);

    fill_images();
    run(t, out, &image_column, rows, 2, 0);
    CHECK(memcmp(out[0], images[3], sizeof out[0]) == 0);
    CHECK(memcmp(out[1], images[0], sizeof out[1]) == 0);
    cer_transform_free(t);
}

static void
channels_come_first(void)
{
    static const uint32_t rows[] = {1, 4};
    const cer_op ops[] = {{.kind = CER_OP_TO_CHW},
                          {.kind = CER_OP_SCALE, .value = 2}};
    float out[2][C][H][W];
    cer_transform *t = new_transform(&image_column, ops, 2);
    const cer_row_type *type = cer_transform_output(t);

    CHECK_EQ_INT(type->shape[0], C);
    CHECK_EQ_INT(type->shape[1], H);
    CHECK_EQ_INT(type->shape[2], W);
    CHECK_EQ_INT(type->dtype, CER_F32);
    run(t, out, &image_column, rows, 2, 0);
    for (int i = 0; i < 2; i++)
        for (int y = 0; y < H; y++)
            for (int x = 0; x < W; x++)
                for (int c = 0; c < C; c++)
                    CHECK(out[i][c][y][x] == 2.0f * images[rows[i]][y][x][c]);
    cer_transform_free(t);
}

/* The moves of one row, drawn as defined in transform.h. */
typedef struct drawn {
    int top, left;
    bool mirrored;
} drawn;

static drawn
draw(uint32_t row, uint64_t epoch, int room_y, int room_x, int padding)
{
    cer_rng rng;
    drawn d;

    cer_rng_seed(&rng, 5, CER_RNG_TRANSFORM, epoch, 100 + row);
    d.top = (int)cer_rng_below(&rng, (uint64_t)room_y + 1) - padding;
    d.left = (int)cer_rng_below(&rng, (uint64_t)room_x + 1) - padding;
    d.mirrored = cer_rng_double(&rng) < 0.5;
    return d;
}

/* Crop with padding, flip and channels first, in any element type, with value
 * changes before or after the padding: compared with the plain definition. */
static void
check_moves(cer_dtype dtype, bool scale_first, bool chw, uint64_t epoch)
{
    enum { OH = 6, OW = 3, PAD = 2 };
    const cer_op crop = {.kind = CER_OP_CROP,
                         .size = {OH, OW},
                         .padding = {PAD, PAD},
                         .random = true};
    const cer_op shift = {.kind = CER_OP_NORMALIZE,
                          .mean = (const double[]){10, 20, 30},
                          .std = (const double[]){1, 2, 4},
                          .n = 3};
    cer_op ops[4] = {scale_first ? shift : crop,
                     scale_first ? crop : shift,
                     {.kind = CER_OP_FLIP, .value = 0.5},
                     {.kind = CER_OP_TO_CHW}};
    static const uint32_t rows[ROWS] = {5, 1, 0, 2, 2, 4};
    int16_t wide[ROWS][H][W][C];
    cer_column column = image_column;
    cer_transform *t;
    float out[ROWS][OH * OW * C];

    for (size_t i = 0; i < sizeof images; i++)
        ((int16_t *)wide)[i] = ((uint8_t *)images)[i];
    if (dtype == CER_I16) {
        column.dtype = CER_I16;
        column.row_bytes *= 2;
        column.data = (const uint8_t *)wide;
    }
    t = new_transform(&column, ops, chw ? 4 : 3);
    run(t, out, &column, rows, ROWS, epoch);
    for (size_t i = 0; i < ROWS; i++) {
        drawn d = draw(rows[i], epoch, H + 2 * PAD - OH, W + 2 * PAD - OW, PAD);

        for (int p = 0; p < OH * OW * C; p++) {
            int y = p / (OW * C), x = p / C % OW, c = p % C;
            int sy = y + d.top, sx = (d.mirrored ? OW - 1 - x : x) + d.left;
            bool inside = sy >= 0 && sy < H && sx >= 0 && sx < W;
            float v = inside ? images[rows[i]][sy][sx][c] : 0.0f;
            int at = chw ? (c * OH + y) * OW + x : p;

            if (inside || !scale_first)
                v = (v - (float)shift.mean[c]) / (float)shift.std[c];
            CHECK(out[i][at] == v);
        }
    }
    cer_transform_free(t);
}

static void
images_move(void)
{
    fill_images();
    for (uint64_t epoch = 0; epoch < 4; epoch++) {
        for (int k = 0; k < 4; k++) {
            check_moves(CER_U8, (k & 1) != 0, (k & 2) != 0, epoch);
            check_moves(CER_I16, (k & 1) != 0, (k & 2) != 0, epoch);
        }
    }
}

/* Two crops that pad, with a value change between them: the later padding
 * covers the earlier one. A crop with nothing of the image is all padding.
 */
static void
paddings_lie_over_each_other(void)
{
    const double mean = -1, std = 1;
    const cer_op ops[] = {
        {.kind = CER_OP_CROP, .size = {4, 4}, .padding = {1, 1}},
        {.kind = CER_OP_NORMALIZE, .mean = &mean, .std = &std, .n = 1},
        {.kind = CER_OP_CROP, .size = {6, 6}, .padding = {1, 1}},
        {.kind = CER_OP_FLIP, .value = 1}};
    static const uint8_t pixels[2][2] = {{10, 20}, {30, 40}};
    static const float expected[6][6] = {
        {0, 0, 0, 0, 0, 0},   {0, 1, 1, 1, 1, 0}, {0, 1, 21, 11, 1, 0},
        {0, 1, 41, 31, 1, 0}, {0, 1, 1, 1, 1, 0}, {0, 0, 0, 0, 0, 0}};
    cer_column column = {.name = "g",
                         .dtype = CER_U8,
                         .ndim = 2,
                         .shape = {2, 2},
                         .row_bytes = 4,
                         .data = (const uint8_t *)pixels};
    const uint32_t row = 0;
    float out[6][6];
    cer_transform *t = new_transform(&column, ops, 4);
    cer_op far[] = {{.kind = CER_OP_CROP, .size = {9, 9}, .padding = {9, 9}},
                    {.kind = CER_OP_CROP,
                     .size = {1, 1},
                     .padding = {0, 0},
                     .random = true},
                    {.kind = CER_OP_FLIP, .value = 1}};

    run(t, out, &column, &row, 1, 0);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    cer_transform_free(t);
    t = new_transform(&column, far, 3);
    for (uint64_t epoch = 0; epoch < 40; epoch++) {
        uint8_t one = 99;

        run(t, &one, &column, &row, 1, epoch);
        CHECK(one == 0 || one == 10 || one == 20 || one == 30 || one == 40);
    }
    cer_transform_free(t);
}

static void
short_and_long_rows_go_through_a_chain(void)
{
    static int32_t values[7000 * 2];
    static double out[7000 * 2];
    const cer_op ops[] = {{.kind = CER_OP_CAST, .dtype = CER_F64},
                          {.kind = CER_OP_SCALE, .value = 3}};
    static const size_t lengths[] = {1, 5, 7000};

    for (int i = 0; i < 14000; i++)
        values[i] = i;
    for (int k = 0; k < 3; k++) {
        size_t n = lengths[k];
        const uint32_t rows[2] = {1, 0};
        cer_column column = {.name = "v",
                             .dtype = CER_I32,
                             .ndim = 1,
                             .shape = {n},
                             .row_bytes = n * 4,
                             .data = (const uint8_t *)values};
        cer_transform *t = new_transform(&column, ops, 2);

        run(t, out, &column, rows, 2, 0);
        for (size_t i = 0; i < n; i++)
            CHECK(out[i] == 3.0 * (double)(n + i) &&
                  out[n + i] == 3.0 * (double)i);
        cer_transform_free(t);
    }
}

static const int32_t tokens[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
static const int64_t offsets[5] = {0, 3, 3, 8, 9};

static void
ragged_rows_are_padded(void)
{
    const cer_op ops[] = {
        {.kind = CER_OP_CAST, .dtype = CER_I64},
        {.kind = CER_OP_PAD, .value = -7, .max_length = 4, .multiple_of = 3}};
    static const uint32_t rows[] = {2, 1, 0};
    static const int64_t expected[3][6] = {
        {4, 5, 6, 7, -7, -7}, {-7, -7, -7, -7, -7, -7}, {1, 2, 3, -7, -7, -7}};
    static const uint8_t expected_mask[3][6] = {
        {1, 1, 1, 1, 0, 0}, {0, 0, 0, 0, 0, 0}, {1, 1, 1, 0, 0, 0}};
    cer_column column = {.name = "t",
                         .dtype = CER_I32,
                         .ragged = true,
                         .row_bytes = 4,
                         .data = (const uint8_t *)tokens,
                         .offsets = offsets};
    cer_transform *t = new_transform(&column, ops, 2);
    int64_t out[3][6], lengths[3];
    uint8_t mask[3][6];

    CHECK_EQ_INT(cer_transform_length(t, offsets, rows, 3), 6);
    CHECK_EQ_INT(cer_transform_length(t, offsets, rows + 1, 1), 0);
    cer_transform_ragged(t, out, (uint8_t *)mask, lengths, 6, column.data,
                         offsets, rows, 3);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    CHECK(memcmp(mask, expected_mask, sizeof mask) == 0);
    CHECK(lengths[0] == 4 && lengths[1] == 0 && lengths[2] == 3);
    cer_transform_ragged(t, NULL, NULL, lengths, 0, column.data, offsets,
                         rows + 1, 1);
    CHECK_EQ_INT(lengths[0], 0);
    cer_transform_free(t);
}

/* Operations after Pad change the padding, per channel; without Pad it is 0. */
static void
padding_takes_part_in_the_chain(void)
{
    const double mean[2] = {1, 2}, std[2] = {1, 1};
    const cer_op ops[] = {
        {.kind = CER_OP_PAD, .value = 5, .multiple_of = 1},
        {.kind = CER_OP_NORMALIZE, .mean = mean, .std = std, .n = 2}};
    static const float values[6] = {1, 2, 3, 4, 5, 6};
    static const int64_t ends[3] = {0, 1, 3};
    static const uint32_t rows[] = {0, 1};
    static const float padded[8] = {0, 0, 4, 3, 2, 2, 4, 4};
    static const float plain[8] = {0, 0, 0, 0, 2, 2, 4, 4};
    cer_column column = {.name = "t",
                         .dtype = CER_F32,
                         .ragged = true,
                         .ndim = 1,
                         .shape = {2},
                         .row_bytes = 8,
                         .data = (const uint8_t *)values,
                         .offsets = ends};

    for (size_t first = 0; first < 2; first++) {
        cer_transform *t = new_transform(&column, ops + first, 2 - first);
        float out[8];
        uint8_t mask[4];
        int64_t lengths[2];

        cer_transform_ragged(t, out, mask, lengths, 2, column.data, ends, rows,
                             2);
        CHECK(memcmp(out, first == 0 ? padded : plain, sizeof out) == 0);
        cer_transform_free(t);
    }
}

/* Offsets in a mapped file may change after the length is computed; writes must
 * still fit the buffer. */
static void
longer_rows_than_there_is_room_for_are_cut(void)
{
    static const int64_t before[3] = {0, 2, 3}, after[3] = {0, 3, 8};
    static const uint32_t rows[] = {1, 0};
    static const uint8_t expected_mask[4] = {1, 1, 1, 1};
    cer_column column = {.name = "t",
                         .dtype = CER_I32,
                         .ragged = true,
                         .row_bytes = 4,
                         .data = (const uint8_t *)tokens};
    cer_transform *t = new_transform(&column, NULL, 0);
    size_t length = cer_transform_length(t, before, rows, 2);
    size_t bytes = cer_transform_ragged_bytes(t, before, rows, 2);
    int32_t out[5] = {0, 0, 0, 0, -1}, raw[4] = {0, 0, 0, -1};
    uint8_t mask[5] = {0, 0, 0, 0, 7};
    int64_t lengths[3] = {0, 0, -1}, starts[3];

    CHECK_EQ_INT(length, 2);
    CHECK_EQ_INT(bytes, 12);
    cer_transform_ragged(t, out, mask, lengths, length, column.data, after,
                         rows, 2);
    CHECK(out[0] == 4 && out[1] == 5 && out[2] == 1 && out[3] == 2);
    CHECK(memcmp(mask, expected_mask, 4) == 0);
    CHECK(lengths[0] == 2 && lengths[1] == 2);
    CHECK(out[4] == -1 && mask[4] == 7 && lengths[2] == -1);
    cer_transform_gather_ragged(t, (uint8_t *)raw, 0, bytes, starts,
                                column.data, after, rows, 2);
    CHECK(raw[0] == 4 && raw[1] == 5 && raw[2] == 6 && raw[3] == -1);
    CHECK(starts[0] == 0 && starts[1] == 3 && starts[2] == 3);
    cer_transform_free(t);
}

static void
check_refused(const cer_column *column, const cer_op *ops, size_t n,
              const char *what)
{
    cer_transform *t = (cer_transform *)&n;
    cer_error err = {0};

    CHECK_EQ_INT(cer_transform_new(column, ops, n, &t, &err), CER_INVALID);
    CHECK(t == NULL);
    if (strstr(err.message, what) == NULL)
        CHECK_EQ_STR(err.message, what);
}

static void
nonsense_is_refused(void)
{
    static cer_op many[100];
    cer_column flat = {.name = "v", .dtype = CER_F32, .ndim = 1, .shape = {3}};
    cer_column ragged = {.name = "t", .dtype = CER_F32, .ragged = true};
    const cer_op chw = {.kind = CER_OP_TO_CHW};
    const cer_op chw_twice[] = {chw, chw};
    const cer_op pad = {.kind = CER_OP_PAD, .multiple_of = 1};
    const cer_op pad_twice[] = {pad, pad};
    const cer_op pad_zero = {.kind = CER_OP_PAD};
    const cer_op crop = {.kind = CER_OP_CROP, .size = {6, 4}};
    const cer_op huge = {
        .kind = CER_OP_CROP, .size = {1, 1}, .padding = {SIZE_MAX, 0}};
    const cer_op none = {.kind = (cer_op_kind)77};

    flat.row_bytes = 12;
    ragged.row_bytes = 4;
    check_refused(&flat, &chw, 1, "column v: image transforms need rows of");
    check_refused(&ragged, &chw, 1, "column t: image transforms need rows of");
    check_refused(&image_column, chw_twice, 2, "only one ToCHW");
    check_refused(&flat, &pad, 1, "column v: Pad is for ragged columns");
    check_refused(&ragged, pad_twice, 2, "only one Pad");
    check_refused(&ragged, &pad_zero, 1, "multiple_of");
    check_refused(&image_column, &crop, 1, "larger than the image");
    check_refused(&image_column, &huge, 1, "larger than the image");
    check_refused(&flat, &none, 1, "unknown transform");
    check_refused(&flat, many, 100, "too many transforms");
}

CHECK_MAIN(nothing_is_a_copy, channels_come_first, images_move,
           paddings_lie_over_each_other, short_and_long_rows_go_through_a_chain,
           ragged_rows_are_padded, padding_takes_part_in_the_chain,
           longer_rows_than_there_is_room_for_are_cut, nonsense_is_refused)
