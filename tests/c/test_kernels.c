/* Batches by kernel: the references, and the kernels' source itself run on the
 * CPU, against the loader's own functions. Same bits everywhere; where a float
 * is not a number, one that is not a number either. */
#include "kernels.h"

#include <stdlib.h>

#include "check.h"
#include "kernels_ptx.h"
#include "rng.h"
#if defined(KERNELS_ON_CPU)
#include "kernels_on_cpu.h"
#endif

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
    size_t n_rows;
    size_t skew; /* values before the first of what is written */
    cer_row_key key;
} test_case;

/* Memory of exactly this size: a sanitizer sees a step beyond. */
static void *
room(size_t bytes)
{
    void *block = malloc(bytes == 0 ? 1 : bytes);

    if (block == NULL)
        abort();
    return block;
}

static size_t
below(cer_rng *rng, size_t bound)
{
    return (size_t)cer_rng_below(rng, bound);
}

static cer_dtype
any_dtype(cer_rng *rng)
{
    return (cer_dtype)below(rng, CER_C64);
}

/* Bits of every kind, with the values that matter among them. */
static void
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

static void
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

static void
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

static void
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

static void
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

/* The column's rows lie at the end of their memory, so that a step too far is
 * seen, and begin `skew` values into it, so that not all is aligned. */
static void
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

static void
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

static void
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

/* --- what they give ------------------------------------------------------- */

typedef struct batch {
    uint8_t *values, *mask;
    int64_t *lengths;
} batch;

static batch
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

static void
free_batch(batch b)
{
    free(b.values);
    free(b.mask);
    free(b.lengths);
}

static bool
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

static bool
same_values(cer_dtype dtype, const uint8_t *a, const uint8_t *b, size_t n)
{
    size_t bytes = cer_dtype_size(dtype);

    for (size_t i = 0; i < n; i++, a += bytes, b += bytes) {
        if (memcmp(a, b, bytes) != 0 && !(is_nan(dtype, a) && is_nan(dtype, b)))
            return false;
    }
    return true;
}

static bool
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

static batch
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

typedef void (*runner)(const cer_kernel_call *call);

static void
run_reference(const cer_kernel_call *call)
{
    cer_kernel_run_host(call->kernel, &call->args);
}

/* Everything that the kernel may read is in memory of its exact size. */
static batch
make_by_kernel(const cer_kernel_plan *plan, const cer_transform *t,
               const test_case *c, size_t length, runner run, bool *seen)
{
    const cer_row_type *type = cer_transform_output(t);
    batch b = new_batch(type, c, length);
    uint32_t *rows = room(c->n_rows * sizeof *rows);
    size_t bytes;
    const void *constants = cer_kernel_plan_constants(plan, &bytes);
    uint8_t *copied = cer_aligned_alloc(bytes + 1);
    const cer_kernel_batch io = {.src = c->column.data,
                                 .offsets = c->offsets,
                                 .rows = rows,
                                 .constants = copied,
                                 .dst = b.values +
                                        c->skew * cer_dtype_size(type->dtype),
                                 .mask = b.mask,
                                 .lengths = b.lengths,
                                 .length = length,
                                 .n_rows = c->n_rows,
                                 .key = c->key};
    cer_kernel_call call;
    cer_error err = {0};

    memcpy(rows, c->rows, c->n_rows * sizeof *rows);
    if (bytes != 0)
        memcpy(copied, constants, bytes);
    if (cer_kernel_plan_batch(plan, &io, &call, &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    if (cer_kernel_blocks(call.kernel, &call.args) != 0) {
        seen[call.kernel] = true;
        run(&call);
    }
    cer_aligned_free(copied);
    free(rows);
    return b;
}

static void
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

/* False: the kernels do not take the chain. */
static bool
check_case(const test_case *c, int number, bool *seen)
{
    cer_transform *t;
    cer_kernel_plan *plan;
    cer_error err = {0};
    size_t length = 0;
    batch expected, got;

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
    got = make_by_kernel(plan, t, c, length, run_reference, seen);
    if (!same_batch(cer_transform_output(t), c, length, expected, got)) {
        check_failures++;
        tell(c, number, "reference");
    }
    free_batch(got);
#if defined(KERNELS_ON_CPU)
    got = make_by_kernel(plan, t, c, length, kernels_on_cpu_run, seen);
    if (!same_batch(cer_transform_output(t), c, length, expected, got)) {
        check_failures++;
        tell(c, number, "kernel");
    }
    free_batch(got);
#endif
    free_batch(expected);
    cer_kernel_plan_free(plan);
    cer_transform_free(t);
    return true;
}

static void
batches_are_the_loaders(void)
{
    enum { CASES = 3000 };
    bool seen[CER_KERNEL_COUNT] = {false};
    int refused = 0;
    cer_rng rng;
    test_case c;

    cer_rng_seed(&rng, 7, CER_RNG_SPLIT, 0, 0);
    for (int i = 0; i < CASES; i++) {
        choose(&rng, &c, i % 3);
        refused += !check_case(&c, i, seen);
        free(c.memory);
        free(c.offsets);
    }
    for (int k = 0; k < CER_KERNEL_COUNT; k++) {
        if (!seen[k])
            fprintf(stderr, "no case for %s\n", cer_kernel_name((cer_kernel)k));
        CHECK(seen[k]);
    }
    CHECK(refused < CASES / 20);
#if !defined(KERNELS_ON_CPU)
    printf("test_kernels.c: no C++ compiler, the references alone were run\n");
#endif
}

/* Every half float and every 16-bit integer, as every type. */
static void
conversions_are_those_of_the_cpu(void)
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
            CHECK(check_case(&c, to, seen));
        }
    }
    free(all);
}

