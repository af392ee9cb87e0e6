#include "tensor.h"

#include "check.h"

typedef struct holder {
    cer_owner owner;
    int drops;
} holder;

static void
count_drop(cer_owner *owner)
{
    ((holder *)(void *)owner)->drops++;
}

static cer_tensor
tensor_of(holder *h, float *values)
{
    cer_tensor t = {.owner = &h->owner,
                    .data = values,
                    .dtype = CER_F32,
                    .ndim = 3,
                    .shape = {2, 1, 3}};

    h->drops = 0;
    cer_owner_init(&h->owner, 1, count_drop);
    cer_tensor_pack(&t);
    return t;
}

static void
strides_are_row_major(void)
{
    cer_tensor t = {.dtype = CER_U8, .ndim = 4, .shape = {5, 0, 1, 7}};
    cer_tensor scalar = {.dtype = CER_F64, .ndim = 0};

    cer_tensor_pack(&t);
    CHECK_EQ_INT(t.strides[3], 1);
    CHECK_EQ_INT(t.strides[2], 7);
    CHECK_EQ_INT(t.strides[1], 7);
    CHECK_EQ_INT(t.strides[0], 7);
    CHECK_EQ_INT(cer_tensor_elements(&t), 0);
    cer_tensor_pack(&scalar);
    CHECK_EQ_INT(cer_tensor_elements(&scalar), 1);
    CHECK_EQ_INT(cer_tensor_bytes(&scalar), 8);
}

static void
channels_may_be_last(void)
{
    cer_tensor t = {.dtype = CER_F32,
                    .channels_last = true,
                    .ndim = 4,
                    .shape = {5, 3, 4, 7}};

    cer_tensor_pack(&t);
    CHECK_EQ_INT(t.strides[1], 1);
    CHECK_EQ_INT(t.strides[3], 3);
    CHECK_EQ_INT(t.strides[2], 3 * 7);
    CHECK_EQ_INT(t.strides[0], 3 * 7 * 4);
}

static void
copies_are_their_own(void)
{
    float values[6] = {1, 2, 3, 4, 5, 6};
    holder h;
    cer_tensor t = tensor_of(&h, values), copy;

    t.read_only = true;
    CHECK_EQ_INT(cer_tensor_copy(&t, &copy, NULL), CER_OK);
    CHECK(copy.data != t.data && !copy.read_only);
    CHECK_EQ_INT((uintptr_t)copy.data % CER_ALIGNMENT, 0);
    CHECK(memcmp(copy.data, values, sizeof values) == 0);
    cer_owner_release(copy.owner);
    t.shape[1] = 0;
    CHECK_EQ_INT(cer_tensor_copy(&t, &copy, NULL), CER_OK);
    CHECK(copy.data == NULL);
    cer_owner_release(copy.owner);
    CHECK_EQ_INT(h.drops, 0);
}

static void
check_view(const DLTensor *view, const cer_tensor *t)
{
    CHECK(view->data == t->data);
    CHECK_EQ_INT(view->device.device_type, kDLCPU);
    CHECK_EQ_INT(view->device.device_id, 0);
    CHECK_EQ_INT(view->ndim, 3);
    CHECK_EQ_INT(view->dtype.code, kDLFloat);
    CHECK_EQ_INT(view->dtype.bits, 32);
    CHECK_EQ_INT(view->dtype.lanes, 1);
    CHECK_EQ_INT(view->byte_offset, 0);
    CHECK(memcmp(view->shape, t->shape, 3 * sizeof t->shape[0]) == 0);
    CHECK(memcmp(view->strides, t->strides, 3 * sizeof t->strides[0]) == 0);
}

