#include "npy.h"

#include <stdlib.h>

#include "check.h"

/* A file in memory: a header of the given version around `text`, padded to 64
 * bytes, and `data_bytes` zeros. The block has the exact size, so that a read
 * past its end is found. */
static uint8_t *
make_file(uint8_t version, const char *text, size_t data_bytes, size_t *size)
{
    size_t prefix = version == 1 ? 10 : 12;
    size_t len = strlen(text);
    size_t total = (prefix + len + 64) / 64 * 64;
    size_t text_bytes = total - prefix;
    uint8_t *file = calloc(1, total + data_bytes);

    memcpy(file, "\x93NUMPY", 6);
    file[6] = version;
    file[8] = (uint8_t)(text_bytes & 0xff);
    file[9] = (uint8_t)(text_bytes >> 8);
    memset(file + prefix, ' ', text_bytes);
    memcpy(file + prefix, text, len);
    file[total - 1] = '\n';
    *size = total + data_bytes;
    return file;
}

static cer_status
parse_text(uint8_t version, const char *text, size_t data_bytes, cer_npy *npy,
           cer_error *err)
{
    size_t size;
    uint8_t *file = make_file(version, text, data_bytes, &size);
    cer_status status = cer_npy_parse(file, size, "x.npy", npy, err);

    free(file);
    return status;
}

static void
headers_are_read(void)
{
    cer_npy npy = {0};

    for (uint8_t version = 1; version <= 3; version++) {
        CHECK_EQ_INT(parse_text(version,
                                "{'descr': '<f4', 'fortran_order': False, "
                                "'shape': (3, 4), }",
                                48, &npy, NULL),
                     CER_OK);
        CHECK_EQ_INT(npy.dtype, CER_F32);
        CHECK_EQ_INT(npy.n_dims, 2);
        CHECK_EQ_INT(npy.shape[0], 3);
        CHECK_EQ_INT(npy.shape[1], 4);
        CHECK_EQ_INT(npy.data_bytes, 48);
        CHECK_EQ_INT(npy.data_offset, 128);
    }
}

static void
any_spelling_of_the_dictionary_is_read(void)
{
    static const char *const texts[] = {
        "{'descr':'<i8','fortran_order':False,'shape':(2,)}",
        "{\"shape\": (2,), \"fortran_order\": False, \"descr\": \"<i8\"}",
        "  { 'shape' : ( 2 , ) , 'descr' : '<i8' , 'fortran_order' : False , }",
    };
    cer_npy npy = {0};

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK_EQ_INT(parse_text(1, texts[i], 16, &npy, NULL), CER_OK);
        CHECK_EQ_INT(npy.dtype, CER_I64);
        CHECK_EQ_INT(npy.n_dims, 1);
        CHECK_EQ_INT(npy.shape[0], 2);
    }
}

static void
damaged_dictionaries_are_refused(void)
{
    static const char *const texts[] = {
        "",
        "{",
        "{}",
        "{,}",
        "[]",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'shape': ()}",
        "{'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ()} x",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ()}\n\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (), 'more': 1}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4' 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4',, 'fortran_order': False, 'shape': ()}",
        "{'descr' '<f4', 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4\", 'fortran_order': False, 'shape': ()}",
        "{'descr': '\\x3cf4', 'fortran_order': False, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': Falsely, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': True, 'shape': ()}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': [1]}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (01,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1L,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ",
        "{'descr':'<f4','fortran_order':False,'shape':(1,1,1,1,1,1,1,1,1,1)}",
    };

    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        cer_npy npy = {0};
        cer_error err = {0};

        if (parse_text(1, texts[i], 4, &npy, &err) != CER_CORRUPT)
            CHECK_EQ_STR(texts[i], "refused");
        CHECK(strncmp(err.message, "x.npy: ", 7) == 0);
    }
}

static void
foreign_types_are_refused_by_name(void)
{
    static const char *const refused[][2] = {
        {"'|O'", "pickled Python objects"},
        {"'>f4'", "big-endian"},
        {"'<f16'", "'<f16'"},
        {"'<c16'", "'<c16'"},
        {"'<U4'", "'<U4'"},
        {"'|S4'", "'|S4'"},
        {"'|V2'", "'|V2'"},
        {"'<M8[ns]'", "'<M8[ns]'"},
        {"'f4'", "'f4'"},
        {"'<f4 '", "'<f4 '"},
        {"''", "''"},
        {"[('a', '<f4')]", "structure"},
    };

    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        char text[128];
        cer_npy npy = {0};
        cer_error err = {0};

        (void)snprintf(text, sizeof text,
                       "{'descr': %s, 'fortran_order': False, 'shape': ()}",
                       refused[i][0]);
        CHECK_EQ_INT(parse_text(1, text, 4, &npy, &err), CER_CORRUPT);
        if (strstr(err.message, refused[i][1]) == NULL)
            CHECK_EQ_STR(err.message, refused[i][1]);
    }
}

