/* transform_impl.h -- the struct that transform.c makes of a column's chain;
 * kernels_plan.c reads it to run the chain on a device. No other file includes
 * it. */
#ifndef CER_TRANSFORM_IMPL_H
#define CER_TRANSFORM_IMPL_H

#include "pointwise.h"
#include "transform.h"

/* A crop or flip, with the image's size before and after it. */
typedef struct transform_move {
    bool flip;
    bool random;
    double probability;
    size_t in[2], out[2]; /* height and width */
    size_t padding[2];
    uint8_t fill; /* index of the fill for the crop's padding */
} transform_move;

struct cer_transform {
    cer_row_type out;
    size_t in_bytes; /* of a row; of a value if ragged */
    size_t n_values; /* in that many bytes */
    bool ragged, image, chw, draws;
    cer_pointwise *values; /* NULL: values stay unchanged */
    /* Results of padding: one fill per padding crop, or one for PAD, each of
     * `fill_values` results. */
    size_t n_fills, fill_values;
    uint8_t *fills;
    bool fill_is_a_byte;            /* the first fill repeats one byte */
    size_t height, width, channels; /* of an image before its moves */
    size_t n_moves;
    transform_move moves[CER_MAX_OPS];
    size_t longest_side; /* of the image at any point of the chain */
    size_t max_length, multiple_of;
};

#endif
