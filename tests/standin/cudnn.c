/* cudnn.c -- the stand-in's functions; see standin_cudnn.h. The constants
 * repeat those of cuDNN's own headers and are independent of the tested code.
 */
#include "standin_cudnn.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, FAILED = 5000 };

/* Descriptors. */
enum {
    D_CONVOLUTION = 1,
    D_ENGINE = 2,
    D_ENGINECFG = 3,
    D_ENGINEHEUR = 4,
    D_EXECUTION_PLAN = 5,
    D_FORWARD = 10,
    D_BACKWARD_FILTER = 11,
    D_BACKWARD_DATA = 12,
    D_OPERATIONGRAPH = 15,
    D_VARIANT_PACK = 16,
    D_TENSOR = 17
};

enum { MOST_BYTES = 64, MOST_ATTRIBUTES = 8 };
enum { REFUSING = 2, GREEDY, GOOD, ENGINES, WORKSPACE = 4096 };

typedef struct descriptor {
    int type;
    bool finalized;
    int engine;                     /* of engines, configurations and plans */
    const struct descriptor *graph; /* likewise */
    size_t n;
    struct {
        int name, type;
        int64_t count;
        unsigned char bytes[MOST_BYTES];
    } attributes[MOST_ATTRIBUTES];
} descriptor;

typedef struct handle {
    void *stream;
} handle;

static size_t left;
static unsigned faults, executed, fail_in;
static bool reached;
static char last_fault[200];

static void
fault(const char *format, ...)
{
    va_list args;

    faults++;
    va_start(args, format);
    (void)vsnprintf(last_fault, sizeof last_fault, format, args);
    va_end(args);
}

void
standin_cudnn_fail(unsigned nth)
{
    reached = false;
    fail_in = nth;
}

bool
standin_cudnn_failed(void)
{
    return reached;
}

size_t
standin_cudnn_left(void)
{
    return left;
}

unsigned
standin_cudnn_faults(void)
{
    return faults;
}

const char *
standin_cudnn_fault(void)
{
    return last_fault;
}

unsigned
standin_cudnn_executed(void)
{
    return executed;
}

/* Starts every call that can fail. */
static bool
fails(void)
{
    if (fail_in == 0 || --fail_in != 0)
        return false;
    reached = true;
    return true;
}

/* --- attributes ----------------------------------------------------------- */

/* The attributes that a descriptor must have: name, type, count, and bytes per
 * element. */
static const struct known {
    int of, name, type, count;
    size_t bytes;
} known[] = {
    {D_CONVOLUTION, 100, 1, 1, 4},     /* compute type */
    {D_CONVOLUTION, 101, 7, 1, 4},     /* mode */
    {D_CONVOLUTION, 102, 3, 2, 8},     /* dilations */
    {D_CONVOLUTION, 103, 3, 2, 8},     /* strides */
    {D_CONVOLUTION, 104, 3, 2, 8},     /* post-paddings */
    {D_CONVOLUTION, 105, 3, 2, 8},     /* pre-paddings */
    {D_CONVOLUTION, 106, 3, 1, 8},     /* dimensions */
    {D_ENGINEHEUR, 200, 8, 1, 4},      /* mode */
    {D_ENGINEHEUR, 201, 15, 1, 8},     /* graph */
    {D_EXECUTION_PLAN, 400, 0, 1, 8},  /* handle */
    {D_EXECUTION_PLAN, 401, 15, 1, 8}, /* configuration */
    {D_FORWARD, 700, 4, 1, 4},         /* alpha */
    {D_FORWARD, 701, 4, 1, 4},         /* beta */
    {D_FORWARD, 702, 15, 1, 8},        /* convolution */
    {D_FORWARD, 703, 15, 1, 8},        /* w */
    {D_FORWARD, 704, 15, 1, 8},        /* x */
    {D_FORWARD, 705, 15, 1, 8},        /* y */
    {D_BACKWARD_DATA, 706, 4, 1, 4},
    {D_BACKWARD_DATA, 707, 4, 1, 4},
    {D_BACKWARD_DATA, 708, 15, 1, 8},
    {D_BACKWARD_DATA, 709, 15, 1, 8}, /* w */
    {D_BACKWARD_DATA, 710, 15, 1, 8}, /* dx */
    {D_BACKWARD_DATA, 711, 15, 1, 8}, /* dy */
    {D_BACKWARD_FILTER, 712, 4, 1, 4},
    {D_BACKWARD_FILTER, 713, 4, 1, 4},
    {D_BACKWARD_FILTER, 714, 15, 1, 8},
    {D_BACKWARD_FILTER, 715, 15, 1, 8}, /* dw */
    {D_BACKWARD_FILTER, 716, 15, 1, 8}, /* x */
    {D_BACKWARD_FILTER, 717, 15, 1, 8}, /* dy */
    {D_OPERATIONGRAPH, 800, 0, 1, 8},
    {D_OPERATIONGRAPH, 801, 15, 1, 8},
    {D_TENSOR, 900, 3, 1, 8}, /* alignment */
    {D_TENSOR, 901, 1, 1, 4}, /* type */
    {D_TENSOR, 902, 3, 4, 8}, /* dimensions */
    {D_TENSOR, 903, 3, 4, 8}, /* strides */
    {D_TENSOR, 906, 3, 1, 8}, /* id */
    {D_VARIANT_PACK, 1000, 3, 3, 8},
    {D_VARIANT_PACK, 1001, 6, 3, 8},
    {D_VARIANT_PACK, 1003, 6, 1, 8},
};

