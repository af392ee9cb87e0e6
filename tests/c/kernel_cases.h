/* kernel_cases.h -- reproducible random columns, chains and batches of every
 * kind, the loader's own results for them, and the comparison with other
 * results. The bits must be equal, except that any NaN equals any NaN. */
#ifndef KERNEL_CASES_H
#define KERNEL_CASES_H

#include <stdlib.h>

#include "check.h"
#include "kernels.h"
#include "rng.h"

enum { MAX_OPS = 12, MAX_ROWS = 70, MAX_CHANNELS = 130 };

/* --- cases ---------------------------------------------------------------- */

typedef struct test_case {
    cer_column column;
    size_t column_rows;
    uint8_t *memory; /* of the column, and of offsets */
    int64_t *offsets;
    cer_op ops[MAX_OPS];
    size_t n_ops;
    double mean[MAX_CHANNELS], std[MAX_CHANNELS];
    uint32_t rows[MAX_ROWS];
    uint32_t *numbers; /* of the rows, which are contiguous; NULL: `rows`, of
                          the column */
    size_t n_rows;
    size_t skew; /* values before the first one written */
    cer_row_key key;
} test_case;

/* Allocates exactly this size, so that a sanitizer sees any overrun. */
static inline void *
room(size_t bytes)
{
    void *block = malloc(bytes == 0 ? 1 : bytes);

    if (block == NULL)
        abort();
    return block;
}

static inline size_t
below(cer_rng *rng, size_t bound)
{
    return (size_t)cer_rng_below(rng, bound);
}

static inline cer_dtype
any_dtype(cer_rng *rng)
{
    return (cer_dtype)below(rng, CER_C64);
}

/* Fills with random bits, including the special values. */
static inline void
fill_values(cer_rng *rng, uint8_t *at, size_t n, cer_dtype dtype)
{
    static const float special[] = {
        0.0f,     -0.0f, 1.0f,    -1.5f,   0x1p-149f, 0x1p-24f, 65504.0f,
        65520.0f, 3e38f, 0x1p31f, 0x1p63f, 255.0f,    1e-8f};
    size_t bytes = cer_dtype_size(dtype);

    for (size_t i = 0; i < n; i++, at += bytes) {
        uint64_t bits = cer_rng_next(rng);
        size_t pick = below(rng, 40);

        if (dtype == CER_F32 && pick < sizeof special / sizeof special[0])
            memcpy(at, &special[pick], sizeof special[pick]);
        else if (dtype == CER_BOOL)
            *at = bits & 1;
        else
            memcpy(at, &bits, bytes);
    }
}

static inline void
add_pointwise(cer_rng *rng, test_case *c, size_t channels)
{
    static const double factors[] = {1 / 255.0, 2, 0.1, -1e-3, 0.5};
    cer_op *op = &c->ops[c->n_ops++];

    switch (below(rng, 3)) {
    case 0:
        *op = (cer_op){.kind = CER_OP_CAST, .dtype = any_dtype(rng)};
        break;
    case 1:
        *op = (cer_op){.kind = CER_OP_SCALE, .value = factors[below(rng, 5)]};
        break;
    default:
        *op = (cer_op){.kind = CER_OP_NORMALIZE,
                       .mean = c->mean,
                       .std = c->std,
                       .n = below(rng, 2) || channels > MAX_CHANNELS ||
                                    channels == 0
                                ? 1
                                : channels};
    }
}

static inline void
add_image_op(cer_rng *rng, test_case *c, size_t size[2], bool *chw)
{
    cer_op *op = &c->ops[c->n_ops++];

    switch (below(rng, 5)) {
    case 0:
    case 1:
        *op = (cer_op){.kind = CER_OP_CROP, .random = below(rng, 2)};
        for (int axis = 0; axis < 2; axis++) {
            op->padding[axis] = below(rng, 3);
            op->size[axis] = 1 + below(rng, size[axis] + 2 * op->padding[axis]);
            size[axis] = op->size[axis];
        }
        break;
    case 2:
        if (!*chw) {
            *op = (cer_op){.kind = CER_OP_TO_CHW};
            *chw = true;
            break;
        }
        *op = (cer_op){.kind = CER_OP_FLIP, .value = 0.5};
        break;
    default:
        *op = (cer_op){.kind = CER_OP_FLIP, .value = 0.5};
    }
}

