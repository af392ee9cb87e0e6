#include "native_cuda.h"

#include "native_kernels.h"

enum { CONVS = 2, PLANNED = 4 };

/* Device memory for the rows of a batch; parts of one block. */
typedef struct row_memory {
    cer_device_block block;
    size_t rows;     /* capacity */
    float *pictures; /* the batch */
    int64_t *labels;
    float *raw[CONVS]; /* the convolutions' outputs and their gradients */
    float *pooled[CONVS];
    float *d_pooled[CONVS];
    uint8_t *which[CONVS];
    float *sums; /* of raw[], per plane */
    float *scores, *d_scores;
    double *losses;
    uint8_t *right;
} row_memory;

/* The convolutions for one number of rows. */
typedef struct plans {
    size_t rows;                                         /* 0: none */
    cer_cudnn_conv forward[CONVS], filters[CONVS], data; /* for the second */
} plans;

struct cer_native_cuda {
    cer_native_net *net;
    cer_device *device;
    cer_cudnn_session cudnn;
    void *stream;
    cer_device_block kinds[CER_NATIVE_NET_KIND_COUNT];
    cer_device_block workspace;
    cer_device_block losses; /* pinned: a batch's results */
    row_memory row;
    plans planned[PLANNED];
    size_t next_plan; /* the slot for the next number of rows */
};

/* --- memory --------------------------------------------------------------- */

static size_t
picture_size(const cer_native_conv *conv)
{
    return conv->channels * conv->height * conv->width;
}

static size_t
raw_size(const cer_native_conv *conv)
{
    return conv->filters * conv->height * conv->width;
}

static size_t
pooled_size(const cer_native_conv *conv)
{
    return conv->filters * (conv->height / 2) * (conv->width / 2);
}

/* Assigns `*to` the next `bytes` per row for `rows` rows; without a base, only
 * counts. */
static bool
carve(char *base, size_t *at, size_t rows, size_t bytes, void *to)
{
    size_t n;

    if (base != NULL)
        *(void **)to = base + *at;
    return cer_mul_size(rows, bytes, &n) &&
           cer_round_up_size(n, CER_ALIGNMENT, &n) && cer_add_size(*at, n, at);
}

/* Lays out a batch's memory; false: its size overflows. */
static bool
lay_out(const cer_native_net *net, size_t rows, char *base, row_memory *m,
        size_t *bytes)
{
    size_t classes = cer_native_net_sizes_of(net)->classes, planes = 0;
    const cer_native_conv *first = cer_native_net_conv(net, 0);
    const size_t f = sizeof(float);
    bool fits = true;

    *bytes = 0;
    for (size_t i = 0; i < CONVS; i++) {
        const cer_native_conv *conv = cer_native_net_conv(net, i);

        planes = conv->filters > planes ? conv->filters : planes;
        fits =
            fits && carve(base, bytes, rows, raw_size(conv) * f, &m->raw[i]) &&
            carve(base, bytes, rows, pooled_size(conv) * f, &m->pooled[i]) &&
            carve(base, bytes, rows, pooled_size(conv) * f, &m->d_pooled[i]) &&
            carve(base, bytes, rows, pooled_size(conv), &m->which[i]);
    }
    return fits &&
           carve(base, bytes, rows, picture_size(first) * f, &m->pictures) &&
           carve(base, bytes, rows, sizeof *m->labels, &m->labels) &&
           carve(base, bytes, rows, planes * f, &m->sums) &&
           carve(base, bytes, rows, classes * f, &m->scores) &&
           carve(base, bytes, rows, classes * f, &m->d_scores) &&
           carve(base, bytes, rows, sizeof *m->losses, &m->losses) &&
           carve(base, bytes, rows, sizeof *m->right, &m->right);
}

/* Bytes of the losses and hits of `rows` rows. */
static size_t
losses_bytes(size_t rows)
{
    return rows * (sizeof(double) + sizeof(uint8_t));
}