#define KNOWN (sizeof known / sizeof known[0])

static const void *
value_of(const descriptor *d, int name)
{
    for (size_t i = 0; i < d->n; i++) {
        if (d->attributes[i].name == name)
            return d->attributes[i].bytes;
    }
    return NULL;
}

static const descriptor *
part_of(const descriptor *d, int name)
{
    const void *value = value_of(d, name);
    const descriptor *part = NULL;

    if (value != NULL)
        memcpy(&part, value, sizeof part);
    return part;
}

static int64_t
number_of(const descriptor *d, int name, size_t i)
{
    int64_t numbers[MOST_BYTES / 8];

    memcpy(numbers, value_of(d, name), sizeof numbers);
    return numbers[i];
}

/* --- functions ------------------------------------------------------------ */

STANDIN_API size_t cudnnGetVersion(void);
STANDIN_API size_t cudnnGetCudartVersion(void);
STANDIN_API const char *cudnnGetErrorString(int status);
STANDIN_API int cudnnCreate(void **out);
STANDIN_API int cudnnDestroy(void *handle);
STANDIN_API int cudnnSetStream(void *handle, void *stream);
STANDIN_API int cudnnBackendCreateDescriptor(int type, void **out);
STANDIN_API int cudnnBackendDestroyDescriptor(void *d);
STANDIN_API int cudnnBackendFinalize(void *d);
STANDIN_API int cudnnBackendSetAttribute(void *d, int name, int type,
                                         int64_t count, const void *values);
STANDIN_API int cudnnBackendGetAttribute(void *d, int name, int type,
                                         int64_t room, int64_t *count,
                                         void *values);
STANDIN_API int cudnnBackendExecute(void *handle, void *plan, void *pack);

size_t
cudnnGetVersion(void)
{
    const char *text = getenv("STANDIN_CUDNN_VERSION");

    return text == NULL ? 91300 : (size_t)atol(text);
}

size_t
cudnnGetCudartVersion(void)
{
    return 13000;
}

const char *
cudnnGetErrorString(int status)
{
    return status == FAILED ? "CUDNN_STATUS_EXECUTION_FAILED"
                            : "CUDNN_STATUS_BAD_PARAM";
}

int
cudnnCreate(void **out)
{
    if (fails())
        return FAILED;
    *out = calloc(1, sizeof(handle));
    left++;
    return SUCCESS;
}

int
cudnnDestroy(void *h)
{
    free(h);
    left--;
    return SUCCESS;
}

int
cudnnSetStream(void *h, void *stream)
{
    if (fails())
        return FAILED;
    ((handle *)h)->stream = stream;
    return SUCCESS;
}

int
cudnnBackendCreateDescriptor(int type, void **out)
{
    descriptor *d;

    if (fails())
        return FAILED;
    d = calloc(1, sizeof *d);
    d->type = type;
    d->engine = -1;
    *out = d;
    left++;
    return SUCCESS;
}

int
cudnnBackendDestroyDescriptor(void *d)
{
    free(d);
    left--;
    return SUCCESS;
}

