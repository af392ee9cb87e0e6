#include "tensor_view.h"

#include "check.h"

static float values[64];

/* A float32 tensor over `values`; shape and strides of `ndim` numbers each. */
static DLTensor
tensor_of(int32_t ndim, int64_t *shape, int64_t *strides)
{
    return (DLTensor){.data = values,
                      .device = {kDLCPU, 0},
                      .ndim = ndim,
                      .dtype = {kDLFloat, 32, 1},
                      .shape = shape,
                      .strides = strides};
}

static void
check_refused(const DLTensor *tensor, const char *why)
{
    cer_tensor_view view = {0};
    cer_error err = {0};

    CHECK_EQ_INT(cer_tensor_view_take(tensor, &view, &err), CER_INVALID);
    if (strstr(err.message, why) == NULL)
        CHECK_EQ_STR(err.message, why);
}

static void
strides_become_bytes(void)
{
    int64_t shape[] = {2, 1, 3}, strides[] = {1, 999, -4};
    DLTensor tensor = tensor_of(3, shape, strides);
    cer_tensor_view view = {0};

    tensor.byte_offset = 100;
    CHECK_EQ_INT(cer_tensor_view_take(&tensor, &view, NULL), CER_OK);
    CHECK_EQ_INT(view.dtype, CER_F32);
    CHECK_EQ_INT(view.ndim, 3);
    CHECK_EQ_INT(view.shape[2], 3);
    CHECK_EQ_INT(view.strides[0], 4);
    CHECK_EQ_INT(view.strides[1], 0); /* never used */
    CHECK_EQ_INT(view.strides[2], -16);
    CHECK(view.data == (uint8_t *)values + 100);
    CHECK(!view.read_only);
    tensor.strides = NULL; /* in C order without gaps */
    CHECK_EQ_INT(cer_tensor_view_take(&tensor, &view, NULL), CER_OK);
    CHECK_EQ_INT(view.strides[0], 12);
    CHECK_EQ_INT(view.strides[2], 4);
}

static void
scalars_and_nothing_are_tensors(void)
{
    int64_t shape[] = {4, 0, 1000000}, strides[] = {INT64_MIN, 7, INT64_MAX};
    DLTensor scalar = tensor_of(0, NULL, NULL);
    DLTensor empty = tensor_of(3, shape, strides);
    cer_tensor_view view = {0};

    CHECK_EQ_INT(cer_tensor_view_take(&scalar, &view, NULL), CER_OK);
    CHECK(view.ndim == 0 && view.data == values);
    CHECK_EQ_INT(cer_tensor_view_take(&empty, &view, NULL), CER_OK);
    CHECK(view.data == NULL);
    CHECK(view.strides[0] == 0 && view.strides[1] == 0 && view.strides[2] == 0);
    empty.data = NULL;
    CHECK_EQ_INT(cer_tensor_view_take(&empty, &view, NULL), CER_OK);
}

static void
shapes_that_cannot_be_are_refused(void)
{
    static int64_t ones[65];
    int64_t negative[] = {-1}, least[] = {INT64_MIN, 1};
    int64_t large[] = {INT64_MAX}, product[] = {1LL << 31, 1LL << 31, 1};
    int64_t hidden[] = {1LL << 31, 0, 1LL << 31};
    int64_t zeros[] = {0, 0, 0};
    DLTensor tensor = tensor_of(1, negative, NULL);

    check_refused(&tensor, "an impossible shape");
    tensor = tensor_of(2, least, NULL);
    check_refused(&tensor, "an impossible shape");
    tensor = tensor_of(1, large, NULL);
    check_refused(&tensor, "");
    tensor = tensor_of(1, large, zeros); /* one element, repeated */
    check_refused(&tensor, "an impossible shape");
    tensor = tensor_of(3, product, zeros);
    check_refused(&tensor, "an impossible shape");
    tensor = tensor_of(3, hidden, zeros); /* without an element */
    check_refused(&tensor, "an impossible shape");
    tensor = tensor_of(1, NULL, NULL);
    check_refused(&tensor, "no shape");
    tensor = tensor_of(65, ones, NULL);
    check_refused(&tensor, "has 65 dimensions");
    tensor = tensor_of(-1, ones, NULL);
    check_refused(&tensor, "has -1 dimensions");
    tensor = tensor_of(INT32_MIN, ones, NULL);
    check_refused(&tensor, "dimensions");
}

