#include "native_net.h"

#include <string.h>

#include "float_env.h"

enum { CONVS = 2 };

/* Values, momenta and gradients; they outlive the network while a tensor is
 * held. */
typedef struct parts_memory {
    cer_owner owner; /* first, so that an owner is its parts_memory */
    float *kinds[CER_NATIVE_NET_KIND_COUNT];
} parts_memory;

/* The results of the forward pass for a batch's rows, by layer. */
typedef struct row_memory {
    float *floats;
    uint8_t *bytes;
    size_t rows; /* capacity */
    float *pooled[CONVS];
    uint8_t *which[CONVS];
    float *scores;
    float *d_scores;
    float *d_pooled; /* gradient of the last pooling's output */
} row_memory;

struct cer_native_net {
    cer_native_net_sizes sizes;
    cer_native_conv convs[CONVS];
    size_t pooled[CONVS]; /* values of one row after each pooling */
    size_t offsets[CER_NATIVE_NET_PART_COUNT + 1]; /* in floats */
    parts_memory *parts;
    /* For one image, sized for the larger convolution. */
    float *columns;
    float *plane;   /* a convolution's output, or its gradient */
    float *d_first; /* the gradient of the first pooling's output */
    row_memory row;
};

/* --- sizes ---------------------------------------------------------------- */

static cer_status
check_size(const char *name, size_t size, size_t least, cer_error *err)
{
    if (size < least || size > CER_NATIVE_NET_MOST)
        return cer_fail(err, CER_INVALID, "%s must be from %zu to %d, not %zu",
                        name, least, CER_NATIVE_NET_MOST, size);
    return CER_OK;
}

static cer_status
check_sizes(const cer_native_net_sizes *sizes, cer_error *err)
{
    const struct {
        const char *name;
        size_t size, least;
    } all[] = {
        {"channels", sizes->channels, 1},
        {"height", sizes->height, 4},
        {"width", sizes->width, 4},
        {"the first of filters", sizes->filters[0], 1},
        {"the second of filters", sizes->filters[1], 1},
        {"classes", sizes->classes, 2},
    };

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (check_size(all[i].name, all[i].size, all[i].least, err) != CER_OK)
            return CER_INVALID;
    }
    return CER_OK;
}

/* The product of four sizes, false if it does not fit. */
static bool
product(size_t a, size_t b, size_t c, size_t d, size_t *out)
{
    return cer_mul_size(a, b, &a) && cer_mul_size(a, c, &a) &&
           cer_mul_size(a, d, out);
}

static void
plan_convolutions(cer_native_net *net)
{
    const cer_native_net_sizes *sizes = &net->sizes;
    size_t channels = sizes->channels, height = sizes->height;
    size_t width = sizes->width;

    for (size_t i = 0; i < CONVS; i++) {
        net->convs[i] =
            (cer_native_conv){channels, height, width, sizes->filters[i]};
        channels = sizes->filters[i];
        height /= 2;
        width /= 2;
        net->pooled[i] = channels * height * width;
    }
}

static void
part_shape(const cer_native_net *net, cer_native_net_part part, cer_tensor *out)
{
    size_t layer = part / 2; /* a weight and a bias each */
    bool weight = part % 2 == 0;
    size_t outputs =
        layer < CONVS ? net->sizes.filters[layer] : net->sizes.classes;

    out->ndim = weight ? (layer < CONVS ? 4 : 2) : 1;
    out->shape[0] = (int64_t)outputs;
    if (weight && layer < CONVS) {
        out->shape[1] = (int64_t)net->convs[layer].channels;
        out->shape[2] = out->shape[3] = 3;
    } else if (weight) {
        out->shape[1] = (int64_t)net->pooled[CONVS - 1];
    }
    cer_tensor_pack(out);
}

/* Each part begins on CER_ALIGNMENT; gaps stay 0. */
static bool
plan_parts(cer_native_net *net)
{
    size_t at = 0;

    for (int part = 0; part < CER_NATIVE_NET_PART_COUNT; part++) {
        cer_tensor tensor = {.dtype = CER_F32};
        size_t n = 1;

        part_shape(net, (cer_native_net_part)part, &tensor);
        for (int32_t i = 0; i < tensor.ndim; i++) {
            if (!cer_mul_size(n, (size_t)tensor.shape[i], &n))
                return false;
        }
        net->offsets[part] = at;
        if (!cer_round_up_size(n, CER_ALIGNMENT / sizeof(float), &n) ||
            !cer_add_size(at, n, &at))
            return false;
    }
    net->offsets[CER_NATIVE_NET_PART_COUNT] = at;
    return true;
}