static inline void
choose_shape(cer_rng *rng, cer_column *col, bool image)
{
    static const size_t lengths[] = {0, 1, 2, 3, 4, 7, 8, 39, 64, 300, 4200};

    if (image) {
        bool large = below(rng, 8) == 0, deep = !large && below(rng, 8) == 0;

        col->ndim = 2 + (uint32_t)below(rng, 2);
        for (int i = 0; i < 2; i++)
            col->shape[i] = 1 + below(rng, large ? 90 : 12);
        if (col->ndim == 3)
            col->shape[2] = 1 + below(rng, deep ? 100 : 4);
        return;
    }
    col->ndim = (uint32_t)below(rng, 4);
    for (uint32_t i = 0; i < col->ndim; i++)
        col->shape[i] = lengths[below(rng, col->ragged      ? 6
                                           : col->ndim == 1 ? 11
                                           : i == 0         ? 10
                                                            : 6)];
}

static inline void
choose_ragged(cer_rng *rng, test_case *c)
{
    size_t longest = below(rng, 6) ? 9 : 600, total = 0;

    c->offsets = room((c->column_rows + 1) * sizeof *c->offsets);
    c->offsets[0] = 0;
    for (size_t i = 0; i < c->column_rows; i++) {
        total += below(rng, 4) ? below(rng, longest) : 0;
        c->offsets[i + 1] = (int64_t)total;
    }
    c->column.offsets = c->offsets;
}

/* The column's rows are at the end of their memory, so that an overrun is seen,
 * and begin `skew` values into it, so that not all are aligned. */
static inline void
choose_rows(cer_rng *rng, test_case *c)
{
    cer_column *col = &c->column;
    size_t bytes = cer_dtype_size(col->dtype), n = 1, values;

    for (uint32_t i = 0; i < col->ndim; i++)
        n *= col->shape[i];
    col->row_bytes = n * bytes;
    c->column_rows = 1 + below(rng, 20);
    if (col->ragged)
        choose_ragged(rng, c);
    values =
        n * (col->ragged ? (size_t)c->offsets[c->column_rows] : c->column_rows);
    c->skew = below(rng, 3) ? 0 : below(rng, 5);
    c->memory = room((values + c->skew) * bytes);
    fill_values(rng, c->memory, values + c->skew, col->dtype);
    col->data = c->memory + c->skew * bytes;
    c->n_rows = below(rng, below(rng, 4) ? 6 : MAX_ROWS);
    for (size_t i = 0; i < c->n_rows; i++)
        c->rows[i] = (uint32_t)below(rng, c->column_rows);
}

static inline void
choose_ops(cer_rng *rng, test_case *c, bool image)
{
    cer_column *col = &c->column;
    size_t size[2] = {col->shape[0], col->shape[1]}, n = below(rng, 6);
    size_t channels = col->ndim == 0 ? 1 : col->shape[col->ndim - 1];
    bool chw = false;

    if (image && col->ndim == 2)
        channels = 1;
    if (col->dtype == CER_C64)
        n = image ? n : 0;
    for (size_t i = 0; i < n; i++) {
        if (image && (below(rng, 2) || col->dtype == CER_C64))
            add_image_op(rng, c, size, &chw);
        else
            add_pointwise(rng, c, channels);
    }
    if (col->ragged && below(rng, 2))
        c->ops[c->n_ops++] = (cer_op){.kind = CER_OP_PAD,
                                      .value = (double)below(rng, 2),
                                      .max_length = below(rng, 3) * 4,
                                      .multiple_of = 1 + below(rng, 8)};
}

static inline void
choose(cer_rng *rng, test_case *c, int kind)
{
    memset(c, 0, sizeof *c);
    c->column.name = "c";
    c->column.dtype = below(rng, 3) ? any_dtype(rng) : CER_U8;
    if (below(rng, 15) == 0)
        c->column.dtype = CER_C64;
    c->column.ragged = kind == 2;
    for (size_t i = 0; i < MAX_CHANNELS; i++) {
        c->mean[i] = cer_rng_double(rng);
        c->std[i] = 0.1 + cer_rng_double(rng);
    }
    choose_shape(rng, &c->column, kind == 1);
    choose_rows(rng, c);
    choose_ops(rng, c, kind == 1);
    c->key = (cer_row_key){cer_rng_next(rng), below(rng, 5), below(rng, 1000)};
}

