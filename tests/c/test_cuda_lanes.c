/* Lanes over the stand-in for CUDA: units whose step is a graph have the bits
 * of ordinary steps; one thread drives all in turn; every failing call is
 * reported by its lane alone; nothing is left. */
#include "lanes.h"

#include <pthread.h>

#include "cuda_files.h"
#include "kernels_ptx.h"
#include "loader_files.h"

int cudaStreamBeginCapture(void *stream, int mode);
int cudaStreamEndCapture(void *stream, void **out);
int cudaGraphInstantiate(void **out, void *graph, unsigned long long flags);
int cudaGraphLaunch(void *graph, void *stream);
int cudaGraphExecDestroy(void *graph);
int cudaGraphDestroy(void *graph);

enum {
    INDEX = 1, /* of the device: not the thread's own */
    COLUMNS = 3,
    MAX_ROWS = 2,
    BATCHES = 12 + 20 + 1, /* of parts with 23, 40 and 1 rows */
    MOST_LANES = 8
};

static const uint32_t visits[] = {1, 0, 2};
static const cer_op scale = {.kind = CER_OP_SCALE, .value = 1.0 / 255};
static const size_t row_bytes[COLUMNS] = {8, 12, 4 * IMG_BYTES};
static cer_part parts[LOADER_SHARDS];

/* A unit: its loader, and a model with a graph for each size of batches. */
typedef struct unit {
    cer_depot *depot;
    cer_device_loader *loader;
    cer_lane *lane;
    void *stream;
    cer_device_block memory;
    float *weight, *loss, *rate;
    double *sum;
    void *inputs[COLUMNS];
    cer_lane_value values[2];
    cer_lane_graph graphs[MAX_ROWS];
    float rates[BATCHES];
    cer_beat *beat;
    uint64_t kept[2 * BATCHES]; /* of the last pass: loss and sum */
    size_t done;
    cer_error error;
} unit;

static cer_device *device;

static void
need(cer_status status, const cer_error *err)
{
    if (status == CER_OK)
        return;
    fprintf(stderr, "%s\n", err->message);
    abort();
}

static void
open_all(void)
{
    cer_cudart *runtime = NULL;
    cer_error err = {0};

    fresh_standin();
    need(open_standin(&runtime, &err), &err);
    need(cer_device_cuda_new(runtime, INDEX, cer_kernels_ptx, &device, &err),
         &err);
    cer_cudart_release(runtime);
    make_parts(parts);
}

static void
close_all(void)
{
    release_parts(parts);
    cer_device_release(device);
    CHECK_EQ_INT(standin_thread_device(), 0);
    CHECK_EQ_INT(standin_thread_mode(), 0);
    nothing_left();
}

static void *
capture(const unit *u, size_t n_rows)
{
    standin_step step = {
        .weight = u->weight, .loss = u->loss, .sum = u->sum, .rate = u->rate};
    cer_device_visit visit;
    void *stream, *graph, *made;
    cer_error err = {0};

    for (int i = 0; i < COLUMNS; i++) {
        step.inputs[i] = u->inputs[i];
        step.bytes[i] = n_rows * row_bytes[i];
    }
    need(cer_device_stream_new(device, &stream, &err), &err);
    need(cer_device_enter(device, &visit, &err), &err);
    CHECK_EQ_INT(cudaStreamBeginCapture(stream, 1), 0);
    CHECK_EQ_INT(standin_train(stream, &step), 0);
    CHECK_EQ_INT(cudaStreamEndCapture(stream, &graph), 0);
    CHECK_EQ_INT(cudaGraphInstantiate(&made, graph, 0), 0);
    CHECK_EQ_INT(cudaGraphDestroy(graph), 0);
    cer_device_leave(device, &visit);
    cer_device_stream_free(device, stream);
    return made;
}

