/* tensor_view.h -- an imported tensor, checked before it is read.
 *
 * DLPack passes a pointer and its description, without a length to check it
 * against. Only the consistency of the description can be checked: that sizes
 * and strides multiply and add without overflow, to addresses that do not wrap
 * around. The arithmetic of later copies then cannot overflow. */
#ifndef CER_TENSOR_VIEW_H
#define CER_TENSOR_VIEW_H

#include "base.h"
#include "dlpack.h"
#include "dtype.h"

#define CER_TENSOR_VIEW_MAX_DIMS 64

/* Maximum distance between the first and last byte of a tensor: a signed
 * integer can hold twice this distance, so stepping past an end is safe. */
#define CER_TENSOR_VIEW_MAX_BYTES ((uint64_t)PTRDIFF_MAX / 2)

/* Strides of dimensions with fewer than two elements, which are never used, are
 * 0; so are all strides if there are no elements. */
typedef struct cer_tensor_view {
    void *data; /* the element with all indices 0; NULL: no elements */
    cer_dtype dtype;
    bool read_only;
    uint32_t ndim;
    int64_t shape[CER_TENSOR_VIEW_MAX_DIMS];
    int64_t strides[CER_TENSOR_VIEW_MAX_DIMS]; /* in bytes */
} cer_tensor_view;

/* Each reports CER_INVALID with a message that continues "the tensor". */

/* Checks a view whose fields are filled in, and normalizes its strides. */
cer_status cer_tensor_view_check(cer_tensor_view *view, cer_error *err);

/* Whether a DLPack device type is host memory; pinned memory is. */
bool cer_tensor_view_is_host(int device_type);

/* Makes a view of a DLTensor: only host memory and types of dtype.h. */
cer_status cer_tensor_view_take(const DLTensor *from, cer_tensor_view *out,
                                cer_error *err);

/* The same for a versioned tensor; does not read one of a different major
 * version. */
cer_status cer_tensor_view_take_versioned(const DLManagedTensorVersioned *from,
                                          cer_tensor_view *out, cer_error *err);

#endif
