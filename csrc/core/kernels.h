/* kernels.h -- batches made on a device: the choice of a kernel for a column's
 * transform, and its arguments.
 *
 * csrc/cuda/kernels.cu has the kernels, kernels_host.c a reference for each.
 * Results equal those of cer_transform_rows and cer_transform_ragged bit for
 * bit, except for the payload of a NaN, which the device chooses.
 *
 * The rows of a batch may be in several parts of a dataset, each with its own
 * memory; one launch makes a column of all of them, from a table of the parts
 * and the places of the rows. The places are not computed on the device: the
 * order is a Fisher-Yates shuffle, in which every swap depends on the one
 * before, and row lists of views need a table anyway. They are eight bytes per
 * row, less than 2% of rows of 512 bytes, and the order is the CPU's.
 *
 * Use: one plan per column, whose constants are copied to the device once; for
 * each batch, cer_kernel_plan_batch and cer_kernel_launch on the consumer's
 * stream. A batch allocates nothing. */
#ifndef CER_KERNELS_H
#define CER_KERNELS_H

#include "device.h"
#include "kernels_args.h"
#include "transform.h"

/*    id             entry in the module   what it does, arguments, values */
#define CER_KERNEL_LIST(X)                                                     \
    X(ROWS_16, cer_rows_16, rows, rows, COPY)                                  \
    X(ROWS_8, cer_rows_8, rows, rows, COPY)                                    \
    X(ROWS_4, cer_rows_4, rows, rows, COPY)                                    \
    X(ROWS_2, cer_rows_2, rows, rows, COPY)                                    \
    X(ROWS_1, cer_rows_1, rows, rows, COPY)                                    \
    X(VALUES_TABLE, cer_values_table, values, values, TABLE)                   \
    X(VALUES_FLOAT, cer_values_float, values, values, FLOAT)                   \
    X(VALUES_WIDE, cer_values_wide, values, values, WIDE)                      \
    X(PLANES_COPY, cer_planes_copy, planes, image, COPY)                       \
    X(PLANES_TABLE, cer_planes_table, planes, image, TABLE)                    \
    X(PLANES_FLOAT, cer_planes_float, planes, image, FLOAT)                    \
    X(PLANES_WIDE, cer_planes_wide, planes, image, WIDE)                       \
    X(PIXELS_COPY, cer_pixels_copy, pixels, image, COPY)                       \
    X(PIXELS_TABLE, cer_pixels_table, pixels, image, TABLE)                    \
    X(PIXELS_FLOAT, cer_pixels_float, pixels, image, FLOAT)                    \
    X(PIXELS_WIDE, cer_pixels_wide, pixels, image, WIDE)                       \
    X(RAGGED_COPY, cer_ragged_copy, ragged, ragged, COPY)                      \
    X(RAGGED_TABLE, cer_ragged_table, ragged, ragged, TABLE)                   \
    X(RAGGED_FLOAT, cer_ragged_float, ragged, ragged, FLOAT)                   \
    X(RAGGED_WIDE, cer_ragged_wide, ragged, ragged, WIDE)

typedef enum cer_kernel {
#define CER_KERNEL_ENUM(id, name, family, args, mode) CER_KERNEL_##id,
    CER_KERNEL_LIST(CER_KERNEL_ENUM)
#undef CER_KERNEL_ENUM
        CER_KERNEL_COUNT
} cer_kernel;

typedef union cer_kernel_args {
    cer_rows_args rows;
    cer_values_args values;
    cer_image_args image;
    cer_ragged_args ragged;
} cer_kernel_args;

typedef struct cer_kernel_call {
    cer_kernel kernel;
    cer_kernel_args args;
} cer_kernel_call;

const char *cer_kernel_name(cer_kernel kernel);
bool cer_kernel_find(const char *name, cer_kernel *out);
size_t cer_kernel_args_bytes(cer_kernel kernel);
/* Number of blocks of CER_KERNEL_THREADS threads; 0 if there is no work. */
uint32_t cer_kernel_blocks(cer_kernel kernel, const cer_kernel_args *args);

/* Runs the kernel's reference on the CPU, on memory that the CPU can read. */
void cer_kernel_run_host(cer_kernel kernel, const cer_kernel_args *args);

/* Enqueues the kernel on `stream`, unless there is no work; `call` need not
 * outlive this. */
cer_status cer_kernel_launch(cer_device *device, const cer_kernel_call *call,
                             void *stream, cer_error *err);

/* --- planning ------------------------------------------------------------- */

typedef struct cer_kernel_plan cer_kernel_plan;

/* Makes the plan for batches of a column with this transform, to which it keeps
 * no reference. *out is the caller's; NULL on failure. Errors: CER_INVALID (the
 * chain is too long or its rows too large for the kernels: make the batches on
 * the CPU; the message gives the reason and follows the column's name),
 * CER_NOMEM. */
cer_status cer_kernel_plan_new(const cer_transform *transform,
                               cer_kernel_plan **out, cer_error *err);
void cer_kernel_plan_free(cer_kernel_plan *plan); /* NULL allowed */

/* The constants that the kernel reads; copy them once, before the first batch,
 * to device memory on CER_ALIGNMENT. *bytes may be 0. They live as long as the
 * plan. */
const void *cer_kernel_plan_constants(const cer_kernel_plan *plan,
                                      size_t *bytes);

/* One batch; all pointers are to device memory. */
typedef struct cer_kernel_batch {
    cer_kernel_source from;   /* its n_rows rows */
    const uint8_t *constants; /* where the plan's were copied */
    void *dst;                /* as cer_transform_output describes */
    uint8_t *mask;            /* ragged: these three */
    int64_t *lengths;
    size_t length; /* the padded length, of cer_transform_length */
    size_t n_rows;
    uint64_t seed, epoch; /* of random draws */
} cer_kernel_batch;

/* Fills in *out. CER_INVALID: the batch is too large for the kernels (2**31
 * values in a padded row). */
cer_status cer_kernel_plan_batch(const cer_kernel_plan *plan,
                                 const cer_kernel_batch *batch,
                                 cer_kernel_call *out, cer_error *err);

/* Fills in the call that copies rows of any type unchanged. */
cer_status cer_kernel_rows(void *dst, const cer_kernel_source *from,
                           size_t row_bytes, size_t n_rows,
                           cer_kernel_call *out, cer_error *err);

#endif
