/* tensor_view.h -- somebody else's tensor, checked before it is read.
 *
 * DLPack hands over a pointer and what is said of it: there is no length to
 * check it against. What can be checked is that the description makes sense:
 * sizes and strides that multiply and add up without overflow, to addresses
 * that do not wrap around. Whoever copies afterwards does arithmetic that
 * cannot overflow. */
#ifndef CER_TENSOR_VIEW_H
#define CER_TENSOR_VIEW_H

#include "base.h"
#include "dlpack.h"
#include "dtype.h"

#define CER_TENSOR_VIEW_MAX_DIMS 64

/* How far apart the first and the last byte of a tensor may lie: twice the
 * distance still fits a signed number, so that stepping over an end does. */
#define CER_TENSOR_VIEW_MAX_BYTES ((uint64_t)PTRDIFF_MAX / 2)

/* Strides of dimensions with fewer than two elements, which nobody takes a step
 * in, are 0; so are all strides where there are no elements. */
typedef struct cer_tensor_view {
    void *data; /* the element with all indices 0; NULL: there is none */
    cer_dtype dtype;
    bool read_only;
    uint32_t ndim;
    int64_t shape[CER_TENSOR_VIEW_MAX_DIMS];
    int64_t strides[CER_TENSOR_VIEW_MAX_DIMS]; /* in bytes */
} cer_tensor_view;

/* Each gives CER_INVALID with a message that goes on from "the tensor ...". */

/* Checks a view whose fields somebody has filled in, and puts its strides in
 * order. */
cer_status cer_tensor_view_check(cer_tensor_view *view, cer_error *err);

/* Whether DLPack means memory of the host: pinned memory is. */
bool cer_tensor_view_is_host(int device_type);

/* Describes what a DLTensor says. Only memory of the host, and only types of
 * dtype.h. */
cer_status cer_tensor_view_take(const DLTensor *from, cer_tensor_view *out,
                                cer_error *err);

/* The same of a tensor with a version; of a major version that is not ours
 * nothing is looked at. */
cer_status cer_tensor_view_take_versioned(const DLManagedTensorVersioned *from,
                                          cer_tensor_view *out, cer_error *err);

#endif