int
cudnnBackendSetAttribute(void *at, int name, int type, int64_t count,
                         const void *values)
{
    descriptor *d = at;

    if (fails())
        return FAILED;
    for (size_t i = 0; i < KNOWN; i++) {
        if (known[i].of != d->type || known[i].name != name)
            continue;
        if (known[i].type != type || known[i].count != count || d->finalized ||
            value_of(d, name) != NULL) {
            fault("attribute %d of type %d, %d of them", name, type,
                  (int)count);
            return BAD_PARAM;
        }
        d->attributes[d->n].name = name;
        d->attributes[d->n].type = type;
        d->attributes[d->n].count = count;
        memcpy(d->attributes[d->n].bytes, values,
               (size_t)count * known[i].bytes);
        d->n++;
        return SUCCESS;
    }
    fault("a descriptor of type %d has no attribute %d", d->type, name);
    return BAD_PARAM;
}

/* Checks that a descriptor's parts are finalized before it. */
static bool
complete(const descriptor *d)
{
    size_t needed = 0;

    for (size_t i = 0; i < KNOWN; i++)
        needed += known[i].of == d->type;
    if (d->n != needed)
        return false;
    for (size_t i = 0; i < d->n; i++) {
        if (d->attributes[i].type == 15 &&
            !part_of(d, d->attributes[i].name)->finalized)
            return false;
    }
    return true;
}

int
cudnnBackendFinalize(void *at)
{
    descriptor *d = at;

    if (fails())
        return FAILED;
    if (!complete(d)) {
        fault("a descriptor of type %d is finished with %d attributes", d->type,
              (int)d->n);
        return BAD_PARAM;
    }
    if (d->type == D_EXECUTION_PLAN) {
        d->engine = part_of(d, 401)->engine;
        d->graph = part_of(d, 401)->graph;
        if (d->engine == REFUSING)
            return NOT_SUPPORTED;
    }
    d->finalized = true;
    return SUCCESS;
}

/* The engines that a heuristic proposes, best first. */
static int
get_results(const descriptor *d, int64_t room, int64_t *count, void *values)
{
    int mode;
    descriptor **configs = values;

    memcpy(&mode, value_of(d, 200), sizeof mode);
    *count = 0;
    for (int engine = 0; engine < ENGINES && *count < room; engine++) {
        if ((engine >= GREEDY) != (mode == 2))
            continue;
        configs[*count]->engine = engine;
        configs[*count]->graph = part_of(d, 201);
        configs[*count]->finalized = true;
        ++*count;
    }
    return SUCCESS;
}

static int
get_notes(const descriptor *d, int64_t *count, void *values)
{
    const int notes[ENGINES][2] = {{5, 4}, {0, 5}, {5, 6}, {5, 6}, {5, 6}};

    memcpy(values, notes[d->engine], sizeof notes[0]);
    *count = 2;
    return SUCCESS;
}

int
cudnnBackendGetAttribute(void *at, int name, int type, int64_t room,
                         int64_t *count, void *values)
{
    const descriptor *d = at;

    if (fails())
        return FAILED;
    if (!d->finalized) {
        fault("attribute %d of an unfinished descriptor", name);
        return BAD_PARAM;
    }
    if (d->type == D_ENGINEHEUR && name == 202 && type == 15)
        return get_results(d, room, count, values);
    if (d->type == D_ENGINECFG && name == 300 && type == 15 && room == 1) {
        descriptor *engine = *(descriptor **)values;

        engine->engine = d->engine;
        engine->graph = d->graph;
        engine->finalized = true;
        *count = 1;
        return SUCCESS;
    }
    if (d->type == D_ENGINE && name == 1303 && type == 11 && room >= 2)
        return get_notes(d, count, values);
    if (d->type == D_EXECUTION_PLAN && name == 402 && type == 3 && room == 1) {
        *(int64_t *)values = d->engine == GREEDY ? (int64_t)1 << 40 : WORKSPACE;
        *count = 1;
        return SUCCESS;
    }
    fault("a descriptor of type %d does not report %d", d->type, name);
    return BAD_PARAM;
}

/* --- convolutions --------------------------------------------------------- */

typedef struct shape {
    int64_t n, c, f, h, w;
} shape;

/* Whether a tensor is dense, float32 and of this shape. */
static bool
is_tensor(const descriptor *t, const int64_t dims[4])
{
    int64_t stride = 1;
    int type;

    memcpy(&type, value_of(t, 901), sizeof type);
    for (size_t i = 4; i-- > 0;) {
        if (number_of(t, 902, i) != dims[i] || number_of(t, 903, i) != stride)
            return false;
        stride *= dims[i];
    }
    return type == 0 && number_of(t, 900, 0) <= 256;
}