static void
sizes_that_overflow_are_refused(void)
{
    static const char *const shapes[] = {
        "(18446744073709551616,)",     /* 2**64: no size_t */
        "(99999999999999999999999,)",  /* many digits */
        "(4611686018427387904,)",      /* times 4 bytes overflows */
        "(2305843009213693952,)",      /* 2**63 bytes: no file */
        "(4294967296, 4294967296)",    /* the product overflows */
        "(0, 4294967296, 4294967296)", /* even for an empty array */
        "(4294967296, 4294967296, 0)",
    };

    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        char text[128];
        cer_npy npy = {0};

        (void)snprintf(text, sizeof text,
                       "{'descr': '<f4', 'fortran_order': False, 'shape': %s}",
                       shapes[i]);
        CHECK_EQ_INT(parse_text(1, text, 0, &npy, NULL), CER_CORRUPT);
    }
}

static void
the_file_ends_with_its_last_element(void)
{
    static const char text[] =
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";
    cer_npy npy = {0};
    cer_error err = {0};

    CHECK_EQ_INT(parse_text(1, text, 47, &npy, &err), CER_CORRUPT);
    CHECK_EQ_STR(err.message, "x.npy: has 47 bytes of elements, but its "
                              "header gives 48");
    CHECK_EQ_INT(parse_text(1, text, 49, &npy, &err), CER_CORRUPT);
    CHECK_EQ_INT(parse_text(1, text, 0, &npy, &err), CER_CORRUPT);
}

static void
a_file_cut_anywhere_is_refused(void)
{
    for (uint8_t version = 1; version <= 3; version++) {
        size_t size;
        uint8_t *file = make_file(version,
                                  "{'descr': '<f4', 'fortran_order': False, "
                                  "'shape': (3, 4), }",
                                  48, &size);

        for (size_t cut = 0; cut < size; cut++) {
            uint8_t *part = malloc(cut == 0 ? 1 : cut);
            cer_npy npy = {0};
            cer_error err = {0};

            memcpy(part, file, cut);
            CHECK_EQ_INT(cer_npy_parse(part, cut, "x.npy", &npy, &err),
                         CER_CORRUPT);
            free(part);
        }
        free(file);
    }
}

/* Changing any byte of the header to any value is an error, or reads as an
 * array that fits the file; never a crash or an out-of-bounds read. */
static void
any_changed_byte_is_survived(void)
{
    size_t size, accepted = 0;
    uint8_t *file = make_file(1,
                              "{'descr': '<f4', 'fortran_order': False, "
                              "'shape': (3, 4), }",
                              48, &size);

    for (size_t at = 0; at < 128; at++) {
        uint8_t good = file[at];

        for (int value = 0; value < 256; value++) {
            cer_npy npy = {0};

            file[at] = (uint8_t)value;
            if (cer_npy_parse(file, size, "x.npy", &npy, NULL) == CER_OK) {
                accepted++;
                CHECK_EQ_INT(npy.data_offset + npy.data_bytes, size);
            }
        }
        file[at] = good;
    }
    CHECK(accepted >= 128); /* the unchanged ones */
    free(file);
}

static void
magic_version_and_alignment_are_checked(void)
{
    static const char text[] =
        "{'descr': '|u1', 'fortran_order': False, 'shape': (), }";
    cer_npy npy = {0};
    size_t size;
    uint8_t *file = make_file(1, text, 1, &size);

    CHECK_EQ_INT(cer_npy_parse(file, size, "x.npy", &npy, NULL), CER_OK);
    CHECK_EQ_INT(npy.n_dims, 0);
    CHECK_EQ_INT(npy.data_bytes, 1);
    file[0] = 'P'; /* like a zip file */
    CHECK_EQ_INT(cer_npy_parse(file, size, "x.npy", &npy, NULL), CER_CORRUPT);
    file[0] = 0x93;
    file[6] = 4;
    CHECK_EQ_INT(cer_npy_parse(file, size, "x.npy", &npy, NULL), CER_CORRUPT);
    file[6] = 1;
    file[7] = 1;
    CHECK_EQ_INT(cer_npy_parse(file, size, "x.npy", &npy, NULL), CER_CORRUPT);
    file[7] = 0;
    file[8]--; /* the text lacks its final newline */
    CHECK_EQ_INT(cer_npy_parse(file, size, "x.npy", &npy, NULL), CER_CORRUPT);
    memcpy(file + 10 + file[8] - 1, "\n", 1); /* and now is not aligned */
    CHECK_EQ_INT(cer_npy_parse(file, size, "x.npy", &npy, NULL), CER_CORRUPT);
    free(file);
}