static void
make_model(unit *u)
{
    cer_error err = {0};
    uint8_t *at;

    need(cer_device_alloc(device, 1 << 14, CER_USE_OTHER, &u->memory, &err),
         &err);
    at = u->memory.data;
    u->weight = (void *)at;
    u->loss = (void *)(at + 64);
    u->sum = (void *)(at + 128);
    u->rate = (void *)(at + 192);
    for (int i = 0; i < COLUMNS; i++)
        u->inputs[i] = at + 256 * (i + 1);
    need(cer_device_fill(device, at, 0, 256, u->stream, &err), &err);
    u->values[0] = (cer_lane_value){u->loss, sizeof *u->loss};
    u->values[1] = (cer_lane_value){u->sum, sizeof *u->sum};
    for (size_t i = 0; i < MAX_ROWS; i++)
        u->graphs[i] = (cer_lane_graph){.n_rows = i + 1,
                                        .graph = capture(u, i + 1),
                                        .inputs = u->inputs,
                                        .values = u->values};
    for (int i = 0; i < BATCHES; i++)
        u->rates[i] = 1.0f / (float)(i + 3);
}

static void
open_unit(unit *u, cer_residence residence, uint32_t threads)
{
    const cer_load_column columns[COLUMNS] = {
        {.name = "id"},
        {.name = "v"},
        {.name = "img", .ops = &scale, .n_ops = 1}};
    const cer_load_options options = {
        .batch_size = 2, .seed = 3, .shuffle = true, .threads = threads};
    cer_error err = {0};

    *u = (unit){.depot = NULL};
    need(cer_depot_new(device, &u->depot, &err), &err);
    u->stream = cer_depot_stream(u->depot, CER_DEPOT_KERNELS);
    need(cer_device_loader_new(u->depot, residence, parts, LOADER_SHARDS,
                               columns, COLUMNS, &options, &u->loader, &err),
         &err);
    need(cer_lane_new(u->loader, &u->lane, &err), &err);
    need(cer_beat_open(-1, &u->beat, &err), &err);
    make_model(u);
}

static void
close_unit(unit *u)
{
    cer_device_visit visit;
    cer_error err = {0};

    cer_lane_free(u->lane);
    cer_device_loader_free(u->loader);
    need(cer_device_sync(device, &err), &err);
    need(cer_device_enter(device, &visit, &err), &err);
    for (int i = 0; i < MAX_ROWS; i++)
        CHECK_EQ_INT(cudaGraphExecDestroy(u->graphs[i].graph), 0);
    cer_device_leave(device, &visit);
    cer_device_free(device, &u->memory);
    cer_depot_release(u->depot);
    cer_beat_close(u->beat);
}

static cer_status
begin_pass(unit *u, cer_error *err)
{
    cer_mix mixes[8];

    return cer_device_loader_begin(u->loader, mixes_of(visits, 3, mixes), 3, 1,
                                   0, SIZE_MAX, err);
}

/* --- ordinary steps --------------------------------------------------------
 */

static cer_status
take_ordinary(unit *u, cer_error *err)
{
    const void *from[2] = {u->loss, u->sum};
    const size_t bytes[2] = {sizeof *u->loss, sizeof *u->sum};
    cer_batch *b = NULL;
    cer_status status = cer_device_loader_next(u->loader, u->stream, &b, err);

    if (status != CER_OK)
        return status;
    status = b->block.place->join(b->block.place, (intptr_t)u->stream, err);
    for (size_t i = 0; status == CER_OK && i < COLUMNS; i++)
        status = cer_device_copy(device, u->inputs[i], b->tensors[i].data,
                                 b->n_rows * row_bytes[i], CER_COPY_ON_DEVICE,
                                 u->stream, err);
    if (status == CER_OK)
        status =
            cer_device_copy(device, u->rate, &u->rates[u->done], sizeof(float),
                            CER_COPY_TO_DEVICE, u->stream, err);
    if (status == CER_OK)
        status = cer_device_launch_graph(device, u->graphs[b->n_rows - 1].graph,
                                         u->stream, err);
    for (size_t i = 0; status == CER_OK && i < 2; i++)
        status =
            cer_device_copy(device, &u->kept[2 * u->done + i], from[i],
                            bytes[i], CER_COPY_FROM_DEVICE, u->stream, err);
    if (status == CER_OK)
        status = cer_device_stream_sync(device, u->stream, err);
    u->done += status == CER_OK;
    cer_owner_release(&b->owner);
    return status;
}

