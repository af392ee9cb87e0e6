/* The native network: its gradients, its bits and its errors. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "random_net.h"

static void
parts_have_names_and_shapes(void)
{
    static const char *const want[] = {"conv1.weight 3 2 3 3", "conv1.bias 3",
                                       "conv2.weight 5 3 3 3", "conv2.bias 5",
                                       "linear.weight 3 10",   "linear.bias 3"};
    cer_native_net *net = make_net();

    for (int part = 0; part < CER_NATIVE_NET_PART_COUNT; part++) {
        cer_tensor tensor = part_of(net, CER_NATIVE_NET_MOMENTA, part);
        char text[64];
        int at = snprintf(text, sizeof text, "%s",
                          cer_native_net_part_name((cer_native_net_part)part));

        for (int32_t i = 0; i < tensor.ndim; i++)
            at += snprintf(text + at, sizeof text - (size_t)at, " %d",
                           (int)tensor.shape[i]);
        CHECK_EQ_STR(text, want[part]);
        CHECK_EQ_INT((uintptr_t)tensor.data % CER_ALIGNMENT, 0);
    }
    CHECK_EQ_INT(cer_native_net_sizes_of(net)->classes, CLASSES);
    cer_native_net_free(net);
    cer_native_net_free(NULL);
}

/* Central differences of the loss for every value of the network. At this point
 * no value is close to a kink of ReLU or of a maximum. */
static void
gradients_are_those_of_the_loss(void)
{
    const float h = 1.0f / 2048;
    cer_native_net *net = make_net();
    cer_native_net_metrics metrics, up, down;
    double most = 0, largest = 0;
    batch b;

    make_batch(&b);
    CHECK_EQ_INT(cer_native_net_differentiate(net, b.pictures, b.labels, ROWS,
                                              &metrics, NULL),
                 CER_OK);
    for (int part = 0; part < CER_NATIVE_NET_PART_COUNT; part++) {
        cer_tensor values = part_of(net, CER_NATIVE_NET_VALUES, part);
        cer_tensor gradients = part_of(net, CER_NATIVE_NET_GRADIENTS, part);
        float *value = values.data, *gradient = gradients.data;

        for (size_t i = 0; i < cer_tensor_elements(&values); i++) {
            float kept = value[i];
            double difference;

            value[i] = kept + h;
            cer_native_net_evaluate(net, b.pictures, b.labels, ROWS, &up, NULL);
            value[i] = kept - h;
            cer_native_net_evaluate(net, b.pictures, b.labels, ROWS, &down,
                                    NULL);
            value[i] = kept;
            difference = (up.loss - down.loss) / (2 * (double)h);
            most = fmax(most, fabs(difference - (double)gradient[i]));
            largest = fmax(largest, fabs(difference));
        }
    }
    CHECK(largest > 0.1);
    CHECK(most < 2e-3);
    cer_native_net_free(net);
}

/* Trains a little; returns copies of all values and momenta. */
static float *
trained(size_t *bytes, int mode)
{
    cer_native_net *net = make_net();
    cer_native_net_metrics metrics;
    cer_tensor first = part_of(net, CER_NATIVE_NET_VALUES, 0);
    cer_tensor last =
        part_of(net, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_PART_COUNT - 1);
    size_t n = (size_t)((float *)last.data - (float *)first.data) +
               cer_tensor_elements(&last);
    float *copy = malloc(n * sizeof *copy);
    double before = 0;
    batch b;

    make_batch(&b);
    CHECK_EQ_INT(fesetround(mode), 0);
    for (int step = 0; step < 60; step++) {
        /* Batches of several lengths. */
        size_t rows = step % 5 == 1 ? 3 : ROWS;

        CHECK_EQ_INT(cer_native_net_differentiate(net, b.pictures, b.labels,
                                                  rows, &metrics, NULL),
                     CER_OK);
        if (step == 0)
            before = metrics.loss;
        cer_native_net_step(net, 0.05f, 0.9f);
    }
    CHECK_EQ_INT(fegetround(), mode);
    CHECK_EQ_INT(fesetround(FE_TONEAREST), 0);
    CHECK(metrics.loss < before / 10);
    CHECK(metrics.accuracy == 1.0);
    CHECK(copy != NULL);
    memcpy(copy, first.data, n * sizeof *copy);
    *bytes = n * sizeof *copy;
    cer_native_net_free(net);
    return copy;
}

