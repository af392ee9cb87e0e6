#include "transform.h"
#include "convert.h"

#include <string.h>

#include "float_env.h"
#include "gather.h"
#include "rng.h"
#include "transform_impl.h"

enum {
    BLOCK_BYTES = 16384, /* rows gathered before a pointwise chain */
    ROWS_AHEAD = 16,     /* ragged rows prefetched before they are copied, */
    ASKED_BYTES = 1024,  /* up to this many bytes of each */
};

const cer_row_type *
cer_transform_output(const cer_transform *t)
{
    return &t->out;
}

bool
cer_transform_copies(const cer_transform *t)
{
    return !t->ragged && !t->image && t->values == NULL;
}

bool
cer_transform_draws(const cer_transform *t)
{
    return t->draws;
}

void
cer_transform_free(cer_transform *t)
{
    if (t == NULL)
        return;
    cer_pointwise_free(t->values);
    cer_free(t->fills);
    cer_free(t);
}

/* --- making --------------------------------------------------------------- */

typedef struct maker {
    cer_transform *t;
    const cer_column *column;
    size_t size[2]; /* of the image at this point of the chain */
    bool padded;    /* PAD was seen */
    /* Fills, by the step of the chain after which they appear. */
    size_t fill_step[CER_MAX_OPS];
    double fill_value[CER_MAX_OPS];
    cer_error *err;
} maker;

static cer_status
refuse(const maker *m, const char *why)
{
    return cer_fail(m->err, CER_INVALID, "column %s: %s", m->column->name, why);
}

static bool
is_image_op(cer_op_kind kind)
{
    return kind == CER_OP_TO_CHW || kind == CER_OP_CROP || kind == CER_OP_FLIP;
}

static cer_status
begin(maker *m, const cer_op *ops, size_t n_ops)
{
    cer_transform *t = m->t;
    const cer_column *c = m->column;

    t->ragged = c->ragged;
    t->in_bytes = c->row_bytes;
    t->n_values = c->row_bytes / cer_dtype_size(c->dtype);
    t->channels = c->ndim == 0 ? 1 : c->shape[c->ndim - 1];
    t->multiple_of = 1;
    for (size_t i = 0; i < n_ops; i++)
        t->image = t->image || is_image_op(ops[i].kind);
    if (!t->image)
        return CER_OK;
    if (c->ragged || c->ndim < 2 || c->ndim > 3)
        return refuse(m, "image transforms need rows of height x width or "
                         "height x width x channels");
    if (c->ndim == 2)
        t->channels = 1;
    t->height = m->size[0] = c->shape[0];
    t->width = m->size[1] = c->shape[1];
    t->longest_side = t->height > t->width ? t->height : t->width;
    return CER_OK;
}

static uint8_t
add_fill(maker *m, double value)
{
    m->fill_step[m->t->n_fills] = cer_pointwise_steps(m->t->values);
    m->fill_value[m->t->n_fills] = value;
    return (uint8_t)m->t->n_fills++;
}

static cer_status
add_crop(maker *m, const cer_op *op)
{
    transform_move *crop = &m->t->moves[m->t->n_moves++];

    crop->random = op->random;
    for (int axis = 0; axis < 2; axis++) {
        size_t room;

        if (!cer_mul_size(op->padding[axis], 2, &room) ||
            !cer_add_size(room, m->size[axis], &room) || room > INT32_MAX ||
            op->size[axis] < 1 || op->size[axis] > room)
            return refuse(m, "a crop is larger than the image");
        crop->in[axis] = m->size[axis];
        crop->out[axis] = op->size[axis];
        crop->padding[axis] = op->padding[axis];
        m->size[axis] = op->size[axis];
        if (m->size[axis] > m->t->longest_side)
            m->t->longest_side = m->size[axis];
    }
    if (op->padding[0] != 0 || op->padding[1] != 0)
        crop->fill = add_fill(m, 0);
    return CER_OK;
}

static cer_status
add_flip(maker *m, const cer_op *op)
{
    transform_move *flip = &m->t->moves[m->t->n_moves++];

    flip->flip = true;
    flip->random = true;
    flip->probability = op->value;
    memcpy(flip->in, m->size, sizeof flip->in);
    memcpy(flip->out, m->size, sizeof flip->out);
    return CER_OK;
}

