#include "cudnn_conv.h"

#include <string.h>

#define LEAST_VERSION 90000

/* cudnnBackendDescriptorType_t */
enum {
    CONVOLUTION = 1,
    ENGINE = 2,
    ENGINE_CONFIG = 3,
    HEURISTICS = 4,
    PLAN = 5,
    OPERATION_FORWARD = 10,
    OPERATION_FILTERS = 11,
    OPERATION_DATA = 12,
    GRAPH = 15,
    PACK = 16,
    TENSOR = 17
};

/* cudnnBackendAttributeType_t */
enum {
    TYPE_HANDLE = 0,
    TYPE_DATA_TYPE = 1,
    TYPE_INT64 = 3,
    TYPE_FLOAT = 4,
    TYPE_POINTER = 6,
    TYPE_CONVOLUTION_MODE = 7,
    TYPE_HEURISTIC_MODE = 8,
    TYPE_NOTE = 11,
    TYPE_DESCRIPTOR = 15
};

/* cudnnBackendAttributeName_t. An operation's other attributes follow its
 * first: alpha, beta, the convolution and its tensors. */
enum {
    CONVOLUTION_COMPUTE_TYPE = 100,
    CONVOLUTION_MODE = 101,
    CONVOLUTION_DILATIONS = 102,
    CONVOLUTION_STRIDES = 103,
    CONVOLUTION_POST_PADDINGS = 104,
    CONVOLUTION_PRE_PADDINGS = 105,
    CONVOLUTION_SPATIAL_DIMS = 106,
    HEURISTICS_MODE = 200,
    HEURISTICS_GRAPH = 201,
    HEURISTICS_RESULTS = 202,
    CONFIG_ENGINE = 300,
    PLAN_HANDLE = 400,
    PLAN_CONFIG = 401,
    PLAN_WORKSPACE = 402,
    FORWARD_ALPHA = 700,
    DATA_ALPHA = 706,
    FILTERS_ALPHA = 712,
    GRAPH_HANDLE = 800,
    GRAPH_OPERATIONS = 801,
    TENSOR_ALIGNMENT = 900,
    TENSOR_TYPE = 901,
    TENSOR_DIMENSIONS = 902,
    TENSOR_STRIDES = 903,
    TENSOR_ID = 906,
    PACK_IDS = 1000,
    PACK_POINTERS = 1001,
    PACK_WORKSPACE = 1003,
    ENGINE_NOTES = 1303
};

enum { DATA_FLOAT = 0, CROSS_CORRELATION = 1 };
enum { HEURISTIC_FALLBACK = 2, HEURISTIC_A = 3 };

/* cudnnBackendNumericalNote_t: notes that exclude an engine. */
enum {
    NOTE_TENSOR_CORE = 0, /* of float32: TF32 */
    NOTE_DOWN_CONVERT = 1,
    NOTE_REDUCED_PRECISION = 2,
    NOTE_NONDETERMINISTIC = 4
};

enum { MOST_CONFIGS = 128, MOST_NOTES = 32, TENSORS = 3 };
#define MOST_WORKSPACE ((int64_t)256 << 20) /* bytes per convolution */
enum { X_ID = 'x', W_ID = 'w', Y_ID = 'y' };

/* --- calls ---------------------------------------------------------------- */

static cer_status
failed(const cer_cudnn_session *s, const char *call, const char *what,
       int status, cer_error *err)
{
    const char *text = s->cudnnGetErrorString(status);

    return cer_fail(err, CER_DEVICE, "%s: %s of %s: %s (cuDNN %zu)",
                    cer_device_name(s->device), call, what,
                    text == NULL ? "unknown" : text, s->cudnnGetVersion());
}

static cer_status
create(const cer_cudnn_session *s, int type, const char *what, void **out,
       cer_error *err)
{
    int status;

    *out = NULL;
    status = s->cudnnBackendCreateDescriptor(type, out);
    return status == 0
               ? CER_OK
               : failed(s, "cudnnBackendCreateDescriptor", what, status, err);
}

