/* kernels_host.c -- the references: plain loops over rows and values. They
 * share the kernels' arithmetic but none of their indexing. */
#include "kernels_impl.h"

#include <string.h>

/* Row i of a batch. */
static const uint8_t *
row_of(const cer_kernel_source *from, uint64_t row_bytes, size_t i)
{
    const cer_row_place *place;

    if (from->contiguous)
        return from->src + i * row_bytes;
    place = &from->places[i];
    return from->parts[place->part].src + place->row * row_bytes;
}

/* Its number in the dataset. */
static uint64_t
number_of(const cer_kernel_source *from, size_t i)
{
    const cer_row_place *place = &from->places[i];

    return from->parts[place->part].first_row + place->row;
}

/* The values of the part of ragged row i, and the row's two offsets in them. */
static const uint8_t *
things_of(const cer_kernel_source *from, size_t i, const int64_t **offset)
{
    const cer_row_place *place;

    if (from->contiguous) {
        *offset = from->offsets + i;
        return from->src;
    }
    place = &from->places[i];
    *offset = from->parts[place->part].offsets + place->row;
    return from->parts[place->part].src;
}

/* Transforms the value at `at`. */
static uint64_t
make_value(cer_value_mode mode, const cer_kernel_values *v, uint32_t channel,
           const uint8_t *at)
{
    uint64_t raw = cer_raw_load(at, v->in_bytes);

    cer_values_make(mode, v, v->constants, &channel, &raw, 1);
    return raw;
}

void
cer_kernels_host_rows(const cer_rows_args *a, cer_value_mode mode)
{
    (void)mode; /* COPY */
    for (size_t i = 0; i < a->tiling.n_rows; i++)
        memcpy(a->dst + i * a->row_bytes, row_of(&a->from, a->row_bytes, i),
               a->row_bytes);
}

void
cer_kernels_host_values(const cer_values_args *a, cer_value_mode mode)
{
    const cer_kernel_values *v = &a->values;
    uint8_t *dst = a->dst;

    for (size_t i = 0; i < a->tiling.n_rows; i++) {
        const uint8_t *src = row_of(&a->from, a->row_bytes, i);

        for (uint32_t k = 0; k < a->elements; k++, dst += v->out_bytes)
            cer_raw_store(dst, v->out_bytes,
                          make_value(mode, v, k % v->by_channels.divisor,
                                     src + (size_t)k * v->in_bytes));
    }
}

/* The value of pixel (y, x) of the result, in one channel. */
static uint64_t
image_value(const cer_image_args *a, cer_value_mode mode, const uint8_t *src,
            const cer_drawn *drawn, const uint32_t at[2], uint32_t channel)
{
    const cer_kernel_values *v = &a->values;
    int32_t y = (int32_t)at[0], x = (int32_t)at[1];
    uint32_t fill = cer_find_pixel(a, drawn, &y, &x);
    size_t pixel = (size_t)y * a->width + (size_t)x;

    if (fill != 0)
        return cer_fill_raw(v, fill - 1, channel);
    return make_value(mode, v, channel,
                      src + (pixel * a->channels + channel) * v->in_bytes);
}

static void
run_image(const cer_image_args *a, cer_value_mode mode, bool planes)
{
    const uint32_t bytes = a->values.out_bytes, c = a->channels;
    size_t pixels = (size_t)a->out[0] * a->out[1], n = pixels * c;
    uint32_t at[2];
    cer_drawn drawn;

    for (size_t i = 0; i < a->tiling.n_rows; i++) {
        const uint8_t *src = row_of(&a->from, a->row_bytes, i);
        uint8_t *dst = a->dst + i * n * bytes;

        cer_draw_moves(a, a->draws ? number_of(&a->from, i) : 0, &drawn);
        for (size_t k = 0; k < n; k++) {
            size_t pixel = planes ? k % pixels : k / c;

            at[0] = (uint32_t)(pixel / a->out[1]);
            at[1] = (uint32_t)(pixel % a->out[1]);
            cer_raw_store(dst + k * bytes, bytes,
                          image_value(a, mode, src, &drawn, at,
                                      (uint32_t)(planes ? k / pixels : k % c)));
        }
    }
}

void
cer_kernels_host_planes(const cer_image_args *a, cer_value_mode mode)
{
    run_image(a, mode, true);
}

void
cer_kernels_host_pixels(const cer_image_args *a, cer_value_mode mode)
{
    run_image(a, mode, false);
}

void
cer_kernels_host_ragged(const cer_ragged_args *a, cer_value_mode mode)
{
    const cer_kernel_values *v = &a->values;
    uint32_t elements = a->length * a->per_thing;
    uint8_t *dst = a->dst;

    for (size_t i = 0; i < a->tiling.n_rows; i++) {
        const int64_t *offset;
        const uint8_t *values = things_of(&a->from, i, &offset);
        const uint8_t *src = values + (size_t)offset[0] * a->thing_bytes;
        uint64_t things = (uint64_t)(offset[1] - offset[0]);

        if (a->max_length != 0 && things > a->max_length)
            things = a->max_length;
        a->lengths[i] = (int64_t)things;
        for (uint32_t k = 0; k < a->length; k++)
            a->mask[i * a->length + k] = k < things;
        for (uint32_t k = 0; k < elements; k++, dst += v->out_bytes) {
            uint32_t channel = k % v->by_channels.divisor;
            bool there = k < things * a->per_thing;

            cer_raw_store(dst, v->out_bytes,
                          there ? make_value(mode, v, channel,
                                             src + (size_t)k * v->in_bytes)
                                : cer_fill_raw(v, 0, channel));
        }
    }
}