static cer_status
add_pad(maker *m, const cer_op *op)
{
    if (!m->t->ragged)
        return refuse(m, "Pad is for ragged columns");
    if (m->padded)
        return refuse(m, "a chain can contain only one Pad");
    if (op->multiple_of < 1)
        return refuse(m, "Pad needs multiple_of >= 1");
    m->padded = true;
    m->t->max_length = op->max_length;
    m->t->multiple_of = op->multiple_of;
    (void)add_fill(m, op->value);
    return CER_OK;
}

static cer_status
add_op(maker *m, const cer_op *op)
{
    cer_pointwise *values = m->t->values;

    switch (op->kind) {
    case CER_OP_CAST:
        return cer_pointwise_cast(values, op->dtype, m->err);
    case CER_OP_SCALE:
        return cer_pointwise_scale(values, op->value, m->err);
    case CER_OP_NORMALIZE:
        return cer_pointwise_normalize(values, op->mean, op->std, op->n,
                                       m->err);
    case CER_OP_TO_CHW:
        if (m->t->chw)
            return refuse(m, "a chain can contain only one ToCHW");
        m->t->chw = true;
        return CER_OK;
    case CER_OP_CROP:
        return add_crop(m, op);
    case CER_OP_FLIP:
        return add_flip(m, op);
    case CER_OP_PAD:
        return add_pad(m, op);
    }
    return refuse(m, "unknown transform");
}

static cer_status
set_output(maker *m)
{
    cer_transform *t = m->t;
    const cer_column *c = m->column;
    cer_row_type *out = &t->out;

    out->dtype = cer_pointwise_dtype(t->values);
    out->ndim = c->ndim;
    memcpy(out->shape, c->shape, sizeof out->shape);
    if (t->image) {
        out->shape[0] = m->size[0];
        out->shape[1] = m->size[1];
    }
    if (t->chw) {
        out->ndim = 3;
        out->shape[0] = t->channels;
        out->shape[1] = m->size[0];
        out->shape[2] = m->size[1];
    }
    out->n_elements = 1;
    for (uint32_t i = 0; i < out->ndim; i++) {
        if (!cer_mul_size(out->n_elements, out->shape[i], &out->n_elements))
            return refuse(m, "rows are too large");
    }
    return cer_mul_size(out->n_elements, cer_dtype_size(out->dtype),
                        &out->bytes)
               ? CER_OK
               : refuse(m, "rows are too large");
}

static cer_status
set_fills(maker *m)
{
    cer_transform *t = m->t;
    size_t bytes = cer_dtype_size(t->out.dtype), per_fill;

    t->fill_values = t->ragged ? t->out.n_elements : t->channels;
    if (t->n_fills == 0 || t->fill_values == 0)
        return CER_OK;
    if (!cer_mul_size(t->fill_values, bytes, &per_fill))
        return refuse(m, "rows are too large");
    t->fills = cer_calloc(t->n_fills, per_fill);
    if (t->fills == NULL)
        return cer_fail(m->err, CER_NOMEM, "out of memory for a transform");
    for (size_t i = 0; i < t->n_fills; i++) {
        uint8_t *fill = t->fills + i * per_fill;
        size_t first = t->channels * bytes; /* one result per channel */

        cer_pointwise_constant(t->values, m->fill_step[i], m->fill_value[i],
                               fill);
        for (size_t at = first; at < per_fill; at += first)
            memcpy(fill + at, fill, first);
    }
    t->fill_is_a_byte = memcmp(t->fills, t->fills + 1, per_fill - 1) == 0;
    return CER_OK;
}

static cer_status
make(maker *m, const cer_op *ops, size_t n_ops)
{
    cer_transform *t = m->t;
    cer_status status;

    if (n_ops > CER_MAX_OPS - 1)
        return refuse(m, "too many transforms in one chain");
    if ((status = begin(m, ops, n_ops)) != CER_OK)
        return status;
    status =
        cer_pointwise_new(m->column->dtype, t->channels, &t->values, m->err);
    for (size_t i = 0; status == CER_OK && i < n_ops; i++)
        status = add_op(m, &ops[i]);
    if (status == CER_OK && t->ragged && !m->padded)
        (void)add_fill(m, 0);
    if (status == CER_OK)
        status = cer_pointwise_finish(t->values, m->err);
    if (status == CER_OK)
        status = set_output(m);
    if (status == CER_OK)
        status = set_fills(m);
    if (status != CER_OK)
        return status;
    if (cer_pointwise_steps(t->values) == 0) {
        cer_pointwise_free(t->values);
        t->values = NULL;
    }
    for (size_t i = 0; i < t->n_moves; i++)
        t->draws = t->draws || t->moves[i].random;
    return CER_OK;
}