static void
destroy(const cer_cudnn_session *s, void *descriptor)
{
    if (descriptor != NULL)
        (void)s->cudnnBackendDestroyDescriptor(descriptor);
}

typedef struct attribute {
    int name, type;
    int64_t count;
    const void *values;
} attribute;

/* Makes a finalized descriptor with these attributes. The caller destroys *out;
 * it is NULL on failure. */
static cer_status
build(const cer_cudnn_session *s, int type, const char *what,
      const attribute *attributes, size_t n, void **out, cer_error *err)
{
    cer_status status = create(s, type, what, out, err);
    int code = 0;

    if (status != CER_OK)
        return status;
    for (size_t i = 0; i < n && code == 0; i++) {
        const attribute *a = &attributes[i];

        code = s->cudnnBackendSetAttribute(*out, a->name, a->type, a->count,
                                           a->values);
    }
    if (code != 0) {
        status = failed(s, "cudnnBackendSetAttribute", what, code, err);
        goto done;
    }
    code = s->cudnnBackendFinalize(*out);
    if (code != 0)
        status = failed(s, "cudnnBackendFinalize", what, code, err);

done:
    if (status != CER_OK) {
        destroy(s, *out);
        *out = NULL;
    }
    return status;
}

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* --- the session ---------------------------------------------------------- */