/* The same batch from a column with only its rows, in order, as a loader
 * streams them. The caller frees its memory. */
static inline test_case
streamed_case(const test_case *c, const cer_transform *t)
{
    test_case s = *c;
    size_t skew = c->skew * cer_dtype_size(c->column.dtype);
    size_t row_bytes = c->column.row_bytes, bytes = c->n_rows * row_bytes;
    uint8_t *values;

    if (c->column.ragged)
        bytes = cer_transform_ragged_bytes(t, c->offsets, c->rows, c->n_rows);
    s.memory = room(skew + bytes);
    memset(s.memory, 0x5a, skew);
    values = s.memory + skew;
    s.column.data = values;
    s.column_rows = c->n_rows;
    s.numbers = room(c->n_rows * sizeof *s.numbers);
    memcpy(s.numbers, c->rows, c->n_rows * sizeof *s.numbers);
    for (size_t i = 0; i < c->n_rows; i++) {
        s.rows[i] = (uint32_t)i;
        if (!c->column.ragged)
            memcpy(values + i * row_bytes,
                   c->column.data + c->rows[i] * row_bytes, row_bytes);
    }
    if (c->column.ragged) {
        s.offsets = room((c->n_rows + 1) * sizeof *s.offsets);
        s.column.offsets = s.offsets;
        cer_transform_gather_ragged(t, values, 0, bytes, s.offsets,
                                    c->column.data, c->offsets, c->rows,
                                    c->n_rows);
        CHECK_EQ_INT(s.offsets[c->n_rows] * (int64_t)row_bytes, bytes);
    }
    return s;
}

static inline void
free_streamed_case(const test_case *s)
{
    free(s->memory);
    free(s->numbers);
    if (s->column.ragged)
        free(s->offsets);
}

/* --- parts ---------------------------------------------------------------- */

enum { PART_ROWS = 7, MAX_PARTS = 3 }; /* at most 20 rows in a column */

/* The column of a case in several parts, in descending order, each in memory of
 * its exact size on CER_ALIGNMENT; of contiguous rows, only their places. */
typedef struct split {
    size_t n;
    cer_kernel_part parts[MAX_PARTS];
    size_t bytes[MAX_PARTS], rows[MAX_PARTS]; /* of src; of offsets */
    cer_row_place *places;
    void *memory[2 * MAX_PARTS];
} split;

static inline void *
aligned_room(size_t bytes)
{
    void *block = cer_aligned_alloc(bytes == 0 ? 1 : bytes);

    if (block == NULL)
        abort();
    return block;
}

static inline void
split_part(const test_case *c, split *s, size_t part, size_t first)
{
    const cer_column *col = &c->column;
    size_t end = first + PART_ROWS, from = first, to;
    cer_kernel_part *p = &s->parts[part];
    int64_t *offsets = NULL;
    uint8_t *src;

    end = end < c->column_rows ? end : c->column_rows;
    to = end;
    s->rows[part] = end - first;
    if (col->ragged) {
        from = (size_t)c->offsets[first];
        to = (size_t)c->offsets[end];
        offsets = room((end - first + 1) * sizeof *offsets);
        for (size_t i = 0; i <= end - first; i++)
            offsets[i] = c->offsets[first + i] - c->offsets[first];
    }
    s->bytes[part] = (to - from) * col->row_bytes;
    src = aligned_room(s->bytes[part]);
    if (s->bytes[part] != 0)
        memcpy(src, col->data + from * col->row_bytes, s->bytes[part]);
    s->memory[2 * part] = src;
    s->memory[2 * part + 1] = offsets;
    p->src = src;
    p->offsets = offsets;
}

static inline void
split_case(const test_case *c, split *s)
{
    const uint32_t *numbers = c->numbers == NULL ? c->rows : c->numbers;

    *s = (split){.n = MAX_PARTS};
    s->places = aligned_room(c->n_rows * sizeof *s->places);
    for (size_t i = 0; i < c->n_rows; i++)
        s->places[i] = (cer_row_place){numbers[i] % PART_ROWS,
                                       MAX_PARTS - 1 - numbers[i] / PART_ROWS};
    for (size_t i = 0; i < MAX_PARTS; i++) {
        size_t part = MAX_PARTS - 1 - i;

        s->parts[part].first_row = c->key.first_row + i * PART_ROWS;
        if (c->numbers == NULL && i * PART_ROWS < c->column_rows)
            split_part(c, s, part, i * PART_ROWS);
    }
}