/* --- runs -------------------------------------------------------------------
 */

static cer_lane_run
run_of(unit *u)
{
    return (cer_lane_run){
        .stream = u->stream,
        .n = BATCHES - u->done,
        .graphs = u->graphs,
        .n_graphs = MAX_ROWS,
        .n_values = 2,
        .rates = (void *const *)(void *)&u->rate,
        .n_rates = 1,
        .rate_values = u->rates + u->done,
        .page = cer_beat_page_of(u->beat),
    };
}

static cer_status
begin_run(unit *u, cer_error *err)
{
    const cer_lane_run run = run_of(u);

    return cer_lane_begin(u->lane, &run, err);
}

static cer_status
end_run(unit *u, cer_error *err)
{
    size_t first = u->done, done = 0;
    cer_status status = cer_lane_end(u->lane, u->kept + 2 * first, &done, err);

    u->done += done;
    return status;
}

static void
drive(cer_lanes *lanes, unit *u)
{
    cer_lane_state state = cer_lane_state_of(u->lane);
    size_t graph;

    while (state != CER_LANE_QUEUED && state != CER_LANE_FAILED) {
        if (state == CER_LANE_OWNERS) {
            CHECK(cer_lane_take(u->lane, &graph));
            state = cer_lane_state_of(u->lane);
        } else {
            state = cer_lanes_drive(lanes, u->lane, 2);
        }
    }
    cer_lanes_leave(lanes, u->lane);
}

/* A pass whose first steps are ordinary. */
static cer_status
run_pass(cer_lanes *lanes, unit *u, size_t ordinary, cer_error *err)
{
    cer_status status = begin_pass(u, err);

    while (status == CER_OK && u->done < ordinary)
        status = take_ordinary(u, err);
    if (status == CER_OK && u->done < BATCHES) {
        status = begin_run(u, err);
        if (status != CER_OK)
            return status;
        drive(lanes, u);
        status = end_run(u, err);
    }
    return status;
}

static bool
same_pass(const unit *a, const unit *b)
{
    return a->done == b->done && memcmp(a->kept, b->kept, sizeof a->kept) == 0;
}

/* The numbers of a pass with ordinary steps alone. */
static void
expect(unit *u)
{
    cer_error err = {0};

    open_unit(u, CER_RESIDENT, 0);
    need(run_pass(NULL, u, BATCHES, &err), &err);
    close_unit(u);
}

static void
runs_are_ordinary_passes(void)
{
    static unit expected, u;
    cer_lanes *lanes;
    cer_error err = {0};

    open_all();
    need(cer_lanes_new(&lanes, &err), &err);
    expect(&expected);
    CHECK_EQ_INT(expected.done, BATCHES);
    for (int way = 0; way < 16; way++) {
        standin_defer(way & 1);
        open_unit(&u, way & 2 ? CER_STREAMED : CER_RESIDENT, way & 4 ? 2 : 0);
        need(run_pass(lanes, &u, way & 8 ? 5 : 0, &err), &err);
        CHECK(same_pass(&u, &expected));
        if (!(way & 8)) /* ordinary steps here do not count */
            CHECK_EQ_INT(cer_beat_page_of(u.beat)->rows, LOADER_ROWS);
        close_unit(&u);
    }
    standin_defer(false);
    cer_lanes_free(lanes);
    close_all();
}

