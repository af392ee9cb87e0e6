/* fuzz_state.c -- any bytes as a state: eight bytes of length, the JSON header
 * and data. In an accepted state, tensors are within its bytes and do not
 * overlap. Repacking it gives a state with the same content, which repacks to
 * itself. */
#include "fuzz.h"
#include "json.h"
#include "state.h"

/* The header's length is four bytes of the input, so that most inputs have a
 * valid one: "....HEADERDATA". 0xffffffff means eight raw bytes follow.
 */
static uint8_t *
make_file(const uint8_t *data, size_t size, size_t *len)
{
    uint8_t *file;

    if (size < 4 || memcmp(data, "\xff\xff\xff\xff", 4) == 0) {
        *len = size < 4 ? size : size - 4;
        return fuzz_copy(size < 4 ? data : data + 4, *len);
    }
    *len = size + 4;
    file = malloc(*len);
    FUZZ_CHECK(file != NULL);
    memcpy(file, data, 4);
    memset(file + 4, 0, 4);
    memcpy(file + 8, data + 4, size - 4);
    return file;
}

static void
check_tensors(const cer_state *state, const uint8_t *file, size_t len)
{
    size_t total = 0;

    for (size_t i = 0; i < state->n_tensors; i++) {
        const cer_state_tensor *t = &state->tensors[i];
        size_t bytes = cer_dtype_size(t->dtype);

        FUZZ_CHECK(t->ndim <= CER_STATE_MAX_DIMS);
        for (uint32_t d = 0; d < t->ndim; d++)
            bytes *= (size_t)t->shape[d];
        FUZZ_CHECK(bytes == t->nbytes);
        FUZZ_CHECK(t->data >= file && t->data <= file + len &&
                   t->nbytes <= (size_t)(file + len - t->data));
        FUZZ_CHECK(cer_state_find(state, t->path, t->path_len) == t);
        total += bytes;
    }
    FUZZ_CHECK(total <= len);
}

/* The structure is untrusted text from a file. */
static void
read_structure(const cer_state *state)
{
    cer_json_reader json;
    cer_json_token token;
    cer_json_kind kind;
    int64_t number;

    cer_json_init(&json, state->structure, state->structure_len);
    while ((kind = cer_json_next(&json, &token)) > CER_JSON_END) {
        if (kind == CER_JSON_NUMBER)
            (void)cer_json_i64(&token, &number);
        if (kind == CER_JSON_STRING || kind == CER_JSON_KEY) {
            char *text = malloc(token.len + 1);
            size_t n = cer_json_unescape(&token, text);

            FUZZ_CHECK(n == SIZE_MAX || n <= token.len);
            free(text);
        }
    }
    FUZZ_CHECK(kind == CER_JSON_END || json.problem != NULL);
}

static void
dense_strides(const cer_state_tensor *t, int64_t *strides)
{
    int64_t step = (int64_t)cer_dtype_size(t->dtype);

    for (uint32_t d = t->ndim; d-- > 0;) {
        strides[d] = step;
        if (t->shape[d] > 1 && t->nbytes != 0)
            step *= t->shape[d];
    }
}

static uint8_t *
pack(const cer_state *state, size_t *nbytes)
{
    cer_state_writer *writer = cer_state_writer_new();
    int64_t strides[CER_STATE_MAX_DIMS];
    uint8_t *bytes;

    FUZZ_CHECK(writer != NULL);
    for (size_t i = 0; i < state->n_tensors; i++) {
        const cer_state_tensor *t = &state->tensors[i];

        dense_strides(t, strides);
        FUZZ_CHECK(cer_state_writer_add(writer, t->path, t->path_len, t->dtype,
                                        t->ndim, t->shape, strides, t->data,
                                        NULL) == CER_OK);
    }
    FUZZ_CHECK(cer_state_writer_finish(writer, state->structure,
                                       state->structure_len, nbytes,
                                       NULL) == CER_OK);
    FUZZ_CHECK(cer_state_fits(state, writer));
    bytes = malloc(*nbytes);
    FUZZ_CHECK(bytes != NULL);
    cer_state_writer_write(writer, bytes);
    cer_state_writer_free(writer);
    return bytes;
}

static void
check_same(const cer_state *a, const cer_state *b)
{
    FUZZ_CHECK(a->n_tensors == b->n_tensors);
    FUZZ_CHECK(a->structure_len == b->structure_len);
    FUZZ_CHECK(a->structure_len == 0 ||
               memcmp(a->structure, b->structure, a->structure_len) == 0);
    for (size_t i = 0; i < a->n_tensors; i++) {
        const cer_state_tensor *x = &a->tensors[i], *y = &b->tensors[i];

        FUZZ_CHECK(x->dtype == y->dtype && x->ndim == y->ndim);
        FUZZ_CHECK(x->path_len == y->path_len && x->nbytes == y->nbytes);
        FUZZ_CHECK(x->path_len == 0 ||
                   memcmp(x->path, y->path, x->path_len) == 0);
        FUZZ_CHECK(x->nbytes == 0 || memcmp(x->data, y->data, x->nbytes) == 0);
    }
}

static void
check_packed_again(const cer_state *state)
{
    size_t len, len_again;
    uint8_t *bytes = pack(state, &len), *again;
    cer_state second;

    FUZZ_CHECK(cer_state_open(bytes, len, "again", &second, NULL) == CER_OK);
    check_same(state, &second);
    again = pack(&second, &len_again);
    FUZZ_CHECK(len == len_again && memcmp(bytes, again, len) == 0);
    cer_state_close(&second);
    free(again);
    free(bytes);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t len;
    uint8_t *file = make_file(data, size, &len);
    cer_state state;
    cer_error err = {0};
    cer_status status =
        cer_state_open(file, len, "x.safetensors", &state, &err);

    if (status == CER_OK) {
        check_tensors(&state, file, len);
        read_structure(&state);
        check_packed_again(&state);
        cer_state_close(&state);
    } else {
        FUZZ_CHECK(status == CER_CORRUPT);
        fuzz_check_error(&err, "x.safetensors");
        FUZZ_CHECK(state.memory == NULL);
    }
    free(file);
    return 0;
}