static inline void
free_split(split *s)
{
    for (size_t i = 0; i < MAX_PARTS; i++) {
        cer_aligned_free(s->memory[2 * i]);
        free(s->memory[2 * i + 1]);
    }
    cer_aligned_free(s->places);
}

/* --- results ------------------------------------------------------- */

typedef struct batch {
    uint8_t *values, *mask;
    int64_t *lengths;
} batch;

static inline batch
new_batch(const cer_row_type *type, const test_case *c, size_t length)
{
    size_t things = c->n_rows * (c->column.ragged ? length : 1);
    size_t bytes = things * type->bytes + c->skew * cer_dtype_size(type->dtype);
    batch b = {room(bytes), room(things), room(c->n_rows * sizeof *b.lengths)};

    memset(b.values, 0xa5, bytes);
    memset(b.mask, 0xa5, things);
    memset(b.lengths, 0xa5, c->n_rows * sizeof *b.lengths);
    return b;
}

static inline void
free_batch(batch b)
{
    free(b.values);
    free(b.mask);
    free(b.lengths);
}

static inline bool
is_nan(cer_dtype dtype, const uint8_t *at)
{
    uint16_t half;
    float single;
    double twice;

    switch (dtype) {
    case CER_F16:
        memcpy(&half, at, sizeof half);
        return (half & 0x7fff) > 0x7c00;
    case CER_BF16:
        memcpy(&half, at, sizeof half);
        return (half & 0x7fff) > 0x7f80;
    case CER_F32:
        memcpy(&single, at, sizeof single);
        return single != single;
    case CER_F64:
        memcpy(&twice, at, sizeof twice);
        return twice != twice;
    default:
        return false;
    }
}

static inline bool
same_values(cer_dtype dtype, const uint8_t *a, const uint8_t *b, size_t n)
{
    size_t bytes = cer_dtype_size(dtype);

    for (size_t i = 0; i < n; i++, a += bytes, b += bytes) {
        if (memcmp(a, b, bytes) != 0 && !(is_nan(dtype, a) && is_nan(dtype, b)))
            return false;
    }
    return true;
}

static inline bool
same_batch(const cer_row_type *type, const test_case *c, size_t length, batch a,
           batch b)
{
    size_t skew = c->skew * cer_dtype_size(type->dtype);
    size_t things = c->n_rows * (c->column.ragged ? length : 1);

    return memcmp(a.values, b.values, skew) == 0 &&
           same_values(type->dtype, a.values + skew, b.values + skew,
                       things * type->n_elements) &&
           memcmp(a.mask, b.mask, things) == 0 &&
           memcmp(a.lengths, b.lengths, c->n_rows * sizeof *a.lengths) == 0;
}

static inline batch
make_as_loader(const cer_transform *t, const test_case *c, size_t length)
{
    const cer_row_type *type = cer_transform_output(t);
    batch b = new_batch(type, c, length);
    uint8_t *dst = b.values + c->skew * cer_dtype_size(type->dtype);
    void *scratch = cer_aligned_alloc(cer_transform_scratch_bytes(t) + 1);
    /* The loader's buffers are aligned. */
    uint8_t *aligned =
        cer_aligned_alloc(c->n_rows * (length + 1) * type->bytes + 1);
    size_t bytes = c->n_rows * type->bytes * (c->column.ragged ? length : 1);
    size_t n_bytes = cer_dtype_size(c->column.dtype);
    size_t source = c->column.row_bytes *
                    (c->column.ragged ? (size_t)c->offsets[c->column_rows]
                                      : c->column_rows);
    uint8_t *src = cer_aligned_alloc(source + n_bytes);

    memcpy(src, c->column.data, source);
    if (c->column.ragged)
        cer_transform_ragged(t, aligned, b.mask, b.lengths, length, src,
                             c->offsets, c->rows, c->n_rows);
    else
        cer_transform_rows(t, aligned, src, c->rows, c->n_rows, &c->key,
                           scratch);
    memcpy(dst, aligned, bytes);
    cer_aligned_free(src);
    cer_aligned_free(aligned);
    cer_aligned_free(scratch);
    return b;
}