/* --- writing -------------------------------------------------------------- */
static void
headers_are_those_of_numpy(void)
{
    cer_npy npy = {.dtype = CER_F32, .n_dims = 2, .shape = {3, 4}};
    char header[CER_NPY_MAX_HEADER_BYTES];
    char expected[129] = "\x93NUMPY\x01\x00v\x00"
                         "{'descr': '<f4', 'fortran_order': False, "
                         "'shape': (3, 4), }";
    size_t used = 10 + strlen(expected + 10);

    memset(expected + used, ' ', 128 - used);
    expected[127] = '\n';
    CHECK_EQ_INT(cer_npy_format(&npy, header, NULL), CER_OK);
    CHECK_EQ_INT(npy.data_offset, 128);
    CHECK_EQ_INT(npy.data_bytes, 48);
    CHECK(memcmp(header, expected, 128) == 0);
}

/* Writes a header and reads it back as a file without elements. */
static void
check_round_trip(cer_npy *npy)
{
    char header[CER_NPY_MAX_HEADER_BYTES];
    cer_npy back = {0};
    cer_error err = {0};
    uint8_t *file;

    CHECK_EQ_INT(cer_npy_format(npy, header, &err), CER_OK);
    CHECK_EQ_INT(npy->data_offset % 64, 0);
    CHECK(npy->data_offset <= sizeof header);
    file = calloc(1, npy->data_offset + npy->data_bytes);
    memcpy(file, header, npy->data_offset);
    CHECK_EQ_INT(cer_npy_parse(file, npy->data_offset + npy->data_bytes,
                               "x.npy", &back, &err),
                 CER_OK);
    CHECK_EQ_INT(back.dtype, cer_npy_stored(npy->dtype));
    CHECK_EQ_INT(back.n_dims, npy->n_dims);
    CHECK(memcmp(back.shape, npy->shape, npy->n_dims * sizeof npy->shape[0]) ==
          0);
    free(file);
}

static void
every_dtype_and_rank_survives(void)
{
    for (int dtype = 0; dtype < CER_DTYPE_COUNT; dtype++) {
        for (uint32_t n = 0; n <= CER_NPY_MAX_DIMS; n++) {
            cer_npy npy = {.dtype = (cer_dtype)dtype, .n_dims = n};

            for (uint32_t i = 0; i < n; i++)
                npy.shape[i] = 1 + (i == 3) + (i == 0) * 9;
            check_round_trip(&npy);
        }
    }
}

static void
empty_arrays_and_large_headers_survive(void)
{
    cer_npy empty = {.dtype = CER_F32, .n_dims = 2, .shape = {0, 39}};
    cer_npy hollow = {.dtype = CER_F64, .n_dims = 3, .shape = {5, 0, 7}};
    cer_npy longest = {.dtype = CER_BOOL, .n_dims = CER_NPY_MAX_DIMS};
    char header[CER_NPY_MAX_HEADER_BYTES];

    check_round_trip(&empty);
    check_round_trip(&hollow);
    longest.shape[1] = (size_t)1 << 62; /* the others are 0 */
    check_round_trip(&longest);
    longest.shape[0] = (size_t)1 << 62;
    CHECK_EQ_INT(cer_npy_format(&longest, header, NULL), CER_INVALID);
}

static void
impossible_headers_are_not_written(void)
{
    cer_npy npy = {.dtype = CER_U8, .n_dims = CER_NPY_MAX_DIMS + 1};
    char header[CER_NPY_MAX_HEADER_BYTES];

    CHECK_EQ_INT(cer_npy_format(&npy, header, NULL), CER_INVALID);
    npy.n_dims = 1;
    npy.shape[0] = SIZE_MAX;
    CHECK_EQ_INT(cer_npy_format(&npy, header, NULL), CER_INVALID);
}

CHECK_MAIN(headers_are_read, any_spelling_of_the_dictionary_is_read,
           damaged_dictionaries_are_refused, foreign_types_are_refused_by_name,
           sizes_that_overflow_are_refused, the_file_ends_with_its_last_element,
           a_file_cut_anywhere_is_refused, any_changed_byte_is_survived,
           magic_version_and_alignment_are_checked, headers_are_those_of_numpy,
           every_dtype_and_rank_survives,
           empty_arrays_and_large_headers_survive,
           impossible_headers_are_not_written)