static cer_status
make_rows(cer_native_cuda *gpu, size_t rows, cer_error *err)
{
    row_memory made = {.rows = rows};
    cer_device_block losses;
    size_t bytes;
    cer_status status;

    if (rows <= gpu->row.rows)
        return CER_OK;
    if (!lay_out(gpu->net, rows, NULL, &made, &bytes))
        return cer_fail(err, CER_NOMEM, "out of memory for a batch of %zu rows",
                        rows);
    status = cer_device_alloc_pinned(gpu->device, losses_bytes(rows),
                                     CER_USE_OTHER, &losses, err);
    if (status != CER_OK)
        return status;
    status = cer_device_alloc_idle(gpu->device, bytes, CER_USE_OTHER,
                                   &made.block, err);
    if (status != CER_OK) {
        cer_device_free(gpu->device, &losses);
        return status;
    }
    (void)lay_out(gpu->net, rows, made.block.data, &made, &bytes);
    cer_device_free(gpu->device, &gpu->row.block);
    cer_device_free(gpu->device, &gpu->losses);
    gpu->row = made;
    gpu->losses = losses;
    return CER_OK;
}

/* --- plans ---------------------------------------------------------------- */

static void
clear_plans(cer_native_cuda *gpu, plans *p)
{
    for (size_t i = 0; i < CONVS; i++) {
        cer_cudnn_conv_clear(&gpu->cudnn, &p->forward[i]);
        cer_cudnn_conv_clear(&gpu->cudnn, &p->filters[i]);
    }
    cer_cudnn_conv_clear(&gpu->cudnn, &p->data);
    p->rows = 0;
}

static cer_status
make_workspace(cer_native_cuda *gpu, const plans *p, cer_error *err)
{
    size_t most = p->data.workspace;
    cer_device_block made;
    cer_status status;

    for (size_t i = 0; i < CONVS; i++) {
        most = p->forward[i].workspace > most ? p->forward[i].workspace : most;
        most = p->filters[i].workspace > most ? p->filters[i].workspace : most;
    }
    if (most <= gpu->workspace.bytes)
        return CER_OK;
    status =
        cer_device_alloc_idle(gpu->device, most, CER_USE_OTHER, &made, err);
    if (status == CER_OK) {
        cer_device_free(gpu->device, &gpu->workspace);
        gpu->workspace = made;
    }
    return status;
}

static cer_status
make_plans(cer_native_cuda *gpu, size_t rows, plans *p, cer_error *err)
{
    cer_status status = CER_OK;

    for (size_t i = 0; i < CONVS && status == CER_OK; i++) {
        const cer_native_conv *conv = cer_native_net_conv(gpu->net, i);

        status = cer_cudnn_conv_plan(&gpu->cudnn, CER_CUDNN_FORWARD, conv, rows,
                                     &p->forward[i], err);
        if (status == CER_OK)
            status = cer_cudnn_conv_plan(&gpu->cudnn, CER_CUDNN_FILTERS, conv,
                                         rows, &p->filters[i], err);
        if (status == CER_OK && i == CONVS - 1)
            status = cer_cudnn_conv_plan(&gpu->cudnn, CER_CUDNN_DATA, conv,
                                         rows, &p->data, err);
    }
    if (status == CER_OK)
        status = make_workspace(gpu, p, err);
    if (status == CER_OK)
        p->rows = rows;
    else
        clear_plans(gpu, p);
    return status;
}

/* Returns the plans for this number of rows; new ones replace the oldest. */
static cer_status
find_plans(cer_native_cuda *gpu, size_t rows, const plans **out, cer_error *err)
{
    plans *p = &gpu->planned[gpu->next_plan];
    cer_status status;

    for (size_t i = 0; i < PLANNED; i++) {
        if (gpu->planned[i].rows == rows) {
            *out = &gpu->planned[i];
            return CER_OK;
        }
    }
    clear_plans(gpu, p);
    status = make_plans(gpu, rows, p, err);
    if (status == CER_OK) {
        gpu->next_plan = (gpu->next_plan + 1) % PLANNED;
        *out = p;
    }
    return status;
}

/* --- the network ---------------------------------------------------------- */