/* --- memory --------------------------------------------------------------- */

static void
free_parts(cer_owner *owner)
{
    parts_memory *parts = (parts_memory *)owner;

    for (int kind = 0; kind < CER_NATIVE_NET_KIND_COUNT; kind++)
        cer_aligned_free(parts->kinds[kind]);
    cer_free(parts);
}

/* Returns zeros, or NULL if out of memory. */
static float *
new_floats(size_t n)
{
    size_t bytes;
    float *floats;

    if (!cer_mul_size(n, sizeof *floats, &bytes) ||
        (floats = cer_aligned_alloc(bytes)) == NULL)
        return NULL;
    return memset(floats, 0, bytes);
}

static bool
make_parts(cer_native_net *net)
{
    parts_memory *parts = cer_calloc(1, sizeof *parts);

    if (parts == NULL)
        return false;
    cer_owner_init(&parts->owner, 1, free_parts);
    net->parts = parts;
    for (int kind = 0; kind < CER_NATIVE_NET_KIND_COUNT; kind++) {
        parts->kinds[kind] =
            new_floats(net->offsets[CER_NATIVE_NET_PART_COUNT]);
        if (parts->kinds[kind] == NULL)
            return false;
    }
    return true;
}

/* Allocates the memory for one image. */
static bool
make_room(cer_native_net *net)
{
    size_t columns = 0, plane = 0;

    for (size_t i = 0; i < CONVS; i++) {
        const cer_native_conv *conv = &net->convs[i];
        size_t n;

        if (!product(conv->channels, CER_NATIVE_TAPS, conv->height, conv->width,
                     &n))
            return false;
        columns = n > columns ? n : columns;
        if (!product(conv->filters, conv->height, conv->width, 1, &n))
            return false;
        plane = n > plane ? n : plane;
    }
    return (net->columns = new_floats(columns)) != NULL &&
           (net->plane = new_floats(plane)) != NULL &&
           (net->d_first = new_floats(net->pooled[0])) != NULL;
}

