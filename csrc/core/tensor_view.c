/* tensor_view.c -- see tensor_view.h. */
#include "tensor_view.h"

static cer_status
refuse(cer_error *err, const char *why)
{
    return cer_fail(err, CER_INVALID, "%s", why);
}

/* Distances of the elements before and after the first one, in bytes. */
typedef struct extent {
    uint64_t before, behind;
} extent;

static bool
add_dimension(extent *e, int64_t size, int64_t stride)
{
    uint64_t step = stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
    uint64_t steps = (uint64_t)size - 1;
    uint64_t *side = stride < 0 ? &e->before : &e->behind;

    if (step > CER_TENSOR_VIEW_MAX_BYTES / steps)
        return false;
    *side += step * steps; /* no overflow: each is below 2**62 */
    return e->before + e->behind <= CER_TENSOR_VIEW_MAX_BYTES;
}

static bool
is_within_memory(const void *data, const extent *e)
{
    return (uintptr_t)data > e->before &&
           e->behind <= UINTPTR_MAX - (uintptr_t)data;
}

/* The bytes of all elements must fit too: with strides of 0 they may far exceed
 * the memory spanned. Sizes of 0 count as 1, so the product of any of them fits
 * too. */
static bool
check_sizes(const cer_tensor_view *view, bool *empty)
{
    size_t bytes = cer_dtype_size(view->dtype);

    *empty = false;
    for (uint32_t i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0)
            *empty = true;
        else if (view->shape[i] < 0 ||
                 !cer_mul_size(bytes, (size_t)view->shape[i], &bytes) ||
                 bytes > CER_TENSOR_VIEW_MAX_BYTES)
            return false;
    }
    return true;
}

cer_status
cer_tensor_view_check(cer_tensor_view *view, cer_error *err)
{
    extent e = {.behind = cer_dtype_size(view->dtype)};
    bool empty;

    if (!check_sizes(view, &empty))
        return refuse(err, "has an impossible shape");
    for (uint32_t i = 0; i < view->ndim; i++) {
        if (empty || view->shape[i] < 2)
            view->strides[i] = 0;
        else if (!add_dimension(&e, view->shape[i], view->strides[i]))
            return refuse(err,
                          "has strides that lead outside the address space");
    }
    if (empty)
        view->data = NULL;
    else if (view->data == NULL)
        return refuse(err, "has no memory");
    else if (!is_within_memory(view->data, &e))
        return refuse(err, "has strides that lead outside the address space");
    return CER_OK;
}

/* Computes strides in bytes from those in elements or, if missing, from the
 * shape. Strides of dimensions with fewer than two elements may be arbitrary,
 * as may all strides of a tensor without elements. */
static bool
take_strides(const DLTensor *from, cer_tensor_view *out)
{
    int64_t item = (int64_t)cer_dtype_size(out->dtype);
    int64_t dense = 1;
    bool fits = true;

    for (uint32_t i = out->ndim; i-- > 0;) {
        int64_t size = out->shape[i];
        int64_t stride = from->strides != NULL ? from->strides[i] : dense;

        out->strides[i] = 0;
        if (size == 0)
            return true;
        if (size < 2)
            continue;
        if (stride > INT64_MAX / item || stride < INT64_MIN / item)
            fits = false;
        else
            out->strides[i] = stride * item;
        dense = dense > INT64_MAX / size ? INT64_MAX : dense * size;
    }
    return fits;
}

bool
cer_tensor_view_is_host(int device_type)
{
    return device_type == kDLCPU || device_type == kDLCUDAHost;
}

cer_status
cer_tensor_view_take(const DLTensor *from, cer_tensor_view *out, cer_error *err)
{
    if (!cer_tensor_view_is_host((int)from->device.device_type))
        return cer_fail(err, CER_INVALID,
                        "is on another device (DLPack type %d), not in the "
                        "host's memory",
                        (int)from->device.device_type);
    if (!cer_dtype_from_dlpack(from->dtype.code, from->dtype.bits,
                               from->dtype.lanes, &out->dtype))
        return cer_fail(err, CER_INVALID,
                        "has an element type (DLPack code %u with %u bits, %u "
                        "lanes) that states cannot hold: convert it, for "
                        "example to float32",
                        (unsigned)from->dtype.code, (unsigned)from->dtype.bits,
                        (unsigned)from->dtype.lanes);
    if (from->ndim < 0 || from->ndim > CER_TENSOR_VIEW_MAX_DIMS)
        return cer_fail(err, CER_INVALID, "has %d dimensions, not 0 to %d",
                        (int)from->ndim, CER_TENSOR_VIEW_MAX_DIMS);
    if (from->ndim > 0 && from->shape == NULL)
        return refuse(err, "has dimensions but no shape");
    out->read_only = false;
    out->ndim = (uint32_t)from->ndim;
    for (uint32_t i = 0; i < out->ndim; i++)
        out->shape[i] = from->shape[i];
    if (!take_strides(from, out) ||
        from->byte_offset > CER_TENSOR_VIEW_MAX_BYTES ||
        from->byte_offset > UINTPTR_MAX - (uintptr_t)from->data)
        return refuse(err, "has strides that lead outside the address space");
    out->data =
        from->data == NULL ? NULL : (uint8_t *)from->data + from->byte_offset;
    return cer_tensor_view_check(out, err);
}

cer_status
cer_tensor_view_take_versioned(const DLManagedTensorVersioned *from,
                               cer_tensor_view *out, cer_error *err)
{
    cer_status status;

    if (from->version.major != DLPACK_MAJOR_VERSION)
        return cer_fail(err, CER_INVALID,
                        "uses DLPack %u.%u, which this version cannot read",
                        (unsigned)from->version.major,
                        (unsigned)from->version.minor);
    status = cer_tensor_view_take(&from->dl_tensor, out, err);
    out->read_only = (from->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    return status;
}
