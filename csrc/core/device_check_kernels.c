/* Runs each kernel and its reference once, on the same batch. */
#include "device_check.h"

#include <string.h>

#include "kernels.h"

enum {
    PARTS = 2,
    PART_ROWS = 20,
    COLUMN_ROWS = PARTS * PART_ROWS,
    ROWS = 33,
    MOST_VALUES = 60,
    LONGEST = 9,
    PADDED = 12
};

/* The output of a kernel. */
typedef struct output {
    _Alignas(CER_ALIGNMENT) uint8_t values[ROWS * MOST_VALUES * 8];
    uint8_t mask[ROWS * PADDED];
    int64_t lengths[ROWS];
} output;

/* A batch, on the host or the device, of rows of two parts. `parts` has the
 * addresses there. */
typedef struct page {
    _Alignas(CER_ALIGNMENT) uint8_t column[PARTS][PART_ROWS * MOST_VALUES * 8];
    _Alignas(CER_ALIGNMENT) uint8_t constants[16 << 10];
    int64_t offsets[PARTS][PART_ROWS + 1];
    _Alignas(8) cer_row_place places[ROWS];
    cer_kernel_part parts[PARTS];
    output out;
} page;

/* The working memory of a case. */
typedef struct work {
    const cer_device_bench *bench;
    page *here, *there;
    output *back;
} work;

size_t
cer_device_check_kernels_bytes(void)
{
    return sizeof(page) + sizeof(output);
}

/* --- one kernel ------------------------------------------------------------
 */

/* Fills in fractional numbers of all sizes that a kernel may encounter. */
static void
fill_column(page *p, cer_dtype dtype)
{
    for (size_t i = 0; i < COLUMN_ROWS * MOST_VALUES; i++) {
        double value = ((double)(i * 37 % 1013) - 500) / 7;
        size_t at = i % (PART_ROWS * MOST_VALUES);
        uint8_t *column = p->column[i / (PART_ROWS * MOST_VALUES)];
        float single = (float)value;

        if (dtype == CER_F64)
            memcpy(column + at * sizeof value, &value, sizeof value);
        else if (dtype == CER_F32)
            memcpy(column + at * sizeof single, &single, sizeof single);
        else
            column[at] = (uint8_t)(i * 37);
    }
}

/* Points the parts to the memory of page `at`. */
static void
set_parts(page *p, const page *at)
{
    for (size_t i = 0; i < PARTS; i++)
        p->parts[i] = (cer_kernel_part){at->column[i], at->offsets[i],
                                        100 - i * PART_ROWS};
}

static void
fill_page(page *p, cer_dtype dtype)
{
    fill_column(p, dtype);
    for (size_t i = 0; i < COLUMN_ROWS; i++) {
        int64_t *offset = &p->offsets[i / PART_ROWS][i % PART_ROWS];

        if (i % PART_ROWS == 0)
            *offset = 0;
        offset[1] = offset[0] + (int64_t)(i * 3 % (LONGEST + 1));
    }
    for (uint32_t i = 0; i < ROWS; i++)
        p->places[i] = (cer_row_place){(i * 7 + 3) % PART_ROWS, i / 3 % PARTS};
    memset(&p->out, 0xa5, sizeof p->out);
}

/* Runs both and compares; the calls differ only in their memory. */
static cer_status
compare(const work *w, const cer_kernel_call *here,
        const cer_kernel_call *there, cer_error *err)
{
    cer_device *d = w->bench->device;
    void *stream = w->bench->streams[0];
    cer_status status;

    set_parts(w->here, w->there);
    if ((status = cer_device_copy(d, w->there, w->here, sizeof *w->here,
                                  CER_COPY_TO_DEVICE, stream, err)) != CER_OK ||
        (status = cer_kernel_launch(d, there, stream, err)) != CER_OK ||
        (status = cer_device_copy(d, w->back, &w->there->out, sizeof *w->back,
                                  CER_COPY_FROM_DEVICE, stream, err)) !=
            CER_OK ||
        (status = cer_device_stream_sync(d, stream, err)) != CER_OK)
        return status;
    set_parts(w->here, w->here);
    cer_kernel_run_host(here->kernel, &here->args);
    if (memcmp(w->back, &w->here->out, sizeof *w->back) == 0)
        return CER_OK;
    return cer_fail(err, CER_DEVICE,
                    "%s: %s gives wrong bytes: the driver or the device is "
                    "faulty",
                    cer_device_name(d), cer_kernel_name(here->kernel));
}

/* --- plain rows ------------------------------------------------------------
 */

static cer_kernel_source
source_at(const page *p)
{
    return (cer_kernel_source){.parts = p->parts, .places = p->places};
}

static cer_status
check_rows(const work *w, size_t row_bytes, cer_error *err)
{
    page *at[2] = {w->here, w->there};
    cer_kernel_call calls[2];
    cer_status status = CER_OK;

    fill_page(w->here, CER_U8);
    for (int i = 0; status == CER_OK && i < 2; i++) {
        const cer_kernel_source from = source_at(at[i]);

        status = cer_kernel_rows(at[i]->out.values, &from, row_bytes, ROWS,
                                 &calls[i], err);
    }
    return status == CER_OK ? compare(w, &calls[0], &calls[1], err) : status;
}

