/* The device layer for a GPU, on the stand-in for the CUDA runtime. */
#include <pthread.h>
#include <stdlib.h>

#include "cuda_files.h"
#include "depot.h"
#include "device_check.h"
#include "kernels.h"
#include "kernels_ptx.h"

/* --- finding ----------------------------------------------------------------
 */

static void
the_runtime_says_what_it_is(void)
{
    cer_cudart *runtime;
    cer_cudart_device about;
    int count;

    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(runtime->version, 13000);
    CHECK_EQ_INT(runtime->driver, 13000);
    CHECK_EQ_STR(runtime->path, STANDIN);
    CHECK_EQ_INT(cer_cudart_devices(runtime, &count, NULL), CER_OK);
    CHECK_EQ_INT(count, 2);
    CHECK_EQ_INT(cer_cudart_describe(runtime, 1, &about, NULL), CER_OK);
    CHECK_EQ_STR(about.name, "Stand-in 1");
    CHECK_EQ_STR(about.uuid, "11111111111111111111111111111111");
    CHECK(about.major == 8 && about.minor == 6 && about.multiprocessors == 2);
    CHECK(about.total_bytes == 1000000000 && !about.mps);
    cer_cudart_release(runtime);
    nothing_left();
}

static void
an_older_runtime_serves_too(void)
{
    const cer_cudart_search search = {.path = OLD_STANDIN};
    cer_cudart *runtime;
    cer_cudart_device about;
    cer_device *device;
    cer_error err = {0};

    CHECK_EQ_INT(cer_cudart_open(&search, &runtime, &err), CER_OK);
    CHECK_EQ_INT(runtime->version, 12000);
    CHECK_EQ_INT(cer_cudart_describe(runtime, 0, &about, &err), CER_OK);
    CHECK(!about.mps); /* it lacks the attribute */
    CHECK_EQ_INT(runtime->cudaGetLastError(), 0);
    CHECK_EQ_INT(cer_device_cuda_new(runtime, 0, add_ptx, &device, &err),
                 CER_OK);
    cer_device_release(device);
    cer_cudart_release(runtime);
}

static void
what_is_no_runtime_is_refused(void)
{
    cer_cudart_search search = {.path = "/nonexistent/libcudart.so"};
    cer_cudart *runtime;
    cer_error err = {0};

    CHECK_EQ_INT(cer_cudart_open(&search, &runtime, &err), CER_DEVICE);
    CHECK(strstr(err.message, "/nonexistent/libcudart.so does not load: "));
#ifdef __linux__
    search.path = "libm.so.6";
    CHECK_EQ_INT(cer_cudart_open(&search, &runtime, &err), CER_DEVICE);
    CHECK(strstr(err.message,
                 "lacks cudaRuntimeGetVersion, so it is not a CUDA "
                 "runtime of 12.0 or later"));
#endif
    CHECK(setenv("STANDIN_VERSION", "11080", 1) == 0);
    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, &err), CER_DEVICE);
    CHECK(strstr(err.message, "is the runtime of CUDA 11.8, and 12.0 or later "
                              "is needed: "));
    CHECK(unsetenv("STANDIN_VERSION") == 0);
    CHECK(setenv("STANDIN_DRIVER", "0", 1) == 0);
    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, &err), CER_DEVICE);
    CHECK(strncmp(err.message, "no NVIDIA driver: ", 18) == 0);
    CHECK(unsetenv("STANDIN_DRIVER") == 0);
    CHECK(runtime == NULL);
    fresh_standin();
}

static void
devices_that_are_not_there(void)
{
    cer_cudart *runtime;
    cer_device *device;
    cer_error err = {0};

    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_cuda_new(runtime, 2, add_ptx, &device, &err),
                 CER_INVALID);
    CHECK_EQ_STR(err.message, "cuda:2: there are 2 CUDA devices, counted from "
                              "0, that this process may use");
    CHECK_EQ_INT(cer_device_cuda_new(runtime, -1, add_ptx, &device, &err),
                 CER_INVALID);
    standin_devices(0);
    CHECK_EQ_INT(cer_device_cuda_new(runtime, 0, add_ptx, &device, &err),
                 CER_DEVICE);
    CHECK_EQ_STR(err.message,
                 "CUDA: cudaGetDeviceCount: cudaErrorNoDevice (100): as the "
                 "test asked; see CUDA_VISIBLE_DEVICES and nvidia-smi");
    CHECK(device == NULL);
    cer_cudart_release(runtime);
    nothing_left();
}