static void
chains_that_are_too_long_are_refused(void)
{
    cer_op ops[CER_KERNEL_STEPS];
    const cer_column column = {.name = "c",
                               .dtype = CER_F32,
                               .ndim = 2,
                               .shape = {4, 4},
                               .row_bytes = 64};
    cer_error err = {0};
    cer_transform *t;
    cer_kernel_plan *plan;

    for (int flips = 0; flips < 2; flips++) {
        size_t most = flips ? CER_KERNEL_MOVES : CER_KERNEL_STEPS;

        for (size_t i = 0; i < CER_KERNEL_STEPS; i++)
            ops[i] = (cer_op){.kind = flips ? CER_OP_FLIP : CER_OP_SCALE,
                              .value = 0.3};
        for (size_t more = 0; more < 2; more++) {
            cer_op all[CER_KERNEL_STEPS + 1];

            memcpy(all, ops, sizeof ops);
            all[CER_KERNEL_STEPS] = ops[0];
            CHECK_EQ_INT(cer_transform_new(&column, all, most + more, &t, &err),
                         CER_OK);
            CHECK_EQ_INT(cer_kernel_plan_new(t, &plan, &err),
                         more ? CER_INVALID : CER_OK);
            CHECK((plan == NULL) == (more == 1));
            cer_kernel_plan_free(plan);
            cer_transform_free(t);
        }
        CHECK_EQ_STR(err.message,
                     flips ? "9 crops and flips are more than the 8 that a "
                             "kernel takes"
                           : "a chain of 25 operations is longer than the 24 "
                             "that a kernel takes");
    }
}

static void
kernels_have_names(void)
{
    cer_kernel found;

    for (int k = 0; k < CER_KERNEL_COUNT; k++) {
        CHECK(cer_kernel_find(cer_kernel_name((cer_kernel)k), &found));
        CHECK_EQ_INT(found, k);
        CHECK(cer_kernel_args_bytes((cer_kernel)k) <= sizeof(cer_kernel_args));
    }
    CHECK(!cer_kernel_find("cer_rows", &found));
    CHECK(CER_KERNEL_COUNT <= CER_DEVICE_MAX_KERNELS);
}

/* As entries, each with one argument of the size that the launch copies. */
static void
the_ptx_has_every_kernel(void)
{
    char text[200];

    for (int k = 0; k < CER_KERNEL_COUNT; k++) {
        const char *name = cer_kernel_name((cer_kernel)k);

        (void)snprintf(text, sizeof text,
                       ".visible .entry %s(\n\t.param .align 8 .b8 "
                       "%s_param_0[%zu]\n)",
                       name, name, cer_kernel_args_bytes((cer_kernel)k));
        CHECK(strstr(cer_kernels_ptx, text) != NULL);
    }
}

static void
large_batches_are_counted_right(void)
{
    cer_kernel_call call;
    cer_error err = {0};
    void *at = (void *)(uintptr_t)CER_ALIGNMENT; /* not read */

    /* 2 GiB less 16 bytes a row, 131072 tiles each. */
    CHECK_EQ_INT(cer_kernel_rows(at, at, 0x7ffffff0, at, 100, &call, &err),
                 CER_OK);
    CHECK_EQ_INT(call.kernel, CER_KERNEL_ROWS_16);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 13107200);
    CHECK_EQ_INT(cer_kernel_rows(at, at, 0x7ffffff0, at, 100000, &call, &err),
                 CER_INVALID);
    CHECK_EQ_STR(err.message, "a batch is larger than a kernel takes");
    CHECK_EQ_INT(cer_kernel_rows(at, at, (size_t)1 << 36, at, 1, &call, &err),
                 CER_INVALID);
    /* Short rows share a block: 64 of 16 vectors. */
    CHECK_EQ_INT(cer_kernel_rows(at, at, 256, at, 129, &call, &err), CER_OK);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 3);
    CHECK_EQ_INT(cer_kernel_rows(at, at, 256, at, 0, &call, &err), CER_OK);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 0);
    CHECK_EQ_INT(cer_kernel_rows(at, at, 0, at, 5, &call, &err), CER_OK);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 0);
}

/* On the host device a launch runs the reference. */
static void
a_launch_copies_rows(void)
{
    static const uint32_t rows[] = {2, 0, 2};
    static const uint16_t from[3][3] = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}};
    uint16_t to[3][3] = {{0}};
    cer_device *device;
    cer_kernel_call call;

    CHECK_EQ_INT(cer_device_host_new(&device, NULL), CER_OK);
    CHECK_EQ_INT(
        cer_kernel_rows(to, from, sizeof from[0], rows, 3, &call, NULL),
        CER_OK);
    CHECK_EQ_INT(cer_kernel_launch(device, &call, NULL, NULL), CER_OK);
    for (int i = 0; i < 3; i++)
        CHECK(memcmp(to[i], from[rows[i]], sizeof to[i]) == 0);
    cer_device_release(device);
}

CHECK_MAIN(batches_are_the_loaders, conversions_are_those_of_the_cpu,
           chains_that_are_too_long_are_refused, kernels_have_names,
           the_ptx_has_every_kernel, large_batches_are_counted_right,
           a_launch_copies_rows)
