/* kernels_args.h -- what each kernel is told: plain structs of fixed layout,
 * passed by value, the same for the C compiler and for CUDA's.
 *
 * Pointers are to memory of the device; nothing in them is of the host. How
 * the work is cut into blocks stands in the struct too (cer_tiling), so that
 * the launch follows from it, and a reference on the CPU can do without.
 *
 * Row i of a batch is row rows[i] of the column, from
 * src + rows[i] * row_bytes on. */
#ifndef CER_KERNELS_ARGS_H
#define CER_KERNELS_ARGS_H

#include "base_shared.h"
#include "pointwise_step.h"

enum {
    CER_KERNEL_THREADS = 256, /* in every block */
    CER_KERNEL_GROUP = 4,     /* values that a thread makes at a time */
    CER_KERNEL_TILE = 1024,   /* items that a block takes on */
    CER_KERNEL_SLOTS = 16,    /* images of which a block takes parts */
    CER_KERNEL_MOVES = 8,     /* of an image; more run elsewhere */
    CER_KERNEL_STEPS = 24,    /* of a chain; likewise */
    CER_KERNEL_TABLE = 16384  /* bytes of tables that a block keeps by it */
};

/* Division of numbers below 2**31 by a fixed one: a multiplication. */
typedef struct cer_divider {
    uint32_t divisor, multiplier, shift;
} cer_divider;

/* Every row is `items` pieces of work; a block takes on `rows` whole rows
 * (chunks is 1), or CER_KERNEL_TILE items of one row. */
typedef struct cer_tiling {
    uint64_t n_rows;
    uint32_t items, rows, chunks;
    cer_divider by_items;
} cer_tiling;

/* --- values ---------------------------------------------------------------
 * What becomes of a value: nothing, an entry of a table (one-byte values), or
 * the steps of a chain, one rounded operation after the other. */
typedef struct cer_kernel_step {
    uint8_t kind;        /* a cer_step_kind */
    uint8_t dtype;       /* after the step; of arithmetic F32 or F64 */
    uint8_t per_channel; /* operands at constants + offset, as `dtype` */
    uint8_t unused;
    uint32_t offset;
    float single; /* otherwise: the operand, as F32 and as F64 */
    uint32_t unused4;
    double operand;
} cer_kernel_step;

typedef struct cer_kernel_values {
    const uint8_t *constants;     /* tables, operands, fills */
    uint32_t in_bytes, out_bytes; /* of a value */
    cer_divider by_channels; /* value i of a row is of channel i % channels */
    uint32_t tables;         /* of 256 entries at constants, channel c's is
                                c % tables */
    uint32_t fills;          /* offset in constants: results per channel, one
                                after the other for every fill */
    uint32_t n_steps;
    uint8_t from, to; /* cer_dtype */
    uint8_t unused[2];
    cer_kernel_step steps[CER_KERNEL_STEPS];
} cer_kernel_values;

/* --- the families ----------------------------------------------------------
 * Rows as they are, an item being `vector` bytes. */
typedef struct cer_rows_args {
    uint8_t *dst;
    const uint8_t *src;
    const uint32_t *rows;
    uint64_t row_bytes;
    cer_tiling tiling;
} cer_rows_args;

/* Rows of `elements` values, each of which changes by itself; an item is a
 * group of values. `aligned`: all groups are whole and may be read and
 * written at once. */
typedef struct cer_values_args {
    uint8_t *dst;
    const uint8_t *src;
    const uint32_t *rows;
    uint64_t row_bytes;
    uint32_t elements;
    uint32_t aligned;
    cer_tiling tiling;
    cer_kernel_values values;
} cer_values_args;

/* A crop or a mirroring of images of in[] to images of out[] (height, width).
 */
typedef struct cer_kernel_move {
    uint32_t in[2], out[2], padding[2];
    uint8_t flip, random;
    uint8_t fill; /* number of the fill of what a crop pads */
    uint8_t unused[5];
    double probability; /* of a mirroring */
} cer_kernel_move;

/* Images of height x width x channels whose pixels move. Kernels named planes
 * write channels first, an item being a group of pixels in a line; those named
 * pixels channels last, an item being a group of values. `aligned`: groups are
 * whole and may be written at once. The moves of row i of the batch are drawn
 * from the stream of (seed, epoch, first_row + numbers[i]). */
typedef struct cer_image_args {
    uint8_t *dst;
    const uint8_t *src;
    const uint32_t *rows;
    const uint32_t *numbers;
    uint64_t row_bytes;
    uint64_t seed, epoch, first_row;
    uint32_t width;  /* of the source */
    uint32_t out[2]; /* height and width */
    uint32_t channels;
    uint32_t aligned;
    uint32_t draws; /* some move is random */
    uint32_t n_moves;
    cer_divider by_line; /* planes: groups in a line; pixels: out[1] */
    cer_tiling tiling;
    cer_kernel_values values;
    cer_kernel_move moves[CER_KERNEL_MOVES];
} cer_image_args;

/* Ragged rows: row r is the `offsets[r + 1] - offsets[r]` things of
 * `per_thing` values from src + offsets[r] * thing_bytes on, cut to max_length
 * (0: not). Written: values (n x length x per_thing), the mask (n x length)
 * and the lengths (n). An item is a group of values; of mask bytes where
 * per_thing is 0. */
typedef struct cer_ragged_args {
    uint8_t *dst;
    uint8_t *mask;
    int64_t *lengths;
    const uint8_t *src;
    const int64_t *offsets;
    const uint32_t *rows;
    uint64_t thing_bytes;
    uint32_t max_length;
    uint32_t length;
    uint32_t per_thing;
    uint32_t aligned; /* of what is written */
    cer_divider by_thing;
    cer_tiling tiling;
    cer_kernel_values values;
} cer_ragged_args;

#endif