cer_status
cer_transform_new(const cer_column *column, const cer_op *ops, size_t n_ops,
                  cer_transform **out, cer_error *err)
{
    maker m = {.t = cer_calloc(1, sizeof **out), .column = column, .err = err};
    cer_status status;
    fenv_t before;

    *out = NULL;
    if (m.t == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a transform");
    cer_float_enter(&before); /* tables and fills are results */
    status = make(&m, ops, n_ops);
    cer_float_leave(&before);
    if (status == CER_OK)
        *out = m.t;
    else
        cer_transform_free(m.t);
    return status;
}

/* --- images --------------------------------------------------------------- */

/* The source of an image axis after the moves: positions lo to hi come from
 * source, source + step and so on; the others are padding, with the fill in
 * `level` (index + 1; 0 inside). Later crops have higher indices: if two axes
 * pad differently, the later one counts. */
typedef struct axis {
    ptrdiff_t lo, hi, source, step;
    uint8_t *level; /* NULL: nothing is padded */
} axis;

static void
crop_axis(axis *a, ptrdiff_t offset, ptrdiff_t in, ptrdiff_t out, uint8_t level)
{
    a->lo -= offset;
    a->hi -= offset;
    if (a->lo < 0) {
        a->source -= a->step * a->lo;
        a->lo = 0;
    }
    if (a->hi > out)
        a->hi = out;
    if (a->lo >= a->hi) /* nothing is left */
        a->lo = a->hi = 0;
    if (a->level == NULL)
        return;
    for (ptrdiff_t k = 0; k < out; k++) {
        /* In the direction that reads each item before it is overwritten */
        ptrdiff_t i = offset >= 0 ? k : out - 1 - k;
        ptrdiff_t j = i + offset;

        a->level[i] = j >= 0 && j < in ? a->level[j] : level;
    }
}

static void
mirror_axis(axis *a, ptrdiff_t size)
{
    ptrdiff_t lo = a->lo;

    a->source += a->step * (a->hi - a->lo - 1);
    a->step = -a->step;
    a->lo = size - a->hi;
    a->hi = size - lo;
    if (a->level == NULL)
        return;
    for (ptrdiff_t i = 0, j = size - 1; i < j; i++, j--) {
        uint8_t level = a->level[i];

        a->level[i] = a->level[j];
        a->level[j] = level;
    }
}

static void
crop(const transform_move *mv, axis axes[2], cer_rng *rng)
{
    for (int i = 0; i < 2; i++) {
        size_t room = mv->in[i] + 2 * mv->padding[i] - mv->out[i];
        size_t at = mv->random ? cer_rng_below(rng, room + 1) : room / 2;

        crop_axis(&axes[i], (ptrdiff_t)at - (ptrdiff_t)mv->padding[i],
                  (ptrdiff_t)mv->in[i], (ptrdiff_t)mv->out[i],
                  (uint8_t)(mv->fill + 1));
    }
}

static void
place(const cer_transform *t, axis axes[2], cer_rng *rng, uint8_t *levels)
{
    bool pads = t->n_fills != 0;

    axes[0] = (axis){0, (ptrdiff_t)t->height, 0, 1, pads ? levels : NULL};
    axes[1] = (axis){0, (ptrdiff_t)t->width, 0, 1,
                     pads ? levels + t->longest_side : NULL};
    if (pads)
        memset(levels, 0, 2 * t->longest_side);
    for (size_t i = 0; i < t->n_moves; i++) {
        const transform_move *mv = &t->moves[i];

        if (!mv->flip)
            crop(mv, axes, rng);
        else if (cer_rng_double(rng) < mv->probability)
            mirror_axis(&axes[1], (ptrdiff_t)mv->in[1]);
    }
}

#define COPY_STEPS(type)                                                       \
    static void copy_##type(void *dst, ptrdiff_t dst_step, const void *src,    \
                            ptrdiff_t src_step, size_t n)                      \
    {                                                                          \
        type *d = dst;                                                         \
        const type *s = src;                                                   \
        for (size_t i = 0; i < n; i++, d += dst_step, s += src_step)           \
            *d = *s;                                                           \
    }