/* The graphs of two lanes alternate, batch by batch. */
static void
lanes_take_turns(void)
{
    static unit expected, units[2];
    cer_lanes *lanes;
    cer_error err = {0};
    unsigned first, graphs = 0;
    char last[8] = "";

    open_all();
    need(cer_lanes_new(&lanes, &err), &err);
    expect(&expected);
    for (int i = 0; i < 2; i++) {
        open_unit(&units[i], CER_RESIDENT, 0);
        need(begin_pass(&units[i], &err), &err);
        need(begin_run(&units[i], &err), &err);
    }
    first = standin_log_lines();
    CHECK_EQ_INT(cer_lanes_drive(lanes, units[0].lane, 0), CER_LANE_GOING);
    CHECK_EQ_INT(cer_lanes_drive(lanes, units[1].lane, 5000), CER_LANE_QUEUED);
    for (unsigned i = first; i < standin_log_lines(); i++) {
        char stream[8];

        if (sscanf(standin_log_line(i), "graph %7s", stream) != 1)
            continue;
        CHECK(strcmp(stream, last) != 0);
        memcpy(last, stream, sizeof last);
        graphs++;
    }
    CHECK_EQ_INT(graphs, 2 * BATCHES);
    for (int i = 0; i < 2; i++) {
        cer_lanes_leave(lanes, units[i].lane);
        need(end_run(&units[i], &err), &err);
        CHECK(same_pass(&units[i], &expected));
        close_unit(&units[i]);
    }
    cer_lanes_free(lanes);
    close_all();
}

/* Without a sleep, the host is at most so many batches ahead. */
static void
the_host_is_not_far_ahead(void)
{
    static unit expected, u;
    cer_error err = {0};
    size_t graph = 0;
    void *made[MAX_ROWS];

    open_all();
    expect(&expected);
    standin_defer(true);
    open_unit(&u, CER_RESIDENT, 0);
    for (int i = 0; i < MAX_ROWS; i++) { /* the owner launches */
        made[i] = u.graphs[i].graph;
        u.graphs[i].graph = NULL;
    }
    need(begin_pass(&u, &err), &err);
    need(begin_run(&u, &err), &err);
    for (size_t i = 0; i < BATCHES; i++) {
        unsigned before = standin_calls("cudaEventSynchronize");
        size_t ahead = (size_t)CER_LANE_GROUP * CER_LANE_GROUPS;

        CHECK_EQ_INT(cer_lane_state_of(u.lane), CER_LANE_OWNERS);
        CHECK(!cer_lane_take(u.lane, &graph));
        CHECK_EQ_INT(standin_calls("cudaEventSynchronize") - before,
                     i >= ahead && i % CER_LANE_GROUP == 0);
        need(cer_device_launch_graph(device, made[graph], u.stream, &err),
             &err);
        cer_lane_launched(u.lane);
    }
    CHECK_EQ_INT(cer_lane_state_of(u.lane), CER_LANE_QUEUED);
    need(end_run(&u, &err), &err);
    CHECK(same_pass(&u, &expected));
    standin_defer(false);
    for (int i = 0; i < MAX_ROWS; i++)
        u.graphs[i].graph = made[i];
    close_unit(&u);
    close_all();
}

/* --- failures ---------------------------------------------------------------
 */

static void
each_failing_call_is_reported(void)
{
    static unit expected, u;
    cer_lanes *lanes;
    cer_error err = {0};
    unsigned failures = 0;
    bool failed = true;

    open_all();
    need(cer_lanes_new(&lanes, &err), &err);
    expect(&expected);
    for (int way = 0; way < 4; way++) {
        standin_defer(way & 1);
        failed = true;
        for (unsigned nth = 1; failed; nth++) {
            cer_status status;

            open_unit(&u, way & 2 ? CER_STREAMED : CER_RESIDENT, 0);
            need(begin_pass(&u, &err), &err);
            while (u.done < 3)
                need(take_ordinary(&u, &err), &err);
            standin_fail(NULL, nth, 719);
            status = begin_run(&u, &err);
            if (status == CER_OK) {
                drive(lanes, &u);
                status = end_run(&u, &err);
            }
            failed = standin_failed() != NULL;
            standin_fail("", 0, 0);
            CHECK(failed || status == CER_OK);
            if (status == CER_OK)
                CHECK(same_pass(&u, &expected));
            else
                CHECK(strstr(err.message, "cuda:1: cu") == err.message);
            failures += status != CER_OK;
            standin_thread_reset();
            close_unit(&u);
        }
    }
    CHECK(failures > 100);
    standin_defer(false);
    cer_lanes_free(lanes);
    close_all();
}

