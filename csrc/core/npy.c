#include "npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAGIC "\x93NUMPY"
#define MAGIC_BYTES 6
#define DATA_STEP 64   /* alignment of elements in written files */
#define OLDEST_STEP 16 /* the same in files of old NumPy versions */
#define SHAPE_ROOM 21  /* digits that numpy.save leaves for shape[0] to grow */

cer_dtype
cer_npy_stored(cer_dtype dtype)
{
    return dtype == CER_BF16 ? CER_U16 : dtype;
}

/* --- reading ------------------------------------------------------------- */

/* The header's text and the position in it. */
typedef struct reader {
    const char *at, *end;
    const char *path;
    cer_error *err;
} reader;

static cer_status
refuse(const reader *in, const char *why)
{
    return cer_fail(in->err, CER_CORRUPT, "%s: %s", in->path, why);
}

static void
skip_spaces(reader *in)
{
    while (in->at < in->end && *in->at == ' ')
        in->at++;
}

/* Takes `c`, and the spaces before it, if it comes next. */
static bool
take(reader *in, char c)
{
    skip_spaces(in);
    if (in->at == in->end || *in->at != c)
        return false;
    in->at++;
    return true;
}

/* Takes a word, e.g. False; the caller checks the text after it. */
static bool
take_word(reader *in, const char *word)
{
    size_t len = strlen(word);

    skip_spaces(in);
    if ((size_t)(in->end - in->at) < len || memcmp(in->at, word, len) != 0)
        return false;
    in->at += len;
    return true;
}

/* Takes a quoted string without escapes of at most room - 1 characters. */
static bool
take_string(reader *in, char *out, size_t room)
{
    char quote = '\'';
    size_t n = 0;

    if (!take(in, quote)) {
        quote = '"';
        if (!take(in, quote))
            return false;
    }
    for (; in->at < in->end && *in->at != quote; in->at++) {
        if (*in->at == '\\' || n + 1 == room)
            return false;
        out[n++] = *in->at;
    }
    out[n] = '\0';
    return take(in, quote);
}

/* Takes a decimal number as Python writes one. */
static bool
take_number(reader *in, size_t *out)
{
    const char *start;
    size_t value = 0;

    skip_spaces(in);
    for (start = in->at; in->at < in->end; in->at++) {
        char c = *in->at;

        if (c < '0' || c > '9')
            break;
        if (!cer_mul_size(value, 10, &value) ||
            !cer_add_size(value, (size_t)(c - '0'), &value))
            return false;
    }
    *out = value;
    return in->at - start == 1 || (in->at > start && *start != '0');
}

static cer_status
read_descr(reader *in, cer_npy *out)
{
    char descr[32];

    if (!take_string(in, descr, sizeof descr))
        return refuse(in, "the element type is a structure, which Cerebro "
                          "does not read");
    if (descr[0] == '|' && descr[1] == 'O')
        return refuse(in, "holds pickled Python objects, which Cerebro never "
                          "loads");
    if (descr[0] == '>')
        return cer_fail(in->err, CER_CORRUPT,
                        "%s: the element type '%s' is big-endian; only "
                        "little-endian files are read",
                        in->path, descr);
    for (int i = 0; i < CER_DTYPE_COUNT; i++) {
        if (strcmp(cer_dtype_npy((cer_dtype)i), descr) == 0) {
            out->dtype = cer_npy_stored((cer_dtype)i);
            return CER_OK;
        }
    }
    return cer_fail(in->err, CER_CORRUPT,
                    "%s: the element type '%s' is not one that Cerebro reads",
                    in->path, descr);
}

static cer_status
read_order(reader *in)
{
    if (take_word(in, "False"))
        return CER_OK;
    if (take_word(in, "True"))
        return refuse(in, "is in Fortran order; only C order is read");
    return refuse(in, "the header's fortran_order is not a truth value");
}

static cer_status
read_shape(reader *in, cer_npy *out)
{
    static const char why[] = "the header's shape is not a tuple of sizes";
    bool comma = true; /* before the next number; (3) is not a tuple, (3,) is */

    out->n_dims = 0;
    if (!take(in, '('))
        return refuse(in, why);
    while (!take(in, ')')) {
        if (!comma)
            return refuse(in, why);
        if (out->n_dims == CER_NPY_MAX_DIMS)
            return refuse(in, "has more dimensions than Cerebro reads");
        if (!take_number(in, &out->shape[out->n_dims++]))
            return refuse(in, why);
        comma = take(in, ',');
    }
    return out->n_dims == 1 && !comma ? refuse(in, why) : CER_OK;
}

enum { SEEN_DESCR = 1, SEEN_ORDER = 2, SEEN_SHAPE = 4, SEEN_ALL = 7 };

/* One 'key': value, each key once. */
static cer_status
read_entry(reader *in, unsigned *seen, cer_npy *out)
{
    char key[16] = "";
    unsigned bit;

    if (!take_string(in, key, sizeof key) || !take(in, ':'))
        return refuse(in, "the header is damaged");
    if (strcmp(key, "descr") == 0)
        bit = SEEN_DESCR;
    else if (strcmp(key, "fortran_order") == 0)
        bit = SEEN_ORDER;
    else if (strcmp(key, "shape") == 0)
        bit = SEEN_SHAPE;
    else
        return refuse(in, "the header has an unknown entry");
    if ((*seen & bit) != 0)
        return refuse(in, "the header has a duplicate entry");
    *seen |= bit;
    return bit == SEEN_DESCR   ? read_descr(in, out)
           : bit == SEEN_ORDER ? read_order(in)
                               : read_shape(in, out);
}