/* --- transforms ------------------------------------------------------------
 */

typedef enum layout { VALUES, PIXELS, PLANES, RAGGED, LAYOUTS } layout;

/* The type selects the arithmetic: a table, float32, float64. */
static const cer_dtype dtypes[] = {CER_U8, CER_F32, CER_F64};

static cer_column
column_of(layout which, cer_dtype dtype)
{
    cer_column c = {.name = "x", .dtype = dtype, .ragged = which == RAGGED};
    size_t values = 1;

    if (which == VALUES) {
        c.ndim = 1;
        c.shape[0] = 13;
    } else if (which != RAGGED) {
        c.ndim = 3;
        c.shape[0] = 5;
        c.shape[1] = 4;
        c.shape[2] = 3;
    }
    for (uint32_t i = 0; i < c.ndim; i++)
        values *= c.shape[i];
    c.row_bytes = values * cer_dtype_size(dtype);
    return c;
}

static size_t
ops_of(layout which, bool moves_only, cer_op *ops)
{
    size_t n = 0;

    if (which == PIXELS || which == PLANES) {
        ops[n++] = (cer_op){.kind = CER_OP_CROP,
                            .size = {4, 4},
                            .padding = {1, 1},
                            .random = true};
        ops[n++] = (cer_op){.kind = CER_OP_FLIP, .value = 0.5};
    }
    if (which == PLANES)
        ops[n++] = (cer_op){.kind = CER_OP_TO_CHW};
    if (!moves_only)
        ops[n++] = (cer_op){.kind = CER_OP_SCALE, .value = 1 / 255.0};
    if (which == RAGGED)
        ops[n++] =
            (cer_op){.kind = CER_OP_PAD, .value = 1, .multiple_of = PADDED};
    return n;
}

static cer_kernel_batch
batch_at(page *p)
{
    return (cer_kernel_batch){.from = source_at(p),
                              .constants = p->constants,
                              .dst = p->out.values,
                              .mask = p->out.mask,
                              .lengths = p->out.lengths,
                              .length = PADDED,
                              .n_rows = ROWS,
                              .seed = 1,
                              .epoch = 2};
}

static cer_status
check_plan(const work *w, const cer_kernel_plan *plan, cer_error *err)
{
    page *at[2] = {w->here, w->there};
    size_t bytes;
    const void *constants = cer_kernel_plan_constants(plan, &bytes);
    cer_kernel_call calls[2];
    cer_status status = CER_OK;

    if (bytes > sizeof w->here->constants)
        return cer_fail(err, CER_INVALID, "a kernel has %zu bytes of constants",
                        bytes);
    if (bytes != 0)
        memcpy(w->here->constants, constants, bytes);
    for (int i = 0; status == CER_OK && i < 2; i++) {
        const cer_kernel_batch batch = batch_at(at[i]);

        status = cer_kernel_plan_batch(plan, &batch, &calls[i], err);
    }
    return status == CER_OK ? compare(w, &calls[0], &calls[1], err) : status;
}

static cer_status
check_transform(const work *w, layout which, cer_dtype dtype, bool moves_only,
                cer_error *err)
{
    const cer_column column = column_of(which, dtype);
    cer_transform *transform = NULL;
    cer_kernel_plan *plan = NULL;
    cer_op ops[4];
    size_t n = ops_of(which, moves_only, ops);
    cer_status status = cer_transform_new(&column, ops, n, &transform, err);

    if (status == CER_OK)
        status = cer_kernel_plan_new(transform, &plan, err);
    if (status == CER_OK) {
        fill_page(w->here, dtype);
        status = check_plan(w, plan, err);
    }
    cer_kernel_plan_free(plan);
    cer_transform_free(transform);
    return status;
}

cer_status
cer_device_check_kernels(const cer_device_bench *bench, cer_error *err)
{
    static const size_t row_bytes[] = {48, 24, 12, 6, 5};
    const size_t n_sizes = sizeof row_bytes / sizeof row_bytes[0];
    const size_t n_dtypes = sizeof dtypes / sizeof dtypes[0];
    const work w = {.bench = bench,
                    .here = bench->here.data,
                    .there = bench->there.data,
                    .back =
                        (void *)((uint8_t *)bench->here.data + sizeof(page))};
    cer_status status = CER_OK;

    for (size_t i = 0; status == CER_OK && i < n_sizes; i++)
        status = check_rows(&w, row_bytes[i], err);
    for (int which = 0; status == CER_OK && which < LAYOUTS; which++) {
        for (size_t i = 0; status == CER_OK && i < n_dtypes; i++)
            status = check_transform(&w, (layout)which, dtypes[i], false, err);
        if (status == CER_OK && which != VALUES)
            status = check_transform(&w, (layout)which, CER_U8, true, err);
    }
    return status;
}
