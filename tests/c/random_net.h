/* random_net.h -- a small native network and a batch for it, reproducible. */
#ifndef RANDOM_NET_H
#define RANDOM_NET_H

#include "check.h"
#include "native_net.h"
#include "random_values.h"

enum { ROWS = 7, SIDE_Y = 9, SIDE_X = 6, CLASSES = 3 };

static const cer_native_net_sizes sizes = {2, SIDE_Y, SIDE_X, {3, 5}, CLASSES};

typedef struct batch {
    float pictures[ROWS * 2 * SIDE_Y * SIDE_X];
    int64_t labels[ROWS];
} batch;

static inline cer_tensor
part_of(const cer_native_net *net, cer_native_net_kind kind, int part)
{
    cer_tensor tensor;

    cer_native_net_tensor(net, kind, (cer_native_net_part)part, &tensor);
    return tensor;
}

static inline cer_native_net *
make_net(void)
{
    cer_native_net *net = NULL;

    CHECK_EQ_INT(cer_native_net_new(&sizes, &net, NULL), CER_OK);
    for (int part = 0; part < CER_NATIVE_NET_PART_COUNT; part++) {
        cer_tensor tensor = part_of(net, CER_NATIVE_NET_VALUES, part);

        CHECK(tensor.data != NULL);
        fill(tensor.data, cer_tensor_elements(&tensor), (uint64_t)part + 1);
    }
    return net;
}

static inline void
make_batch(batch *out)
{
    fill(out->pictures, sizeof out->pictures / sizeof(float), 1);
    for (int64_t i = 0; i < ROWS; i++)
        out->labels[i] = i % CLASSES;
}

#endif