cer_status
cer_native_cuda_new(cer_native_net *net, cer_device *device, const char *cudnn,
                    cer_native_cuda **out, cer_error *err)
{
    cer_native_cuda *gpu = cer_calloc(1, sizeof *gpu);
    cer_status status;
    size_t floats;

    *out = NULL;
    if (gpu == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a network");
    gpu->net = net;
    gpu->device = device;
    cer_device_retain(device);
    status = cer_device_stream_new(device, &gpu->stream, err);
    if (status != CER_OK)
        goto done;
    status =
        cer_cudnn_session_open(cudnn, device, gpu->stream, &gpu->cudnn, err);
    for (int kind = 0; kind < CER_NATIVE_NET_KIND_COUNT && status == CER_OK;
         kind++) {
        (void)cer_native_net_block(net, (cer_native_net_kind)kind, &floats);
        status = cer_device_alloc_idle(device, floats * sizeof(float),
                                       CER_USE_OTHER, &gpu->kinds[kind], err);
        /* The gaps between the parts are 0 and stay 0. */
        if (status == CER_OK)
            status = cer_device_fill(device, gpu->kinds[kind].data, 0,
                                     floats * sizeof(float), gpu->stream, err);
    }

done:
    if (status == CER_OK)
        *out = gpu;
    else
        cer_native_cuda_free(gpu);
    return status;
}

void
cer_native_cuda_free(cer_native_cuda *gpu)
{
    if (gpu == NULL)
        return;
    if (gpu->stream != NULL)
        (void)cer_device_stream_sync(gpu->device, gpu->stream, NULL);
    if (gpu->cudnn.handle != NULL) {
        for (size_t i = 0; i < PLANNED; i++)
            clear_plans(gpu, &gpu->planned[i]);
        cer_cudnn_session_close(&gpu->cudnn);
    }
    for (int kind = 0; kind < CER_NATIVE_NET_KIND_COUNT; kind++)
        cer_device_free(gpu->device, &gpu->kinds[kind]);
    cer_device_free(gpu->device, &gpu->workspace);
    cer_device_free(gpu->device, &gpu->row.block);
    cer_device_free(gpu->device, &gpu->losses);
    if (gpu->stream != NULL)
        cer_device_stream_free(gpu->device, gpu->stream);
    cer_device_release(gpu->device);
    cer_free(gpu);
}

/* Waits for the stream, also after a failure, so that nothing still reads or
 * writes the caller's memory. */
static cer_status
settle(cer_native_cuda *gpu, cer_status status, cer_error *err)
{
    cer_status waited = cer_device_stream_sync(gpu->device, gpu->stream,
                                               status == CER_OK ? err : NULL);

    return status == CER_OK ? waited : status;
}

cer_status
cer_native_cuda_push(cer_native_cuda *gpu, cer_error *err)
{
    cer_status status = CER_OK;

    for (int kind = CER_NATIVE_NET_VALUES;
         kind <= CER_NATIVE_NET_MOMENTA && status == CER_OK; kind++) {
        size_t floats;
        const float *from =
            cer_native_net_block(gpu->net, (cer_native_net_kind)kind, &floats);

        status = cer_device_copy(gpu->device, gpu->kinds[kind].data, from,
                                 floats * sizeof *from, CER_COPY_TO_DEVICE,
                                 gpu->stream, err);
    }
    return settle(gpu, status, err);
}

cer_status
cer_native_cuda_pull(cer_native_cuda *gpu, cer_error *err)
{
    cer_status status = CER_OK;

    for (int kind = 0; kind < CER_NATIVE_NET_KIND_COUNT && status == CER_OK;
         kind++) {
        size_t floats;
        float *to =
            cer_native_net_block(gpu->net, (cer_native_net_kind)kind, &floats);

        status = cer_device_copy(gpu->device, to, gpu->kinds[kind].data,
                                 floats * sizeof *to, CER_COPY_FROM_DEVICE,
                                 gpu->stream, err);
    }
    return settle(gpu, status, err);
}

static float *
part_of(const cer_native_cuda *gpu, cer_native_net_kind kind, size_t part)
{
    return (float *)gpu->kinds[kind].data +
           cer_native_net_offset(gpu->net, (cer_native_net_part)part);
}

static cer_status
launch(cer_native_cuda *gpu, cer_native_kernel kernel, const void *args,
       cer_error *err)
{
    return cer_native_kernel_launch(gpu->device, kernel, args, gpu->stream,
                                    err);
}

static cer_status
convolve(cer_native_cuda *gpu, const cer_cudnn_conv *conv, float *x, float *w,
         float *y, cer_error *err)
{
    return cer_cudnn_conv_run(&gpu->cudnn, conv, x, w, y, gpu->workspace.data,
                              err);
}

/* The input of convolution `i`. */
static float *
input_of(const cer_native_cuda *gpu, size_t i)
{
    return i == 0 ? gpu->row.pictures : gpu->row.pooled[i - 1];
}

/* --- forward -------------------------------------------------------------- */

static cer_status
pool(cer_native_cuda *gpu, size_t i, size_t rows, cer_error *err)
{
    const cer_native_conv *conv = cer_native_net_conv(gpu->net, i);
    const cer_native_pool_args args = {
        .in = gpu->row.raw[i],
        .bias = part_of(gpu, CER_NATIVE_NET_VALUES, 2 * i + 1),
        .out = gpu->row.pooled[i],
        .which = gpu->row.which[i],
        .items = rows * pooled_size(conv),
        .planes = (uint32_t)conv->filters,
        .height = (uint32_t)conv->height,
        .width = (uint32_t)conv->width,
    };

    return launch(gpu, CER_NATIVE_KERNEL_POOL, &args, err);
}

/* Uploads the pictures and computes the scores. */
static cer_status
forward(cer_native_cuda *gpu, const plans *p, const float *pictures,
        size_t rows, cer_error *err)
{
    size_t inputs = pooled_size(cer_native_net_conv(gpu->net, CONVS - 1));
    size_t classes = cer_native_net_sizes_of(gpu->net)->classes;
    const cer_native_product_args linear = {
        .a = gpu->row.pooled[CONVS - 1],
        .b = part_of(gpu, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_WEIGHT),
        .start =
            part_of(gpu, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_BIAS),
        .c = gpu->row.scores,
        .items = rows * classes,
        .n = classes,
        .k = inputs,
        .a_row = inputs,
        .a_column = 1,
        .b_row = 1,
        .b_column = inputs,
    };
    cer_status status =
        cer_device_copy(gpu->device, gpu->row.pictures, pictures,
                        rows * picture_size(cer_native_net_conv(gpu->net, 0)) *
                            sizeof *pictures,
                        CER_COPY_TO_DEVICE, gpu->stream, err);

    for (size_t i = 0; i < CONVS && status == CER_OK; i++) {
        status = convolve(gpu, &p->forward[i], input_of(gpu, i),
                          part_of(gpu, CER_NATIVE_NET_VALUES, 2 * i),
                          gpu->row.raw[i], err);
        if (status == CER_OK)
            status = pool(gpu, i, rows, err);
    }
    return status == CER_OK
               ? launch(gpu, CER_NATIVE_KERNEL_PRODUCT, &linear, err)
               : status;
}

/* Queues the losses and the gradients of the scores. */
static cer_status
score(cer_native_cuda *gpu, const int64_t *labels, size_t rows, cer_error *err)
{
    char *back = gpu->losses.data;
    const cer_native_score_args args = {
        .scores = gpu->row.scores,
        .labels = gpu->row.labels,
        .d_scores = gpu->row.d_scores,
        .losses = gpu->row.losses,
        .right = gpu->row.right,
        .items = rows,
        .classes = cer_native_net_sizes_of(gpu->net)->classes,
        .rows = rows,
    };
    cer_status status = cer_device_copy(gpu->device, gpu->row.labels, labels,
                                        rows * sizeof *labels,
                                        CER_COPY_TO_DEVICE, gpu->stream, err);

    if (status == CER_OK)
        status = launch(gpu, CER_NATIVE_KERNEL_SCORE, &args, err);
    if (status == CER_OK)
        status = cer_device_copy(gpu->device, back, gpu->row.losses,
                                 rows * sizeof(double), CER_COPY_FROM_DEVICE,
                                 gpu->stream, err);
    if (status == CER_OK)
        status = cer_device_copy(gpu->device, back + rows * sizeof(double),
                                 gpu->row.right, rows, CER_COPY_FROM_DEVICE,
                                 gpu->stream, err);
    return status;
}

/* Computes the means from sums in row order. */
static void
add_up(const cer_native_cuda *gpu, size_t rows, cer_native_net_metrics *out)
{
    const double *losses = gpu->losses.data;
    const uint8_t *right = (const uint8_t *)(losses + rows);
    double loss = 0.0;
    size_t hits = 0;

    for (size_t row = 0; row < rows; row++) {
        loss += losses[row];
        hits += right[row];
    }
    *out = (cer_native_net_metrics){loss / (double)rows,
                                    (double)hits / (double)rows};
}

/* --- backward ------------------------------------------------------------- */

/* out[item] = the sum over all rows of in[row * items + item]. */
static cer_status
sum_rows(cer_native_cuda *gpu, const float *in, float *out, size_t items,
         size_t rows, cer_error *err)
{
    const cer_native_sum_args args = {.in = in,
                                      .out = out,
                                      .items = items,
                                      .count = rows,
                                      .item_step = 1,
                                      .step = items};

    return launch(gpu, CER_NATIVE_KERNEL_SUM, &args, err);
}

static cer_status
backward_linear(cer_native_cuda *gpu, size_t rows, cer_error *err)
{
    size_t inputs = pooled_size(cer_native_net_conv(gpu->net, CONVS - 1));
    size_t classes = cer_native_net_sizes_of(gpu->net)->classes;
    const cer_native_product_args weight = {
        .a = gpu->row.d_scores,
        .b = gpu->row.pooled[CONVS - 1],
        .c = part_of(gpu, CER_NATIVE_NET_GRADIENTS,
                     CER_NATIVE_NET_LINEAR_WEIGHT),
        .items = classes * inputs,
        .n = inputs,
        .k = rows,
        .a_row = 1,
        .a_column = classes,
        .b_row = inputs,
        .b_column = 1,
    };
    const cer_native_product_args data = {
        .a = gpu->row.d_scores,
        .b = part_of(gpu, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_WEIGHT),
        .c = gpu->row.d_pooled[CONVS - 1],
        .items = rows * inputs,
        .n = inputs,
        .k = classes,
        .a_row = classes,
        .a_column = 1,
        .b_row = inputs,
        .b_column = 1,
    };
    cer_status status = launch(gpu, CER_NATIVE_KERNEL_PRODUCT, &weight, err);

    if (status == CER_OK)
        status = sum_rows(
            gpu, gpu->row.d_scores,
            part_of(gpu, CER_NATIVE_NET_GRADIENTS, CER_NATIVE_NET_LINEAR_BIAS),
            classes, rows, err);
    return status == CER_OK ? launch(gpu, CER_NATIVE_KERNEL_PRODUCT, &data, err)
                            : status;
}

/* Computes the gradient before the maximum, replacing raw[i], and that of the
 * bias: summed first over a plane, then over the rows. */
static cer_status
unpool(cer_native_cuda *gpu, size_t i, size_t rows, cer_error *err)
{
    const cer_native_conv *conv = cer_native_net_conv(gpu->net, i);
    const cer_native_unpool_args args = {
        .out = gpu->row.pooled[i],
        .d_out = gpu->row.d_pooled[i],
        .which = gpu->row.which[i],
        .d_in = gpu->row.raw[i],
        .items = rows * raw_size(conv),
        .height = (uint32_t)conv->height,
        .width = (uint32_t)conv->width,
    };
    const cer_native_sum_args planes = {
        .in = gpu->row.raw[i],
        .out = gpu->row.sums,
        .items = rows * conv->filters,
        .count = conv->height * conv->width,
        .item_step = conv->height * conv->width,
        .step = 1,
    };
    cer_status status = launch(gpu, CER_NATIVE_KERNEL_UNPOOL, &args, err);

    if (status == CER_OK)
        status = launch(gpu, CER_NATIVE_KERNEL_SUM, &planes, err);
    if (status == CER_OK)
        status = sum_rows(gpu, gpu->row.sums,
                          part_of(gpu, CER_NATIVE_NET_GRADIENTS, 2 * i + 1),
                          conv->filters, rows, err);
    return status;
}

static cer_status
backward(cer_native_cuda *gpu, const plans *p, size_t rows, cer_error *err)
{
    cer_status status = backward_linear(gpu, rows, err);

    for (size_t i = CONVS; i-- > 0 && status == CER_OK;) {
        status = unpool(gpu, i, rows, err);
        if (status == CER_OK)
            status = convolve(gpu, &p->filters[i], input_of(gpu, i),
                              part_of(gpu, CER_NATIVE_NET_GRADIENTS, 2 * i),
                              gpu->row.raw[i], err);
        if (status == CER_OK && i > 0)
            status = convolve(gpu, &p->data, gpu->row.d_pooled[i - 1],
                              part_of(gpu, CER_NATIVE_NET_VALUES, 2 * i),
                              gpu->row.raw[i], err);
    }
    return status;
}

/* --- public functions ----------------------------------------------------- */

static cer_status
run_batch(cer_native_cuda *gpu, const float *pictures, const int64_t *labels,
          size_t rows, bool gradients, cer_native_net_metrics *out,
          cer_error *err)
{
    const plans *p = NULL;
    cer_status status =
        cer_native_net_check_labels(gpu->net, labels, rows, err);

    if (status == CER_OK)
        status = make_rows(gpu, rows, err);
    if (status == CER_OK)
        status = find_plans(gpu, rows, &p, err);
    if (status == CER_OK)
        status = forward(gpu, p, pictures, rows, err);
    if (status == CER_OK)
        status = score(gpu, labels, rows, err);
    if (status == CER_OK && gradients)
        status = backward(gpu, p, rows, err);
    status = settle(gpu, status, err);
    if (status == CER_OK)
        add_up(gpu, rows, out);
    return status;
}

cer_status
cer_native_cuda_differentiate(cer_native_cuda *gpu, const float *pictures,
                              const int64_t *labels, size_t rows,
                              cer_native_net_metrics *out, cer_error *err)
{
    return run_batch(gpu, pictures, labels, rows, true, out, err);
}

cer_status
cer_native_cuda_evaluate(cer_native_cuda *gpu, const float *pictures,
                         const int64_t *labels, size_t rows,
                         cer_native_net_metrics *out, cer_error *err)
{
    return run_batch(gpu, pictures, labels, rows, false, out, err);
}

cer_status
cer_native_cuda_step(cer_native_cuda *gpu, float rate, float momentum,
                     cer_error *err)
{
    size_t floats;
    cer_native_descend_args args = {
        .values = gpu->kinds[CER_NATIVE_NET_VALUES].data,
        .momenta = gpu->kinds[CER_NATIVE_NET_MOMENTA].data,
        .gradients = gpu->kinds[CER_NATIVE_NET_GRADIENTS].data,
        .rate = rate,
        .mu = momentum,
    };

    (void)cer_native_net_block(gpu->net, CER_NATIVE_NET_VALUES, &floats);
    args.items = floats;
    return launch(gpu, CER_NATIVE_KERNEL_DESCEND, &args, err);
}

cer_status
cer_native_cuda_predict(cer_native_cuda *gpu, const float *pictures,
                        size_t rows, float *scores, cer_error *err)
{
    const plans *p = NULL;
    size_t classes = cer_native_net_sizes_of(gpu->net)->classes;
    cer_status status = make_rows(gpu, rows, err);

    if (status == CER_OK)
        status = find_plans(gpu, rows, &p, err);
    if (status == CER_OK)
        status = forward(gpu, p, pictures, rows, err);
    if (status == CER_OK)
        status = cer_device_copy(gpu->device, scores, gpu->row.scores,
                                 rows * classes * sizeof *scores,
                                 CER_COPY_FROM_DEVICE, gpu->stream, err);
    return settle(gpu, status, err);
}