COPY_STEPS(uint8_t)
COPY_STEPS(uint16_t)
COPY_STEPS(uint32_t)
COPY_STEPS(uint64_t)

static void
copy_steps(size_t bytes, void *dst, ptrdiff_t dst_step, const void *src,
           ptrdiff_t src_step, size_t n)
{
    if (bytes == 1)
        copy_uint8_t(dst, dst_step, src, src_step, n);
    else if (bytes == 2)
        copy_uint16_t(dst, dst_step, src, src_step, n);
    else if (bytes == 4)
        copy_uint32_t(dst, dst_step, src, src_step, n);
    else
        copy_uint64_t(dst, dst_step, src, src_step, n);
}

/* The source values of an image's pixels: bytes to look up in a table, or final
 * values. */
typedef struct pixels {
    const uint8_t *values;
    size_t value_bytes;
    const uint8_t *table;
    size_t tables;
} pixels;

/* Writes n pixels, from source pixel `from` in steps of `step` pixels, to
 * consecutive pixels of the result, starting at `to`. */
static void
put_pixels(const cer_transform *t, uint8_t *dst, size_t to, const pixels *px,
           size_t from, ptrdiff_t step, size_t n)
{
    size_t bytes = cer_dtype_size(t->out.dtype), c = t->channels;
    size_t plane = t->chw ? t->out.shape[1] * t->out.shape[2] : 1;
    ptrdiff_t dst_step = t->chw ? 1 : (ptrdiff_t)c;
    const uint8_t *src = px->values + from * c * px->value_bytes;

    dst += (t->chw ? to : to * c) * bytes;
    if (px->table == NULL && step == 1 && (!t->chw || c == 1)) {
        memcpy(dst, src, n * c * bytes);
        return;
    }
    for (size_t i = 0; i < c;
         i++, dst += plane * bytes, src += px->value_bytes) {
        if (px->table == NULL)
            copy_steps(bytes, dst, dst_step, src, step * (ptrdiff_t)c, n);
        else
            cer_pointwise_lookup(bytes, dst, dst_step, src, step * (ptrdiff_t)c,
                                 n, px->table + i % px->tables * 256 * bytes);
    }
}

/* Fills pixels x0 to x1 of line y with their padding. */
static void
put_padding(const cer_transform *t, uint8_t *dst, size_t y, size_t x0,
            size_t x1, const axis axes[2])
{
    size_t bytes = cer_dtype_size(t->out.dtype), c = t->channels;
    size_t width = t->out.shape[t->chw ? 2 : 1];
    size_t plane = t->chw ? t->out.shape[1] * width : 1;

    for (size_t x = x0; x < x1; x++) {
        uint8_t level = axes[0].level[y] > axes[1].level[x] ? axes[0].level[y]
                                                            : axes[1].level[x];
        const uint8_t *fill = t->fills + (size_t)(level - 1) * c * bytes;
        size_t to = (y * width + x) * (t->chw ? 1 : c);

        copy_steps(bytes, dst + to * bytes, (ptrdiff_t)plane, fill, 1, c);
    }
}

static void
put_image(const cer_transform *t, uint8_t *dst, const pixels *px,
          const axis axes[2])
{
    size_t height = t->out.shape[t->chw ? 1 : 0];
    size_t width = t->out.shape[t->chw ? 2 : 1];
    size_t y0 = (size_t)axes[0].lo, y1 = (size_t)axes[0].hi;
    size_t x0 = (size_t)axes[1].lo, x1 = (size_t)axes[1].hi;
    size_t from = (size_t)axes[0].source * t->width + (size_t)axes[1].source;

    if (t->out.bytes == 0)
        return;
    if (x0 == x1 || y0 == y1) {
        y0 = y1 = 0; /* all padding */
    } else if (axes[1].step == 1 && x0 == 0 && x1 == t->width && x1 == width) {
        put_pixels(t, dst, y0 * width, px, from, 1, (y1 - y0) * width);
    } else {
        for (size_t y = y0; y < y1; y++, from += t->width)
            put_pixels(t, dst, y * width + x0, px, from, axes[1].step, x1 - x0);
    }
    if (axes[0].level == NULL)
        return;
    for (size_t y = 0; y < height; y++) {
        bool inside = y >= y0 && y < y1;

        put_padding(t, dst, y, 0, inside ? x0 : width, axes);
        if (inside)
            put_padding(t, dst, y, x1, width, axes);
    }
}

