/* kernels_plan.c -- turns a chain of transform.c into a kernel and its
 * arguments. The parts that depend only on the chain are computed when the plan
 * is made; a batch adds pointers, and whether their alignment allows access to
 * several values at once. The kernels find a part's pointers in device memory,
 * so its alignment is known here from the contract only. */
#include "kernels_impl.h"

#include <string.h>

#include "float_env.h"
#include "pointwise_impl.h"
#include "transform_impl.h"

enum { CONSTANT_ALIGNMENT = 16 };

struct cer_kernel_plan {
    bool ragged, image, chw;
    cer_value_mode mode;
    size_t in_bytes;  /* of a row; of a thing if ragged */
    size_t out_bytes; /* of a row; of a thing if ragged */
    size_t elements;  /* in its output */
    cer_kernel_values values;
    cer_image_args images; /* without pointers, tiling and values */
    size_t max_length;
    uint8_t *constants;
    size_t constant_bytes;
};

void
cer_kernel_plan_free(cer_kernel_plan *plan)
{
    if (plan == NULL)
        return;
    cer_aligned_free(plan->constants);
    cer_free(plan);
}

const void *
cer_kernel_plan_constants(const cer_kernel_plan *plan, size_t *bytes)
{
    *bytes = plan->constant_bytes;
    return plan->constants;
}

/* --- constants ------------------------------------------------------------ */

/* Reserves `bytes` more and returns their offset. */
static size_t
reserve(size_t *total, size_t bytes)
{
    size_t at = *total;

    *total += (bytes + CONSTANT_ALIGNMENT - 1) / CONSTANT_ALIGNMENT *
              CONSTANT_ALIGNMENT;
    return at;
}

static bool
has_table(const cer_transform *t)
{
    return t->values != NULL && t->values->table != NULL;
}

static size_t
fill_bytes(const cer_transform *t)
{
    return t->fills == NULL ? 0 : t->channels * cer_dtype_size(t->out.dtype);
}

/* Lays out the constants: tables or operands, then fills. */
static size_t
lay_out(const cer_transform *t, cer_kernel_values *v)
{
    size_t total = 0, n_fills = t->ragged ? 1 : t->n_fills;

    if (has_table(t)) {
        (void)reserve(&total, t->values->tables * 256 * v->out_bytes);
    } else if (t->values != NULL) {
        for (size_t i = 0; i < t->values->n_steps; i++) {
            const pointwise_step *s = &t->values->steps[i];

            if (s->n > 1)
                v->steps[i].offset =
                    (uint32_t)reserve(&total, s->n * cer_dtype_size(s->dtype));
        }
    }
    v->fills = (uint32_t)reserve(&total, n_fills * fill_bytes(t));
    return total;
}

static void
write_constants(const cer_transform *t, const cer_kernel_values *v,
                uint8_t *constants)
{
    size_t n_fills = t->ragged ? 1 : t->n_fills;

    if (has_table(t)) {
        memcpy(constants, t->values->table,
               t->values->tables * 256 * v->out_bytes);
    } else if (t->values != NULL) {
        for (size_t i = 0; i < t->values->n_steps; i++) {
            const pointwise_step *s = &t->values->steps[i];

            if (s->n > 1) /* the period begins with each operand once */
                memcpy(constants + v->steps[i].offset, s->period,
                       s->n * cer_dtype_size(s->dtype));
        }
    }
    if (fill_bytes(t) != 0)
        memcpy(constants + v->fills, t->fills, n_fills * fill_bytes(t));
}

/* --- making --------------------------------------------------------------- */

/* Whether float32 can represent every value of the type. */
static bool
is_single(cer_dtype dtype)
{
    return dtype == CER_F16 || dtype == CER_BF16 || dtype == CER_F32;
}