cer_status
cer_native_net_new(const cer_native_net_sizes *sizes, cer_native_net **out,
                   cer_error *err)
{
    cer_status status = check_sizes(sizes, err);
    cer_native_net *net = NULL;

    *out = NULL;
    if (status != CER_OK)
        return status;
    net = cer_calloc(1, sizeof *net);
    if (net == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a network");
    net->sizes = *sizes;
    plan_convolutions(net);
    if (!plan_parts(net) || !make_parts(net) || !make_room(net)) {
        status = cer_fail(err, CER_NOMEM,
                          "out of memory for a network of %zux%zux%zu images "
                          "with %zu and %zu filters and %zu classes",
                          sizes->channels, sizes->height, sizes->width,
                          sizes->filters[0], sizes->filters[1], sizes->classes);
        goto done;
    }
    *out = net;

done:
    if (status != CER_OK)
        cer_native_net_free(net);
    return status;
}

void
cer_native_net_free(cer_native_net *net)
{
    if (net == NULL)
        return;
    if (net->parts != NULL)
        cer_owner_release(&net->parts->owner);
    cer_aligned_free(net->columns);
    cer_aligned_free(net->plane);
    cer_aligned_free(net->d_first);
    cer_aligned_free(net->row.floats);
    cer_free(net->row.bytes);
    cer_free(net);
}

const cer_native_net_sizes *
cer_native_net_sizes_of(const cer_native_net *net)
{
    return &net->sizes;
}

const char *
cer_native_net_part_name(cer_native_net_part part)
{
    static const char *const names[] = {
#define CER_NATIVE_NET_PART(id, name) name,
        CER_NATIVE_NET_PARTS(CER_NATIVE_NET_PART)
#undef CER_NATIVE_NET_PART
    };

    return names[part];
}

const cer_native_conv *
cer_native_net_conv(const cer_native_net *net, size_t i)
{
    return &net->convs[i];
}

float *
cer_native_net_block(const cer_native_net *net, cer_native_net_kind kind,
                     size_t *floats)
{
    *floats = net->offsets[CER_NATIVE_NET_PART_COUNT];
    return net->parts->kinds[kind];
}

size_t
cer_native_net_offset(const cer_native_net *net, cer_native_net_part part)
{
    return net->offsets[part];
}

static float *
part_of(const cer_native_net *net, cer_native_net_kind kind, size_t part)
{
    return net->parts->kinds[kind] + net->offsets[part];
}

void
cer_native_net_tensor(const cer_native_net *net, cer_native_net_kind kind,
                      cer_native_net_part part, cer_tensor *out)
{
    *out = (cer_tensor){.owner = &net->parts->owner,
                        .data = part_of(net, kind, part),
                        .dtype = CER_F32};
    part_shape(net, part, out);
}

/* Makes room for the results of `rows` rows; unchanged on failure. */
static cer_status
make_rows(cer_native_net *net, size_t rows, cer_error *err)
{
    size_t classes = net->sizes.classes, per_row, bytes_per_row, n;
    row_memory made = {.rows = rows};
    float *at;

    if (rows <= net->row.rows)
        return CER_OK;
    bytes_per_row = net->pooled[0] + net->pooled[1];
    per_row = bytes_per_row + net->pooled[1] + 2 * classes;
    if (!cer_mul_size(per_row, rows, &n) ||
        (made.floats = new_floats(n)) == NULL ||
        (made.bytes = cer_calloc(rows, bytes_per_row)) == NULL) {
        cer_aligned_free(made.floats);
        return cer_fail(err, CER_NOMEM,
                        "out of memory for a batch of %zu rows: %zu values per "
                        "row are kept",
                        rows, per_row);
    }
    at = made.floats;
    for (size_t i = 0; i < CONVS; i++) {
        made.pooled[i] = at;
        at += rows * net->pooled[i];
        made.which[i] = made.bytes + (i == 0 ? 0 : rows * net->pooled[0]);
    }
    made.d_pooled = at;
    made.scores = at + rows * net->pooled[1];
    made.d_scores = made.scores + rows * classes;
    cer_aligned_free(net->row.floats);
    cer_free(net->row.bytes);
    net->row = made;
    return CER_OK;
}

/* --- forward -------------------------------------------------------------- */

/* The input of convolution `i` for a row. */
static const float *
input_of(const cer_native_net *net, size_t i, const float *pictures, size_t row)
{
    const cer_native_conv *conv = &net->convs[0];

    return i == 0 ? pictures + row * conv->channels * conv->height * conv->width
                  : net->row.pooled[i - 1] + row * net->pooled[i - 1];
}

/* Writes the scores of all rows. */
static void
forward(cer_native_net *net, const float *pictures, size_t rows, float *scores)
{
    size_t classes = net->sizes.classes;
    const float *bias =
        part_of(net, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_BIAS);

    for (size_t row = 0; row < rows; row++) {
        for (size_t i = 0; i < CONVS; i++) {
            const cer_native_conv *conv = &net->convs[i];
            size_t to = row * net->pooled[i];

            cer_native_unfold(conv, input_of(net, i, pictures, row),
                              net->columns);
            cer_native_conv_forward(
                conv, net->columns, part_of(net, CER_NATIVE_NET_VALUES, 2 * i),
                part_of(net, CER_NATIVE_NET_VALUES, 2 * i + 1), net->plane);
            cer_native_pool_forward(conv->filters, conv->height, conv->width,
                                    net->plane, net->row.pooled[i] + to,
                                    net->row.which[i] + to);
        }
        memcpy(scores + row * classes, bias, classes * sizeof *scores);
    }
    cer_native_add_inner(
        rows, classes, net->pooled[1], net->row.pooled[1],
        part_of(net, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_WEIGHT),
        scores);
}

cer_status
cer_native_net_check_labels(const cer_native_net *net, const int64_t *labels,
                            size_t rows, cer_error *err)
{
    int64_t classes = (int64_t)net->sizes.classes;

    for (size_t row = 0; row < rows; row++) {
        if (labels[row] < 0 || labels[row] >= classes)
            return cer_fail(err, CER_INVALID,
                            "the label of row %zu is %lld, but the network has "
                            "%lld classes, from 0",
                            row, (long long)labels[row], (long long)classes);
    }
    return CER_OK;
}

/* Checks labels, runs forward and computes metrics; optionally the gradients of
 * the scores. */
static cer_status
score(cer_native_net *net, const float *pictures, const int64_t *labels,
      size_t rows, bool gradients, cer_native_net_metrics *out, cer_error *err)
{
    size_t classes = net->sizes.classes, hits = 0;
    cer_status status = cer_native_net_check_labels(net, labels, rows, err);
    double loss = 0.0;

    if (status != CER_OK || (status = make_rows(net, rows, err)) != CER_OK)
        return status;
    forward(net, pictures, rows, net->row.scores);
    for (size_t row = 0; row < rows; row++) {
        float *d_scores = gradients ? net->row.d_scores + row * classes : NULL;
        bool right;

        loss += cer_native_cross_entropy(
            classes, net->row.scores + row * classes, (size_t)labels[row], rows,
            d_scores, &right);
        hits += right;
    }
    *out = (cer_native_net_metrics){loss / (double)rows,
                                    (double)hits / (double)rows};
    return CER_OK;
}

/* --- backward ------------------------------------------------------------- */

/* Computes the gradients of the linear layer and its input from those of the
 * scores. */
static void
backward_linear(cer_native_net *net, size_t rows)
{
    size_t classes = net->sizes.classes, inputs = net->pooled[1];
    float *bias =
        part_of(net, CER_NATIVE_NET_GRADIENTS, CER_NATIVE_NET_LINEAR_BIAS);

    cer_native_add_product(
        classes, rows, inputs, net->row.d_scores, 1, classes,
        net->row.pooled[1],
        part_of(net, CER_NATIVE_NET_GRADIENTS, CER_NATIVE_NET_LINEAR_WEIGHT));
    for (size_t row = 0; row < rows; row++) {
        for (size_t i = 0; i < classes; i++)
            bias[i] += net->row.d_scores[row * classes + i];
    }
    memset(net->row.d_pooled, 0, rows * inputs * sizeof(float));
    cer_native_add_product(
        rows, classes, inputs, net->row.d_scores, classes, 1,
        part_of(net, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_WEIGHT),
        net->row.d_pooled);
}

/* Adds one row's share of the gradients of both convolutions. */
static void
backward_row(cer_native_net *net, const float *pictures, size_t row)
{
    for (size_t i = CONVS; i-- > 0;) {
        const cer_native_conv *conv = &net->convs[i];
        size_t from = row * net->pooled[i];
        const float *d_pooled =
            i == CONVS - 1 ? net->row.d_pooled + from : net->d_first;

        cer_native_pool_backward(
            conv->filters, conv->height, conv->width, net->row.pooled[i] + from,
            net->row.which[i] + from, d_pooled, net->plane);
        cer_native_unfold(conv, input_of(net, i, pictures, row), net->columns);
        cer_native_conv_filters(
            conv, net->columns, net->plane,
            part_of(net, CER_NATIVE_NET_GRADIENTS, 2 * i),
            part_of(net, CER_NATIVE_NET_GRADIENTS, 2 * i + 1));
        if (i > 0)
            cer_native_conv_data(conv, net->plane,
                                 part_of(net, CER_NATIVE_NET_VALUES, 2 * i),
                                 net->columns, net->d_first);
    }
}

/* --- interface ------------------------------------------------------------ */

cer_status
cer_native_net_differentiate(cer_native_net *net, const float *pictures,
                             const int64_t *labels, size_t rows,
                             cer_native_net_metrics *out, cer_error *err)
{
    cer_status status;
    fenv_t before;

    cer_float_enter(&before);
    status = score(net, pictures, labels, rows, true, out, err);
    if (status != CER_OK)
        goto done;
    memset(net->parts->kinds[CER_NATIVE_NET_GRADIENTS], 0,
           net->offsets[CER_NATIVE_NET_PART_COUNT] * sizeof(float));
    backward_linear(net, rows);
    for (size_t row = 0; row < rows; row++)
        backward_row(net, pictures, row);

done:
    cer_float_leave(&before);
    return status;
}

void
cer_native_net_step(cer_native_net *net, float rate, float momentum)
{
    fenv_t before;

    cer_float_enter(&before);
    cer_native_descend(net->offsets[CER_NATIVE_NET_PART_COUNT], rate, momentum,
                       net->parts->kinds[CER_NATIVE_NET_GRADIENTS],
                       net->parts->kinds[CER_NATIVE_NET_MOMENTA],
                       net->parts->kinds[CER_NATIVE_NET_VALUES]);
    cer_float_leave(&before);
}

cer_status
cer_native_net_evaluate(cer_native_net *net, const float *pictures,
                        const int64_t *labels, size_t rows,
                        cer_native_net_metrics *out, cer_error *err)
{
    cer_status status;
    fenv_t before;

    cer_float_enter(&before);
    status = score(net, pictures, labels, rows, false, out, err);
    cer_float_leave(&before);
    return status;
}

cer_status
cer_native_net_predict(cer_native_net *net, const float *pictures, size_t rows,
                       float *scores, cer_error *err)
{
    cer_status status = make_rows(net, rows, err);
    fenv_t before;

    cer_float_enter(&before);
    if (status == CER_OK)
        forward(net, pictures, rows, scores);
    cer_float_leave(&before);
    return status;
}