static size_t
image_values_bytes(const cer_transform *t)
{
    size_t tables;

    if (t->values == NULL || cer_pointwise_table(t->values, &tables) != NULL)
        return 0;
    return (t->n_values * cer_dtype_size(t->out.dtype) + 63) & ~(size_t)63;
}

static void
transform_images(const cer_transform *t, uint8_t *dst, const uint8_t *src,
                 const uint32_t *rows, size_t n, const cer_row_key *key,
                 uint8_t *scratch)
{
    size_t values_bytes = image_values_bytes(t);
    pixels px = {NULL, cer_dtype_size(t->out.dtype), NULL, 1};
    cer_rng rng = {{0}};
    axis axes[2];

    if (t->values != NULL && values_bytes == 0) {
        px.table = cer_pointwise_table(t->values, &px.tables);
        px.value_bytes = 1;
    }
    for (size_t i = 0; i < n; i++, dst += t->out.bytes) {
        px.values = src + (size_t)rows[i] * t->in_bytes;
        if (values_bytes != 0) {
            cer_pointwise_run(t->values, scratch, px.values, t->n_values);
            px.values = scratch;
        }
        if (t->draws)
            cer_rng_seed(&rng, key->seed, CER_RNG_TRANSFORM, key->epoch,
                         key->first_row + rows[i]);
        place(t, axes, &rng, scratch + values_bytes);
        put_image(t, dst, &px, axes);
    }
}

/* --- rows ----------------------------------------------------------------- */

static size_t
rows_per_block(const cer_transform *t)
{
    return t->in_bytes == 0 || t->in_bytes >= BLOCK_BYTES
               ? 1
               : BLOCK_BYTES / t->in_bytes;
}

size_t
cer_transform_scratch_bytes(const cer_transform *t)
{
    if (t->ragged)
        return 0;
    if (t->image)
        return image_values_bytes(t) + 2 * t->longest_side;
    return t->values == NULL ? 0 : BLOCK_BYTES;
}

/* Converts images to floats. Rows are scattered, which the hardware cannot
 * predict: while one is converted, the next is prefetched, line by line. */
static void
transform_pixels(const cer_transform *t, uint8_t *dst, const uint8_t *src,
                 const uint32_t *rows, size_t n)
{
    for (size_t i = 0; i < n; i++, dst += t->out.bytes) {
        size_t next = rows[i + 1 < n ? i + 1 : i];

        cer_convert_pixels((float *)(void *)dst,
                           src + (size_t)rows[i] * t->in_bytes,
                           src + next * t->in_bytes, t->n_values);
    }
}

/* Gathers short rows first, so that the chain runs over many at once. */
static void
transform_values(const cer_transform *t, uint8_t *dst, const uint8_t *src,
                 const uint32_t *rows, size_t n, void *scratch)
{
    size_t block = rows_per_block(t);

    if (block == 1 && cer_pointwise_makes_floats(t->values)) {
        transform_pixels(t, dst, src, rows, n);
        return;
    }
    for (size_t i = 0; i < n; i += block, dst += block * t->out.bytes) {
        size_t m = n - i < block ? n - i : block;
        const void *values = src + (size_t)rows[i] * t->in_bytes;

        if (block > 1) {
            cer_gather_rows(scratch, src, t->in_bytes, rows + i, m);
            values = scratch;
        }
        cer_pointwise_run(t->values, dst, values, m * t->n_values);
    }
}

void
cer_transform_rows(const cer_transform *t, void *dst, const uint8_t *src,
                   const uint32_t *rows, size_t n, const cer_row_key *key,
                   void *scratch)
{
    if (t->out.bytes == 0 || n == 0)
        return;
    if (t->image)
        transform_images(t, dst, src, rows, n, key, scratch);
    else if (t->values != NULL)
        transform_values(t, dst, src, rows, n, scratch);
    else
        cer_gather_rows(dst, src, t->in_bytes, rows, n);
}