static void
it_learns_and_repeats_its_bits(void)
{
    static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
    size_t bytes, same;
    float *once = trained(&bytes, FE_TONEAREST);

    /* In any rounding mode of the thread. */
    for (int i = 0; i < 3; i++) {
        float *again = trained(&same, modes[i]);

        CHECK_EQ_INT(bytes, same);
        CHECK(memcmp(once, again, bytes) == 0);
        free(again);
    }
    free(once);
}

/* A row's scores do not depend on the other rows or on earlier batches. */
static void
rows_are_alone(void)
{
    cer_native_net *net = make_net();
    float all[ROWS * CLASSES], one[CLASSES];
    batch b;

    make_batch(&b);
    CHECK_EQ_INT(cer_native_net_predict(net, b.pictures, ROWS, all, NULL),
                 CER_OK);
    for (size_t row = 0; row < ROWS; row++) {
        cer_native_net_predict(net, b.pictures + row * 2 * SIDE_Y * SIDE_X, 1,
                               one, NULL);
        CHECK(memcmp(one, all + row * CLASSES, sizeof one) == 0);
    }
    cer_native_net_free(net);
}

static void
labels_out_of_range_change_nothing(void)
{
    cer_native_net *net = make_net();
    cer_tensor gradients = part_of(net, CER_NATIVE_NET_GRADIENTS, 0);
    cer_native_net_metrics metrics;
    cer_error err;
    batch b;

    make_batch(&b);
    b.labels[4] = CLASSES;
    CHECK_EQ_INT(cer_native_net_differentiate(net, b.pictures, b.labels, ROWS,
                                              &metrics, &err),
                 CER_INVALID);
    CHECK_EQ_STR(err.message, "the label of row 4 is 3, but the network has 3 "
                              "classes, from 0");
    CHECK(((float *)gradients.data)[0] == 0.0f);
    b.labels[4] = -1;
    CHECK_EQ_INT(cer_native_net_evaluate(net, b.pictures, b.labels, ROWS,
                                         &metrics, NULL),
                 CER_INVALID);
    cer_native_net_free(net);
}

static void
sizes_out_of_range_are_named(void)
{
    cer_native_net_sizes wrong = sizes;
    cer_native_net *net;
    cer_error err;

    wrong.height = 3;
    CHECK_EQ_INT(cer_native_net_new(&wrong, &net, &err), CER_INVALID);
    CHECK(net == NULL);
    CHECK_EQ_STR(err.message, "height must be from 4 to 65536, not 3");
    wrong = sizes;
    wrong.filters[1] = 0;
    CHECK_EQ_INT(cer_native_net_new(&wrong, &net, &err), CER_INVALID);
    CHECK_EQ_STR(err.message,
                 "the second of filters must be from 1 to 65536, not 0");
    wrong = sizes;
    wrong.classes = 1;
    CHECK_EQ_INT(cer_native_net_new(&wrong, &net, &err), CER_INVALID);
    wrong.classes = CER_NATIVE_NET_MOST + 1;
    CHECK_EQ_INT(cer_native_net_new(&wrong, &net, NULL), CER_INVALID);
}

static void
parts_outlive_the_network(void)
{
    cer_native_net *net = make_net();
    cer_tensor bias =
        part_of(net, CER_NATIVE_NET_VALUES, CER_NATIVE_NET_LINEAR_BIAS);
    float kept = ((float *)bias.data)[2];

    cer_owner_retain(bias.owner, 1);
    cer_native_net_free(net);
    CHECK(((float *)bias.data)[2] == kept);
    cer_owner_release(bias.owner);
}

CHECK_MAIN(parts_have_names_and_shapes, gradients_are_those_of_the_loss,
           it_learns_and_repeats_its_bits, rows_are_alone,
           labels_out_of_range_change_nothing, sizes_out_of_range_are_named,
           parts_outlive_the_network)
