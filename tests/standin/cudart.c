/* cudart.c -- the stand-in's functions; see standin.h.
 *
 * One lock guards everything. A stream is a queue of operations; an event holds
 * a marker, an operation in a stream. Waiting for it runs that stream up to the
 * marker, with the streams that it waits for. */
#include "standin.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels.h"
#include "lanes_kernel.h"
#include "native_kernels.h"

#ifdef STANDIN_OLD
#define DEFAULT_VERSION 12000
#else
#define DEFAULT_VERSION 13000
#endif

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    NO_DEVICE = 100,
    INVALID_CONTEXT = 201,
    INVALID_PTX = 218,
    INVALID_HANDLE = 400,
    SYMBOL_NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_IMPLICIT = 906
};

#define MAX_DEVICES 8
#define MAX_LINES 4096
#define LINE_BYTES 80
#define MAX_KERNELS 64
#define MAX_ARGS 4096
#define MAX_PUSHED 4
#define MAX_CALLS 64

/* --- state ---------------------------------------------------------------- */

typedef enum kind {
    KIND_DEVICE,
    KIND_PINNED,
    KIND_STREAM,
    KIND_EVENT,
    KIND_MODULE,
    KIND_GRAPH,
    KIND_EXEC,
    KIND_COUNT
} kind;

static const char *const kind_names[KIND_COUNT] = {
    "device", "pinned", "stream", "event", "module", "graph", "exec"};

/* A resource that the caller must free. */
typedef struct thing {
    struct thing *next;
    kind kind;
    int device;
    void *handle;
    size_t bytes;
} thing;

typedef struct stream stream;

typedef struct marker {
    unsigned users; /* the event, and operations in queues */
    bool done;
    stream *stream; /* its queue's, until done */
} marker;

typedef struct graph graph;

typedef struct operation {
    struct operation *next;
    enum { COPY, FILL, KERNEL, RECORD, WAIT, GRAPH } what;
    void *to;
    const void *from;
    void *staged; /* bytes of `from`, read at the call */
    size_t bytes;
    int value;
    void (*reference)(const void *args);
    int kernel; /* Cerebro's own if `reference` is NULL */
    marker *marker;
    graph *graph;
} operation;

/* Captured work; one that can be launched shares it. */
struct graph {
    unsigned number, users; /* handles, launches, and a capture */
    int device;
    operation *first, **last;
};

typedef struct exec {
    graph *graph;
} exec;

struct stream {
    unsigned number;
    int device;
    bool capturing;
    graph *recorded; /* of a capture that makes a graph */
    operation *first, **last;
};

typedef struct event {
    unsigned number;
    marker *marker; /* NULL: never recorded */
} event;

typedef struct registered_kernel {
    char name[64];
    size_t bytes;
    void (*reference)(const void *args);
} registered_kernel;

typedef struct module {
    const char *text;
    int device;
    struct function *functions;
} module;

typedef struct function {
    struct function *next;
    module *module;
    char name[64];
    size_t bytes;
    void (*reference)(const void *args);
    int kernel;
} function;

static pthread_mutex_t lock;
static pthread_once_t started = PTHREAD_ONCE_INIT;

static int n_devices, version, driver;
static size_t memory_bytes;
static bool deferred;
static unsigned odd; /* the state of random numbers; 0: none are drawn */
static thing *things;
static size_t device_bytes[MAX_DEVICES];
static bool contexts[MAX_DEVICES]; /* primary contexts that exist */
static stream default_streams[MAX_DEVICES];
static unsigned n_streams, n_events, n_graphs;
static stream *captured;
static registered_kernel kernels[MAX_KERNELS];
static unsigned n_kernels;

static char fail_function[64]; /* "": any */
static unsigned fail_in;       /* calls; 0: not armed */
static bool fail_always;
static int fail_code;
static char failed[64];
static struct {
    char name[64];
    unsigned n;
} calls[MAX_CALLS];     /* of each function */
static char broken[64]; /* the work that is queued but not done */
static atomic_int *gate;

static unsigned faults;
static char last_fault[160];
static char lines[MAX_LINES][LINE_BYTES];
static unsigned n_lines;

static _Thread_local int thread_device;
static _Thread_local int thread_mode;
static _Thread_local int thread_error;
static _Thread_local bool thread_bound; /* has a context */

/* A thread's state when a context was pushed. */
typedef struct pushed {
    int device;
    bool bound;
} pushed;

static _Thread_local pushed thread_pushed[MAX_PUSHED];
static _Thread_local int thread_n_pushed;

static long
setting(const char *name, long otherwise)
{
    const char *text = getenv(name);

    return text == NULL ? otherwise : atol(text);
}

static void
arm(const char *name, unsigned nth, int code)
{
    (void)snprintf(fail_function, sizeof fail_function, "%s",
                   name == NULL ? "" : name);
    fail_in = nth;
    fail_always = nth == 0 && code != 0;
    fail_code = code;
    failed[0] = '\0';
}

static void
read_environment(void)
{
    const char *fails = getenv("STANDIN_FAIL");
    char name[64] = "";
    unsigned nth = 0;
    int code = 0;

    n_devices = (int)setting("STANDIN_DEVICES", 1);
    memory_bytes = (size_t)setting("STANDIN_MEMORY", 1000000000);
    deferred = setting("STANDIN_DEFER", 0) != 0;
    odd = (unsigned)setting("STANDIN_ODD", 0);
    version = (int)setting("STANDIN_VERSION", DEFAULT_VERSION);
    driver = (int)setting("STANDIN_DRIVER", 13000);
    if (fails != NULL)
        (void)sscanf(fails, "%63[^:]:%u:%d", name, &nth, &code);
    arm(name, nth, code);
    (void)snprintf(broken, sizeof broken, "%s",
                   getenv("STANDIN_BREAK") == NULL ? ""
                                                   : getenv("STANDIN_BREAK"));
    gate = NULL;
    faults = n_lines = 0;
    last_fault[0] = '\0';
    captured = NULL;
    memset(contexts, 0, sizeof contexts);
    memset(calls, 0, sizeof calls);
}