static cer_value_mode
choose_mode(const cer_transform *t)
{
    const cer_pointwise *chain = t->values;

    if (chain == NULL)
        return CER_VALUES_COPY;
    if (chain->table != NULL)
        return CER_VALUES_TABLE;
    if (chain->from == CER_F64)
        return CER_VALUES_WIDE;
    for (size_t i = 0; i < chain->n_steps; i++) {
        if (!is_single(chain->steps[i].dtype))
            return CER_VALUES_WIDE;
    }
    return CER_VALUES_FLOAT;
}

static void
take_steps(const cer_pointwise *chain, cer_kernel_values *v)
{
    v->from = (uint8_t)chain->from;
    v->to = (uint8_t)cer_pointwise_dtype(chain);
    if (chain->table != NULL) {
        v->tables = (uint32_t)chain->tables;
        return;
    }
    v->n_steps = (uint32_t)chain->n_steps;
    for (size_t i = 0; i < chain->n_steps; i++) {
        const pointwise_step *s = &chain->steps[i];
        cer_kernel_step *to = &v->steps[i];

        to->kind = (uint8_t)s->kind;
        to->dtype = (uint8_t)s->dtype;
        to->per_channel = s->n > 1;
        if (s->n == 1) {
            to->operand = s->operands[0];
            to->single = (float)s->operands[0];
        }
    }
}

static void
take_image(const cer_transform *t, cer_image_args *a)
{
    a->width = (uint32_t)t->width;
    a->out[0] = (uint32_t)t->out.shape[t->chw ? 1 : 0];
    a->out[1] = (uint32_t)t->out.shape[t->chw ? 2 : 1];
    a->channels = (uint32_t)t->channels;
    a->draws = t->draws;
    a->n_moves = (uint32_t)t->n_moves;
    a->by_line = cer_kernels_divider(
        t->chw ? (a->out[1] + CER_KERNEL_GROUP - 1) / CER_KERNEL_GROUP
               : a->out[1]);
    for (size_t i = 0; i < t->n_moves; i++) {
        const transform_move *m = &t->moves[i];
        cer_kernel_move *to = &a->moves[i];

        for (int axis = 0; axis < 2; axis++) {
            to->in[axis] = (uint32_t)m->in[axis];
            to->out[axis] = (uint32_t)m->out[axis];
            to->padding[axis] = (uint32_t)m->padding[axis];
        }
        to->flip = m->flip;
        to->random = m->random;
        to->fill = m->fill;
        to->probability = m->probability;
    }
}

static cer_status
check(const cer_transform *t, cer_error *err)
{
    size_t steps = t->values == NULL || has_table(t) ? 0 : t->values->n_steps;

    if (steps > CER_KERNEL_STEPS)
        return cer_fail(err, CER_INVALID,
                        "a chain of %zu operations is longer than the %d that "
                        "a kernel supports",
                        steps, CER_KERNEL_STEPS);
    if (t->n_moves > CER_KERNEL_MOVES)
        return cer_fail(err, CER_INVALID,
                        "%zu crops and flips are more than the %d that a "
                        "kernel supports",
                        t->n_moves, CER_KERNEL_MOVES);
    if (t->in_bytes > CER_KERNEL_MOST || t->out.n_elements > CER_KERNEL_MOST)
        return cer_fail(err, CER_INVALID,
                        "rows of %zu bytes are larger than a kernel supports",
                        t->in_bytes > t->out.bytes ? t->in_bytes
                                                   : t->out.bytes);
    if (t->n_values == 0 && t->out.n_elements != 0)
        return cer_fail(
            err, CER_INVALID,
            "a kernel does not support crops of images without pixels");
    return CER_OK;
}

