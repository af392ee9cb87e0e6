/* Batches by kernel through the device layer: planned, launched and fetched as
 * in the loader. Runs on the stand-in, which runs the references; or, if
 * CEREBRO_TEST_CUDART names the CUDA runtime, on the first GPU.
 * CEREBRO_TEST_CASES limits the cases, for slow sanitizers. */
#include "cuda_files.h"
#include "kernel_cases.h"
#include "kernels_ptx.h"

enum { BEYOND = 64 }; /* guard bytes after the output, which must not change */

static cer_device *device;

static const char *
real_runtime(void)
{
    return getenv("CEREBRO_TEST_CUDART");
}

static void
need(cer_status status, const cer_error *err)
{
    if (status == CER_OK)
        return;
    fprintf(stderr, "%s\n", err->message);
    abort();
}

/* A copy in the device's memory; NULL if empty. */
static cer_device_block
upload(const void *from, size_t bytes)
{
    cer_device_block block;
    cer_error err;

    need(cer_device_alloc(device, bytes, CER_USE_OTHER, &block, &err), &err);
    if (bytes != 0)
        need(cer_device_copy(device, block.data, from, bytes,
                             CER_COPY_TO_DEVICE, NULL, &err),
             &err);
    return block;
}

/* Fetches `bytes` and checks that the guard bytes after them are unchanged. */
static void
fetch(void *to, cer_device_block *block, size_t bytes)
{
    uint8_t beyond[BEYOND];
    cer_error err;

    need(cer_device_copy(device, beyond, (uint8_t *)block->data + bytes, BEYOND,
                         CER_COPY_FROM_DEVICE, NULL, &err),
         &err);
    if (bytes != 0)
        need(cer_device_copy(device, to, block->data, bytes,
                             CER_COPY_FROM_DEVICE, NULL, &err),
             &err);
    need(cer_device_stream_sync(device, NULL, &err), &err);
    for (int i = 0; i < BEYOND; i++)
        CHECK(beyond[i] == 0xa5);
    cer_device_free(device, block);
}

/* Allocates `bytes` with the batch's marks, plus the guard bytes. */
static cer_device_block
upload_marked(const void *from, size_t bytes)
{
    uint8_t *marked = room(bytes + BEYOND);
    cer_device_block block;

    memcpy(marked, from, bytes);
    memset(marked + bytes, 0xa5, BEYOND);
    block = upload(marked, bytes + BEYOND);
    free(marked);
    return block;
}

/* Uploads the parts of a case; returns the table of them. */
static cer_device_block
upload_parts(const split *s, cer_device_block blocks[2 * MAX_PARTS])
{
    cer_kernel_part parts[MAX_PARTS];

    memcpy(parts, s->parts, sizeof parts);
    for (size_t i = 0; i < MAX_PARTS; i++) {
        const int64_t *offsets = s->parts[i].offsets;

        blocks[2 * i] = upload(s->parts[i].src, s->bytes[i]);
        blocks[2 * i + 1] = upload(
            offsets, offsets == NULL ? 0 : (s->rows[i] + 1) * sizeof *offsets);
        parts[i].src = blocks[2 * i].data;
        parts[i].offsets = blocks[2 * i + 1].data;
    }
    return upload(parts, sizeof parts);
}

static batch
make_on_device(const cer_kernel_plan *plan, const cer_transform *t,
               const test_case *c, size_t length, bool *seen)
{
    const cer_row_type *type = cer_transform_output(t);
    const cer_column *col = &c->column;
    batch b = new_batch(type, c, length);
    size_t skew = c->skew * cer_dtype_size(col->dtype);
    size_t out_skew = c->skew * cer_dtype_size(type->dtype);
    size_t things = c->n_rows * (col->ragged ? length : 1), n_constants;
    size_t n_values =
        col->ragged ? (size_t)c->offsets[c->column_rows] : c->column_rows;
    const void *constants = cer_kernel_plan_constants(plan, &n_constants);
    const bool contiguous = c->numbers != NULL;
    cer_device_block in = upload(
        col->data - skew, contiguous ? skew + n_values * col->row_bytes : 0);
    cer_device_block offsets =
        upload(c->offsets, contiguous && col->ragged
                               ? (c->column_rows + 1) * sizeof *c->offsets
                               : 0);
    cer_device_block blocks[2 * MAX_PARTS], parts, places;
    cer_device_block fixed = upload(constants, n_constants);
    cer_device_block values =
        upload_marked(b.values, out_skew + things * type->bytes);
    cer_device_block mask = upload_marked(b.mask, things);
    cer_device_block lengths =
        upload_marked(b.lengths, c->n_rows * sizeof *b.lengths);
    cer_kernel_batch io = {.from = {.src = in.data,
                                    .offsets = offsets.data,
                                    .contiguous = contiguous},
                           .constants = fixed.data,
                           .dst = (uint8_t *)values.data + out_skew,
                           .mask = mask.data,
                           .lengths = lengths.data,
                           .length = length,
                           .n_rows = c->n_rows,
                           .seed = c->key.seed,
                           .epoch = c->key.epoch};
    cer_kernel_call call;
    cer_error err = {0};
    split s;

    split_case(c, &s);
    parts = upload_parts(&s, blocks);
    places = upload(s.places, c->n_rows * sizeof *s.places);
    free_split(&s);
    if (in.data != NULL)
        io.from.src += skew;
    io.from.parts = parts.data;
    io.from.places = places.data;
    need(cer_kernel_plan_batch(plan, &io, &call, &err), &err);
    if (cer_kernel_blocks(call.kernel, &call.args) != 0)
        seen[call.kernel] = true;
    need(cer_kernel_launch(device, &call, NULL, &err), &err);
    fetch(b.values, &values, out_skew + things * type->bytes);
    fetch(b.mask, &mask, things);
    fetch(b.lengths, &lengths, c->n_rows * sizeof *b.lengths);
    cer_device_free(device, &fixed);
    for (size_t i = 0; i < 2 * MAX_PARTS; i++)
        cer_device_free(device, &blocks[i]);
    cer_device_free(device, &parts);
    cer_device_free(device, &places);
    cer_device_free(device, &offsets);
    cer_device_free(device, &in);
    return b;
}

