/* kernels_args.h -- the arguments of each kernel: plain structs of fixed
 * layout, passed by value, the same for the C and CUDA compilers.
 *
 * All pointers are to device memory. The struct also says how the work is
 * divided into blocks (cer_tiling): the launch follows from it, and a reference
 * on the CPU ignores it. */
#ifndef CER_KERNELS_ARGS_H
#define CER_KERNELS_ARGS_H

#include "gather_place.h"
#include "pointwise_step.h"

enum {
    CER_KERNEL_THREADS = 256, /* in every block */
    CER_KERNEL_GROUP = 4,     /* values that a thread computes at a time */
    CER_KERNEL_TILE = 1024,   /* items per block */
    CER_KERNEL_SLOTS = 16,    /* images of which a block computes parts */
    CER_KERNEL_MOVES = 8,     /* per image; more run elsewhere */
    CER_KERNEL_STEPS = 24,    /* per chain; more run elsewhere */
    CER_KERNEL_TABLE = 16384  /* bytes of tables in a block's shared memory */
};

/* Divides numbers below 2**31 by a constant, with a multiplication. */
typedef struct cer_divider {
    uint32_t divisor, multiplier, shift;
} cer_divider;

/* Every row has `items` items of work; a block does `rows` whole rows (chunks
 * is 1) or CER_KERNEL_TILE items of one row. */
typedef struct cer_tiling {
    uint64_t n_rows;
    uint32_t items, rows, chunks;
    cer_divider by_items;
} cer_tiling;

/* --- rows -----------------------------------------------------------------
 * A column's rows in one part of the dataset. The values begin on
 * CER_ALIGNMENT. */
typedef struct cer_kernel_part {
    const uint8_t *src;     /* row 0; where ragged, value 0 */
    const int64_t *offsets; /* where ragged: the rows' */
    uint64_t first_row;     /* number of row 0, which keys random draws */
} cer_kernel_part;

/* Where a batch's rows are. If they are contiguous, row i is at src + i *
 * row_bytes (where ragged, at src + offsets[i] * thing_bytes), on any
 * alignment, and parts and places only serve random draws. Otherwise it is row
 * places[i].row of parts[places[i].part]. `places` is on 8 bytes. */
typedef struct cer_kernel_source {
    const cer_kernel_part *parts;
    const cer_row_place *places;
    const uint8_t *src;
    const int64_t *offsets;
    uint32_t contiguous;
    uint32_t unused;
} cer_kernel_source;

/* --- values ---------------------------------------------------------------
 * A value stays unchanged, becomes an entry of a table (one-byte values), or
 * goes through a chain, one rounded operation after the other. */
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
    cer_divider by_channels; /* value i of a row has channel i % channels */
    uint32_t tables; /* of 256 entries at constants; channel c uses table c %
                        tables */
    uint32_t fills;  /* offset in constants of each fill's results per channel,
                        fill after fill */
    uint32_t n_steps;
    uint8_t from, to; /* cer_dtype */
    uint8_t unused[2];
    cer_kernel_step steps[CER_KERNEL_STEPS];
} cer_kernel_values;

/* --- the families ----------------------------------------------------------
 * Rows copied unchanged; an item is `vector` bytes. */
typedef struct cer_rows_args {
    uint8_t *dst;
    cer_kernel_source from;
    uint64_t row_bytes;
    cer_tiling tiling;
} cer_rows_args;

/* Rows of `elements` values, each transformed by itself; an item is a group of
 * values. `aligned`: all groups are whole and can be read and written in one
 * access. */
typedef struct cer_values_args {
    uint8_t *dst;
    cer_kernel_source from;
    uint64_t row_bytes;
    uint32_t elements;
    uint32_t aligned;
    cer_tiling tiling;
    cer_kernel_values values;
} cer_values_args;

/* A crop or flip of images of size in[] to size out[] (height, width). */
typedef struct cer_kernel_move {
    uint32_t in[2], out[2], padding[2];
    uint8_t flip, random;
    uint8_t fill; /* index of the fill for a crop's padding */
    uint8_t unused[5];
    double probability; /* of a flip */
} cer_kernel_move;

/* Images of height x width x channels that are cropped or flipped. Kernels
 * named planes write channels first, and an item is a group of pixels in a
 * line; those named pixels write channels last, and an item is a group of
 * values. `aligned`: groups are whole and can be written in one access. The
 * moves of a row are drawn from the stream of (seed, epoch, first_row of its
 * part + its number there). */
typedef struct cer_image_args {
    uint8_t *dst;
    cer_kernel_source from;
    uint64_t row_bytes;
    uint64_t seed, epoch;
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

/* Ragged rows: row r of a part has `offsets[r + 1] - offsets[r]` things of
 * `per_thing` values, starting at src + offsets[r] * thing_bytes and cut to
 * max_length (0: not cut). Output: values (n x length x per_thing), the mask (n
 * x length) and the lengths (n). An item is a group of values, or of mask bytes
 * if per_thing is 0. */
typedef struct cer_ragged_args {
    uint8_t *dst;
    uint8_t *mask;
    int64_t *lengths;
    cer_kernel_source from;
    uint64_t thing_bytes;
    uint32_t max_length;
    uint32_t length;
    uint32_t per_thing;
    uint32_t aligned; /* of the output */
    cer_divider by_thing;
    cer_tiling tiling;
    cer_kernel_values values;
} cer_ragged_args;

#endif
