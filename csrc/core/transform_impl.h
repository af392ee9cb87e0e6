/* transform_impl.h -- what transform.c makes of a column's chain;
 * kernels_plan.c reads it to have the same done on a device. Nobody else
 * includes it. */
#ifndef CER_TRANSFORM_IMPL_H
#define CER_TRANSFORM_IMPL_H

#include "pointwise.h"
#include "transform.h"

/* A crop or a mirroring, with the image's size before it. */
typedef struct transform_move {
    bool flip;
    bool random;
    double probability;
    size_t in[2], out[2]; /* height and width */
    size_t padding[2];
    uint8_t fill; /* number of the fill of what the crop pads */
} transform_move;

struct cer_transform {
    cer_row_type out;
    size_t in_bytes; /* of a row; of a value where ragged */
    size_t n_values; /* in as many bytes */
    bool ragged, image, chw, draws;
    cer_pointwise *values; /* NULL: values stay as they are */
    /* What padding becomes: one fill per crop that pads, or one for PAD, each
     * `fill_values` results. */
    size_t n_fills, fill_values;
    uint8_t *fills;
    bool fill_is_a_byte; /* the first fill is one byte over and over */
    size_t height, width, channels; /* of an image before it moves */
    size_t n_moves;
    transform_move moves[CER_MAX_OPS];
    size_t longest_side; /* of the image at any point of the chain */
    size_t max_length, multiple_of;
};

#endif