/* --- ragged rows ---------------------------------------------------------- */

static size_t
row_length(const cer_transform *t, const int64_t *offsets, uint32_t row)
{
    size_t length = (size_t)(offsets[(size_t)row + 1] - offsets[row]);

    return t->max_length != 0 && length > t->max_length ? t->max_length
                                                        : length;
}

size_t
cer_transform_length(const cer_transform *t, const int64_t *offsets,
                     const uint32_t *rows, size_t n)
{
    size_t longest = 0, over;

    for (size_t i = 0; i < n; i++) {
        size_t length = row_length(t, offsets, rows[i]);

        longest = length > longest ? length : longest;
    }
    over = longest % t->multiple_of;
    return over == 0 ? longest : longest + t->multiple_of - over;
}

static void
put_fill(const cer_transform *t, uint8_t *dst, size_t n)
{
    size_t done = t->out.bytes, all = n * t->out.bytes;

    if (all == 0)
        return;
    if (t->fill_is_a_byte) {
        memset(dst, t->fills[0], all);
        return;
    }
    memcpy(dst, t->fills, t->out.bytes);
    while (done < all) { /* by doubling */
        size_t m = done < all - done ? done : all - done;

        memcpy(dst + done, dst, m);
        done += m;
    }
}

static const uint8_t *
row_values(const cer_transform *t, const uint8_t *src, const int64_t *offsets,
           uint32_t row)
{
    return src + (size_t)offsets[row] * t->in_bytes;
}

static void
ask_for_row(const cer_transform *t, const uint8_t *src, const int64_t *offsets,
            uint32_t row)
{
    size_t bytes = row_length(t, offsets, row) * t->in_bytes;

    cer_gather_ask(row_values(t, src, offsets, row),
                   bytes < ASKED_BYTES ? bytes : ASKED_BYTES);
}

void
cer_transform_ragged(const cer_transform *t, void *dst, uint8_t *mask,
                     int64_t *lengths, size_t length, const uint8_t *src,
                     const int64_t *offsets, const uint32_t *rows, size_t n)
{
    uint8_t *to = dst;

    for (size_t i = 0; i < n; i++) {
        size_t m = row_length(t, offsets, rows[i]);

        if (i + ROWS_AHEAD < n)
            ask_for_row(t, src, offsets, rows[i + ROWS_AHEAD]);
        /* Another process may have changed the mapped offsets since `length`
         * was computed: the result has no room for more. */
        m = m < length ? m : length;
        lengths[i] = (int64_t)m;
        if (length == 0)
            continue;
        memset(mask, 1, m);
        memset(mask + m, 0, length - m);
        mask += length;
        if (t->out.bytes == 0)
            continue;
        if (t->values != NULL)
            cer_pointwise_run(t->values, to,
                              row_values(t, src, offsets, rows[i]),
                              m * t->n_values);
        else
            memcpy(to, row_values(t, src, offsets, rows[i]), m * t->in_bytes);
        put_fill(t, to + m * t->out.bytes, length - m);
        to += length * t->out.bytes;
    }
}

size_t
cer_transform_ragged_bytes(const cer_transform *t, const int64_t *offsets,
                           const uint32_t *rows, size_t n)
{
    size_t all = 0;

    for (size_t i = 0; i < n; i++)
        all += row_length(t, offsets, rows[i]);
    return all * t->in_bytes;
}

void
cer_transform_gather_ragged(const cer_transform *t, uint8_t *dst, size_t start,
                            size_t bytes, int64_t *starts, const uint8_t *src,
                            const int64_t *offsets, const uint32_t *rows,
                            size_t n)
{
    size_t room = t->in_bytes == 0 ? SIZE_MAX : bytes / t->in_bytes;

    for (size_t i = 0; i < n; i++) {
        size_t m = row_length(t, offsets, rows[i]);

        if (i + ROWS_AHEAD < n)
            ask_for_row(t, src, offsets, rows[i + ROWS_AHEAD]);
        m = m < room - start ? m : room - start; /* as above */
        memcpy(dst + start * t->in_bytes, row_values(t, src, offsets, rows[i]),
               m * t->in_bytes);
        starts[i] = (int64_t)start;
        start += m;
    }
    starts[n] = (int64_t)start;
}
