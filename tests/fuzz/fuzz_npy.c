/* fuzz_npy.c -- any bytes as a .npy file. An accepted file must end with its
 * last element, and its header must survive a rewrite. */
#include "fuzz.h"
#include "npy.h"

static void
check_parsed(const cer_npy *npy, size_t size)
{
    size_t bytes = cer_dtype_size(npy->dtype);

    FUZZ_CHECK(npy->n_dims <= CER_NPY_MAX_DIMS);
    FUZZ_CHECK(npy->dtype == cer_npy_stored(npy->dtype));
    FUZZ_CHECK(npy->data_offset % 16 == 0 && npy->data_offset <= size);
    FUZZ_CHECK(npy->data_bytes == size - npy->data_offset);
    for (uint32_t i = 0; i < npy->n_dims; i++)
        bytes *= npy->shape[i];
    FUZZ_CHECK(bytes == npy->data_bytes);
}

static void
check_written(const cer_npy *npy)
{
    char header[CER_NPY_MAX_HEADER_BYTES];
    cer_npy again = *npy, parsed = {0};
    uint8_t *file;
    size_t size;

    FUZZ_CHECK(cer_npy_format(&again, header, NULL) == CER_OK);
    FUZZ_CHECK(again.data_bytes == npy->data_bytes);
    size = again.data_offset + again.data_bytes;
    file = calloc(1, size);
    FUZZ_CHECK(file != NULL);
    memcpy(file, header, again.data_offset);
    FUZZ_CHECK(cer_npy_parse(file, size, "x.npy", &parsed, NULL) == CER_OK);
    FUZZ_CHECK(parsed.dtype == npy->dtype && parsed.n_dims == npy->n_dims);
    FUZZ_CHECK(parsed.n_dims == 0 ||
               memcmp(parsed.shape, npy->shape,
                      npy->n_dims * sizeof npy->shape[0]) == 0);
    free(file);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *file = fuzz_copy(data, size);
    cer_npy npy = {0};
    cer_error err = {0};
    cer_status status = cer_npy_parse(file, size, "x.npy", &npy, &err);

    if (status == CER_OK) {
        check_parsed(&npy, size);
        check_written(&npy);
    } else {
        FUZZ_CHECK(status == CER_CORRUPT);
        fuzz_check_error(&err, "x.npy");
    }
    free(file);
    return 0;
}