static void
strides_that_lead_nowhere_are_refused(void)
{
    static const int64_t bad[][2] = {
        {INT64_MAX, 1},         {INT64_MIN, 1},      {1LL << 61, 1},
        {-(1LL << 61), 1},      {1LL << 60, 1 << 0}, {INT64_MAX / 4, -4},
        {1LL << 58, 1LL << 59},
    };
    int64_t shape[] = {3, 3};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int64_t strides[] = {bad[i][0], bad[i][1]};
        DLTensor tensor = tensor_of(2, shape, strides);

        check_refused(&tensor, "lead outside the address space");
    }
}

static void
addresses_do_not_wrap(void)
{
    int64_t shape[] = {4}, forward[] = {1}, back[] = {-1};
    DLTensor tensor = tensor_of(1, shape, forward);

    tensor.byte_offset = UINT64_MAX;
    check_refused(&tensor, "lead outside the address space");
    tensor.byte_offset = UINT64_MAX - (uintptr_t)values - 3;
    check_refused(&tensor, "lead outside the address space");
    tensor.data = (void *)(uintptr_t)40; /* 40 - 126 if signed */
    tensor.byte_offset = UINT64_MAX - 125;
    check_refused(&tensor, "lead outside the address space");
    tensor.byte_offset = 0;
    tensor.data = (void *)(uintptr_t)8;
    tensor.strides = back;
    check_refused(&tensor, "lead outside the address space");
    tensor.data = NULL;
    check_refused(&tensor, "has no memory");
    tensor.byte_offset = (uintptr_t)values; /* data stays NULL */
    check_refused(&tensor, "has no memory");
}

static void
foreign_memory_and_types_are_refused(void)
{
    int64_t shape[] = {1};
    DLTensor tensor = tensor_of(1, shape, NULL);
    cer_tensor_view view = {0};
    cer_error err = {0};

    tensor.device.device_type = kDLCUDA;
    check_refused(&tensor, "another device (DLPack type 2)");
    tensor.device.device_type = kDLCUDAHost;
    CHECK(cer_tensor_view_take(&tensor, &view, &err) == CER_OK);
    tensor.device.device_type = kDLCPU;
    tensor.dtype.lanes = 4;
    check_refused(&tensor, "4 lanes");
    tensor.dtype = (DLDataType){kDLFloat, 128, 1};
    check_refused(&tensor, "code 2 with 128 bits");
    tensor.dtype = (DLDataType){kDLInt, 4, 1};
    check_refused(&tensor, "code 0 with 4 bits");
    tensor.dtype = (DLDataType){kDLOpaqueHandle, 64, 1};
    check_refused(&tensor, "code 3 with 64 bits");
}

static void
versions_are_minded(void)
{
    int64_t shape[] = {2};
    DLManagedTensorVersioned managed = {
        .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION + 5},
        .flags = DLPACK_FLAG_BITMASK_READ_ONLY,
        .dl_tensor = tensor_of(1, shape, NULL)};
    cer_tensor_view view = {0};
    cer_error err = {0};

    CHECK_EQ_INT(cer_tensor_view_take_versioned(&managed, &view, NULL), CER_OK);
    CHECK(view.read_only && view.shape[0] == 2);
    managed.flags = 0;
    CHECK_EQ_INT(cer_tensor_view_take_versioned(&managed, &view, NULL), CER_OK);
    CHECK(!view.read_only);
    managed.version.major++;
    managed.dl_tensor.ndim = 1 << 30; /* reused by now */
    CHECK_EQ_INT(cer_tensor_view_take_versioned(&managed, &view, &err),
                 CER_INVALID);
    CHECK(strstr(err.message, "cannot read") != NULL);
}

CHECK_MAIN(strides_become_bytes, scalars_and_nothing_are_tensors,
           shapes_that_cannot_be_are_refused,
           strides_that_lead_nowhere_are_refused, addresses_do_not_wrap,
           foreign_memory_and_types_are_refused, versions_are_minded)