/* --- work -------------------------------------------------------------------
 */

/* Copies four numbers to the device on one stream, adds, and copies back on
 * another. */
typedef struct scene {
    cer_device *device;
    cer_device_block there, here;
    void *first, *second, *event;
} scene;

static cer_status
set_up(scene *s, int index, cer_error *err)
{
    cer_cudart *runtime = NULL;
    cer_status status = open_standin(&runtime, err);

    *s = (scene){0};
    if (status == CER_OK)
        status = cer_device_cuda_new(runtime, index, add_ptx, &s->device, err);
    cer_cudart_release(runtime);
    if (status != CER_OK ||
        (status = cer_device_alloc(s->device, 16, CER_USE_OTHER, &s->there,
                                   err)) != CER_OK ||
        (status = cer_device_alloc_pinned(s->device, 16, CER_USE_OTHER,
                                          &s->here, err)) != CER_OK ||
        (status = cer_device_stream_new(s->device, &s->first, err)) != CER_OK ||
        (status = cer_device_stream_new(s->device, &s->second, err)) !=
            CER_OK ||
        (status = cer_device_event_new(s->device, &s->event, err)) != CER_OK)
        return status;
    return CER_OK;
}

static void
tear_down(scene *s)
{
    if (s->device != NULL) {
        cer_device_event_free(s->device, s->event);
        cer_device_stream_free(s->device, s->second);
        cer_device_stream_free(s->device, s->first);
        cer_device_free(s->device, &s->here);
        cer_device_free(s->device, &s->there);
        CHECK_EQ_INT(cer_device_held(s->device, CER_USE_OTHER), 0);
    }
    cer_device_release(s->device);
}

static cer_status
add_ten(scene *s, cer_error *err)
{
    const add_args args = {s->there.data, 4, 10};
    const cer_device_launch launch = add_launch(&args);
    cer_device *d = s->device;
    cer_status status;

    for (int32_t i = 0; i < 4; i++)
        ((int32_t *)s->here.data)[i] = i;
    if ((status = cer_device_copy(d, s->there.data, s->here.data, 16,
                                  CER_COPY_TO_DEVICE, s->first, err)) !=
            CER_OK ||
        (status = cer_device_run(d, &launch, s->first, err)) != CER_OK ||
        (status = cer_device_event_record(d, s->event, s->first, err)) !=
            CER_OK ||
        (status = cer_device_stream_wait(d, s->second, s->event, err)) !=
            CER_OK ||
        (status = cer_device_fill(d, s->there.data, 1, 4, s->second, err)) !=
            CER_OK)
        return status;
    return cer_device_copy(d, s->here.data, s->there.data, 16,
                           CER_COPY_FROM_DEVICE, s->second, err);
}

static void
check_sums(const scene *s)
{
    const int32_t *n = s->here.data;

    CHECK(n[0] == 0x01010101 && n[1] == 11 && n[2] == 12 && n[3] == 13);
}