static cer_status
read_text(reader *in, cer_npy *out)
{
    unsigned seen = 0;
    bool comma = true;
    cer_status status;

    if (!take(in, '{'))
        return refuse(in, "the header is damaged");
    while (!take(in, '}')) {
        if (!comma)
            return refuse(in, "the header is damaged");
        if ((status = read_entry(in, &seen, out)) != CER_OK)
            return status;
        comma = take(in, ',');
    }
    if (seen != SEEN_ALL)
        return refuse(in, "the header lacks descr, fortran_order or shape");
    if (!take(in, '\n') || in->at != in->end)
        return refuse(in, "the header does not end where it should");
    return CER_OK;
}

/* Reads magic, version and length; sets `in` to the text. */
static cer_status
find_text(const uint8_t *file, size_t file_bytes, reader *in)
{
    size_t prefix, len;

    if (file_bytes < MAGIC_BYTES + 4)
        return refuse(in, "is too short for a .npy file");
    if (memcmp(file, MAGIC, MAGIC_BYTES) != 0)
        return refuse(in, "is not a .npy file");
    if (file[6] < 1 || file[6] > 3 || file[7] != 0)
        return refuse(in, "has an unknown .npy version");
    len = (size_t)(file[8] | file[9] << 8);
    prefix = MAGIC_BYTES + 4;
    if (file[6] > 1) {
        prefix += 2;
        if (file_bytes < prefix)
            return refuse(in, "is too short for a .npy file");
        len |= (size_t)file[10] << 16 | (size_t)file[11] << 24;
    }
    if (len > file_bytes - prefix)
        return refuse(in, "is truncated within its header");
    in->at = (const char *)file + prefix;
    in->end = in->at + len;
    return CER_OK;
}

/* Computes the bytes of all elements. Dimensions of 0 count as 1 in the check,
 * so the product of any of them fits too. */
static bool
elements_bytes(const cer_npy *npy, size_t *out)
{
    size_t bytes = cer_dtype_size(npy->dtype);
    bool empty = false;

    for (uint32_t i = 0; i < npy->n_dims; i++) {
        empty = empty || npy->shape[i] == 0;
        if (npy->shape[i] != 0 && !cer_mul_size(bytes, npy->shape[i], &bytes))
            return false;
    }
    *out = empty ? 0 : bytes;
    return bytes <= (size_t)PTRDIFF_MAX - CER_NPY_MAX_HEADER_BYTES;
}

cer_status
cer_npy_parse(const void *file, size_t file_bytes, const char *path,
              cer_npy *out, cer_error *err)
{
    reader in = {.path = path, .err = err};
    cer_status status = find_text(file, file_bytes, &in);
    size_t present;

    if (status != CER_OK)
        return status;
    out->data_offset = (size_t)(in.end - (const char *)file);
    present = file_bytes - out->data_offset;
    if ((status = read_text(&in, out)) != CER_OK)
        return status;
    if (out->data_offset % OLDEST_STEP != 0)
        return refuse(&in, "the elements are not aligned to 16 bytes");
    if (!elements_bytes(out, &out->data_bytes))
        return refuse(&in, "the header's shape is larger than any file");
    if (present != out->data_bytes)
        return cer_fail(err, CER_CORRUPT,
                        "%s: has %zu bytes of elements, but its header gives "
                        "%zu",
                        path, present, out->data_bytes);
    return CER_OK;
}

/* --- writing ------------------------------------------------------------- */

/* Writes the dictionary as numpy.save does, without padding; returns its
 * length. */
static size_t
format_text(const cer_npy *npy, char *text, size_t room)
{
    size_t n = (size_t)snprintf(
        text, room, "{'descr': '%s', 'fortran_order': False, 'shape': (",
        cer_dtype_npy(cer_npy_stored(npy->dtype)));
    size_t digits = 0;

    for (uint32_t i = 0; i < npy->n_dims; i++) {
        int len = snprintf(text + n, room - n, "%s%zu", i == 0 ? "" : ", ",
                           npy->shape[i]);

        digits = i == 0 ? (size_t)len : digits;
        n += (size_t)len;
    }
    n += (size_t)snprintf(text + n, room - n, "%s), }",
                          npy->n_dims == 1 ? "," : "");
    /* numpy.save leaves room for the first dimension to grow in place. */
    if (npy->n_dims != 0 && digits < SHAPE_ROOM)
        n += (size_t)snprintf(text + n, room - n, "%*s",
                              (int)(SHAPE_ROOM - digits), "");
    return n;
}

cer_status
cer_npy_format(cer_npy *out, char header[CER_NPY_MAX_HEADER_BYTES],
               cer_error *err)
{
    enum { PREFIX = MAGIC_BYTES + 4 };
    size_t used, total, text_bytes;

    if (out->n_dims > CER_NPY_MAX_DIMS)
        return cer_fail(err, CER_INVALID,
                        "%u dimensions; at most %d are supported",
                        (unsigned)out->n_dims, CER_NPY_MAX_DIMS);
    if (!elements_bytes(out, &out->data_bytes))
        return cer_fail(err, CER_INVALID, "the shape is larger than any file");
    used = PREFIX +
           format_text(out, header + PREFIX, CER_NPY_MAX_HEADER_BYTES - PREFIX);
    /* Nine dimensions of 20 digits easily fit in version 1.0, so 2.0 is read
     * but never written. As in numpy.save, a text that already ends on the step
     * is padded by a whole step. */
    total = (used + 1) / DATA_STEP * DATA_STEP + DATA_STEP;
    text_bytes = total - PREFIX;
    memset(header + used, ' ', total - used);
    header[total - 1] = '\n';
    memcpy(header, MAGIC "\x01\x00", MAGIC_BYTES + 2);
    header[8] = (char)(text_bytes & 0xff);
    header[9] = (char)(text_bytes >> 8);
    out->data_offset = total;
    return CER_OK;
}