static void
start(void)
{
    pthread_mutexattr_t recursive;

    (void)pthread_mutexattr_init(&recursive);
    (void)pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    (void)pthread_mutex_init(&lock, &recursive);
    (void)pthread_mutexattr_destroy(&recursive);
    for (int i = 0; i < MAX_DEVICES; i++) {
        default_streams[i].device = i;
        default_streams[i].last = &default_streams[i].first;
    }
    read_environment();
}

static void
take(void)
{
    (void)pthread_once(&started, start);
    (void)pthread_mutex_lock(&lock);
}

static void
give(void)
{
    (void)pthread_mutex_unlock(&lock);
}

static void fault(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

static void
fault(const char *format, ...)
{
    va_list args;

    faults++;
    va_start(args, format);
    (void)vsnprintf(last_fault, sizeof last_fault, format, args);
    va_end(args);
}

static void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

static void
note(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(lines[n_lines % MAX_LINES], LINE_BYTES, format, args);
    va_end(args);
    n_lines++;
}

static void *
must(void *block)
{
    if (block == NULL)
        abort(); /* of a test */
    return block;
}

/* --- control ---------------------------------------------------------------
 */

#define CONTROL(body)                                                          \
    do {                                                                       \
        take();                                                                \
        body;                                                                  \
        give();                                                                \
    } while (0)

void
standin_reset(void)
{
    CONTROL(read_environment());
}

void
standin_devices(int count)
{
    CONTROL(n_devices = count);
}

void
standin_memory(size_t bytes)
{
    CONTROL(memory_bytes = bytes);
}

void
standin_defer(bool on)
{
    CONTROL(deferred = on);
}

void
standin_fail(const char *name, unsigned nth, int code)
{
    CONTROL(arm(name, nth, code));
}

static void
count_call(const char *name)
{
    unsigned i = 0;

    while (i < MAX_CALLS - 1 && calls[i].n != 0 &&
           strcmp(calls[i].name, name) != 0)
        i++;
    (void)snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
    calls[i].n++;
}

unsigned
standin_calls(const char *name)
{
    unsigned n = 0;

    take();
    for (int i = 0; i < MAX_CALLS; i++)
        n += name == NULL || strcmp(calls[i].name, name) == 0 ? calls[i].n : 0;
    give();
    return n;
}

const char *
standin_failed(void)
{
    return failed[0] == '\0' ? NULL : failed;
}

size_t
standin_left(const char *name)
{
    size_t n = 0;

    take();
    for (const thing *t = things; t != NULL; t = t->next)
        n += name == NULL || strcmp(kind_names[t->kind], name) == 0;
    give();
    return n;
}

size_t
standin_device_bytes(int device)
{
    return device_bytes[device];
}

bool
standin_has_context(int device)
{
    return contexts[device];
}

unsigned
standin_faults(void)
{
    return faults;
}

const char *
standin_fault(void)
{
    return last_fault;
}

unsigned
standin_log_lines(void)
{
    return n_lines;
}

const char *
standin_log_line(unsigned i)
{
    return i < n_lines && n_lines - i <= MAX_LINES ? lines[i % MAX_LINES] : "";
}

int
standin_thread_device(void)
{
    return thread_device;
}

int
standin_thread_mode(void)
{
    return thread_mode;
}

int
standin_thread_error(void)
{
    return thread_error;
}

void
standin_thread_reset(void)
{
    thread_device = thread_mode = thread_error = thread_n_pushed = 0;
    thread_bound = false;
}

void
standin_kernel(const char *name, size_t bytes,
               void (*reference)(const void *args))
{
    take();
    if (n_kernels < MAX_KERNELS) {
        registered_kernel *k = &kernels[n_kernels++];

        (void)snprintf(k->name, sizeof k->name, "%s", name);
        k->bytes = bytes;
        k->reference = reference;
    }
    give();
}

/* --- calls -----------------------------------------------------------------
 */

/* The start of every function: returns 0, or the error to return. */
static int
begin(const char *name)
{
    bool is_it;

    take();
    count_call(name);
    is_it = fail_function[0] == '\0' || strcmp(fail_function, name) == 0;
    if (is_it && (fail_always || (fail_in != 0 && --fail_in == 0))) {
        (void)snprintf(failed, sizeof failed, "%s", name);
        return fail_code;
    }
    return SUCCESS;
}

static int
end(int code)
{
    if (code != SUCCESS)
        thread_error = code;
    give();
    return code;
}

/* Driver calls leave no last error. */
static int
end_in_driver(int code)
{
    give();
    return code;
}

/* For calls that would break a capture on any stream, unless the thread's
 * capture mode is relaxed. */
static void
check_capture(const char *name)
{
    if (captured != NULL && thread_mode != 2)
        fault("%s while a graph is captured", name);
}

/* The runtime creates the context of the thread's device if missing. */
static void
bind_thread(void)
{
    thread_bound = true;
    contexts[thread_device] = true;
}

/* Calls that need a device. */
static int
begin_on_device(const char *name)
{
    int code = begin(name);

    if (code == SUCCESS && n_devices == 0)
        code = NO_DEVICE;
    check_capture(name);
    bind_thread();
    return code;
}

/* For driver calls, which need a current context. */
static int
begin_in_driver(const char *name)
{
    int code = begin(name);

    if (code == SUCCESS && !thread_bound)
        code = INVALID_CONTEXT;
    check_capture(name);
    return code;
}

/* --- things -----------------------------------------------------------------
 */

static void
add_thing(kind which, void *handle, size_t bytes)
{
    thing *t = must(calloc(1, sizeof *t));

    *t = (thing){things, which, thread_device, handle, bytes};
    things = t;
}

/* What has been found comes first: the same few are asked for again. */
static thing *
put_first(thing **link)
{
    thing *t = *link;

    *link = t->next;
    t->next = things;
    things = t;
    return t;
}

static thing *
find_thing(kind which, const void *handle)
{
    for (thing **link = &things; *link != NULL; link = &(*link)->next) {
        if ((*link)->kind == which && (*link)->handle == handle)
            return put_first(link);
    }
    return NULL;
}

static bool
remove_thing(kind which, const void *handle, const char *call)
{
    for (thing **link = &things; *link != NULL; link = &(*link)->next) {
        thing *t = *link;

        if (t->kind != which || t->handle != handle)
            continue;
        *link = t->next;
        free(t);
        return true;
    }
    fault("%s of an unknown thing, not a %s", call, kind_names[which]);
    return false;
}

/* The block that holds these bytes; NULL: unregistered memory. */
static const thing *
holder(const void *data, size_t bytes)
{
    uintptr_t at = (uintptr_t)data;

    for (thing **link = &things; *link != NULL; link = &(*link)->next) {
        const thing *t = *link;
        uintptr_t first = (uintptr_t)t->handle;

        if (t->kind <= KIND_PINNED && at >= first && at < first + t->bytes) {
            if (at + bytes > first + t->bytes)
                fault("%zu bytes reach beyond a block of %zu", bytes, t->bytes);
            return put_first(link);
        }
    }
    return NULL;
}

static bool
on_device(const void *data, size_t bytes)
{
    const thing *t = holder(data, bytes);

    return t != NULL && t->kind == KIND_DEVICE;
}

/* --- streams ----------------------------------------------------------------
 */

static stream *
stream_of(void *handle, const char *call)
{
    stream *s = handle;

    if ((uintptr_t)handle <= 2)
        return &default_streams[thread_device];
    if (find_thing(KIND_STREAM, handle) == NULL) {
        fault("%s on what is not a stream", call);
        return NULL;
    }
    if (s->device != thread_device)
        fault("%s on a stream of device %d while device %d is current", call,
              s->device, thread_device);
    return s;
}

static void
drop_marker(marker *m)
{
    if (m != NULL && --m->users == 0)
        free(m);
}

static void run_until(marker *m);
static void drop_graph(graph *g);

static void
free_operation(operation *o)
{
    drop_marker(o->marker);
    drop_graph(o->graph);
    free(o->staged);
    free(o);
}

static void
drop_graph(graph *g)
{
    operation *o;

    if (g == NULL || --g->users != 0)
        return;
    while ((o = g->first) != NULL) {
        g->first = o->next;
        free_operation(o);
    }
    free(g);
}

static void
run_operation(const operation *o)
{
    switch (o->what) {
    case COPY:
        if (o->bytes != 0)
            memmove(o->to, o->staged != NULL ? o->staged : o->from, o->bytes);
        break;
    case FILL:
        memset(o->to, o->value, o->bytes);
        break;
    case KERNEL:
        if (o->reference != NULL)
            o->reference(o->staged);
        else
            cer_kernel_run_host((cer_kernel)o->kernel, o->staged);
        break;
    case RECORD:
        o->marker->done = true;
        break;
    case WAIT:
        run_until(o->marker);
        break;
    case GRAPH:
        for (const operation *each = o->graph->first; each != NULL;
             each = each->next)
            run_operation(each);
        break;
    }
}

static void
run_one(stream *s)
{
    operation *o = s->first;

    s->first = o->next;
    if (s->first == NULL)
        s->last = &s->first;
    run_operation(o);
    free_operation(o);
}

static void
drain(stream *s)
{
    while (s->first != NULL)
        run_one(s);
}

static unsigned
drawn(unsigned below)
{
    odd ^= odd << 13;
    odd ^= odd >> 17;
    odd ^= odd << 5;
    return odd % below;
}

/* With STANDIN_ODD, does some work of any streams that need not wait. */
static void
run_some(void)
{
    if (odd == 0 || drawn(2) == 0)
        return;
    for (thing *t = things; t != NULL; t = t->next) {
        stream *s = t->kind == KIND_STREAM ? t->handle : NULL;

        for (unsigned n = drawn(3); s != NULL && s->first != NULL && n > 0;
             n--) {
            if (s->first->what == WAIT && !s->first->marker->done)
                break;
            run_one(s);
        }
    }
}

static void
run_until(marker *m)
{
    while (!m->done)
        run_one(m->stream);
}

static void
drain_all(void)
{
    for (int i = 0; i < MAX_DEVICES; i++)
        drain(&default_streams[i]);
    for (thing *t = things; t != NULL; t = t->next) {
        if (t->kind == KIND_STREAM)
            drain(t->handle);
    }
}

/* Whether the environment asks for a device that skips this work. */
static bool
is_broken(const operation *o)
{
    static const char *const names[] = {
        [COPY] = "copy",     [FILL] = "fill", [KERNEL] = "kernel",
        [RECORD] = "record", [WAIT] = "wait", [GRAPH] = "graph"};

    if (strcmp(broken, "crash") == 0)
        abort();
    while (strcmp(broken, "hang") == 0) {
        const struct timespec a_while = {.tv_sec = 1};

        (void)nanosleep(&a_while, NULL);
    }
    return strstr(broken, names[o->what]) != NULL;
}

/* Puts a copy of `o` on the stream. */
static void
enqueue(stream *s, const operation *o)
{
    operation *own = must(malloc(sizeof *own));

    *own = *o;
    if (is_broken(o)) { /* its replacement does nothing */
        if (o->what == RECORD)
            o->marker->done = true;
        drop_marker(o->marker);
        drop_graph(o->graph);
        *own = (operation){.what = COPY, .staged = o->staged};
    }
    own->next = NULL;
    if (s->recorded != NULL) {
        if (o->what >= RECORD)
            fault("a capture of more than copies, fills and kernels");
        *s->recorded->last = own;
        s->recorded->last = &own->next;
        return;
    }
    *s->last = own;
    s->last = &own->next;
    if (!deferred)
        drain(s);
    else
        run_some();
}

/* The start of every function that queues work on a stream. */
static int
begin_on_stream(const char *name, void *handle, stream **out)
{
    int code = begin_on_device(name);

    *out = NULL;
    if (code != SUCCESS)
        return code;
    if ((*out = stream_of(handle, name)) == NULL)
        return INVALID_HANDLE;
    if ((*out)->capturing) {
        fault("%s on a stream that is captured", name);
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

void
standin_gate(atomic_int *flag)
{
    CONTROL(gate = flag);
}

/* Reports that the host waits, and continues after the test's answer. */
static void
pass_gate(void)
{
    const struct timespec a_while = {.tv_nsec = 1000000};
    atomic_int *flag;

    take();
    flag = gate;
    gate = NULL;
    give();
    if (flag == NULL)
        return;
    atomic_store(flag, 1);
    for (int i = 0; i < 10000 && atomic_load(flag) != 2; i++)
        (void)nanosleep(&a_while, NULL);
    if (atomic_load(flag) != 2)
        CONTROL(fault("no answer while the host waits"));
}

void
standin_capture(void *handle)
{
    take();
    if (captured != NULL)
        captured->capturing = false;
    captured = handle == NULL ? NULL : stream_of(handle, "standin_capture");
    if (captured != NULL)
        captured->capturing = true;
    give();
}

/* --- the runtime: process and devices ---------------------------------------
 */

#define API STANDIN_API
/* As in CUDA's own header; Cerebro's prototypes are in its own table. */
#define FUNCTION(name, params)                                                 \
    API int name params;                                                       \
    int name params

FUNCTION(cudaRuntimeGetVersion, (int *out))
{
    int code = begin("cudaRuntimeGetVersion");

    if (code == SUCCESS)
        *out = version;
    return end(code);
}

FUNCTION(cudaDriverGetVersion, (int *out))
{
    int code = begin("cudaDriverGetVersion");

    if (code == SUCCESS)
        *out = driver;
    return end(code);
}

API const char *cudaGetErrorName(int code);
API const char *cudaGetErrorString(int code);

const char *
cudaGetErrorName(int code)
{
    switch (code) {
    case OUT_OF_MEMORY:
        return "cudaErrorMemoryAllocation";
    case NO_DEVICE:
        return "cudaErrorNoDevice";
    case INVALID_DEVICE:
        return "cudaErrorInvalidDevice";
    case INVALID_PTX:
        return "cudaErrorInvalidPtx";
    case 700:
        return "cudaErrorIllegalAddress";
    default:
        return "cudaErrorOfTheStandIn";
    }
}

const char *
cudaGetErrorString(int code)
{
    return code == OUT_OF_MEMORY ? "out of memory" : "as the test asked";
}

FUNCTION(cudaGetLastError, (void))
{
    int code = thread_error;

    thread_error = SUCCESS;
    return code;
}

FUNCTION(cudaGetDeviceCount, (int *count))
{
    int code = begin("cudaGetDeviceCount");

    if (code == SUCCESS && n_devices == 0)
        code = NO_DEVICE;
    if (code == SUCCESS)
        *count = n_devices;
    return end(code);
}

FUNCTION(cudaDeviceSynchronize, (void))
{
    int code = begin_on_device("cudaDeviceSynchronize");

    if (code == SUCCESS && captured != NULL) { /* in any mode */
        fault("cudaDeviceSynchronize while a graph is captured");
        code = CAPTURE_UNSUPPORTED;
    }
    if (code == SUCCESS)
        drain_all();
    return end(code);
}

FUNCTION(cudaDeviceGetAttribute, (int *value, int attribute, int device))
{
    int code = begin("cudaDeviceGetAttribute");

    if (code == SUCCESS && (device < 0 || device >= n_devices))
        code = INVALID_DEVICE;
    if (code != SUCCESS)
        return end(code);
    switch (attribute) {
    case 16: /* multiprocessors */
        *value = 2;
        break;
    case 75: /* compute capability */
        *value = 8;
        break;
    case 76:
        *value = 6;
        break;
    case 133: /* MPS */
        if (version < 12020)
            code = INVALID_VALUE;
        else
            *value = 0;
        break;
    default:
        code = INVALID_VALUE;
    }
    return end(code);
}

FUNCTION(cudaThreadExchangeStreamCaptureMode, (int *mode))
{
    int code = begin("cudaThreadExchangeStreamCaptureMode");
    int before = thread_mode;

    if (code == SUCCESS) {
        bind_thread();
        thread_mode = *mode;
        *mode = before;
    }
    return end(code);
}

/* --- the runtime: memory -----------------------------------------------------
 */

FUNCTION(cudaMemGetInfo, (size_t * free_bytes, size_t *total))
{
    int code = begin_on_device("cudaMemGetInfo");

    if (code == SUCCESS) {
        *free_bytes = memory_bytes - device_bytes[thread_device];
        *total = memory_bytes;
    }
    return end(code);
}

/* Memory with arbitrary content, as on a GPU. */
static void *
dirty(size_t bytes)
{
    void *block = aligned_alloc(256, (bytes + 255) / 256 * 256);

    return memset(must(block), 0xa5, bytes);
}

FUNCTION(cudaMalloc, (void **out, size_t bytes))
{
    int code = begin_on_device("cudaMalloc");

    if (code == SUCCESS && bytes > memory_bytes - device_bytes[thread_device])
        code = OUT_OF_MEMORY;
    if (code == SUCCESS) {
        *out = dirty(bytes);
        add_thing(KIND_DEVICE, *out, bytes);
        device_bytes[thread_device] += bytes;
    }
    return end(code);
}

/* Frees a block of either kind, after all work, as CUDA does. */
static int
release(const char *name, kind which, void *data)
{
    int code = begin_on_device(name);
    const thing *t = find_thing(which, data);

    if (data == NULL)
        return end(code);
    drain_all();
    if (t != NULL && which == KIND_DEVICE)
        device_bytes[t->device] -= t->bytes;
    if (remove_thing(which, data, name))
        free(data);
    else if (code == SUCCESS)
        code = INVALID_VALUE;
    return end(code);
}

FUNCTION(cudaFree, (void *data))
{
    return release("cudaFree", KIND_DEVICE, data);
}

FUNCTION(cudaHostAlloc, (void **out, size_t bytes, unsigned flags))
{
    int code = begin_on_device("cudaHostAlloc");

    if (flags != 1)
        fault("cudaHostAlloc of memory that is not portable");
    if (code == SUCCESS) {
        *out = dirty(bytes);
        add_thing(KIND_PINNED, *out, bytes);
    }
    return end(code);
}

FUNCTION(cudaFreeHost, (void *data))
{
    return release("cudaFreeHost", KIND_PINNED, data);
}

/* --- the runtime: work -------------------------------------------------------
 */

FUNCTION(cudaMemcpyAsync,
         (void *to, const void *from, size_t bytes, int how, void *handle))
{
    static const char *const names[] = {"", "copy_to", "copy_from", "copy_on"};
    stream *s;
    operation o = {.what = COPY, .to = to, .from = from, .bytes = bytes};
    int code = begin_on_stream("cudaMemcpyAsync", handle, &s);
    bool pageable;

    if (code != SUCCESS)
        return end(code);
    if (how < 1 || how > 3 || on_device(to, bytes) != (how != 2) ||
        on_device(from, bytes) != (how != 1)) {
        fault("a copy of kind %d has its memory elsewhere", how);
        return end(INVALID_VALUE);
    }
    note("%s s%u %zu", names[how], s->number, bytes);
    /* Memory that is not pinned is read or written before the call returns. */
    pageable = how != 3 && holder(how == 1 ? from : to, bytes) == NULL;
    if (pageable && how == 1)
        o.staged = memcpy(must(malloc(bytes)), from, bytes);
    enqueue(s, &o);
    if (pageable && how == 2)
        drain(s);
    return end(SUCCESS);
}

FUNCTION(cudaMemsetAsync, (void *to, int value, size_t bytes, void *handle))
{
    stream *s;
    operation o = {.what = FILL, .to = to, .value = value, .bytes = bytes};
    int code = begin_on_stream("cudaMemsetAsync", handle, &s);

    if (code != SUCCESS)
        return end(code);
    if (!on_device(to, bytes)) {
        fault("cudaMemsetAsync of memory that is not the device's");
        return end(INVALID_VALUE);
    }
    note("fill s%u %zu", s->number, bytes);
    enqueue(s, &o);
    return end(SUCCESS);
}

FUNCTION(cudaStreamCreateWithFlags, (void **out, unsigned flags))
{
    int code = begin_on_device("cudaStreamCreateWithFlags");
    stream *s;

    if (flags != 1)
        fault("a stream that waits for the default one");
    if (code == SUCCESS) {
        s = must(calloc(1, sizeof *s));
        s->number = ++n_streams;
        s->device = thread_device;
        s->last = &s->first;
        add_thing(KIND_STREAM, s, 0);
        *out = s;
    }
    return end(code);
}

FUNCTION(cudaStreamDestroy, (void *handle))
{
    int code = begin_on_device("cudaStreamDestroy");

    if (find_thing(KIND_STREAM, handle) != NULL)
        drain(handle);
    if (remove_thing(KIND_STREAM, handle, "cudaStreamDestroy"))
        free(handle);
    else if (code == SUCCESS)
        code = INVALID_HANDLE;
    return end(code);
}

FUNCTION(cudaStreamSynchronize, (void *handle))
{
    stream *s;
    int code;

    pass_gate();
    code = begin_on_stream("cudaStreamSynchronize", handle, &s);
    if (code == SUCCESS && s->recorded != NULL) {
        fault("cudaStreamSynchronize on a stream that is captured");
        code = CAPTURE_UNSUPPORTED;
    }
    if (code == SUCCESS)
        drain(s);
    return end(code);
}

FUNCTION(cudaStreamIsCapturing, (void *handle, int *status))
{
    int code = begin("cudaStreamIsCapturing");
    const stream *s = stream_of(handle, "cudaStreamIsCapturing");

    if (code == SUCCESS && s == NULL)
        code = INVALID_HANDLE;
    if (code != SUCCESS)
        return end(code);
    if (captured != NULL && (uintptr_t)handle <= 1)
        return end(CAPTURE_IMPLICIT);
    *status = s->capturing || s->recorded != NULL;
    return end(SUCCESS);
}

static event *
event_of(void *handle, const char *call)
{
    if (find_thing(KIND_EVENT, handle) != NULL)
        return handle;
    fault("%s of what is not an event", call);
    return NULL;
}

FUNCTION(cudaStreamWaitEvent, (void *handle, void *what, unsigned flags))
{
    stream *s;
    operation o = {.what = WAIT};
    int code = begin_on_stream("cudaStreamWaitEvent", handle, &s);
    const event *e = event_of(what, "cudaStreamWaitEvent");

    (void)flags;
    if (code == SUCCESS && e == NULL)
        code = INVALID_HANDLE;
    if (code != SUCCESS)
        return end(code);
    note("wait s%u e%u", s->number, e->number);
    if (e->marker != NULL) {
        o.marker = e->marker;
        o.marker->users++;
        enqueue(s, &o);
    }
    return end(SUCCESS);
}

FUNCTION(cudaEventCreateWithFlags, (void **out, unsigned flags))
{
    int code = begin_on_device("cudaEventCreateWithFlags");
    event *e;

    if ((flags & 2) == 0)
        fault("an event that takes times");
    if (code == SUCCESS) {
        e = must(calloc(1, sizeof *e));
        e->number = ++n_events;
        add_thing(KIND_EVENT, e, 0);
        *out = e;
    }
    return end(code);
}

FUNCTION(cudaEventDestroy, (void *handle))
{
    int code = begin_on_device("cudaEventDestroy");
    event *e = event_of(handle, "cudaEventDestroy");

    if (e != NULL) {
        (void)remove_thing(KIND_EVENT, e, "cudaEventDestroy");
        drop_marker(e->marker);
        free(e);
    } else if (code == SUCCESS) {
        code = INVALID_HANDLE;
    }
    return end(code);
}

FUNCTION(cudaEventRecord, (void *handle, void *on))
{
    stream *s;
    operation o = {.what = RECORD};
    int code = begin_on_stream("cudaEventRecord", on, &s);
    event *e = event_of(handle, "cudaEventRecord");

    if (code == SUCCESS && e == NULL)
        code = INVALID_HANDLE;
    if (code != SUCCESS)
        return end(code);
    note("record s%u e%u", s->number, e->number);
    drop_marker(e->marker);
    e->marker = must(calloc(1, sizeof *e->marker));
    e->marker->users = 2;
    e->marker->stream = s;
    o.marker = e->marker;
    enqueue(s, &o);
    return end(SUCCESS);
}

FUNCTION(cudaEventSynchronize, (void *handle))
{
    int code = begin_on_device("cudaEventSynchronize");
    const event *e = event_of(handle, "cudaEventSynchronize");

    if (code == SUCCESS && e == NULL)
        code = INVALID_HANDLE;
    if (code == SUCCESS && e->marker != NULL)
        run_until(e->marker);
    return end(code);
}

/* --- the runtime: graphs -----------------------------------------------------
 */

FUNCTION(cudaStreamBeginCapture, (void *handle, int mode))
{
    stream *s;
    int code = begin_on_stream("cudaStreamBeginCapture", handle, &s);

    (void)mode;
    if (code == SUCCESS && (s->recorded != NULL || (uintptr_t)handle <= 2)) {
        fault("a capture that cannot begin");
        code = INVALID_VALUE;
    }
    if (code == SUCCESS) {
        s->recorded = must(calloc(1, sizeof *s->recorded));
        *s->recorded =
            (graph){.number = ++n_graphs, .users = 1, .device = s->device};
        s->recorded->last = &s->recorded->first;
    }
    return end(code);
}

FUNCTION(cudaStreamEndCapture, (void *handle, void **out))
{
    stream *s;
    int code = begin_on_stream("cudaStreamEndCapture", handle, &s);

    if (code == SUCCESS && s->recorded == NULL)
        code = INVALID_VALUE;
    if (code == SUCCESS) {
        *out = s->recorded;
        s->recorded = NULL;
        add_thing(KIND_GRAPH, *out, 0);
    }
    return end(code);
}

FUNCTION(cudaGraphInstantiate, (void **out, void *from, unsigned long long how))
{
    int code = begin_on_device("cudaGraphInstantiate");
    exec *e;

    (void)how;
    if (code == SUCCESS && find_thing(KIND_GRAPH, from) == NULL)
        code = INVALID_VALUE;
    if (code == SUCCESS) {
        e = must(malloc(sizeof *e));
        e->graph = from;
        e->graph->users++;
        add_thing(KIND_EXEC, e, 0);
        *out = e;
    }
    return end(code);
}

FUNCTION(cudaGraphLaunch, (void *handle, void *on))
{
    stream *s;
    operation o = {.what = GRAPH};
    int code = begin_on_stream("cudaGraphLaunch", on, &s);
    const exec *e = handle;

    if (code == SUCCESS && find_thing(KIND_EXEC, e) == NULL) {
        fault("cudaGraphLaunch of what is not a graph");
        code = INVALID_VALUE;
    }
    if (code == SUCCESS && e->graph->device != thread_device) {
        fault("cudaGraphLaunch of a graph of device %d", e->graph->device);
        code = INVALID_VALUE;
    }
    if (code != SUCCESS)
        return end(code);
    note("graph s%u g%u", s->number, e->graph->number);
    o.graph = e->graph;
    o.graph->users++;
    enqueue(s, &o);
    return end(SUCCESS);
}

FUNCTION(cudaGraphExecDestroy, (void *handle))
{
    int code = begin_on_device("cudaGraphExecDestroy");
    exec *e = handle;

    if (remove_thing(KIND_EXEC, e, "cudaGraphExecDestroy")) {
        drop_graph(e->graph);
        free(e);
    } else if (code == SUCCESS) {
        code = INVALID_VALUE;
    }
    return end(code);
}

FUNCTION(cudaGraphDestroy, (void *handle))
{
    int code = begin_on_device("cudaGraphDestroy");

    if (remove_thing(KIND_GRAPH, handle, "cudaGraphDestroy"))
        drop_graph(handle);
    else if (code == SUCCESS)
        code = INVALID_VALUE;
    return end(code);
}

static void
train(const void *args)
{
    const standin_step *a = args;
    float weight = *a->weight;

    for (int i = 0; i < 4; i++) {
        const uint8_t *input = a->inputs[i];

        for (uint64_t k = 0; k < a->bytes[i]; k++)
            weight = weight * 0.999f + *a->rate * (float)input[k] / 255.0f;
    }
    *a->weight = *a->loss = weight;
    *a->sum += (double)weight;
}

int
standin_train(void *handle, const standin_step *step)
{
    stream *s;
    operation o = {.what = KERNEL, .reference = train};
    int code = begin_on_stream("standin_train", handle, &s);

    if (code != SUCCESS)
        return end(code);
    note("launch s%u train", s->number);
    o.staged = memcpy(must(malloc(sizeof *step)), step, sizeof *step);
    enqueue(s, &o);
    return end(SUCCESS);
}

/* --- the driver --------------------------------------------------------------
 */

static int
cuDeviceGetName(char *name, int bytes, int device)
{
    int code = begin("cuDeviceGetName");

    if (code == SUCCESS)
        (void)snprintf(name, (size_t)bytes, "Stand-in %d", device);
    return end_in_driver(code);
}

static int
cuDeviceTotalMem(size_t *bytes, int device)
{
    int code = begin("cuDeviceTotalMem");

    (void)device;
    if (code == SUCCESS)
        *bytes = memory_bytes;
    return end_in_driver(code);
}

static int
cuDeviceGetUuid(void *uuid, int device)
{
    int code = begin("cuDeviceGetUuid");

    if (code == SUCCESS)
        memset(uuid, 0x10 + device, 16);
    return end_in_driver(code);
}

/* Each query advances the work by one step, so that polling ends. */
static int
cuEventQuery(void *handle)
{
    int code = begin_in_driver("cuEventQuery");
    const event *e = event_of(handle, "cuEventQuery");

    if (code == SUCCESS && e == NULL)
        code = INVALID_HANDLE;
    if (code == SUCCESS && e->marker != NULL && !e->marker->done) {
        run_one(e->marker->stream);
        code = NOT_READY;
    }
    return end_in_driver(code);
}

/* Handles of contexts: their addresses. */
static bool context_names[MAX_DEVICES];

static int
cuDevicePrimaryCtxRetain(void **out, int device)
{
    int code = begin("cuDevicePrimaryCtxRetain");

    if (code == SUCCESS && (device < 0 || device >= n_devices))
        code = INVALID_DEVICE;
    if (code == SUCCESS) {
        contexts[device] = true;
        *out = &context_names[device];
    }
    return end_in_driver(code);
}

static int
cuCtxPushCurrent(void *context)
{
    int code = begin("cuCtxPushCurrent");
    ptrdiff_t device = (bool *)context - context_names;

    if (code == SUCCESS &&
        (context == NULL || device < 0 || device >= n_devices))
        code = INVALID_CONTEXT;
    if (code == SUCCESS && thread_n_pushed == MAX_PUSHED) {
        fault("contexts that are never popped");
        code = INVALID_CONTEXT;
    }
    if (code == SUCCESS) {
        thread_pushed[thread_n_pushed++] =
            (pushed){thread_device, thread_bound};
        thread_device = (int)device;
        thread_bound = true;
    }
    return end_in_driver(code);
}

static int
cuCtxPopCurrent(void **out)
{
    int code = begin("cuCtxPopCurrent");

    if (thread_n_pushed == 0) {
        fault("a context is popped that was never pushed");
        return end_in_driver(INVALID_CONTEXT);
    }
    *out = &context_names[thread_device];
    thread_device = thread_pushed[--thread_n_pushed].device;
    thread_bound = thread_pushed[thread_n_pushed].bound;
    return end_in_driver(code);
}

static int
cuModuleLoadDataEx(void **out, const void *image, unsigned n, int *options,
                   void **values)
{
    int code = begin_in_driver("cuModuleLoadDataEx");
    module *m;

    if (code == SUCCESS && strstr(image, ".version") == NULL)
        code = INVALID_PTX;
    for (unsigned i = 0; code == INVALID_PTX && i < n; i++) {
        if (options[i] == 5)
            (void)snprintf(values[i], 16, "line 1: not PTX");
    }
    if (code == SUCCESS) {
        m = must(calloc(1, sizeof *m));
        m->text = image;
        m->device = thread_device;
        add_thing(KIND_MODULE, m, 0);
        *out = m;
    }
    return end_in_driver(code);
}

static int
cuModuleUnload(void *handle)
{
    int code = begin_in_driver("cuModuleUnload");
    module *m = handle;
    function *f;

    if (!remove_thing(KIND_MODULE, m, "cuModuleUnload"))
        return end_in_driver(code == SUCCESS ? INVALID_HANDLE : code);
    while ((f = m->functions) != NULL) {
        m->functions = f->next;
        free(f);
    }
    free(m);
    return end_in_driver(code);
}

/* Whether the text has an entry of this name. */
static bool
has_entry(const char *text, const char *name)
{
    size_t n = strlen(name);
    const char *at = text;

    while ((at = strstr(at, ".entry ")) != NULL) {
        at += strlen(".entry ");
        if (strncmp(at, name, n) == 0 && strchr("( \n\t", at[n]) != NULL)
            return true;
    }
    return false;
}

static bool
find_kernel(const char *name, function *out)
{
    cer_kernel kernel;

    for (unsigned i = 0; i < n_kernels; i++) {
        if (strcmp(kernels[i].name, name) == 0) {
            out->bytes = kernels[i].bytes;
            out->reference = kernels[i].reference;
            return true;
        }
    }
    if (cer_native_kernel_find(name, &out->reference, &out->bytes) ||
        cer_lane_kernel_find(name, &out->reference, &out->bytes))
        return true;
    if (!cer_kernel_find(name, &kernel))
        return false;
    out->bytes = cer_kernel_args_bytes(kernel);
    out->kernel = (int)kernel;
    return true;
}

static int
cuModuleGetFunction(void **out, void *handle, const char *name)
{
    int code = begin_in_driver("cuModuleGetFunction");
    module *m = handle;
    function found = {.module = m}, *f;

    if (code == SUCCESS &&
        (!has_entry(m->text, name) || !find_kernel(name, &found)))
        code = SYMBOL_NOT_FOUND;
    if (code == SUCCESS) {
        f = must(malloc(sizeof *f));
        *f = found;
        (void)snprintf(f->name, sizeof f->name, "%s", name);
        f->next = m->functions;
        m->functions = f;
        *out = f;
    }
    return end_in_driver(code);
}

static int
cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
               unsigned block_x, unsigned block_y, unsigned block_z,
               unsigned shared, void *on, void **params, void **extra)
{
    const function *f = handle;
    stream *s;
    operation o = {.what = KERNEL};
    bool bound = thread_bound;
    int code = begin_on_stream("cuLaunchKernel", on, &s);
    size_t bytes;

    if (code == SUCCESS && !bound)
        code = INVALID_CONTEXT;
    if (code != SUCCESS)
        return end_in_driver(code);
    if (f->module->device != thread_device || params != NULL || grid_x == 0 ||
        grid_x > INT32_MAX || grid_y == 0 || grid_y > 65535 || grid_z == 0 ||
        grid_z > 65535 || shared > 48 * 1024 || block_x == 0 || block_y == 0 ||
        block_z == 0 || block_z > 64 ||
        (uint64_t)block_x * block_y * block_z > 1024) {
        fault("a launch of %s that no device accepts", f->name);
        return end_in_driver(INVALID_VALUE);
    }
    bytes = *(size_t *)extra[3];
    if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != NULL ||
        bytes != f->bytes || bytes > MAX_ARGS) {
        fault("a launch of %s with %zu bytes of arguments, not %zu", f->name,
              bytes, f->bytes);
        return end_in_driver(INVALID_VALUE);
    }
    note("launch s%u %s", s->number, f->name);
    o.staged = memcpy(must(malloc(bytes)), extra[1], bytes);
    o.reference = f->reference;
    o.kernel = f->kernel;
    enqueue(s, &o);
    return end_in_driver(SUCCESS);
}

static int
entry_point(const char *call, const char *name, void **out, int *result)
{
#define ENTRY(function)                                                        \
    {                                                                          \
#function, (void (*)(void))function                                    \
    }
    static const struct {
        const char *name;
        void (*function)(void);
    } table[] = {
        ENTRY(cuDeviceGetName),
        ENTRY(cuDeviceTotalMem),
        ENTRY(cuDevicePrimaryCtxRetain),
        ENTRY(cuCtxPushCurrent),
        ENTRY(cuCtxPopCurrent),
        ENTRY(cuModuleLoadDataEx),
        ENTRY(cuModuleUnload),
        ENTRY(cuModuleGetFunction),
        ENTRY(cuLaunchKernel),
        ENTRY(cuDeviceGetUuid),
        ENTRY(cuEventQuery),
    };
    int code = begin(call);

    *out = NULL;
    *result = 1; /* not found */
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (code == SUCCESS && strcmp(table[i].name, name) == 0) {
            memcpy(out, &table[i].function, sizeof *out);
            *result = 0;
        }
    }
    return end(code);
}

/* Runtimes before 12.5 have the first only. */
#ifdef STANDIN_OLD
FUNCTION(cudaGetDriverEntryPoint,
         (const char *name, void **out, unsigned long long flags, int *result))
{
    (void)flags;
    return entry_point("cudaGetDriverEntryPoint", name, out, result);
}
#else
FUNCTION(cudaGetDriverEntryPointByVersion,
         (const char *name, void **out, unsigned since,
          unsigned long long flags, int *result))
{
    (void)flags;
    if (since != 12000)
        fault("a driver function of CUDA %u", since);
    return entry_point("cudaGetDriverEntryPointByVersion", name, out, result);
}
#endif