static const way on_device[] = {{"device", make_on_device}};

static void
open_device(void)
{
    const cer_cudart_search search = {
        .path = real_runtime() != NULL ? real_runtime() : STANDIN};
    cer_cudart *runtime;
    cer_error err = {0};

    if (real_runtime() == NULL)
        fresh_standin();
    need(cer_cudart_open(&search, &runtime, &err), &err);
    need(cer_device_cuda_new(runtime, 0, cer_kernels_ptx, &device, &err), &err);
    cer_cudart_release(runtime);
}

static void
close_device(void)
{
    cer_device_release(device);
    if (real_runtime() == NULL)
        nothing_left();
}

static int
n_cases(void)
{
    const char *wanted = getenv("CEREBRO_TEST_CASES");

    return wanted != NULL ? atoi(wanted) : real_runtime() != NULL ? 3000 : 600;
}

static void
batches_are_the_loaders(void)
{
    open_device();
    check_cases(n_cases(), on_device, 1);
    close_device();
}

static void
conversions_are_those_of_the_cpu(void)
{
    open_device();
    check_conversions(on_device, 1);
    close_device();
}

/* Row widths around those of vectors and tiles, with more rows than fit in a
 * block, from all over a large column, in two parts that overlap. */
static void
rows_of_every_width(void)
{
    static const size_t widths[] = {
        1,   2,   3,    4,    8,    12,   16,    48,    100,   156,
        511, 512, 1024, 4096, 4100, 8176, 16384, 16400, 32768, 150528};
    enum { COLUMN = 4000000, SELECTED = 700, SECOND = 1 << 20 };
    uint8_t *column = room(COLUMN);
    cer_row_place places[SELECTED];
    cer_device_block in, selected, table;
    cer_kernel_part parts[2] = {{.src = NULL}};
    cer_rng rng;

    open_device();
    cer_rng_seed(&rng, 1, CER_RNG_SPLIT, 0, 0);
    for (size_t i = 0; i < COLUMN; i++)
        column[i] = (uint8_t)cer_rng_next(&rng);
    in = upload(column, COLUMN);
    parts[0].src = in.data;
    parts[1].src = (uint8_t *)in.data + SECOND;
    table = upload(parts, sizeof parts);
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        size_t width = widths[i], n = SELECTED, bytes;
        uint8_t *expected, *got, *marks;
        cer_device_block out;
        cer_kernel_call call;
        cer_error err = {0};

        n = n * width > COLUMN ? COLUMN / width : n;
        bytes = n * width;
        expected = room(bytes);
        got = room(bytes);
        marks = calloc(1, bytes);
        for (size_t k = 0; k < n; k++) {
            size_t part = below(&rng, 2), first = part * SECOND;
            size_t row = below(&rng, (COLUMN - first) / width);

            places[k] = (cer_row_place){(uint32_t)row, (uint32_t)part};
            memcpy(expected + k * width, column + first + row * width, width);
        }
        selected = upload(places, n * sizeof *places);
        out = upload_marked(marks, bytes);
        const cer_kernel_source from = {.parts = table.data,
                                        .places = selected.data};

        need(cer_kernel_rows(out.data, &from, width, n, &call, &err), &err);
        need(cer_kernel_launch(device, &call, NULL, &err), &err);
        fetch(got, &out, bytes);
        CHECK(memcmp(got, expected, bytes) == 0);
        cer_device_free(device, &selected);
        free(marks);
        free(got);
        free(expected);
    }
    cer_device_free(device, &table);
    cer_device_free(device, &in);
    free(column);
    close_device();
}

CHECK_MAIN(batches_are_the_loaders, conversions_are_those_of_the_cpu,
           rows_of_every_width)
