/* fuzz_dlpack.c -- any DLPack tensor that a producer might pass, decoded from
 * bytes. An accepted tensor must have strides that stay in the address space.
 * If it is also within our own block, it is packed, compared element by
 * element, and loaded back. */
#include "fuzz.h"
#include "state.h"
#include "tensor_view.h"

enum { ARENA_BYTES = 2048, MAX_NDIM = 70, MAX_ELEMENTS = 1 << 14 };

enum {
    VERSIONED = 1,
    NO_STRIDES = 2,
    NO_SHAPE = 4,
    NO_DATA = 8,
    ANY_ADDRESS = 16,
    ANY_DTYPE = 32
};

typedef struct cursor {
    const uint8_t *at, *end;
} cursor;

/* Returns zeros after the input's end. */
static uint8_t
take_byte(cursor *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

static uint64_t
take_u64(cursor *in)
{
    uint64_t value = 0;

    for (int i = 0; i < 8; i++)
        value |= (uint64_t)take_byte(in) << (8 * i);
    return value;
}

/* One byte for most numbers, with its sign; 0x80 announces eight. */
static int64_t
take_number(cursor *in)
{
    uint8_t byte = take_byte(in);

    return byte == 0x80 ? (int64_t)take_u64(in) : (int8_t)byte;
}

static DLDataType
take_dtype(cursor *in, uint8_t flags)
{
    uint8_t choice = take_byte(in);
    cer_dtype dtype = (cer_dtype)(choice % CER_DTYPE_COUNT);
    DLDataType type = {cer_dtype_dlpack_code(dtype),
                       (uint8_t)(cer_dtype_size(dtype) * 8), 1};

    if ((flags & ANY_DTYPE) != 0) {
        type.code = choice;
        type.bits = take_byte(in);
        type.lanes = (uint16_t)(take_byte(in) | take_byte(in) << 8);
    }
    return type;
}

/* --- accepted tensors -------------------------------------------------------
 */

static bool
is_empty(const cer_tensor_view *view)
{
    bool empty = false;

    for (uint32_t i = 0; i < view->ndim; i++) {
        FUZZ_CHECK(view->shape[i] >= 0);
        FUZZ_CHECK(view->shape[i] > 1 || view->strides[i] == 0);
        empty = empty || view->shape[i] == 0;
    }
    return empty;
}

/* Finds the lowest and highest address of any byte; returns the number of
 * elements. */
static size_t
find_extent(const cer_tensor_view *view, uintptr_t *low, uintptr_t *high)
{
    size_t elements = 1;

    FUZZ_CHECK(is_empty(view) == (view->data == NULL));
    *low = (uintptr_t)view->data;
    *high = *low + cer_dtype_size(view->dtype);
    if (is_empty(view))
        return 0;
    for (uint32_t i = 0; i < view->ndim; i++) {
        int64_t reach;

        FUZZ_CHECK(
            !__builtin_mul_overflow(view->strides[i], view->shape[i], &reach));
        reach = view->strides[i] * (view->shape[i] - 1);
        *(reach < 0 ? low : high) += (uintptr_t)reach;
        FUZZ_CHECK(!__builtin_mul_overflow(elements, (size_t)view->shape[i],
                                           &elements));
    }
    FUZZ_CHECK(*low < *high);
    return elements;
}

/* Looks up every element by its indices. */
static void
copy_slowly(const cer_tensor_view *view, size_t elements, uint8_t *to)
{
    size_t item = cer_dtype_size(view->dtype);

    for (size_t n = 0; n < elements; n++) {
        const uint8_t *from = view->data;
        size_t rest = n;

        for (uint32_t i = view->ndim; i-- > 0;) {
            size_t size = (size_t)view->shape[i];

            from += (int64_t)(rest % size) * view->strides[i];
            rest /= size;
        }
        memcpy(to + n * item, from, item);
    }
}

static void
pack_and_load(const cer_tensor_view *view, size_t elements)
{
    cer_state_writer *writer = cer_state_writer_new();
    size_t item = cer_dtype_size(view->dtype), nbytes = 0;
    uint8_t *slow = malloc(elements * item + 1), *packed, *again;
    cer_state state;

    FUZZ_CHECK(writer != NULL && slow != NULL);
    FUZZ_CHECK(cer_state_writer_add(writer, "/x", 2, view->dtype, view->ndim,
                                    view->shape, view->strides, view->data,
                                    NULL) == CER_OK);
    FUZZ_CHECK(cer_state_writer_finish(writer, "{}", 2, &nbytes, NULL) ==
               CER_OK);
    packed = malloc(nbytes);
    again = malloc(nbytes);
    FUZZ_CHECK(packed != NULL && again != NULL);
    cer_state_writer_write(writer, packed);
    FUZZ_CHECK(cer_state_open(packed, nbytes, "x", &state, NULL) == CER_OK);
    FUZZ_CHECK(state.n_tensors == 1 &&
               state.tensors[0].nbytes == elements * item);
    copy_slowly(view, elements, slow);
    FUZZ_CHECK(elements == 0 ||
               memcmp(slow, state.tensors[0].data, elements * item) == 0);
    if (cer_state_fits(&state, writer)) {
        cer_state_copy_into(&state, writer);
        cer_state_writer_write(writer, again);
        FUZZ_CHECK(memcmp(packed, again, nbytes) == 0);
    }
    cer_state_close(&state);
    cer_state_writer_free(writer);
    free(slow);
    free(packed);
    free(again);
}

static void
check_view(const cer_tensor_view *view, const uint8_t *arena)
{
    uintptr_t low, high, first = (uintptr_t)arena;
    size_t elements = find_extent(view, &low, &high);

    if (elements <= MAX_ELEMENTS &&
        (elements == 0 || (low >= first && high <= first + ARENA_BYTES)))
        pack_and_load(view, elements);
}

/* --- the producer --------------------------------------------------- */

static void
try_tensor(cursor *in, uint8_t *arena)
{
    uint8_t flags = take_byte(in);
    DLManagedTensorVersioned managed = {
        .version = {DLPACK_MAJOR_VERSION ^ take_byte(in), take_byte(in)},
        .flags = take_byte(in)};
    DLTensor *tensor = &managed.dl_tensor;
    int64_t *shape, *strides;
    cer_tensor_view view = {0};
    cer_error err = {0};
    cer_status status;
    size_t dims;

    tensor->device.device_type = (DLDeviceType)(kDLCPU ^ take_byte(in));
    tensor->dtype = take_dtype(in, flags);
    tensor->ndim = (int32_t)take_number(in);
    tensor->byte_offset = (uint64_t)take_number(in);
    dims =
        tensor->ndim < 0 || tensor->ndim > MAX_NDIM ? 0 : (size_t)tensor->ndim;
    if ((flags & NO_DATA) == 0)
        tensor->data = (flags & ANY_ADDRESS) != 0
                           ? (void *)(uintptr_t)take_u64(in)
                           : arena + take_byte(in) * 8;
    shape = malloc(dims * sizeof *shape + 1);
    strides = malloc(dims * sizeof *strides + 1);
    FUZZ_CHECK(shape != NULL && strides != NULL);
    for (size_t i = 0; i < dims; i++) {
        shape[i] = take_number(in);
        strides[i] = take_number(in);
    }
    tensor->shape = (flags & NO_SHAPE) != 0 ? NULL : shape;
    tensor->strides = (flags & NO_STRIDES) != 0 ? NULL : strides;
    status = (flags & VERSIONED) != 0
                 ? cer_tensor_view_take_versioned(&managed, &view, &err)
                 : cer_tensor_view_take(tensor, &view, &err);
    free(shape); /* the producer's data is no longer needed */
    free(strides);
    FUZZ_CHECK(status == CER_OK || status == CER_INVALID);
    if (status == CER_OK)
        check_view(&view, arena);
    else
        fuzz_check_error(&err, NULL);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cursor in = {data, data + size};
    uint8_t *arena = malloc(ARENA_BYTES);

    FUZZ_CHECK(arena != NULL);
    for (size_t i = 0; i < ARENA_BYTES; i++)
        arena[i] = (uint8_t)(i * 131 >> 3);
    try_tensor(&in, arena);
    free(arena);
    return 0;
}