static inline void
tell(const test_case *c, int number, const char *what)
{
    fprintf(stderr, "case %d, %s: %s, %u dims (%zu %zu %zu), %zu rows, ops",
            number, what, cer_dtype_name(c->column.dtype),
            (unsigned)c->column.ndim, c->column.shape[0], c->column.shape[1],
            c->column.shape[2], c->n_rows);
    for (size_t i = 0; i < c->n_ops; i++)
        fprintf(stderr, " %d", (int)c->ops[i].kind);
    fprintf(stderr, "\n");
}

/* A different way to make the same batch; notes the kernels used in `seen`. */
typedef batch (*maker)(const cer_kernel_plan *plan, const cer_transform *t,
                       const test_case *c, size_t length, bool *seen);

typedef struct way {
    const char *name;
    maker make;
} way;

/* From the column in parts, and from only the batch's rows. False: the kernels
 * do not support the chain. */
static inline bool
check_case(const test_case *c, int number, const way *ways, size_t n_ways,
           bool *seen)
{
    cer_transform *t;
    cer_kernel_plan *plan;
    cer_error err = {0};
    size_t length = 0;
    batch expected;
    test_case streamed;

    if (cer_transform_new(&c->column, c->ops, c->n_ops, &t, &err) != CER_OK) {
        fprintf(stderr, "case %d: %s\n", number, err.message);
        check_failures++;
        return false;
    }
    if (cer_kernel_plan_new(t, &plan, &err) != CER_OK) {
        CHECK_EQ_INT(err.status, CER_INVALID);
        cer_transform_free(t);
        return false;
    }
    if (c->column.ragged)
        length = cer_transform_length(t, c->offsets, c->rows, c->n_rows);
    expected = make_as_loader(t, c, length);
    streamed = streamed_case(c, t);
    for (size_t i = 0; i < 2 * n_ways; i++) {
        const test_case *from = i % 2 == 0 ? c : &streamed;
        batch got = ways[i / 2].make(plan, t, from, length, seen);

        if (!same_batch(cer_transform_output(t), c, length, expected, got)) {
            check_failures++;
            tell(c, number, ways[i / 2].name);
            fprintf(stderr, "  %s\n", i % 2 == 0 ? "resident" : "streamed");
        }
        free_batch(got);
    }
    free_streamed_case(&streamed);
    free_batch(expected);
    cer_kernel_plan_free(plan);
    cer_transform_free(t);
    return true;
}

/* Runs `n` cases; every kernel must be used and few chains rejected. */
static inline void
check_cases(int n, const way *ways, size_t n_ways)
{
    bool seen[CER_KERNEL_COUNT] = {false};
    int refused = 0;
    cer_rng rng;
    test_case c;

    cer_rng_seed(&rng, 7, CER_RNG_SPLIT, 0, 0);
    for (int i = 0; i < n; i++) {
        choose(&rng, &c, i % 3);
        refused += !check_case(&c, i, ways, n_ways, seen);
        free(c.memory);
        free(c.offsets);
    }
    for (int k = 0; k < CER_KERNEL_COUNT; k++) {
        if (!seen[k])
            fprintf(stderr, "no case for %s\n", cer_kernel_name((cer_kernel)k));
        CHECK(seen[k]);
    }
    CHECK(refused < n / 20);
}

/* Every float16 and every 16-bit integer, as every type. */
static inline void
check_conversions(const way *ways, size_t n_ways)
{
    enum { N = 65536 };
    static const cer_dtype from[] = {CER_F16, CER_BF16, CER_I16, CER_U16};
    bool seen[CER_KERNEL_COUNT] = {false};
    uint16_t *all = room(N * sizeof *all);
    test_case c = {.column = {.name = "c", .ndim = 1, .shape = {N}},
                   .column_rows = 1,
                   .n_ops = 1,
                   .n_rows = 1};

    for (size_t i = 0; i < N; i++)
        all[i] = (uint16_t)i;
    c.column.row_bytes = N * sizeof *all;
    c.column.data = (const uint8_t *)all;
    for (size_t i = 0; i < sizeof from / sizeof from[0]; i++) {
        for (int to = 0; to < CER_C64; to++) {
            c.column.dtype = from[i];
            c.ops[0] = (cer_op){.kind = CER_OP_CAST, .dtype = (cer_dtype)to};
            CHECK(check_case(&c, to, ways, n_ways, seen));
        }
    }
    free(all);
}

#endif