static cer_status
load(const char *path, cer_cudnn_session *s, cer_error *err)
{
    void *library = NULL;
    cer_status status;

    if (path == NULL)
        return cer_fail(
            err, CER_DEVICE,
            "there is no cuDNN 9, which the native network needs on a GPU: "
            "pip install nvidia-cudnn-cu13, or -cu12 for CUDA 12");
    if ((status = cer_library_open_path(path, &library, err)) != CER_OK)
        return status;
#define LOAD(result, name, params)                                             \
    if (!cer_library_symbol(library, #name, (void *)&s->name))                 \
        return cer_fail(err, CER_DEVICE,                                       \
                        "%s lacks " #name ", so it is not cuDNN 9", path);
    CER_CUDNN_LIST(LOAD)
#undef LOAD
    if (s->cudnnGetVersion() < LEAST_VERSION)
        return cer_fail(err, CER_DEVICE,
                        "cuDNN 9 is needed, and %s is version %zu", path,
                        s->cudnnGetVersion());
    return CER_OK;
}

cer_status
cer_cudnn_session_open(const char *path, cer_device *device, void *stream,
                       cer_cudnn_session *out, cer_error *err)
{
    cer_cudnn_session s = {.device = device};
    cer_status status = load(path, &s, err);
    cer_device_visit visit;
    int code;

    if (status != CER_OK ||
        (status = cer_device_enter(device, &visit, err)) != CER_OK)
        return status;
    if ((code = s.cudnnCreate(&s.handle)) != 0) {
        status = failed(&s, "cudnnCreate", "a handle", code, err);
        goto done;
    }
    if ((code = s.cudnnSetStream(s.handle, stream)) != 0) {
        status = failed(&s, "cudnnSetStream", "a handle", code, err);
        (void)s.cudnnDestroy(s.handle);
        goto done;
    }
    *out = s;

done:
    cer_device_leave(device, &visit);
    return status;
}

void
cer_cudnn_session_close(cer_cudnn_session *session)
{
    cer_device_visit visit;
    cer_status status;

    if (session->handle == NULL)
        return;
    status = cer_device_enter(session->device, &visit, NULL);
    (void)session->cudnnDestroy(session->handle);
    if (status == CER_OK)
        cer_device_leave(session->device, &visit);
    session->handle = NULL;
}

/* --- graphs of one convolution -------------------------------------------- */

static cer_status
make_tensor(const cer_cudnn_session *s, int64_t id, const int64_t shape[4],
            void **out, cer_error *err)
{
    const int64_t strides[4] = {shape[1] * shape[2] * shape[3],
                                shape[2] * shape[3], shape[3], 1};
    const int64_t alignment = 16;
    const int type = DATA_FLOAT;
    const attribute attributes[] = {
        {TENSOR_TYPE, TYPE_DATA_TYPE, 1, &type},
        {TENSOR_DIMENSIONS, TYPE_INT64, 4, shape},
        {TENSOR_STRIDES, TYPE_INT64, 4, strides},
        {TENSOR_ID, TYPE_INT64, 1, &id},
        {TENSOR_ALIGNMENT, TYPE_INT64, 1, &alignment},
    };

    return build(s, TENSOR, "a tensor", attributes, COUNT(attributes), out,
                 err);
}

static cer_status
make_convolution(const cer_cudnn_session *s, void **out, cer_error *err)
{
    static const int64_t ones[2] = {1, 1}, dims = 2;
    const int type = DATA_FLOAT, mode = CROSS_CORRELATION;
    const attribute attributes[] = {
        {CONVOLUTION_COMPUTE_TYPE, TYPE_DATA_TYPE, 1, &type},
        {CONVOLUTION_MODE, TYPE_CONVOLUTION_MODE, 1, &mode},
        {CONVOLUTION_SPATIAL_DIMS, TYPE_INT64, 1, &dims},
        {CONVOLUTION_PRE_PADDINGS, TYPE_INT64, 2, ones},
        {CONVOLUTION_POST_PADDINGS, TYPE_INT64, 2, ones},
        {CONVOLUTION_DILATIONS, TYPE_INT64, 2, ones},
        {CONVOLUTION_STRIDES, TYPE_INT64, 2, ones},
    };

    return build(s, CONVOLUTION, "a convolution", attributes, COUNT(attributes),
                 out, err);
}

/* Indices of a plan's parts in cer_cudnn_conv.kept; the tensors x, w and y come
 * first. */
enum {
    TENSOR_PART = 0,
    CONVOLUTION_PART = 3,
    OPERATION_PART,
    GRAPH_PART,
    CONFIG_PART
};

/* An operation's attributes have the same order in all directions. */
static cer_status
make_operation(const cer_cudnn_session *s, cer_cudnn_direction direction,
               void **parts, cer_error *err)
{
    static const struct {
        int type, first;
    } kinds[CER_CUDNN_DIRECTION_COUNT] = {
        [CER_CUDNN_FORWARD] = {OPERATION_FORWARD, FORWARD_ALPHA},
        [CER_CUDNN_DATA] = {OPERATION_DATA, DATA_ALPHA},
        [CER_CUDNN_FILTERS] = {OPERATION_FILTERS, FILTERS_ALPHA},
    };
    const float one = 1.0f, zero = 0.0f;
    const int first = kinds[direction].first;
    const attribute attributes[] = {
        {first, TYPE_FLOAT, 1, &one},
        {first + 1, TYPE_FLOAT, 1, &zero},
        {first + 2, TYPE_DESCRIPTOR, 1, &parts[CONVOLUTION_PART]},
        {first + 3, TYPE_DESCRIPTOR, 1, &parts[TENSOR_PART + 1]},
        {first + 4, TYPE_DESCRIPTOR, 1, &parts[TENSOR_PART]},
        {first + 5, TYPE_DESCRIPTOR, 1, &parts[TENSOR_PART + 2]},
    };

    return build(s, kinds[direction].type, "a convolution's operation",
                 attributes, COUNT(attributes), &parts[OPERATION_PART], err);
}

static cer_status
make_graph(const cer_cudnn_session *s, cer_cudnn_direction direction,
           const cer_native_conv *conv, size_t rows, void **parts,
           cer_error *err)
{
    const int64_t n = (int64_t)rows, c = (int64_t)conv->channels;
    const int64_t f = (int64_t)conv->filters;
    const int64_t h = (int64_t)conv->height, w = (int64_t)conv->width;
    const int64_t ids[TENSORS] = {X_ID, W_ID, Y_ID};
    const int64_t shapes[TENSORS][4] = {
        {n, c, h, w}, {f, c, 3, 3}, {n, f, h, w}};
    cer_status status = CER_OK;

    for (size_t i = 0; i < TENSORS && status == CER_OK; i++)
        status =
            make_tensor(s, ids[i], shapes[i], &parts[TENSOR_PART + i], err);
    if (status == CER_OK)
        status = make_convolution(s, &parts[CONVOLUTION_PART], err);
    if (status == CER_OK)
        status = make_operation(s, direction, parts, err);
    if (status == CER_OK) {
        const attribute attributes[] = {
            {GRAPH_HANDLE, TYPE_HANDLE, 1, &s->handle},
            {GRAPH_OPERATIONS, TYPE_DESCRIPTOR, 1, &parts[OPERATION_PART]},
        };

        status = build(s, GRAPH, "a graph", attributes, COUNT(attributes),
                       &parts[GRAPH_PART], err);
    }
    return status;
}

/* --- engines -------------------------------------------------------------- */

/* Whether a configuration's engine gives the same float32 bits every time. An
 * engine that does not report this is rejected. */
static cer_status
check_engine(const cer_cudnn_session *s, void *config, bool *good,
             cer_error *err)
{
    int notes[MOST_NOTES];
    int64_t count = 0;
    void *engine;
    cer_status status = create(s, ENGINE, "an engine", &engine, err);
    int code;

    *good = true;
    if (status != CER_OK)
        return status;
    code = s->cudnnBackendGetAttribute(config, CONFIG_ENGINE, TYPE_DESCRIPTOR,
                                       1, &count, &engine);
    if (code == 0)
        code = s->cudnnBackendGetAttribute(engine, ENGINE_NOTES, TYPE_NOTE,
                                           MOST_NOTES, &count, notes);
    *good = code == 0;
    for (int64_t i = 0; *good && i < count && i < MOST_NOTES; i++) {
        if (notes[i] == NOTE_NONDETERMINISTIC || notes[i] == NOTE_TENSOR_CORE ||
            notes[i] == NOTE_DOWN_CONVERT || notes[i] == NOTE_REDUCED_PRECISION)
            *good = false;
    }
    destroy(s, engine);
    return CER_OK;
}

/* Plans with one configuration. Leaves out->plan NULL, without an error, if its
 * engine is unsuitable, rejects the shapes or needs more workspace than
 * MOST_WORKSPACE. */
static cer_status
try_config(const cer_cudnn_session *s, void *config, cer_cudnn_conv *out,
           cer_error *err)
{
    const attribute attributes[] = {
        {PLAN_HANDLE, TYPE_HANDLE, 1, &s->handle},
        {PLAN_CONFIG, TYPE_DESCRIPTOR, 1, &config},
    };
    int64_t count = 0, workspace = 0;
    bool good;
    cer_status status = check_engine(s, config, &good, err);
    int code;

    if (status != CER_OK || !good ||
        build(s, PLAN, "a plan", attributes, COUNT(attributes), &out->plan,
              NULL) != CER_OK)
        return status;
    code = s->cudnnBackendGetAttribute(out->plan, PLAN_WORKSPACE, TYPE_INT64, 1,
                                       &count, &workspace);
    if (code == 0 && workspace >= 0 && workspace <= MOST_WORKSPACE) {
        out->workspace = (size_t)workspace;
        return CER_OK;
    }
    destroy(s, out->plan);
    out->plan = NULL;
    return CER_OK;
}

/* Tries the proposals of one cuDNN heuristic. A heuristic without proposals for
 * this graph is not an error, because others follow. */
static cer_status
try_heuristic(const cer_cudnn_session *s, int mode, cer_cudnn_conv *out,
              cer_error *err)
{
    void *graph = out->kept[GRAPH_PART];
    const attribute attributes[] = {
        {HEURISTICS_GRAPH, TYPE_DESCRIPTOR, 1, &graph},
        {HEURISTICS_MODE, TYPE_HEURISTIC_MODE, 1, &mode},
    };
    void *heuristics, *configs[MOST_CONFIGS] = {NULL};
    int64_t room = 0, count = 0;
    cer_status status = CER_OK;

    if (build(s, HEURISTICS, "engines", attributes, COUNT(attributes),
              &heuristics, NULL) != CER_OK)
        return CER_OK;
    while (status == CER_OK && room < MOST_CONFIGS) {
        status = create(s, ENGINE_CONFIG, "an engine", &configs[room], err);
        room += status == CER_OK;
    }
    if (status != CER_OK)
        goto done;
    if (s->cudnnBackendGetAttribute(heuristics, HEURISTICS_RESULTS,
                                    TYPE_DESCRIPTOR, room, &count,
                                    configs) != 0)
        goto done;
    for (int64_t i = 0;
         i < count && i < room && status == CER_OK && out->plan == NULL; i++) {
        status = try_config(s, configs[i], out, err);
        if (out->plan != NULL) {
            out->kept[CONFIG_PART] = configs[i];
            configs[i] = NULL;
        }
    }

done:
    for (size_t i = 0; i < MOST_CONFIGS; i++)
        destroy(s, configs[i]);
    destroy(s, heuristics);
    return status;
}

/* --- public functions ----------------------------------------------------- */

cer_status
cer_cudnn_conv_plan(const cer_cudnn_session *session,
                    cer_cudnn_direction direction, const cer_native_conv *conv,
                    size_t rows, cer_cudnn_conv *out, cer_error *err)
{
    static const int modes[] = {HEURISTIC_A, HEURISTIC_FALLBACK};
    cer_cudnn_conv made = {.plan = NULL};
    cer_device_visit visit;
    cer_status status = cer_device_enter(session->device, &visit, err);

    if (status != CER_OK)
        return status;
    status = make_graph(session, direction, conv, rows, made.kept, err);
    for (size_t i = 0;
         i < COUNT(modes) && status == CER_OK && made.plan == NULL; i++)
        status = try_heuristic(session, modes[i], &made, err);
    if (status == CER_OK && made.plan == NULL)
        status = cer_fail(err, CER_DEVICE,
                          "%s: cuDNN %zu has no deterministic float32 engine "
                          "with at most 256 MB of workspace for %zu images "
                          "of %zux%zux%zu and %zu filters",
                          cer_device_name(session->device),
                          session->cudnnGetVersion(), rows, conv->channels,
                          conv->height, conv->width, conv->filters);
    if (status == CER_OK)
        *out = made;
    else
        cer_cudnn_conv_clear(session, &made);
    cer_device_leave(session->device, &visit);
    return status;
}

void
cer_cudnn_conv_clear(const cer_cudnn_session *session, cer_cudnn_conv *conv)
{
    destroy(session, conv->plan);
    for (size_t i = CER_CUDNN_CONV_PARTS; i-- > 0;)
        destroy(session, conv->kept[i]);
    *conv = (cer_cudnn_conv){.plan = NULL};
}

cer_status
cer_cudnn_conv_run(const cer_cudnn_session *session, const cer_cudnn_conv *conv,
                   void *x, void *w, void *y, void *workspace, cer_error *err)
{
    static const int64_t ids[TENSORS] = {X_ID, W_ID, Y_ID};
    void *const pointers[TENSORS] = {x, w, y};
    const attribute attributes[] = {
        {PACK_IDS, TYPE_INT64, TENSORS, ids},
        {PACK_POINTERS, TYPE_POINTER, TENSORS, pointers},
        {PACK_WORKSPACE, TYPE_POINTER, 1, &workspace},
    };
    void *pack;
    cer_device_visit visit;
    int code;
    cer_status status = cer_device_enter(session->device, &visit, err);

    if (status != CER_OK)
        return status;
    status = build(session, PACK, "a convolution's memory", attributes,
                   COUNT(attributes), &pack, err);
    if (status == CER_OK) {
        code = session->cudnnBackendExecute(session->handle, conv->plan, pack);
        if (code != 0)
            status = failed(session, "cudnnBackendExecute", "a convolution",
                            code, err);
        destroy(session, pack);
    }
    cer_device_leave(session->device, &visit);
    return status;
}