static void
a_cancelled_run_ends(void)
{
    static unit u;
    cer_lanes *lanes;
    cer_error err = {0};

    open_all();
    need(cer_lanes_new(&lanes, &err), &err);
    for (int given_up = 0; given_up < 2; given_up++) {
        open_unit(&u, CER_RESIDENT, 0);
        standin_defer(true);
        need(begin_pass(&u, &err), &err);
        need(begin_run(&u, &err), &err);
        CHECK_EQ_INT(cer_lanes_drive(lanes, u.lane, 0), CER_LANE_GOING);
        if (!given_up) {
            atomic_store(&cer_beat_page_of(u.beat)->cancel, 1);
            drive(lanes, &u);
        }
        cer_lanes_leave(lanes, u.lane);
        CHECK_EQ_INT(end_run(&u, &err), CER_CANCELLED);
        CHECK_EQ_INT(u.done, 0);
        standin_defer(false);
        close_unit(&u);
    }
    cer_lanes_free(lanes);
    close_all();
}

/* --- threads ----------------------------------------------------------------
 */

typedef struct worker {
    unit unit;
    cer_lanes *lanes;
    pthread_t thread;
    cer_status status;
} worker;

static void *
work(void *argument)
{
    worker *w = argument;

    w->status = run_pass(w->lanes, &w->unit, 0, &w->unit.error);
    return NULL;
}

/* Every third is cancelled somewhere, and one has a graph that fails. */
static void
lanes_on_threads(void)
{
    static unit expected;
    static worker workers[MOST_LANES];
    cer_lanes *lanes;
    cer_error err = {0};

    open_all();
    need(cer_lanes_new(&lanes, &err), &err);
    expect(&expected);
    for (int round = 0; round < 20; round++) {
        void *graph;

        standin_defer(round & 1);
        for (int i = 0; i < MOST_LANES; i++) {
            workers[i].lanes = lanes;
            open_unit(&workers[i].unit,
                      i % 4 == 3 ? CER_STREAMED : CER_RESIDENT, i & 1);
        }
        graph = workers[1].unit.graphs[0].graph;
        workers[1].unit.graphs[0].graph = &graph; /* none */
        for (int i = 0; i < MOST_LANES; i++)
            CHECK_EQ_INT(
                pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
        for (int i = 2; i < MOST_LANES; i += 3)
            atomic_store(&cer_beat_page_of(workers[i].unit.beat)->cancel, 1);
        for (int i = 0; i < MOST_LANES; i++)
            (void)pthread_join(workers[i].thread, NULL);
        workers[1].unit.graphs[0].graph = graph;
        for (int i = 0; i < MOST_LANES; i++) {
            const worker *w = &workers[i];

            if (i == 1)
                CHECK(strstr(w->unit.error.message, "cudaGraphLaunch") != NULL);
            else if (w->status != CER_OK)
                CHECK(i % 3 == 2 && w->status == CER_CANCELLED);
            else
                CHECK(same_pass(&w->unit, &expected));
            close_unit(&workers[i].unit);
        }
        CHECK_EQ_STR(standin_fault(), "cudaGraphLaunch of what is not a graph");
    }
    standin_reset();
    standin_devices(2);
    standin_defer(false);
    cer_lanes_free(lanes);
    close_all();
}

CHECK_MAIN(runs_are_ordinary_passes, lanes_take_turns,
           the_host_is_not_far_ahead, each_failing_call_is_reported,
           a_cancelled_run_ends, lanes_on_threads)
