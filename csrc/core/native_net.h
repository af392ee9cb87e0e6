/* native_net.h -- a small convolutional network, whole, without a framework:
 *
 *     convolution 3x3 + bias, ReLU, maximum of 2x2     conv1
 *     convolution 3x3 + bias, ReLU, maximum of 2x2     conv2
 *     linear                                           linear
 *     softmax cross-entropy, mean over the rows
 *     stochastic gradient descent with momentum
 *
 * It is the model that Cerebro brings along to show that an installation trains
 * and reproduces its bits: the same values and batches give the same bits, in
 * any process, on one machine and with one build. The arithmetic is in
 * native_ops.h, rows are taken in order, and one thread does it all.
 *
 * Values, momenta and gradients lie in one block each, which begin as zeros and
 * are shared with whoever holds one of their tensors. A network is used by one
 * thread at a time. */
#ifndef CER_NATIVE_NET_H
#define CER_NATIVE_NET_H

#include "native_ops.h"
#include "tensor.h"

/* The parts in the order of their memory: its id and its name. */
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

#define CER_NATIVE_NET_MOST 65536 /* of each size */

typedef struct cer_native_net_sizes {
    size_t channels, height, width; /* of a picture; 4 x 4 or larger */
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

/* Describes a part's memory; takes no reference of it. */
void cer_native_net_tensor(const cer_native_net *net, cer_native_net_kind kind,
                           cer_native_net_part part, cer_tensor *out);

/* For who computes with it elsewhere: the convolutions (0 and 1), all memory of
 * one kind, and where in it a part begins, in floats. */
const cer_native_conv *cer_native_net_conv(const cer_native_net *net, size_t i);
float *cer_native_net_block(const cer_native_net *net, cer_native_net_kind kind,
                            size_t *floats);
size_t cer_native_net_offset(const cer_native_net *net,
                             cer_native_net_part part);
cer_status cer_native_net_check_labels(const cer_native_net *net,
                                       const int64_t *labels, size_t rows,
                                       cer_error *err);

/* Each takes pictures[rows][channels][height][width]. The first batch, and one
 * with more rows than all before, takes memory; labels are checked before
 * anything is changed: CER_INVALID names the row. rows > 0. */

/* Writes the gradients of the mean loss. */
cer_status cer_native_net_differentiate(cer_native_net *net,
                                        const float *pictures,
                                        const int64_t *labels, size_t rows,
                                        cer_native_net_metrics *out,
                                        cer_error *err);

/* One step along the gradients that are there. */
void cer_native_net_step(cer_native_net *net, float rate, float momentum);

cer_status cer_native_net_evaluate(cer_native_net *net, const float *pictures,
                                   const int64_t *labels, size_t rows,
                                   cer_native_net_metrics *out, cer_error *err);

/* Writes scores[rows][classes], before the softmax. */
cer_status cer_native_net_predict(cer_native_net *net, const float *pictures,
                                  size_t rows, float *scores, cer_error *err);

#endif
