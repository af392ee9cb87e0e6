#include "state.h"

#include <stdlib.h>

#include "check.h"
#include "state_files.h"

static _Alignas(64) uint8_t bytes[1024];

static void
the_layout_is_as_described(void)
{
    static const char header[] =
        "{\"__metadata__\":{\"cerebro\":\"{\\\"a\\\":1}\"},"
        "\"/"
        "flags\":{\"dtype\":\"BOOL\",\"shape\":[5],\"data_offsets\":[32,37]},"
        "\"/s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]},"
        "\"/w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]}}";
    size_t nbytes = 0;
    float w[6];
    double s;

    CHECK_EQ_INT(write_state(bytes, &nbytes, NULL), CER_OK);
    CHECK_EQ_INT(nbytes, 256 + 37);
    CHECK_EQ_INT(bytes[0], 256 - 8);
    CHECK(memcmp(bytes + 8, header, sizeof header - 1) == 0);
    for (size_t i = 8 + sizeof header - 1; i < 256; i++)
        CHECK_EQ_INT(bytes[i], ' ');
    memcpy(&s, bytes + 256, 8);
    CHECK(s == 0.5);
    memcpy(w, bytes + 264, sizeof w);
    for (int i = 0; i < 6; i++)
        CHECK(w[i] == (float)i);
    CHECK(memcmp(bytes + 288, "\1\0\1\1\0", 5) == 0);
}

static void
a_state_is_read(void)
{
    size_t nbytes;
    cer_state state;
    const cer_state_tensor *w;

    CHECK_EQ_INT(write_state(bytes, &nbytes, NULL), CER_OK);
    CHECK_EQ_INT(cer_state_open(bytes, nbytes, "x", &state, NULL), CER_OK);
    CHECK_EQ_INT(state.n_tensors, 3);
    CHECK_EQ_INT(state.structure_len, 7);
    CHECK(memcmp(state.structure, "{\"a\":1}", 7) == 0);
    CHECK(memcmp(state.tensors[0].path, "/flags", 6) == 0);
    w = cer_state_find(&state, "/w", 2);
    CHECK(w == &state.tensors[2]);
    CHECK_EQ_INT(w->dtype, CER_F32);
    CHECK_EQ_INT(w->ndim, 2);
    CHECK_EQ_INT(w->shape[1], 3);
    CHECK_EQ_INT(w->nbytes, 24);
    CHECK(w->data == bytes + 264);
    CHECK(cer_state_find(&state, "/", 1) == NULL);
    CHECK(cer_state_find(&state, "/ww", 3) == NULL);
    cer_state_close(&state);
    cer_state_close(&state);
}

static void
what_has_changed_since_is_told(void)
{
    static const int64_t shape[] = {2, 3}, strides[] = {12, 4};
    static const int64_t turned[] = {3, 2}, other[] = {4, 8};
    cer_state_writer *writer = cer_state_writer_new();
    float w[6] = {0};
    cer_error err = {0};

    CHECK_EQ_INT(cer_state_writer_add(writer, "/w", 2, CER_F32, 2, shape,
                                      strides, w, NULL),
                 CER_OK);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_F32, 2, shape, strides, w, NULL),
        CER_OK);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_I32, 2, shape, strides, w, NULL),
        CER_STATE);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_F32, 1, shape, strides, w, NULL),
        CER_STATE);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_F32, 2, turned, strides, w, NULL),
        CER_STATE);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_F32, 2, shape, other, w, NULL),
        CER_STATE);
    CHECK_EQ_INT(cer_state_writer_check(writer, 0, CER_F32, 2, shape, strides,
                                        w + 1, &err),
                 CER_STATE);
    CHECK(strstr(err.message, "the tensor at '/w' was replaced") != NULL);
    cer_state_writer_free(writer);
}

/* Stores neither a path nor a dimension: there is no memory for them. */
static void
a_scalar_can_be_all_there_is(void)
{
    cer_state_writer *writer = cer_state_writer_new();
    double value = 2.5, other = 0;
    size_t nbytes;
    cer_state state;

    CHECK_EQ_INT(cer_state_writer_add(writer, "", 0, CER_F64, 0, NULL, NULL,
                                      &value, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_state_writer_finish(writer, "1", 1, &nbytes, NULL),
                 CER_OK);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_F64, 0, NULL, NULL, &value, NULL),
        CER_OK);
    CHECK_EQ_INT(
        cer_state_writer_check(writer, 0, CER_F64, 0, NULL, NULL, &other, NULL),
        CER_STATE);
    cer_state_writer_write(writer, bytes);
    CHECK_EQ_INT(cer_state_open(bytes, nbytes, "x", &state, NULL), CER_OK);
    CHECK(cer_state_find(&state, NULL, 0) == state.tensors);
    CHECK_EQ_INT(cer_state_writer_find(writer, NULL, 0), 0);
    CHECK(cer_state_fits(&state, writer));
    memcpy(&other, state.tensors[0].data, sizeof other);
    CHECK(other == value);
    value = 0;
    cer_state_copy_into(&state, writer);
    CHECK(value == 2.5);
    cer_state_close(&state);
    cer_state_writer_free(writer);
}

static void
a_state_cut_anywhere_is_corrupt(void)
{
    size_t nbytes;

    CHECK_EQ_INT(write_state(bytes, &nbytes, NULL), CER_OK);
    for (size_t len = 0; len < nbytes; len++) {
        uint8_t *cut = malloc(len + (len == 0));
        cer_error err = {0};
        cer_state state;

        memcpy(cut, bytes, len);
        CHECK_EQ_INT(cer_state_open(cut, len, "x.a", &state, &err),
                     CER_CORRUPT);
        CHECK(strncmp(err.message, "x.a is corrupt: ", 16) == 0);
        CHECK(state.memory == NULL);
        free(cut);
    }
}

