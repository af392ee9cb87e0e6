/* The native network on a GPU, on the stand-ins for the CUDA runtime and cuDNN:
 * compared with the network on the host, and with every call failing in turn.
 */
#include <math.h>
#include <stdlib.h>

#include "cuda_files.h"
#include "kernels_ptx.h"
#include "native_cuda.h"
#include "random_net.h"
#include "standin_cudnn.h"

enum { STEPS = 6 };

#define CUDNN STANDIN_FOLDER "/libcudnn_standin.so"

static cer_status
open_gpu(cer_native_net *net, cer_native_cuda **out, cer_error *err)
{
    cer_cudart *runtime = NULL;
    cer_device *device = NULL;
    cer_status status = open_standin(&runtime, err);

    *out = NULL;
    if (status != CER_OK)
        return status;
    status = cer_device_cuda_new(runtime, 1, cer_kernels_ptx, &device, err);
    if (status == CER_OK)
        status = cer_native_cuda_new(net, device, CUDNN, out, err);
    cer_device_release(device);
    cer_cudart_release(runtime);
    return status;
}

static void
check_near(cer_native_net *ours, cer_native_net *theirs,
           cer_native_net_kind kind, float tolerance)
{
    size_t n;
    const float *a = cer_native_net_block(ours, kind, &n);
    const float *b = cer_native_net_block(theirs, kind, &n);
    float most = 0, largest = 0;

    for (size_t i = 0; i < n; i++) {
        most = fmaxf(most, fabsf(a[i] - b[i]));
        largest = fmaxf(largest, fabsf(b[i]));
    }
    CHECK(largest > 0);
    CHECK(most <= tolerance * largest);
}

static void
end_test(void)
{
    CHECK_EQ_INT(standin_cudnn_left(), 0);
    CHECK_EQ_INT(standin_cudnn_faults(), 0);
    if (standin_cudnn_faults() != 0)
        fprintf(stderr, "%s\n", standin_cudnn_fault());
    nothing_left();
}

