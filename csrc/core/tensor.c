#include "tensor.h"

#include <string.h>

void
cer_owner_init(cer_owner *owner, size_t count, void (*drop)(cer_owner *owner))
{
    atomic_init(&owner->count, count);
    owner->drop = drop;
}

void
cer_owner_retain(cer_owner *owner, size_t count)
{
    atomic_fetch_add_explicit(&owner->count, count, memory_order_relaxed);
}

void
cer_owner_release(cer_owner *owner)
{
    if (atomic_fetch_sub_explicit(&owner->count, 1, memory_order_acq_rel) == 1)
        owner->drop(owner);
}

void
cer_tensor_pack(cer_tensor *tensor)
{
    static const int32_t last_to_first[] = {1, 3, 2, 0};
    int64_t step = 1;

    for (int32_t k = 0; k < tensor->ndim; k++) {
        int32_t i =
            tensor->channels_last ? last_to_first[k] : tensor->ndim - 1 - k;

        tensor->strides[i] = step;
        if (tensor->shape[i] > 0)
            step *= tensor->shape[i];
    }
}

size_t
cer_tensor_elements(const cer_tensor *tensor)
{
    size_t n = 1;

    for (int32_t i = 0; i < tensor->ndim; i++)
        n *= (size_t)tensor->shape[i];
    return n;
}

size_t
cer_tensor_bytes(const cer_tensor *tensor)
{
    return cer_tensor_elements(tensor) * cer_dtype_size(tensor->dtype);
}

DLDevice
cer_tensor_device(const cer_tensor *tensor)
{
    return tensor->place == NULL ? (DLDevice){kDLCPU, 0}
                                 : tensor->place->device;
}

/* --- new memory ----------------------------------------------------------- */

typedef struct own_memory {
    cer_owner owner; /* first, so that an owner is its own_memory */
    void *memory;
} own_memory;

static void
free_own_memory(cer_owner *owner)
{
    own_memory *own = (own_memory *)(void *)owner;

    cer_aligned_free(own->memory);
    cer_free(own);
}

cer_status
cer_tensor_new(const cer_tensor *like, cer_tensor *out, cer_error *err)
{
    size_t bytes = cer_tensor_bytes(like);
    own_memory *own = cer_calloc(1, sizeof *own);

    if (own == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory for a copy of a tensor");
    cer_owner_init(&own->owner, 1, free_own_memory);
    if (bytes != 0 && (own->memory = cer_aligned_alloc(bytes)) == NULL) {
        cer_owner_release(&own->owner);
        return cer_fail(err, CER_NOMEM,
                        "out of memory for a copy of a tensor of %zu bytes",
                        bytes);
    }
    *out = *like;
    out->owner = &own->owner;
    out->place = NULL;
    out->data = own->memory;
    out->read_only = false;
    return CER_OK;
}

cer_status
cer_tensor_copy(const cer_tensor *tensor, cer_tensor *out, cer_error *err)
{
    size_t bytes = cer_tensor_bytes(tensor);
    cer_status status = cer_tensor_new(tensor, out, err);

    if (status == CER_OK && bytes != 0)
        memcpy(out->data, tensor->data, bytes);
    return status;
}

/* --- exports -------------------------------------------------------------- */

static void
drop_holder(cer_export *block)
{
    if (atomic_fetch_sub_explicit(&block->holders, 1, memory_order_acq_rel) ==
        1)
        cer_free(block);
}

static void
finish(cer_export *block)
{
    /* An embedded block is part of its owner's memory, which may be reused as
     * soon as the reference is released. */
    bool on_heap = block->on_heap;

    if (atomic_exchange_explicit(&block->done, true, memory_order_acq_rel))
        return;
    cer_owner_release(block->owner);
    if (on_heap)
        drop_holder(block);
}

static void
delete_versioned(DLManagedTensorVersioned *managed)
{
    finish(managed->manager_ctx);
}

static void
delete_legacy(DLManagedTensor *managed)
{
    finish(managed->manager_ctx);
}

static void
fill(cer_export *block, const cer_tensor *tensor, int64_t *shape,
     int64_t *strides, uint64_t flags)
{
    DLTensor view = {
        .data = tensor->data,
        .device = cer_tensor_device(tensor),
        .ndim = tensor->ndim,
        .dtype = {cer_dtype_dlpack_code(tensor->dtype),
                  (uint8_t)(cer_dtype_size(tensor->dtype) * 8), 1},
        .shape = shape,
        .strides = strides,
    };

    block->owner = tensor->owner;
    atomic_init(&block->done, false);
    block->versioned = (DLManagedTensorVersioned){
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
        .manager_ctx = block,
        .deleter = delete_versioned,
        .flags =
            flags | (tensor->read_only ? DLPACK_FLAG_BITMASK_READ_ONLY : 0),
        .dl_tensor = view,
    };
    block->legacy = (DLManagedTensor){
        .dl_tensor = view, .manager_ctx = block, .deleter = delete_legacy};
}

void
cer_export_embed(cer_export *block, cer_tensor *tensor)
{
    block->on_heap = false;
    atomic_init(&block->holders, 0);
    fill(block, tensor, tensor->shape, tensor->strides, 0);
}

cer_export *
cer_export_new(const cer_tensor *tensor, uint64_t flags)
{
    cer_export *block = cer_alloc(sizeof *block);

    if (block == NULL)
        return NULL;
    block->on_heap = true;
    atomic_init(&block->holders, 2);
    memcpy(block->shape, tensor->shape, sizeof block->shape);
    memcpy(block->strides, tensor->strides, sizeof block->strides);
    fill(block, tensor, block->shape, block->strides, flags);
    cer_owner_retain(tensor->owner, 1);
    return block;
}

void
cer_export_capsule_gone(cer_export *block, bool consumed)
{
    if (!consumed)
        finish(block);
    drop_holder(block);
}