/* Changing any byte of the header to one of several values is an error or
 * harmless. */
static void
damaged_headers_do_no_harm(void)
{
    static const char others[] = "\0\x01 \"\\{}[]:,0-9eu\x7f\x80\xff";
    size_t nbytes;

    CHECK_EQ_INT(write_state(bytes, &nbytes, NULL), CER_OK);
    for (size_t at = 0; at < 256; at++) {
        uint8_t old = bytes[at];

        for (size_t i = 0; i < sizeof others - 1; i++) {
            cer_state state;

            bytes[at] = (uint8_t)others[i];
            if (cer_state_open(bytes, nbytes, "x", &state, NULL) == CER_OK)
                cer_state_close(&state);
        }
        bytes[at] = old;
    }
}

static void
an_empty_state(void)
{
    cer_state_writer *writer = cer_state_writer_new();
    size_t nbytes;
    cer_state state;

    CHECK_EQ_INT(cer_state_writer_finish(writer, "0", 1, &nbytes, NULL),
                 CER_OK);
    CHECK_EQ_INT(nbytes, 64);
    cer_state_writer_write(writer, bytes);
    CHECK(cer_state_writer_find(writer, "", 0) == SIZE_MAX);
    CHECK_EQ_INT(cer_state_open(bytes, nbytes, "x", &state, NULL), CER_OK);
    CHECK_EQ_INT(state.n_tensors, 0);
    CHECK(cer_state_find(&state, "", 0) == NULL);
    CHECK(cer_state_fits(&state, writer));
    cer_state_copy_into(&state, writer);
    cer_state_close(&state);
    cer_state_writer_free(writer);
    cer_state_writer_free(NULL);
}

static void
what_cannot_be_written_is_refused(void)
{
    cer_state_writer *writer = cer_state_writer_new();
    int64_t ones[65], huge[2] = {INT64_MAX, INT64_MAX}, negative[1] = {-1};
    size_t nbytes;
    cer_error err = {0};

    for (int i = 0; i < 65; i++)
        ones[i] = 1;
    CHECK_EQ_INT(cer_state_writer_add(writer, "/deep", 5, CER_F32, 65, ones,
                                      ones, NULL, &err),
                 CER_STATE);
    CHECK(strstr(err.message, "'/deep'") != NULL);
    CHECK_EQ_INT(cer_state_writer_add(writer, "/x", 2, CER_F32, 2, huge, huge,
                                      NULL, &err),
                 CER_STATE);
    CHECK_EQ_INT(cer_state_writer_add(writer, "/x", 2, CER_F32, 1, negative,
                                      negative, NULL, &err),
                 CER_STATE);
    for (int i = 0; i < 2; i++)
        CHECK_EQ_INT(cer_state_writer_add(writer, "/twice", 6, CER_U8, 1, ones,
                                          ones, bytes, &err),
                     CER_OK);
    CHECK_EQ_INT(cer_state_writer_finish(writer, "1", 1, &nbytes, &err),
                 CER_STATE);
    CHECK(strstr(err.message, "'/twice'") != NULL);
    cer_state_writer_free(writer);
}

/* A writer with one float32 tensor "/x" of 2 x 3. */
static cer_state_writer *
one_tensor(float *data, int64_t outer, int64_t inner, size_t *nbytes)
{
    cer_state_writer *writer = cer_state_writer_new();

    CHECK_EQ_INT(cer_state_writer_add(writer, "/x", 2, CER_F32, 2,
                                      (int64_t[]){2, 3},
                                      (int64_t[]){outer, inner}, data, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_state_writer_finish(writer, "1", 1, nbytes, NULL), CER_OK);
    return writer;
}

static void
states_are_copied_into_what_fits(void)
{
    static const struct {
        int64_t outer, inner;
        bool fits;
    } layouts[] = {{12, 4, true},  {4, 8, true},  {32, 8, true},
                   {-12, 4, true}, {0, 4, false}, {12, 0, false},
                   {4, 4, false},  {8, 4, false}, {4, 2, false}};
    float from[6] = {0, 1, 2, 3, 4, 5};
    size_t nbytes, ignored;
    cer_state_writer *source = one_tensor(from, 12, 4, &nbytes);
    cer_state state;

    cer_state_writer_write(source, bytes);
    CHECK_EQ_INT(cer_state_open(bytes, nbytes, "x", &state, NULL), CER_OK);
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        float memory[32] = {0};
        char *x = (char *)(memory + 8);
        cer_state_writer *live = one_tensor(memory + 8, layouts[i].outer,
                                            layouts[i].inner, &ignored);

        CHECK_EQ_INT(cer_state_fits(&state, live), layouts[i].fits);
        if (layouts[i].fits) {
            cer_state_copy_into(&state, live);
            for (int e = 0; e < 6; e++) {
                float got;

                memcpy(&got,
                       x + e / 3 * layouts[i].outer + e % 3 * layouts[i].inner,
                       4);
                CHECK(got == (float)e);
            }
        }
        cer_state_writer_free(live);
    }
    CHECK_EQ_INT(cer_state_writer_find(source, "/x", 2), 0);
    cer_state_close(&state);
    cer_state_writer_free(source);
}

CHECK_MAIN(the_layout_is_as_described, a_state_is_read,
           what_has_changed_since_is_told, a_scalar_can_be_all_there_is,
           a_state_cut_anywhere_is_corrupt, damaged_headers_do_no_harm,
           an_empty_state, what_cannot_be_written_is_refused,
           states_are_copied_into_what_fits)