static void
work_is_done_in_order(void)
{
    static const char *const expected[] = {
        "copy_to s%u 16", "launch s%u test_add", "record s%u e",
        "wait s%u e",     "fill s%u 4",          "copy_from s%u 16"};
    scene s;
    unsigned first = 0;
    char line[80];

    fresh_standin();
    CHECK_EQ_INT(set_up(&s, 1, NULL), CER_OK);
    CHECK_EQ_STR(cer_device_name(s.device), "cuda:1");
    CHECK_EQ_INT(cer_device_index(s.device), 1);
    CHECK_EQ_INT(cer_device_kind_of(s.device), CER_DEVICE_CUDA);
    CHECK_EQ_INT(standin_device_bytes(1), 16);
    CHECK_EQ_INT(add_ten(&s, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_stream_sync(s.device, s.second, NULL), CER_OK);
    check_sums(&s);
    CHECK_EQ_INT(standin_log_lines(), 6);
    CHECK_EQ_INT(sscanf(standin_log_line(0), "copy_to s%u", &first), 1);
    for (unsigned i = 0; i < 6; i++) {
        (void)snprintf(line, sizeof line, expected[i], first + (i > 2));
        CHECK_EQ_INT(strncmp(standin_log_line(i), line, strlen(line)), 0);
    }
    tear_down(&s);
    CHECK_EQ_INT(standin_thread_device(), 0);
    CHECK_EQ_INT(standin_thread_mode(), 0);
    CHECK(standin_has_context(1));
    CHECK(!standin_has_context(0)); /* that device was not requested */
    nothing_left();
}

static void
deferred_work_waits_for_whoever_waits(void)
{
    scene s;
    bool done = true;
    int queries = 0;

    fresh_standin();
    standin_defer(true);
    CHECK_EQ_INT(set_up(&s, 0, NULL), CER_OK);
    CHECK_EQ_INT(add_ten(&s, NULL), CER_OK);
    CHECK_EQ_INT(((int32_t *)s.here.data)[3], 3);
    CHECK_EQ_INT(cer_device_event_query(s.device, s.event, &done, NULL),
                 CER_OK);
    CHECK(!done);
    while (!done && ++queries < 10)
        CHECK_EQ_INT(cer_device_event_query(s.device, s.event, &done, NULL),
                     CER_OK);
    CHECK(done);
    CHECK_EQ_INT(((int32_t *)s.here.data)[3], 3); /* the second stream's */
    CHECK_EQ_INT(cer_device_stream_sync(s.device, s.second, NULL), CER_OK);
    check_sums(&s);

    CHECK_EQ_INT(add_ten(&s, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_event_record(s.device, s.event, s.second, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_event_sync(s.device, s.event, NULL), CER_OK);
    check_sums(&s);
    CHECK_EQ_INT(add_ten(&s, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_sync(s.device, NULL), CER_OK);
    check_sums(&s);
    tear_down(&s);
    nothing_left();
}

/* A failed launch of PyTorch is left for PyTorch to find. */
static void
asking_for_an_event_hides_no_error(void)
{
    cer_cudart *runtime;
    scene s;
    bool done = true;

    fresh_standin();
    standin_defer(true);
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(set_up(&s, 0, NULL), CER_OK);
    CHECK_EQ_INT(add_ten(&s, NULL), CER_OK);
    standin_fail("cudaMemsetAsync", 1, 98);
    CHECK_EQ_INT(runtime->cudaMemsetAsync(s.there.data, 0, 4, s.first), 98);
    CHECK_EQ_INT(cer_device_event_query(s.device, s.event, &done, NULL),
                 CER_OK);
    CHECK(!done);
    CHECK_EQ_INT(runtime->cudaGetLastError(), 98);
    CHECK_EQ_INT(cer_device_sync(s.device, NULL), CER_OK);
    tear_down(&s);
    cer_cudart_release(runtime);
    nothing_left();
}

/* A device that accepts work but does it wrong fails its check. */
static void
wrong_results_are_found(void)
{
    static const struct {
        const char *broken, *part;
        bool late;
    } cases[] = {{"copy", "memory", false},
                 {"fill", "memory", false},
                 {"wait", "streams", true},
                 {"record", "streams", true},
                 {"kernel", "kernels", false}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cer_cudart *runtime;
        cer_device *device;
        cer_error err = {0};
        char message[64];

        CHECK(setenv("STANDIN_BREAK", cases[i].broken, 1) == 0);
        fresh_standin();
        standin_defer(cases[i].late);
        CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
        CHECK_EQ_INT(
            cer_device_cuda_new(runtime, 0, cer_kernels_ptx, &device, NULL),
            CER_OK);
        CHECK_EQ_INT(cer_device_check(device, &err), CER_DEVICE);
        (void)snprintf(message, sizeof message,
                       "the check of %s failed: cuda:0: ", cases[i].part);
        CHECK(strncmp(err.message, message, strlen(message)) == 0);
        cer_device_release(device);
        cer_cudart_release(runtime);
        CHECK(unsetenv("STANDIN_BREAK") == 0);
        nothing_left();
    }
}

static void
the_check_runs_every_kernel(void)
{
    cer_cudart *runtime;
    cer_device *device;
    bool seen[CER_KERNEL_COUNT] = {false};
    size_t n = 0;

    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(
        cer_device_cuda_new(runtime, 0, cer_kernels_ptx, &device, NULL),
        CER_OK);
    CHECK_EQ_INT(cer_device_check(device, NULL), CER_OK);
    for (unsigned i = 0; i < standin_log_lines(); i++) {
        char name[64];
        cer_kernel kernel;

        if (sscanf(standin_log_line(i), "launch s%*u %63s", name) == 1 &&
            cer_kernel_find(name, &kernel))
            seen[kernel] = true;
    }
    for (int i = 0; i < CER_KERNEL_COUNT; i++)
        n += seen[i];
    CHECK_EQ_INT(n, CER_KERNEL_COUNT);
    cer_device_release(device);
    cer_cudart_release(runtime);
    nothing_left();
}

/* Host memory may change as soon as a copy returns, unless it is pinned. */
static void
pinned_memory_is_read_late(void)
{
    scene s;
    int32_t plain[4] = {1, 2, 3, 4}, back[4];

    fresh_standin();
    standin_defer(true);
    CHECK_EQ_INT(set_up(&s, 0, NULL), CER_OK);
    for (int pin = 0; pin < 2; pin++) {
        int32_t *from = pin != 0 ? s.here.data : plain;

        from[0] = 1;
        CHECK_EQ_INT(cer_device_copy(s.device, s.there.data, from, sizeof plain,
                                     CER_COPY_TO_DEVICE, s.first, NULL),
                     CER_OK);
        from[0] = 9;
        CHECK_EQ_INT(cer_device_copy(s.device, back, s.there.data, sizeof back,
                                     CER_COPY_FROM_DEVICE, s.first, NULL),
                     CER_OK);
        CHECK_EQ_INT(back[0], pin != 0 ? 9 : 1);
    }
    tear_down(&s);
    nothing_left();
}

/* Pinned memory falls back to ordinary memory if the system allows no more; any
 * other error fails. */
static void
without_pinned_memory_work_is_the_same(void)
{
    static const int codes[] = {2, 304, 800, 801};
    cer_error err = {0};
    scene s;

    for (size_t i = 0; i < 2 * sizeof codes / sizeof codes[0]; i++) {
        fresh_standin();
        standin_defer(i % 2 != 0);
        standin_fail("cudaHostAlloc", 0, codes[i / 2]);
        CHECK_EQ_INT(set_up(&s, 0, &err), CER_OK);
        CHECK(s.here.pinned && s.here.pageable);
        CHECK_EQ_INT((uintptr_t)s.here.data % CER_ALIGNMENT, 0);
        CHECK_EQ_INT(standin_left("pinned"), 0);
        CHECK_EQ_INT(standin_thread_error(), 0);
        CHECK(strncmp(cer_device_unpinned(s.device),
                      "cuda:0: cudaHostAlloc: cudaError", 32) == 0);
        CHECK_EQ_INT(add_ten(&s, NULL), CER_OK);
        CHECK_EQ_INT(cer_device_stream_sync(s.device, s.second, NULL), CER_OK);
        check_sums(&s);
        tear_down(&s);
        nothing_left();
    }
    fresh_standin();
    standin_fail("cudaHostAlloc", 0, 1);
    CHECK_EQ_INT(set_up(&s, 0, &err), CER_DEVICE);
    CHECK(strstr(err.message, "cudaHostAlloc") != NULL);
    CHECK(cer_device_unpinned(s.device) == NULL);
    tear_down(&s);
    nothing_left();
}

/* --- capturing ---------------------------------------------------------------
 */

static void
graphs_of_others_are_left_alone(void)
{
    scene s;
    bool capturing;

    fresh_standin();
    CHECK_EQ_INT(set_up(&s, 0, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_stream_capturing(s.device, NULL, &capturing, NULL),
                 CER_OK);
    CHECK(!capturing);
    standin_capture(s.second);
    CHECK_EQ_INT(
        cer_device_stream_capturing(s.device, s.first, &capturing, NULL),
        CER_OK);
    CHECK(!capturing);
    CHECK_EQ_INT(
        cer_device_stream_capturing(s.device, s.second, &capturing, NULL),
        CER_OK);
    CHECK(capturing);
    /* The default stream would take part in the capture. */
    CHECK_EQ_INT(cer_device_stream_capturing(s.device, NULL, &capturing, NULL),
                 CER_OK);
    CHECK(capturing);
    CHECK_EQ_INT(cer_device_event_record(s.device, s.event, s.first, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_event_sync(s.device, s.event, NULL), CER_OK);
    standin_capture(NULL);
    tear_down(&s);
    nothing_left();
}

/* --- failures
 * ----------------------------------------------------------------- */

static cer_status
everything(cer_error *err)
{
    scene s;
    size_t free_bytes, total;
    bool flag;
    cer_status status = set_up(&s, 1, err);

    if (status == CER_OK) {
        status = add_ten(&s, err);
        if (status == CER_OK)
            status = cer_device_event_query(s.device, s.event, &flag, err);
        if (status == CER_OK)
            status = cer_device_event_sync(s.device, s.event, err);
        if (status == CER_OK)
            status = cer_device_stream_sync(s.device, s.second, err);
        if (status == CER_OK)
            status = cer_device_stream_capturing(s.device, s.first, &flag, err);
        if (status == CER_OK)
            status = cer_device_memory(s.device, &free_bytes, &total, err);
        if (status == CER_OK)
            status = cer_device_sync(s.device, err);
    }
    tear_down(&s);
    return status;
}

/* Calls whose failure cannot be handled: freeing and restoring. */
static bool
is_quiet(const char *name)
{
    static const char *const quiet[] = {
        "cudaFree",          "cudaFreeHost",
        "cudaStreamDestroy", "cudaEventDestroy",
        "cuModuleUnload",    "cuCtxPushCurrent",
        "cuCtxPopCurrent",   "cudaThreadExchangeStreamCaptureMode"};

    for (size_t i = 0; i < sizeof quiet / sizeof quiet[0]; i++) {
        if (strcmp(quiet[i], name) == 0)
            return true;
    }
    return false;
}

/* Runs `action` with its 1st, 2nd, ... call failing until no call fails. Every
 * failure names the call or is harmless; nothing leaks. */
static void
fail_every_call(cer_status (*action)(cer_error *err), unsigned at_least)
{
    unsigned n = 1, told = 0;

    for (;; n++) {
        cer_error err = {0};
        cer_status status;
        const char *name;

        fresh_standin();
        standin_fail(NULL, n, 700);
        status = action(&err);
        name = standin_failed();
        CHECK_EQ_STR(standin_fault(), "");
        CHECK_EQ_INT(standin_thread_error(), 0);
        if (name == NULL) {
            CHECK_EQ_INT(status, CER_OK);
            break;
        }
        CHECK_EQ_INT(standin_left(NULL), 0);
        if (status == CER_OK) {
            CHECK(is_quiet(name));
            continue;
        }
        told++;
        CHECK_EQ_INT(status, CER_DEVICE);
        CHECK(strstr(err.message, name) != NULL);
    }
    CHECK(n > at_least && told > at_least / 2);
}

/* With the module's real kernels. */
static cer_status
check_a_device(cer_error *err)
{
    cer_cudart *runtime = NULL;
    cer_device *device = NULL;
    cer_status status = open_standin(&runtime, err);

    standin_defer(true);
    if (status == CER_OK)
        status = cer_device_cuda_new(runtime, 1, cer_kernels_ptx, &device, err);
    cer_cudart_release(runtime);
    if (status == CER_OK)
        status = cer_device_check(device, err);
    cer_device_release(device);
    return status;
}

static void
every_call_fails_in_turn(void)
{
    fail_every_call(everything, 80);
    fail_every_call(check_a_device, 60);
}

static void
errors_say_what_to_do(void)
{
    scene s;
    cer_error err = {0};

    fresh_standin();
    CHECK_EQ_INT(set_up(&s, 1, NULL), CER_OK);
    standin_fail("cudaMemcpyAsync", 1, 700);
    CHECK_EQ_INT(add_ten(&s, &err), CER_DEVICE);
    CHECK_EQ_STR(err.message,
                 "cuda:1: cudaMemcpyAsync: cudaErrorIllegalAddress (700): as "
                 "the test asked; this process can no longer use the device, "
                 "a new process can");
    CHECK_EQ_INT(standin_thread_error(), 0);
    CHECK_EQ_INT(add_ten(&s, &err), CER_OK); /* the process still works */
    tear_down(&s);
    nothing_left();
}

static void
kernels_that_the_driver_refuses(void)
{
    const add_args args = {NULL, 0, 0};
    cer_device_launch launch = add_launch(&args);
    cer_cudart *runtime;
    cer_device *device;
    cer_error err = {0};

    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_cuda_new(runtime, 0, "nonsense", &device, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_run(device, &launch, NULL, &err), CER_DEVICE);
    CHECK(strstr(err.message, "cuda:0: cuModuleLoadDataEx: cudaErrorInvalidPtx "
                              "(218): ") != NULL);
    CHECK(strstr(err.message, ": line 1: not PTX") != NULL);
    cer_device_release(device);
    cer_cudart_release(runtime);

    device = standin_device(0);
    launch.name = "missing";
    launch.index = 1;
    CHECK_EQ_INT(cer_device_run(device, &launch, NULL, &err), CER_DEVICE);
    CHECK(strstr(err.message, "cuda:0: cuModuleGetFunction: ") != NULL);
    launch = add_launch(&args);
    CHECK_EQ_INT(cer_device_run(device, &launch, NULL, &err), CER_OK);
    cer_device_release(device);
    nothing_left();
}

static void
short_memory_says_what_is_resident(void)
{
    cer_device *device = standin_device(0);
    cer_device_block shard, batch;
    size_t free_bytes, total;
    cer_error err = {0};

    standin_memory(10000000);
    CHECK_EQ_INT(
        cer_device_alloc(device, 9000000, CER_USE_SHARDS, &shard, NULL),
        CER_OK);
    CHECK_EQ_INT(
        cer_device_alloc(device, 2000000, CER_USE_BATCHES, &batch, &err),
        CER_NOMEM);
    CHECK_EQ_STR(err.message,
                 "out of memory on cuda:0: 2.0 MB for batches; Cerebro holds "
                 "in this process: shards 9.0 MB; 1.0 of 10.0 MB are free. Use "
                 "fewer workers per device, smaller batches or a smaller "
                 "model");
    CHECK_EQ_INT(cer_device_memory(device, &free_bytes, &total, NULL), CER_OK);
    CHECK(free_bytes == 1000000 && total == 10000000);
    cer_device_free(device, &shard);
    CHECK_EQ_INT(
        cer_device_alloc(device, 2000000, CER_USE_BATCHES, &batch, &err),
        CER_OK);
    cer_device_free(device, &batch);
    cer_device_release(device);
    nothing_left();
}

/* --- foreign memory ------------------------------------------------ */

static cer_status
lend(void *context, int device, size_t bytes, void **out, void **ticket,
     cer_error *err)
{
    const cer_device_block *block = context;

    (void)device, (void)err;
    CHECK(bytes <= block->bytes);
    CHECK_EQ_INT(standin_thread_device(), 0); /* it may run any code */
    CHECK_EQ_INT(standin_thread_mode(), 0);
    *out = block->data;
    *ticket = NULL;
    return CER_OK;
}

static void
take_back(void *context, int device, void *data, void *ticket)
{
    (void)device, (void)ticket;
    CHECK(data == ((const cer_device_block *)context)->data);
}

static cer_device_block pool;
static const cer_device_allocator lender = {&pool, lend, take_back};

/* A device whose pool reuses memory while the last owner's work, which changes
 * its 1 to 2, is still pending on the default stream. */
static cer_device *
device_with_pool(void)
{
    cer_device *device = standin_device(1);

    standin_defer(true);
    CHECK_EQ_INT(cer_device_alloc(device, 256, CER_USE_OTHER, &pool, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_fill(device, pool.data, 1, 256, NULL, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_sync(device, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_fill(device, pool.data, 2, 256, NULL, NULL),
                 CER_OK);
    cer_device_set_allocator(device, &lender);
    return device;
}

static void
free_pool(cer_device *device)
{
    cer_device_set_allocator(device, NULL);
    cer_device_free(device, &pool);
    cer_device_release(device);
    nothing_left();
}

/* Also for a pool's code, which finds the thread as it was. */
static void
calls_in_succession_prepare_once(void)
{
    cer_device *device = device_with_pool();
    cer_device_visit outer, inner;
    cer_device_block block;
    unsigned before = standin_calls("cuCtxPushCurrent");

    CHECK_EQ_INT(cer_device_enter(device, &outer, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_enter(device, &inner, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_sync(device, NULL), CER_OK);
    cer_device_leave(device, &inner);
    CHECK_EQ_INT(cer_device_fill(device, pool.data, 3, 8, NULL, NULL), CER_OK);
    CHECK_EQ_INT(standin_thread_device(), 1);
    CHECK_EQ_INT(standin_calls("cuCtxPushCurrent") - before, 1);
    CHECK_EQ_INT(cer_device_alloc(device, 64, CER_USE_OTHER, &block, NULL),
                 CER_OK);
    CHECK_EQ_INT(standin_thread_device(), 1);
    CHECK_EQ_INT(standin_thread_mode(), 2);
    cer_device_leave(device, &outer);
    CHECK_EQ_INT(standin_thread_device(), 0);
    CHECK_EQ_INT(standin_thread_mode(), 0);
    cer_device_free(device, &block);
    free_pool(device);
}

static void
memory_of_a_pool_is_waited_for(void)
{
    cer_device *device = device_with_pool();
    cer_device_block block;

    CHECK_EQ_INT(cer_device_alloc(device, 64, CER_USE_OTHER, &block, NULL),
                 CER_OK);
    CHECK_EQ_INT(((uint8_t *)block.data)[0], 1);
    cer_device_free(device, &block);
    CHECK_EQ_INT(cer_device_alloc_idle(device, 64, CER_USE_OTHER, &block, NULL),
                 CER_OK);
    CHECK_EQ_INT(((uint8_t *)block.data)[0], 2);
    cer_device_free(device, &block);
    standin_fail("cudaStreamSynchronize", 1, 700);
    CHECK_EQ_INT(cer_device_alloc_idle(device, 64, CER_USE_OTHER, &block, NULL),
                 CER_DEVICE);
    CHECK(block.data == NULL &&
          cer_device_held(device, CER_USE_OTHER) == pool.bytes);
    free_pool(device);
}

/* The depot's blocks are written after that work, without a host wait. */
static void
blocks_of_a_pool_come_behind_its_last_owner(void)
{
    cer_device *device = device_with_pool();
    cer_depot_block *block;
    cer_depot *depot;
    void *stream;

    CHECK_EQ_INT(cer_depot_new(device, &depot, NULL), CER_OK);
    stream = cer_depot_stream(depot, CER_DEPOT_COPIES);
    CHECK_EQ_INT(cer_depot_get(depot, 64, &block, NULL), CER_OK);
    CHECK_EQ_INT(cer_uses_before(&block->uses, stream, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_fill(device, pool.data, 3, 64, stream, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_uses_filled(&block->uses, stream, NULL), CER_OK);
    CHECK_EQ_INT(((uint8_t *)pool.data)[0], 1);
    CHECK_EQ_INT(cer_device_stream_sync(device, stream, NULL), CER_OK);
    CHECK_EQ_INT(((uint8_t *)pool.data)[0], 3);
    CHECK_EQ_INT(((uint8_t *)pool.data)[64], 2);
    cer_depot_give(block);
    cer_depot_release(depot);
    free_pool(device);
}

/* --- threads
 * ------------------------------------------------------------------ */

static void *
launch_often(void *context)
{
    cer_device *device = context;
    cer_device_block block;
    add_args args;
    cer_device_launch launch;
    void *stream;

    CHECK_EQ_INT(cer_device_stream_new(device, &stream, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_alloc(device, 64, CER_USE_OTHER, &block, NULL),
                 CER_OK);
    args = (add_args){block.data, 16, 1};
    launch = add_launch(&args);
    CHECK_EQ_INT(cer_device_fill(device, block.data, 0, 64, stream, NULL),
                 CER_OK);
    for (int i = 0; i < 100; i++)
        CHECK_EQ_INT(cer_device_run(device, &launch, stream, NULL), CER_OK);
    CHECK_EQ_INT(cer_device_stream_sync(device, stream, NULL), CER_OK);
    CHECK_EQ_INT(((int32_t *)block.data)[15], 100);
    CHECK_EQ_INT(standin_thread_device(), 0);
    cer_device_free(device, &block);
    cer_device_stream_free(device, stream);
    cer_device_release(device);
    return NULL;
}

static void *
only_launch(void *context)
{
    cer_device *device = context;
    const add_args args = {NULL, 0, 0};
    const cer_device_launch launch = add_launch(&args);

    CHECK_EQ_INT(cer_device_run(device, &launch, NULL, NULL), CER_OK);
    cer_device_release(device);
    return NULL;
}

/* A launch may be a thread's first call, and so may the last release. */
static void
a_launch_finds_the_context(void)
{
    pthread_t thread;

    for (int i = 0; i < 2; i++) {
        cer_device *device = standin_device(i);

        CHECK(pthread_create(&thread, NULL, only_launch, device) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        nothing_left();
    }
}

static void
threads_share_a_device(void)
{
    cer_device *device = standin_device(1);
    pthread_t threads[4];

    cer_device_retain(device);
    for (int i = 0; i < 4; i++) {
        cer_device_retain(device);
        CHECK(pthread_create(&threads[i], NULL, launch_often, device) == 0);
    }
    cer_device_release(device);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQ_INT(standin_left("module"), 1);
    cer_device_release(device);
    nothing_left();
}

typedef struct visitor {
    cer_uses *uses;
    pthread_t self;
} visitor;

static void *
use_own_stream(void *context)
{
    visitor *v = context;

    v->self = pthread_self();
    CHECK_EQ_INT(cer_uses_join(v->uses, (void *)2, NULL), CER_OK);
    return NULL;
}

static void *
write_on_own_stream(void *context)
{
    visitor *v = context;

    v->self = pthread_self();
    CHECK_EQ_INT(cer_uses_before(v->uses, (void *)2, NULL), CER_OK);
    return NULL;
}

/* The default stream of an ended thread is not that of a new thread with the
 * same id, so its work is waited for. */
static void
thread_ids_that_come_again(void)
{
    scene s;
    cer_uses uses;
    pthread_t thread;
    visitor first = {.uses = &uses}, second = {.uses = &uses};

    fresh_standin();
    standin_defer(true);
    CHECK_EQ_INT(set_up(&s, 0, NULL), CER_OK);
    CHECK_EQ_INT(cer_uses_init(&uses, s.device, NULL), CER_OK);
    for (int i = 0; i < 4; i++)
        ((int32_t *)s.here.data)[i] = 7;
    CHECK(pthread_create(&thread, NULL, use_own_stream, &first) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQ_INT(cer_device_fill(s.device, s.there.data, 0, 16, s.first, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_device_copy(s.device, s.here.data, s.there.data, 16,
                                 CER_COPY_FROM_DEVICE, s.first, NULL),
                 CER_OK);
    CHECK(pthread_create(&thread, NULL, write_on_own_stream, &second) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(pthread_equal(first.self, second.self)); /* else this tests nothing */
    CHECK_EQ_INT(((int32_t *)s.here.data)[3],
                 0); /* the device was waited for */
    cer_uses_end(&uses);
    cer_uses_clear(&uses);
    tear_down(&s);
    nothing_left();
}

CHECK_MAIN(the_runtime_says_what_it_is, an_older_runtime_serves_too,
           what_is_no_runtime_is_refused, devices_that_are_not_there,
           work_is_done_in_order, deferred_work_waits_for_whoever_waits,
           asking_for_an_event_hides_no_error, wrong_results_are_found,
           the_check_runs_every_kernel, thread_ids_that_come_again,
           pinned_memory_is_read_late, without_pinned_memory_work_is_the_same,
           graphs_of_others_are_left_alone, errors_say_what_to_do,
           kernels_that_the_driver_refuses, short_memory_says_what_is_resident,
           calls_in_succession_prepare_once, memory_of_a_pool_is_waited_for,
           blocks_of_a_pool_come_behind_its_last_owner,
           a_launch_finds_the_context, threads_share_a_device,
           every_call_fails_in_turn)
