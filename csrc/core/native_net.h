/* native_net.h -- a complete small convolutional network without a framework:
 *
 *     convolution 3x3 + bias, ReLU, maximum of 2x2     conv1
 *     convolution 3x3 + bias, ReLU, maximum of 2x2     conv2
 *     linear                                           linear
 *     softmax cross-entropy, mean over the rows
 *     stochastic gradient descent with momentum
 *
 * Cerebro includes this model to test that an installation trains and
 * reproduces its bits: the same values and batches give the same bits in every
 * process, on one machine with one build. The arithmetic is in native_ops.h;
 * one thread takes the rows in order.
 *
 * Values, momenta and gradients each have one block, initially zero and shared
 * with the holders of its tensors. Only one thread may use a network at a
 * time. */
#ifndef CER_NATIVE_NET_H
#define CER_NATIVE_NET_H

#include "native_ops.h"
#include "tensor.h"

/* The id and name of each part, in memory order. */
#define CER_NATIVE_NET_PARTS(X)                                                \
    X(CONV1_WEIGHT, "conv1.weight")   /* filters[0], channels, 3, 3 */         \
    X(CONV1_BIAS, "conv1.bias")       /* filters[0] */                         \
    X(CONV2_WEIGHT, "conv2.weight")   /* filters[1], filters[0], 3, 3 */       \
    X(CONV2_BIAS, "conv2.bias")       /* filters[1] */                         \
    X(LINEAR_WEIGHT, "linear.weight") /* classes, filters[1] * h/4 * w/4 */    \
    X(LINEAR_BIAS, "linear.bias")     /* classes */

typedef enum cer_native_net_part {
#define CER_NATIVE_NET_PART(id, name) CER_NATIVE_NET_##id,
    CER_NATIVE_NET_PARTS(CER_NATIVE_NET_PART)
#undef CER_NATIVE_NET_PART
        CER_NATIVE_NET_PART_COUNT
} cer_native_net_part;

typedef enum cer_native_net_kind {
    CER_NATIVE_NET_VALUES,
    CER_NATIVE_NET_MOMENTA,
    CER_NATIVE_NET_GRADIENTS,
    CER_NATIVE_NET_KIND_COUNT
} cer_native_net_kind;

#define CER_NATIVE_NET_MOST 65536 /* limit of each size */

typedef struct cer_native_net_sizes {
    size_t channels, height, width; /* of an image; 4 x 4 or larger */
    size_t filters[2];
    size_t classes; /* 2 or more */
} cer_native_net_sizes;

/* Means over a batch's rows. */
typedef struct cer_native_net_metrics {
    double loss;
    double accuracy;
} cer_native_net_metrics;

typedef struct cer_native_net cer_native_net;

/* CER_INVALID names the size that is out of range. */
cer_status cer_native_net_new(const cer_native_net_sizes *sizes,
                              cer_native_net **out, cer_error *err);
void cer_native_net_free(cer_native_net *net); /* NULL allowed */

const cer_native_net_sizes *cer_native_net_sizes_of(const cer_native_net *net);
const char *cer_native_net_part_name(cer_native_net_part part);

/* Describes a part's memory; takes no reference. */
void cer_native_net_tensor(const cer_native_net *net, cer_native_net_kind kind,
                           cer_native_net_part part, cer_tensor *out);

/* For computation elsewhere: the convolutions (0 and 1), the block of one kind,
 * and a part's offset in it, in floats. */
const cer_native_conv *cer_native_net_conv(const cer_native_net *net, size_t i);
float *cer_native_net_block(const cer_native_net *net, cer_native_net_kind kind,
                            size_t *floats);
size_t cer_native_net_offset(const cer_native_net *net,
                             cer_native_net_part part);
cer_status cer_native_net_check_labels(const cer_native_net *net,
                                       const int64_t *labels, size_t rows,
                                       cer_error *err);

/* Each takes pictures[rows][channels][height][width], rows > 0. The first
 * batch, and any batch larger than all before, allocates memory. Labels are
 * checked before anything changes: CER_INVALID names the row. */

/* Computes the gradients of the mean loss. */
cer_status cer_native_net_differentiate(cer_native_net *net,
                                        const float *pictures,
                                        const int64_t *labels, size_t rows,
                                        cer_native_net_metrics *out,
                                        cer_error *err);

/* Does one step along the current gradients. */
void cer_native_net_step(cer_native_net *net, float rate, float momentum);

cer_status cer_native_net_evaluate(cer_native_net *net, const float *pictures,
                                   const int64_t *labels, size_t rows,
                                   cer_native_net_metrics *out, cer_error *err);

/* Writes scores[rows][classes], before the softmax. */
cer_status cer_native_net_predict(cer_native_net *net, const float *pictures,
                                  size_t rows, float *scores, cer_error *err);

#endif
