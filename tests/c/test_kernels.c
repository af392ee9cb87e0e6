/* Batches by kernel: the references, and the kernel source run on the CPU,
 * compared with the loader's own functions. */
#include "kernel_cases.h"
#include "kernels_ptx.h"
#if defined(KERNELS_ON_CPU)
#include "kernels_on_cpu.h"
#endif

typedef void (*runner)(const cer_kernel_call *call);

/* Everything that the kernel may read is in memory of its exact size. */
static batch
make_by_kernel(const cer_kernel_plan *plan, const cer_transform *t,
               const test_case *c, size_t length, runner run, bool *seen)
{
    const cer_row_type *type = cer_transform_output(t);
    batch b = new_batch(type, c, length);
    size_t bytes;
    const void *constants = cer_kernel_plan_constants(plan, &bytes);
    uint8_t *copied = cer_aligned_alloc(bytes + 1);
    const bool contiguous = c->numbers != NULL;
    split s;
    cer_kernel_batch io = {.from = {.contiguous = contiguous},
                           .constants = copied,
                           .dst =
                               b.values + c->skew * cer_dtype_size(type->dtype),
                           .mask = b.mask,
                           .lengths = b.lengths,
                           .length = length,
                           .n_rows = c->n_rows,
                           .seed = c->key.seed,
                           .epoch = c->key.epoch};
    cer_kernel_call call;
    cer_error err = {0};

    split_case(c, &s);
    if (contiguous) {
        io.from.src = c->column.data;
        io.from.offsets = c->offsets;
    }
    if (!contiguous || cer_transform_draws(t)) {
        io.from.parts = s.parts;
        io.from.places = s.places;
    }
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
    free_split(&s);
    return b;
}

static void
run_reference(const cer_kernel_call *call)
{
    cer_kernel_run_host(call->kernel, &call->args);
}

static batch
make_by_reference(const cer_kernel_plan *plan, const cer_transform *t,
                  const test_case *c, size_t length, bool *seen)
{
    return make_by_kernel(plan, t, c, length, run_reference, seen);
}

#if defined(KERNELS_ON_CPU)
static batch
make_by_source(const cer_kernel_plan *plan, const cer_transform *t,
               const test_case *c, size_t length, bool *seen)
{
    return make_by_kernel(plan, t, c, length, kernels_on_cpu_run, seen);
}
#endif

static const way ways[] = {
    {"reference", make_by_reference},
#if defined(KERNELS_ON_CPU)
    {"kernel", make_by_source},
#endif
};
enum { N_WAYS = sizeof ways / sizeof ways[0] };

static void
batches_are_the_loaders(void)
{
    check_cases(3000, ways, N_WAYS);
    if (N_WAYS == 1)
        printf("%s: no C++ compiler, ran only the references\n", __FILE__);
}

static void
conversions_are_those_of_the_cpu(void)
{
    check_conversions(ways, N_WAYS);
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
                             "kernel supports"
                           : "a chain of 25 operations is longer than the 24 "
                             "that a kernel supports");
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

/* Each kernel is an entry with one argument of the size that the launch copies.
 */
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
    static const cer_kernel_source from = {.contiguous = 0}; /* not read */
    cer_kernel_call call;
    cer_error err = {0};
    void *at = (void *)(uintptr_t)CER_ALIGNMENT; /* not read */

    /* 2 GiB - 16 bytes per row, 131072 tiles each. */
    CHECK_EQ_INT(cer_kernel_rows(at, &from, 0x7ffffff0, 100, &call, &err),
                 CER_OK);
    CHECK_EQ_INT(call.kernel, CER_KERNEL_ROWS_16);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 13107200);
    CHECK_EQ_INT(cer_kernel_rows(at, &from, 0x7ffffff0, 100000, &call, &err),
                 CER_INVALID);
    CHECK_EQ_STR(err.message, "a batch is larger than a kernel supports");
    CHECK_EQ_INT(cer_kernel_rows(at, &from, (size_t)1 << 36, 1, &call, &err),
                 CER_INVALID);
    /* Short rows share a block: 64 of 16 vectors. */
    CHECK_EQ_INT(cer_kernel_rows(at, &from, 256, 129, &call, &err), CER_OK);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 3);
    CHECK_EQ_INT(cer_kernel_rows(at, &from, 256, 0, &call, &err), CER_OK);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 0);
    CHECK_EQ_INT(cer_kernel_rows(at, &from, 0, 5, &call, &err), CER_OK);
    CHECK_EQ_INT(cer_kernel_blocks(call.kernel, &call.args), 0);
}

/* On the host device a launch runs the reference. */
static void
a_launch_copies_rows(void)
{
    _Alignas(8) static const cer_row_place places[] = {{1, 1}, {0, 0}, {1, 1}};
    _Alignas(CER_ALIGNMENT) static const uint16_t first[1][3] = {{1, 2, 3}};
    _Alignas(CER_ALIGNMENT) static const uint16_t second[2][3] = {{4, 5, 6},
                                                                  {7, 8, 9}};
    const cer_kernel_part in[] = {{.src = (const uint8_t *)first},
                                  {.src = (const uint8_t *)second}};
    const cer_kernel_source from = {.parts = in, .places = places};
    uint16_t to[3][3] = {{0}};
    cer_device *device;
    cer_kernel_call call;

    CHECK_EQ_INT(cer_device_host_new(&device, NULL), CER_OK);
    CHECK_EQ_INT(cer_kernel_rows(to, &from, sizeof to[0], 3, &call, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_kernel_launch(device, &call, NULL, NULL), CER_OK);
    CHECK(memcmp(to[0], second[1], sizeof to[0]) == 0);
    CHECK(memcmp(to[1], first[0], sizeof to[1]) == 0);
    CHECK(memcmp(to[2], second[1], sizeof to[2]) == 0);
    cer_device_release(device);
}

CHECK_MAIN(batches_are_the_loaders, conversions_are_those_of_the_cpu,
           chains_that_are_too_long_are_refused, kernels_have_names,
           the_ptx_has_every_kernel, large_batches_are_counted_right,
           a_launch_copies_rows)