static void
exports_describe_the_tensor(void)
{
    float values[6];
    holder h;
    cer_tensor t = tensor_of(&h, values);
    cer_export *block;

    t.read_only = true;
    block = cer_export_new(&t, DLPACK_FLAG_BITMASK_IS_COPIED);
    check_view(&block->versioned.dl_tensor, &t);
    check_view(&block->legacy.dl_tensor, &t);
    CHECK_EQ_INT(block->versioned.version.major, DLPACK_MAJOR_VERSION);
    CHECK_EQ_INT(block->versioned.flags,
                 DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED);
    CHECK_EQ_INT(atomic_load(&h.owner.count), 2);
    cer_export_capsule_gone(block, false);
    CHECK_EQ_INT(atomic_load(&h.owner.count), 1);
    cer_owner_release(&h.owner);
    CHECK_EQ_INT(h.drops, 1);
}

/* Device memory is labeled as such in every export. */
static void
exports_name_the_device(void)
{
    float values[6];
    holder h;
    cer_tensor t = tensor_of(&h, values), copy;
    cer_place place = {.device = {kDLCUDA, 3}};
    cer_export *block, embedded;

    CHECK_EQ_INT(cer_tensor_device(&t).device_type, kDLCPU);
    t.place = &place;
    CHECK_EQ_INT(cer_tensor_device(&t).device_type, kDLCUDA);
    block = cer_export_new(&t, 0);
    CHECK_EQ_INT(block->versioned.dl_tensor.device.device_type, kDLCUDA);
    CHECK_EQ_INT(block->legacy.dl_tensor.device.device_id, 3);
    cer_export_capsule_gone(block, false);
    cer_owner_retain(&h.owner, 1);
    cer_export_embed(&embedded, &t);
    CHECK_EQ_INT(embedded.versioned.dl_tensor.device.device_id, 3);
    embedded.versioned.deleter(&embedded.versioned);
    CHECK_EQ_INT(cer_tensor_new(&t, &copy, NULL), CER_OK); /* on the host */
    CHECK(copy.place == NULL && copy.data != NULL);
    cer_owner_release(copy.owner);
    cer_owner_release(&h.owner);
    CHECK_EQ_INT(h.drops, 1);
}

/* In every order, and with an extra deleter call before the capsule is freed,
 * the reference is released once. */
static void
deleters_run_once(void)
{
    float values[6];

    for (int order = 0; order < 8; order++) {
        holder h;
        cer_tensor t = tensor_of(&h, values);
        cer_export *block = cer_export_new(&t, 0);
        bool versioned = (order & 1) != 0, capsule_first = (order & 2) != 0;
        bool name_kept = (order & 4) != 0;
        DLManagedTensorVersioned *v = &block->versioned;
        DLManagedTensor *legacy = &block->legacy;

        if (capsule_first)
            cer_export_capsule_gone(block, true);
        if (versioned)
            v->deleter(v);
        else
            legacy->deleter(legacy);
        CHECK_EQ_INT(atomic_load(&h.owner.count), 1);
        if (!capsule_first)
            cer_export_capsule_gone(block, !name_kept);
        CHECK_EQ_INT(atomic_load(&h.owner.count), 1);
        cer_owner_release(&h.owner);
        CHECK_EQ_INT(h.drops, 1);
    }
}

static void
embedded_exports_are_used_again(void)
{
    float values[6];
    holder h;
    cer_tensor t = tensor_of(&h, values);
    cer_export block;

    for (int i = 0; i < 3; i++) {
        cer_owner_retain(&h.owner, 1);
        cer_export_embed(&block, &t);
        check_view(&block.versioned.dl_tensor, &t);
        CHECK(block.versioned.dl_tensor.shape == t.shape);
        block.versioned.deleter(&block.versioned);
        block.versioned.deleter(&block.versioned);
        CHECK_EQ_INT(atomic_load(&h.owner.count), 1);
    }
}

CHECK_MAIN(strides_are_row_major, channels_may_be_last, copies_are_their_own,
           exports_describe_the_tensor, exports_name_the_device,
           deleters_run_once, embedded_exports_are_used_again)