static cer_status
make(const cer_transform *t, cer_kernel_plan *p, cer_error *err)
{
    cer_kernel_values *v = &p->values;

    p->ragged = t->ragged;
    p->image = t->image;
    p->chw = t->chw;
    p->mode = choose_mode(t);
    p->in_bytes = t->in_bytes;
    p->out_bytes = t->out.bytes;
    p->elements = t->out.n_elements;
    p->max_length = t->max_length;
    v->out_bytes = (uint32_t)cer_dtype_size(t->out.dtype);
    v->in_bytes =
        t->n_values == 0 ? v->out_bytes : (uint32_t)(t->in_bytes / t->n_values);
    v->by_channels =
        cer_kernels_divider(t->channels == 0 ? 1 : (uint32_t)t->channels);
    if (t->values != NULL)
        take_steps(t->values, v);
    if (t->image && t->out.n_elements != 0)
        take_image(t, &p->images);
    p->constant_bytes = lay_out(t, v);
    if (p->constant_bytes == 0)
        return CER_OK;
    p->constants = cer_aligned_alloc(p->constant_bytes);
    if (p->constants == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a kernel's tables");
    memset(p->constants, 0, p->constant_bytes);
    write_constants(t, v, p->constants);
    return CER_OK;
}

cer_status
cer_kernel_plan_new(const cer_transform *transform, cer_kernel_plan **out,
                    cer_error *err)
{
    cer_status status = check(transform, err);
    cer_kernel_plan *plan;
    fenv_t before;

    *out = NULL;
    if (status != CER_OK)
        return status;
    plan = cer_calloc(1, sizeof *plan);
    if (plan == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a kernel's plan");
    cer_float_enter(&before);
    status = make(transform, plan, err);
    cer_float_leave(&before);
    if (status == CER_OK)
        *out = plan;
    else
        cer_kernel_plan_free(plan);
    return status;
}

/* --- batches -------------------------------------------------------------- */

static cer_status
too_large(cer_error *err)
{
    return cer_fail(err, CER_INVALID,
                    "a batch is larger than a kernel supports");
}

static bool
is_on(const void *pointer, size_t bytes)
{
    return (uintptr_t)pointer % bytes == 0;
}

/* Whether a group of values of `bytes` bytes can be accessed at once. */
static bool
groups_fit(const void *pointer, size_t bytes)
{
    size_t group = bytes * CER_KERNEL_GROUP;

    return is_on(pointer, group < 16 ? group : 16);
}

static size_t
groups(size_t values)
{
    return (values + CER_KERNEL_GROUP - 1) / CER_KERNEL_GROUP;
}

/* Whether all rows of a source that has rows of `bytes` can be read in pieces
 * of `vector` bytes: the values of a part begin on CER_ALIGNMENT. */
static bool
rows_are_on(const cer_kernel_source *from, size_t bytes, size_t vector)
{
    return bytes % vector == 0 &&
           (!from->contiguous || is_on(from->src, vector));
}

cer_status
cer_kernel_rows(void *dst, const cer_kernel_source *from, size_t row_bytes,
                size_t n_rows, cer_kernel_call *out, cer_error *err)
{
    static const cer_kernel kernels[] = {CER_KERNEL_ROWS_16, CER_KERNEL_ROWS_8,
                                         CER_KERNEL_ROWS_4, CER_KERNEL_ROWS_2,
                                         CER_KERNEL_ROWS_1};
    cer_rows_args *a = &out->args.rows;
    size_t vector = 16, i = 0;

    while (!is_on(dst, vector) || !rows_are_on(from, row_bytes, vector)) {
        vector /= 2;
        i++;
    }
    out->kernel = kernels[i];
    a->dst = dst;
    a->from = *from;
    a->row_bytes = row_bytes;
    return cer_kernels_cut(n_rows, row_bytes / vector, CER_KERNEL_TILE,
                           &a->tiling)
               ? CER_OK
               : too_large(err);
}

static cer_status
plan_values(const cer_kernel_plan *p, const cer_kernel_batch *b,
            cer_kernel_call *out, cer_error *err)
{
    cer_values_args *a = &out->args.values;

    out->kernel =
        (cer_kernel)(CER_KERNEL_VALUES_TABLE + (p->mode - CER_VALUES_TABLE));
    a->dst = b->dst;
    a->from = b->from;
    a->row_bytes = p->in_bytes;
    a->elements = (uint32_t)p->elements;
    a->aligned =
        p->elements % CER_KERNEL_GROUP == 0 &&
        (!b->from.contiguous || groups_fit(b->from.src, p->values.in_bytes)) &&
        groups_fit(b->dst, p->values.out_bytes);
    a->values = p->values;
    a->values.constants = b->constants;
    return cer_kernels_cut(b->n_rows, groups(p->elements), CER_KERNEL_TILE,
                           &a->tiling)
               ? CER_OK
               : too_large(err);
}

static cer_status
plan_image(const cer_kernel_plan *p, const cer_kernel_batch *b,
           cer_kernel_call *out, cer_error *err)
{
    cer_image_args *a = &out->args.image;
    size_t line = p->chw ? p->images.out[1] : p->elements;
    size_t items = p->elements == 0 ? 0
                   : p->chw         ? p->images.out[0] * groups(line)
                                    : groups(line);

    *a = p->images;
    out->kernel = (cer_kernel)((p->chw ? CER_KERNEL_PLANES_COPY
                                       : CER_KERNEL_PIXELS_COPY) +
                               p->mode);
    a->dst = b->dst;
    a->from = b->from;
    a->row_bytes = p->in_bytes;
    a->seed = b->seed;
    a->epoch = b->epoch;
    a->aligned =
        line % CER_KERNEL_GROUP == 0 && groups_fit(b->dst, p->values.out_bytes);
    a->values = p->values;
    a->values.constants = b->constants;
    return cer_kernels_cut(b->n_rows, items, CER_KERNEL_SLOTS, &a->tiling)
               ? CER_OK
               : too_large(err);
}

static cer_status
plan_ragged(const cer_kernel_plan *p, const cer_kernel_batch *b,
            cer_kernel_call *out, cer_error *err)
{
    cer_ragged_args *a = &out->args.ragged;
    size_t row, items;

    if (b->length > CER_KERNEL_MOST ||
        !cer_mul_size(b->length, p->elements, &row) || row > CER_KERNEL_MOST)
        return too_large(err);
    out->kernel = (cer_kernel)(CER_KERNEL_RAGGED_COPY + p->mode);
    a->dst = b->dst;
    a->mask = b->mask;
    a->lengths = b->lengths;
    a->from = b->from;
    a->thing_bytes = p->in_bytes;
    a->max_length =
        p->max_length > CER_KERNEL_MOST ? 0 : (uint32_t)p->max_length;
    a->length = (uint32_t)b->length;
    a->per_thing = (uint32_t)p->elements;
    a->aligned =
        row % CER_KERNEL_GROUP == 0 && groups_fit(b->dst, p->values.out_bytes);
    a->by_thing =
        cer_kernels_divider(p->elements == 0 ? 1 : (uint32_t)p->elements);
    a->values = p->values;
    a->values.constants = b->constants;
    /* Things without values still have a mask; rows without things still have a
     * length. */
    items = groups(p->elements == 0 ? b->length : row);
    return cer_kernels_cut(b->n_rows, items == 0 ? 1 : items, CER_KERNEL_TILE,
                           &a->tiling)
               ? CER_OK
               : too_large(err);
}

cer_status
cer_kernel_plan_batch(const cer_kernel_plan *plan,
                      const cer_kernel_batch *batch, cer_kernel_call *out,
                      cer_error *err)
{
    if (plan->ragged)
        return plan_ragged(plan, batch, out, err);
    if (plan->image)
        return plan_image(plan, batch, out, err);
    if (plan->mode != CER_VALUES_COPY)
        return plan_values(plan, batch, out, err);
    return cer_kernel_rows(batch->dst, &batch->from, plan->in_bytes,
                           batch->n_rows, out, err);
}