static bool
is_convolution(const descriptor *c)
{
    int mode;

    memcpy(&mode, value_of(c, 101), sizeof mode);
    for (int name = 102; name <= 105; name++) {
        if (number_of(c, name, 0) != 1 || number_of(c, name, 1) != 1)
            return false;
    }
    return mode == 1 && number_of(c, 106, 0) == 2;
}

/* Accumulates one product for every output, tap and channel. */
static void
convolve(int direction, const shape *s, float *x, float *w, float *y)
{
    float *to = direction == D_FORWARD           ? y
                : direction == D_BACKWARD_FILTER ? w
                                                 : x;
    int64_t size = direction == D_FORWARD           ? s->n * s->f * s->h * s->w
                   : direction == D_BACKWARD_FILTER ? s->f * s->c * 9
                                                    : s->n * s->c * s->h * s->w;

    memset(to, 0, (size_t)size * sizeof *to);
    for (int64_t i = 0; i < s->n * s->f * s->c * s->h * s->w * 9; i++) {
        int64_t tap = i % 9, at = i / 9;
        int64_t right = at % s->w, down = at / s->w % s->h;
        int64_t c = at / s->w / s->h % s->c;
        int64_t f = at / s->w / s->h / s->c % s->f;
        int64_t n = at / s->w / s->h / s->c / s->f;
        int64_t from_down = down + tap / 3 - 1,
                from_right = right + tap % 3 - 1;
        int64_t xi = ((n * s->c + c) * s->h + from_down) * s->w + from_right;
        int64_t wi = (f * s->c + c) * 9 + tap;
        int64_t yi = ((n * s->f + f) * s->h + down) * s->w + right;

        if (from_down < 0 || from_down >= s->h || from_right < 0 ||
            from_right >= s->w)
            continue;
        if (direction == D_FORWARD)
            y[yi] += x[xi] * w[wi];
        else if (direction == D_BACKWARD_FILTER)
            w[wi] += x[xi] * y[yi];
        else
            x[xi] += w[wi] * y[yi];
    }
}

/* Reads an operation's factors of its result and of the old value. */
static bool
scales(const descriptor *op, int first)
{
    float alpha, beta;

    memcpy(&alpha, value_of(op, first), sizeof alpha);
    memcpy(&beta, value_of(op, first + 1), sizeof beta);
    return alpha == 1.0f && beta == 0.0f;
}

int
cudnnBackendExecute(void *h, void *plan, void *pack)
{
    static const int64_t ids[3] = {'x', 'w', 'y'};
    const descriptor *p = plan, *v = pack, *op, *x, *w, *y;
    float *pointers[3];
    void *workspace;
    shape s;
    int first;

    if (fails())
        return FAILED;
    if (h == NULL || p->type != D_EXECUTION_PLAN || !p->finalized ||
        v->type != D_VARIANT_PACK || !v->finalized || p->engine != GOOD) {
        fault("a plan of engine %d is run", p->engine);
        return BAD_PARAM;
    }
    op = part_of(p->graph, 801);
    first = op->type == D_FORWARD         ? 700
            : op->type == D_BACKWARD_DATA ? 706
                                          : 712;
    w = part_of(op, first + 3);
    x = part_of(op, first + 4);
    y = part_of(op, first + 5);
    s = (shape){number_of(x, 902, 0), number_of(x, 902, 1),
                number_of(w, 902, 0), number_of(x, 902, 2),
                number_of(x, 902, 3)};
    memcpy(pointers, value_of(v, 1001), sizeof pointers);
    memcpy(&workspace, value_of(v, 1003), sizeof workspace);
    if (memcmp(value_of(v, 1000), ids, sizeof ids) != 0 ||
        number_of(x, 906, 0) != 'x' || number_of(w, 906, 0) != 'w' ||
        number_of(y, 906, 0) != 'y' ||
        !is_tensor(x, (int64_t[4]){s.n, s.c, s.h, s.w}) ||
        !is_tensor(w, (int64_t[4]){s.f, s.c, 3, 3}) ||
        !is_tensor(y, (int64_t[4]){s.n, s.f, s.h, s.w}) ||
        !is_convolution(part_of(op, first + 2)) || !scales(op, first)) {
        fault("a convolution of type %d is not what it should be", op->type);
        return BAD_PARAM;
    }
    memset(workspace, 0xee, WORKSPACE);
    convolve(op->type, &s, pointers[0], pointers[1], pointers[2]);
    executed++;
    return SUCCESS;
}