/* Batches of different lengths, training and evaluation in turn. */
static void
it_is_the_network_of_the_host(void)
{
    cer_native_net *net = make_net(), *host = make_net();
    cer_native_cuda *gpu;
    cer_native_net_metrics here, there;
    float scores[ROWS * CLASSES], wanted[ROWS * CLASSES];
    batch b;

    fresh_standin();
    make_batch(&b);
    CHECK_EQ_INT(open_gpu(net, &gpu, NULL), CER_OK);
    CHECK_EQ_INT(cer_native_cuda_push(gpu, NULL), CER_OK);
    for (int step = 0; step < 12; step++) {
        size_t rows = ROWS - (size_t)step % 6;

        CHECK_EQ_INT(cer_native_cuda_differentiate(gpu, b.pictures, b.labels,
                                                   rows, &there, NULL),
                     CER_OK);
        CHECK_EQ_INT(cer_native_net_differentiate(host, b.pictures, b.labels,
                                                  rows, &here, NULL),
                     CER_OK);
        CHECK(fabs(here.loss - there.loss) <= 1e-5 * (1 + here.loss));
        CHECK(here.accuracy == there.accuracy);
        CHECK_EQ_INT(cer_native_cuda_pull(gpu, NULL), CER_OK);
        check_near(net, host, CER_NATIVE_NET_GRADIENTS, 1e-4f);
        CHECK_EQ_INT(cer_native_cuda_step(gpu, 0.02f, 0.9f, NULL), CER_OK);
        cer_native_net_step(host, 0.02f, 0.9f);
    }
    CHECK_EQ_INT(cer_native_cuda_pull(gpu, NULL), CER_OK);
    check_near(net, host, CER_NATIVE_NET_VALUES, 1e-4f);
    check_near(net, host, CER_NATIVE_NET_MOMENTA, 1e-3f);
    CHECK_EQ_INT(cer_native_cuda_predict(gpu, b.pictures, ROWS, scores, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_native_net_predict(host, b.pictures, ROWS, wanted, NULL),
                 CER_OK);
    for (size_t i = 0; i < ROWS * CLASSES; i++)
        CHECK(fabsf(scores[i] - wanted[i]) <= 1e-3f);
    CHECK_EQ_INT(
        cer_native_cuda_evaluate(gpu, b.pictures, b.labels, ROWS, &there, NULL),
        CER_OK);
    CHECK_EQ_INT(
        cer_native_net_evaluate(host, b.pictures, b.labels, ROWS, &here, NULL),
        CER_OK);
    CHECK(fabs(here.loss - there.loss) <= 1e-4 * (1 + here.loss));
    CHECK(standin_cudnn_executed() > 0);
    cer_native_cuda_free(gpu);
    cer_native_cuda_free(NULL);
    cer_native_net_free(net);
    cer_native_net_free(host);
    end_test();
}

/* Trains a little from a pushed state; the network holds the result. */
static cer_native_net *
trained(int from, int to, const cer_native_net *before)
{
    cer_native_net *net = make_net();
    cer_native_cuda *gpu;
    cer_native_net_metrics metrics;
    batch b;

    for (int kind = 0; before != NULL && kind < CER_NATIVE_NET_GRADIENTS;
         kind++) {
        size_t n;
        float *own = cer_native_net_block(net, (cer_native_net_kind)kind, &n);

        memcpy(own, cer_native_net_block(before, (cer_native_net_kind)kind, &n),
               n * sizeof *own);
    }
    make_batch(&b);
    CHECK_EQ_INT(open_gpu(net, &gpu, NULL), CER_OK);
    CHECK_EQ_INT(cer_native_cuda_push(gpu, NULL), CER_OK);
    for (int step = from; step < to; step++) {
        CHECK_EQ_INT(cer_native_cuda_differentiate(gpu, b.pictures, b.labels,
                                                   ROWS - (size_t)step % 3,
                                                   &metrics, NULL),
                     CER_OK);
        CHECK_EQ_INT(cer_native_cuda_step(gpu, 0.02f, 0.9f, NULL), CER_OK);
    }
    CHECK_EQ_INT(cer_native_cuda_pull(gpu, NULL), CER_OK);
    cer_native_cuda_free(gpu);
    return net;
}

/* The same bits twice, and with a hop to a second network in between. */
static void
bits_are_reproduced(void)
{
    cer_native_net *once, *again, *half, *hopped;

    fresh_standin();
    once = trained(0, STEPS, NULL);
    again = trained(0, STEPS, NULL);
    half = trained(0, STEPS / 2, NULL);
    hopped = trained(STEPS / 2, STEPS, half);
    for (int kind = 0; kind < CER_NATIVE_NET_KIND_COUNT; kind++) {
        size_t n;
        const float *a =
            cer_native_net_block(once, (cer_native_net_kind)kind, &n);

        CHECK(memcmp(a,
                     cer_native_net_block(again, (cer_native_net_kind)kind, &n),
                     n * sizeof *a) == 0);
        CHECK(
            memcmp(a,
                   cer_native_net_block(hopped, (cer_native_net_kind)kind, &n),
                   n * sizeof *a) == 0);
    }
    cer_native_net_free(once);
    cer_native_net_free(again);
    cer_native_net_free(half);
    cer_native_net_free(hopped);
    end_test();
}

static cer_status
do_everything(cer_error *err)
{
    cer_native_net *net = make_net();
    cer_native_cuda *gpu;
    cer_native_net_metrics metrics;
    float scores[ROWS * CLASSES];
    batch b;
    cer_status status;

    make_batch(&b);
    status = open_gpu(net, &gpu, err);
    if (status == CER_OK)
        status = cer_native_cuda_push(gpu, err);
    if (status == CER_OK)
        status = cer_native_cuda_differentiate(gpu, b.pictures, b.labels, ROWS,
                                               &metrics, err);
    if (status == CER_OK)
        status = cer_native_cuda_step(gpu, 0.1f, 0.9f, err);
    if (status == CER_OK)
        status = cer_native_cuda_evaluate(gpu, b.pictures, b.labels, ROWS,
                                          &metrics, err);
    if (status == CER_OK)
        status = cer_native_cuda_predict(gpu, b.pictures, ROWS, scores, err);
    if (status == CER_OK)
        status = cer_native_cuda_pull(gpu, err);
    cer_native_cuda_free(gpu);
    cer_native_net_free(net);
    return status;
}

/* A failing heuristic, an engine without notes and a plan that cannot be
 * finalized are not errors: the next proposal is tried. */
static void
every_call_of_cudnn_may_fail(void)
{
    unsigned nth = 0, refused = 0;
    cer_status status;

    fresh_standin();
    for (;;) {
        cer_error err = {0};

        standin_cudnn_fail(++nth);
        status = do_everything(&err);
        if (!standin_cudnn_failed())
            break;
        refused += status == CER_OK;
        if (status != CER_OK) {
            CHECK_EQ_INT(status, CER_DEVICE);
            CHECK(strncmp(err.message, "cuda:1: ", 8) == 0);
            CHECK(strstr(err.message, "CUDNN_STATUS_EXECUTION_FAILED") ||
                  strstr(err.message, "no deterministic float32 engine"));
        }
        CHECK_EQ_INT(standin_cudnn_left(), 0);
        nothing_left();
    }
    standin_cudnn_fail(0);
    CHECK_EQ_INT(status, CER_OK);
    CHECK(nth > 500);
    /* Five convolutions. Each queries the first heuristic (create, two
     * attributes, finalize, read), the notes of four rejected engines (two
     * attributes), and two plans (create, two attributes, finalize), one of
     * which reports its workspace. */
    CHECK_EQ_INT(refused, 5 * (5 + 4 * 2 + 2 * 4 + 1));
    end_test();
}

static void
every_call_of_cuda_may_fail(void)
{
    unsigned nth = 0;
    cer_status status;

    for (;;) {
        cer_error err = {0};

        fresh_standin();
        standin_fail(NULL, ++nth, 700);
        status = do_everything(&err);
        if (standin_failed() == NULL)
            break;
        CHECK_EQ_INT(standin_cudnn_left(), 0);
        nothing_left();
    }
    CHECK_EQ_INT(status, CER_OK);
    CHECK(nth > 50);
    end_test();
}

static void
what_is_no_cudnn_is_refused(void)
{
    cer_native_net *net = make_net();
    cer_cudart *runtime;
    cer_device *device;
    cer_native_cuda *gpu;
    cer_error err;

    fresh_standin();
    CHECK_EQ_INT(open_standin(&runtime, NULL), CER_OK);
    CHECK_EQ_INT(
        cer_device_cuda_new(runtime, 0, cer_kernels_ptx, &device, NULL),
        CER_OK);
    CHECK_EQ_INT(cer_native_cuda_new(net, device, NULL, &gpu, &err),
                 CER_DEVICE);
    CHECK_EQ_STR(err.message,
                 "there is no cuDNN 9, which the native network needs on a "
                 "GPU: pip install nvidia-cudnn-cu13, or -cu12 for CUDA 12");
    CHECK_EQ_INT(
        cer_native_cuda_new(net, device, "/nonexistent/l.so", &gpu, &err),
        CER_DEVICE);
    CHECK(strstr(err.message, "/nonexistent/l.so does not load"));
    CHECK_EQ_INT(cer_native_cuda_new(net, device, STANDIN, &gpu, &err),
                 CER_DEVICE);
    CHECK(strstr(err.message, "lacks cudnnGetVersion, so it is not cuDNN 9"));
    CHECK(setenv("STANDIN_CUDNN_VERSION", "8907", 1) == 0);
    CHECK_EQ_INT(cer_native_cuda_new(net, device, CUDNN, &gpu, &err),
                 CER_DEVICE);
    CHECK_EQ_STR(err.message,
                 "cuDNN 9 is needed, and " CUDNN " is version 8907");
    CHECK(unsetenv("STANDIN_CUDNN_VERSION") == 0);
    CHECK(gpu == NULL);
    cer_device_release(device);
    cer_cudart_release(runtime);
    cer_native_net_free(net);
    end_test();
}

CHECK_MAIN(it_is_the_network_of_the_host, bits_are_reproduced,
           every_call_of_cudnn_may_fail, every_call_of_cuda_may_fail,
           what_is_no_cudnn_is_refused)
