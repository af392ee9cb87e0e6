/* state.c -- see state.h. */
#include "state.h"

#include <stdlib.h>
#include <string.h>

#include "copy.h"
#include "json.h"

#define METADATA "__metadata__"
#define STRUCTURE_KEY "cerebro"

/* A path and the index of its tensor; sorted byte by byte. */
typedef struct path_key {
    const char *path;
    size_t len, index;
} path_key;

static int
compare_paths(const char *a, size_t a_len, const char *b, size_t b_len)
{
    size_t n = a_len < b_len ? a_len : b_len;
    int order = n == 0 ? 0 : memcmp(a, b, n); /* the empty path may be NULL */

    return order != 0 ? order : (a_len > b_len) - (a_len < b_len);
}

static int
compare_keys(const void *a, const void *b)
{
    const path_key *x = a, *y = b;

    return compare_paths(x->path, x->len, y->path, y->len);
}

static size_t
find_key(const path_key *keys, size_t n, const char *path, size_t len)
{
    path_key wanted = {path, len, 0};
    const path_key *found =
        n == 0 ? NULL : bsearch(&wanted, keys, n, sizeof *keys, compare_keys);

    return found == NULL ? SIZE_MAX : found->index;
}

/* --- writing ------------------------------------------------------------- */
typedef struct added {
    const void *data;
    size_t path_at, path_len; /* in writer.paths */
    size_t dims_at;           /* in writer.dims: the shape, then the strides */
    size_t nbytes, offset;    /* offset from the beginning of data */
    cer_dtype dtype;
    uint32_t ndim;
} added;

struct cer_state_writer {
    added *tensors;
    size_t n, capacity;
    int64_t *dims;
    size_t n_dims, dims_capacity;
    cer_text paths;
    cer_text header; /* with its length and its padding */
    path_key *keys;  /* set by finish(), as is: */
    cer_copy *copies;
};

cer_state_writer *
cer_state_writer_new(void)
{
    return cer_calloc(1, sizeof(cer_state_writer));
}

void
cer_state_writer_free(cer_state_writer *writer)
{
    if (writer == NULL)
        return;
    cer_free(writer->tensors);
    cer_free(writer->dims);
    cer_free(writer->keys);
    cer_free(writer->copies);
    cer_text_clear(&writer->paths);
    cer_text_clear(&writer->header);
    cer_free(writer);
}

/* Makes room for `more` items of `size` bytes in a growing array. */
static bool
reserve(void **array, size_t *capacity, size_t used, size_t more, size_t size)
{
    size_t wanted = *capacity == 0 ? 64 : *capacity, bytes;
    void *grown;

    if (*capacity - used >= more)
        return true;
    while (wanted - used < more) {
        if (!cer_mul_size(wanted, 2, &wanted))
            return false;
    }
    if (!cer_mul_size(wanted, size, &bytes))
        return false;
    grown = cer_realloc(*array, bytes);
    if (grown == NULL)
        return false;
    *array = grown;
    *capacity = wanted;
    return true;
}

/* item x the product of shape; false if a size is negative or it overflows. */
static bool
tensor_bytes(cer_dtype dtype, uint32_t ndim, const int64_t *shape, size_t *out)
{
    size_t nbytes = cer_dtype_size(dtype);
    bool empty = false;

    for (uint32_t i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return false;
        if (shape[i] == 0)
            empty = true;
        else if (!cer_mul_size(nbytes, (size_t)shape[i], &nbytes) ||
                 nbytes > (size_t)PTRDIFF_MAX)
            return false;
    }
    *out = empty ? 0 : nbytes;
    return true;
}

cer_status
cer_state_writer_add(cer_state_writer *writer, const char *path,
                     size_t path_len, cer_dtype dtype, uint32_t ndim,
                     const int64_t *shape, const int64_t *strides,
                     const void *data, cer_error *err)
{
    added tensor = {.data = data, .dtype = dtype, .ndim = ndim};

    if (ndim > CER_STATE_MAX_DIMS ||
        !tensor_bytes(dtype, ndim, shape, &tensor.nbytes))
        return cer_fail(err, CER_STATE,
                        "the tensor at '%.*s' has more than %d dimensions or "
                        "is too large",
                        (int)path_len, path, CER_STATE_MAX_DIMS);
    if (!reserve((void **)&writer->tensors, &writer->capacity, writer->n, 1,
                 sizeof(added)) ||
        !reserve((void **)&writer->dims, &writer->dims_capacity, writer->n_dims,
                 (size_t)ndim * 2, sizeof(int64_t)))
        return cer_fail(err, CER_NOMEM,
                        "out of memory: a state cannot be packed");
    tensor.path_at = writer->paths.len;
    tensor.path_len = path_len;
    tensor.dims_at = writer->n_dims;
    cer_text_add(&writer->paths, path, path_len);
    if (ndim > 0) {
        memcpy(writer->dims + writer->n_dims, shape, ndim * sizeof(int64_t));
        memcpy(writer->dims + writer->n_dims + ndim, strides,
               ndim * sizeof(int64_t));
    }
    writer->n_dims += (size_t)ndim * 2;
    writer->tensors[writer->n++] = tensor;
    return CER_OK;
}

/* NULL for a scalar: if all tensors are scalars, dims was never allocated. */
static const int64_t *
shape_of(const cer_state_writer *writer, const added *tensor)
{
    return tensor->ndim == 0 ? NULL : writer->dims + tensor->dims_at;
}

static const int64_t *
strides_of(const cer_state_writer *writer, const added *tensor)
{
    return tensor->ndim == 0 ? NULL
                             : writer->dims + tensor->dims_at + tensor->ndim;
}

cer_status
cer_state_writer_check(const cer_state_writer *writer, size_t i,
                       cer_dtype dtype, uint32_t ndim, const int64_t *shape,
                       const int64_t *strides, const void *data, cer_error *err)
{
    const added *tensor = &writer->tensors[i];
    size_t size = ndim * sizeof *shape;

    if (tensor->dtype == dtype && tensor->ndim == ndim &&
        tensor->data == data &&
        (ndim == 0 || (memcmp(shape_of(writer, tensor), shape, size) == 0 &&
                       memcmp(strides_of(writer, tensor), strides, size) == 0)))
        return CER_OK;
    return cer_fail(
        err, CER_STATE,
        "the memory of the tensor at '%.*s' was replaced while the "
        "state was read: do not resize or change tensors "
        "meanwhile, in another thread or in methods of a tensor",
        (int)tensor->path_len,
        tensor->path_len == 0 ? "" : writer->paths.bytes + tensor->path_at);
}

static cer_status
sort_paths(cer_state_writer *writer, cer_error *err)
{
    for (size_t i = 0; i < writer->n; i++) {
        const added *tensor = &writer->tensors[i];

        /* All paths may be empty and their text not allocated. */
        writer->keys[i].path =
            tensor->path_len == 0 ? "" : writer->paths.bytes + tensor->path_at;
        writer->keys[i].len = tensor->path_len;
        writer->keys[i].index = i;
    }
    if (writer->n > 1)
        qsort(writer->keys, writer->n, sizeof(path_key), compare_keys);
    for (size_t i = 1; i < writer->n; i++) {
        if (compare_keys(&writer->keys[i - 1], &writer->keys[i]) == 0)
            return cer_fail(err, CER_STATE,
                            "two tensors of the state have the path '%.*s': "
                            "rename the key of one",
                            (int)writer->keys[i].len, writer->keys[i].path);
    }
    return CER_OK;
}

/* Places the tensors, those with the largest elements first, and prepares their
 * copies. *data_bytes is the total length. */
static cer_status
place_tensors(cer_state_writer *writer, size_t *data_bytes, cer_error *err)
{
    size_t n_copies = 0;

    *data_bytes = 0;
    for (size_t item = 8; item > 0; item /= 2) {
        for (size_t i = 0; i < writer->n; i++) {
            added *tensor = &writer->tensors[writer->keys[i].index];

            if (cer_dtype_size(tensor->dtype) != item)
                continue;
            tensor->offset = *data_bytes;
            if (!cer_add_size(*data_bytes, tensor->nbytes, data_bytes))
                return cer_fail(err, CER_STATE, "the state is too large");
            writer->copies[n_copies++] = (cer_copy){
                .strided = (uint8_t *)(uintptr_t)tensor->data,
                .nbytes = tensor->nbytes,
                .item = item,
                .ndim = tensor->ndim,
                .shape = shape_of(writer, tensor),
                .strides = strides_of(writer, tensor),
            };
        }
    }
    return CER_OK;
}

static void
add_entry(cer_text *header, const cer_state_writer *writer, const path_key *key)
{
    const added *tensor = &writer->tensors[key->index];
    const int64_t *shape = shape_of(writer, tensor);

    cer_text_add_char(header, ',');
    cer_json_add_string(header, key->path, key->len);
    cer_text_add_cstr(header, ":{\"dtype\":\"");
    cer_text_add_cstr(header, cer_dtype_safetensors(tensor->dtype));
    cer_text_add_cstr(header, "\",\"shape\":[");
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        if (i > 0)
            cer_text_add_char(header, ',');
        cer_text_add_i64(header, shape[i]);
    }
    cer_text_add_cstr(header, "],\"data_offsets\":[");
    cer_text_add_u64(header, tensor->offset);
    cer_text_add_char(header, ',');
    cer_text_add_u64(header, tensor->offset + tensor->nbytes);
    cer_text_add_cstr(header, "]}");
}

static void
put_u64(char *to, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        to[i] = (char)(value >> (8 * i));
}

/* The start of the data after a header that ends at `len`. */
static size_t
data_start(size_t len)
{
    size_t step = len > 4096 ? 4096 : CER_STATE_ALIGNMENT;

    return (len + step - 1) & ~(step - 1);
}

static cer_status
write_header(cer_state_writer *writer, const char *structure,
             size_t structure_len, cer_error *err)
{
    cer_text *header = &writer->header;

    cer_text_add(header, "\0\0\0\0\0\0\0\0", 8);
    cer_text_add_cstr(header, "{\"" METADATA "\":{\"" STRUCTURE_KEY "\":");
    cer_json_add_string(header, structure, structure_len);
    cer_text_add_char(header, '}');
    for (size_t i = 0; i < writer->n; i++)
        add_entry(header, writer, &writer->keys[i]);
    cer_text_add_char(header, '}');
    if (!header->failed) {
        for (size_t fill = data_start(header->len) - header->len; fill > 0;
             fill--)
            cer_text_add_char(header, ' ');
    }
    if (header->failed)
        return cer_fail(err, CER_NOMEM,
                        "out of memory: a state cannot be packed");
    if (header->len - 8 > CER_STATE_MAX_HEADER)
        return cer_fail(err, CER_STATE,
                        "values other than tensors make the state's header %zu "
                        "bytes long, more than %d: put large lists of numbers "
                        "into arrays",
                        header->len - 8, CER_STATE_MAX_HEADER);
    put_u64(header->bytes, header->len - 8);
    return CER_OK;
}

cer_status
cer_state_writer_finish(cer_state_writer *writer, const char *structure,
                        size_t structure_len, size_t *nbytes, cer_error *err)
{
    size_t data_bytes;
    cer_status status;

    if (writer->n > 0) {
        writer->keys = cer_calloc(writer->n, sizeof(path_key));
        writer->copies = cer_calloc(writer->n, sizeof(cer_copy));
        if (writer->keys == NULL || writer->copies == NULL ||
            writer->paths.failed)
            return cer_fail(err, CER_NOMEM,
                            "out of memory: a state cannot be packed");
    }
    status = sort_paths(writer, err);
    if (status == CER_OK)
        status = place_tensors(writer, &data_bytes, err);
    if (status == CER_OK)
        status = write_header(writer, structure, structure_len, err);
    if (status == CER_OK &&
        !cer_add_size(writer->header.len, data_bytes, nbytes))
        status = cer_fail(err, CER_STATE, "the state is too large");
    return status;
}

void
cer_state_writer_write(cer_state_writer *writer, uint8_t *to)
{
    size_t offset = writer->header.len;

    memcpy(to, writer->header.bytes, writer->header.len);
    for (size_t i = 0; i < writer->n; i++) { /* in the order of their places */
        writer->copies[i].dense = to + offset;
        offset += writer->copies[i].nbytes;
    }
    cer_copy_all(writer->copies, writer->n, CER_COPY_TO_DENSE, 0);
}

size_t
cer_state_writer_find(const cer_state_writer *writer, const char *path,
                      size_t path_len)
{
    return find_key(writer->keys, writer->n, path, path_len);
}

/* --- reading ------------------------------------------------------------- */
typedef struct parsed {
    size_t path_at, path_len; /* in memory.text */
    size_t dims_at;
    size_t begin, end; /* in the header; from the start of the data */
    cer_dtype dtype;
    uint32_t ndim;
} parsed;

typedef struct memory {
    cer_state_tensor *tensors;
    int64_t *dims;
    char *text; /* as long as the header: paths and structure, unescaped */
} memory;

typedef struct parser {
    cer_json_reader json;
    const char *name;
    cer_error *err;
    memory *memory;
    parsed *tensors;
    size_t n, capacity, n_dims, dims_capacity, text_len;
    size_t structure_at, structure_len;
    bool has_structure;
} parser;

static cer_status
corrupt(const parser *p, const char *what)
{
    return cer_fail(p->err, CER_CORRUPT, "%s is corrupt: %s", p->name, what);
}

static cer_status
no_memory(const parser *p)
{
    return cer_fail(p->err, CER_NOMEM, "out of memory reading %s", p->name);
}

/* Reads the next token; CER_CORRUPT unless it is of that kind. */
static cer_status
expect(parser *p, cer_json_kind kind, cer_json_token *token, const char *what)
{
    if (cer_json_next(&p->json, token) == kind)
        return CER_OK;
    return corrupt(p, token->kind == CER_JSON_INVALID ? p->json.problem : what);
}

/* Stores the text of a key or string; the memory always suffices. */
static cer_status
keep_text(parser *p, const cer_json_token *token, size_t *at, size_t *len)
{
    *at = p->text_len;
    *len = cer_json_unescape(token, p->memory->text + p->text_len);
    if (*len == SIZE_MAX)
        return corrupt(p, "a name in its header is not text");
    p->text_len += *len;
    return CER_OK;
}

static cer_status
parse_metadata(parser *p)
{
    cer_json_token token;
    cer_status status = expect(p, CER_JSON_OBJECT, &token, "bad metadata");
    bool ours;

    while (status == CER_OK &&
           cer_json_next(&p->json, &token) == CER_JSON_KEY) {
        ours = cer_json_is(&token, STRUCTURE_KEY);
        if (ours && p->has_structure)
            return corrupt(p, "two structures in its header");
        status = expect(p, CER_JSON_STRING, &token, "bad metadata");
        if (status == CER_OK && ours) {
            p->has_structure = true;
            status = keep_text(p, &token, &p->structure_at, &p->structure_len);
        }
    }
    if (status == CER_OK && token.kind != CER_JSON_OBJECT_END)
        status = corrupt(p, "bad metadata");
    return status;
}

static cer_status
parse_shape(parser *p, parsed *tensor)
{
    cer_json_token token;
    cer_status status = expect(p, CER_JSON_ARRAY, &token, "bad shape");

    if (status != CER_OK)
        return status;
    tensor->dims_at = p->n_dims;
    tensor->ndim = 0;
    while (cer_json_next(&p->json, &token) == CER_JSON_NUMBER) {
        int64_t dim;

        if (tensor->ndim == CER_STATE_MAX_DIMS || !cer_json_i64(&token, &dim) ||
            dim < 0)
            return corrupt(p, "bad shape");
        if (!reserve((void **)&p->memory->dims, &p->dims_capacity, p->n_dims, 1,
                     sizeof(int64_t)))
            return no_memory(p);
        p->memory->dims[p->n_dims++] = dim;
        tensor->ndim++;
    }
    return token.kind == CER_JSON_ARRAY_END ? CER_OK : corrupt(p, "bad shape");
}

static cer_status
parse_offset(parser *p, size_t *out)
{
    cer_json_token token;
    uint64_t value;
    cer_status status = expect(p, CER_JSON_NUMBER, &token, "bad offsets");

    if (status != CER_OK)
        return status;
    if (!cer_json_u64(&token, &value) || value > SIZE_MAX)
        return corrupt(p, "bad offsets");
    *out = (size_t)value;
    return CER_OK;
}

static cer_status
parse_offsets(parser *p, parsed *tensor)
{
    cer_json_token token;
    cer_status status = expect(p, CER_JSON_ARRAY, &token, "bad offsets");

    if (status == CER_OK)
        status = parse_offset(p, &tensor->begin);
    if (status == CER_OK)
        status = parse_offset(p, &tensor->end);
    if (status == CER_OK)
        status = expect(p, CER_JSON_ARRAY_END, &token, "bad offsets");
    return status;
}

static cer_status
parse_dtype(parser *p, parsed *tensor)
{
    cer_json_token token;
    char name[8] = "";
    cer_status status = expect(p, CER_JSON_STRING, &token, "bad dtype");

    if (status != CER_OK)
        return status;
    if (token.len < sizeof name)
        memcpy(name, token.text, token.len);
    if (!cer_dtype_from_safetensors(name, &tensor->dtype))
        return corrupt(p, "unknown dtype");
    return CER_OK;
}

/* Parses a tensor's three members, each once, in any order. */
static cer_status
parse_members(parser *p, parsed *tensor)
{
    cer_json_token token;
    unsigned seen = 0;
    cer_status status = expect(p, CER_JSON_OBJECT, &token, "bad tensor");

    while (status == CER_OK &&
           cer_json_next(&p->json, &token) == CER_JSON_KEY) {
        unsigned member = cer_json_is(&token, "dtype")          ? 1
                          : cer_json_is(&token, "shape")        ? 2
                          : cer_json_is(&token, "data_offsets") ? 4
                                                                : 0;

        if (member == 0 || (seen & member) != 0)
            return corrupt(p, "unknown or repeated member of a tensor");
        seen |= member;
        status = member == 1   ? parse_dtype(p, tensor)
                 : member == 2 ? parse_shape(p, tensor)
                               : parse_offsets(p, tensor);
    }
    if (status == CER_OK && (token.kind != CER_JSON_OBJECT_END || seen != 7))
        status = corrupt(p, "bad tensor");
    return status;
}

static cer_status
parse_tensor(parser *p, const cer_json_token *key)
{
    parsed tensor = {0};
    size_t nbytes;
    cer_status status = keep_text(p, key, &tensor.path_at, &tensor.path_len);

    if (status == CER_OK)
        status = parse_members(p, &tensor);
    if (status != CER_OK)
        return status;
    if (!tensor_bytes(tensor.dtype, tensor.ndim,
                      tensor.ndim == 0 ? NULL
                                       : p->memory->dims + tensor.dims_at,
                      &nbytes) ||
        tensor.end < tensor.begin || tensor.end - tensor.begin != nbytes)
        return corrupt(p, "a tensor's shape does not match its offsets");
    if (!reserve((void **)&p->tensors, &p->capacity, p->n, 1, sizeof(parsed)))
        return no_memory(p);
    p->tensors[p->n++] = tensor;
    return CER_OK;
}

static cer_status
parse_header(parser *p)
{
    cer_json_token token;
    bool metadata = false;
    cer_status status =
        expect(p, CER_JSON_OBJECT, &token, "its header is not a JSON object");

    while (status == CER_OK &&
           cer_json_next(&p->json, &token) == CER_JSON_KEY) {
        if (!cer_json_is(&token, METADATA)) {
            status = parse_tensor(p, &token);
        } else if (metadata) {
            status = corrupt(p, "two metadata in its header");
        } else {
            metadata = true;
            status = parse_metadata(p);
        }
    }
    if (status == CER_OK && token.kind != CER_JSON_OBJECT_END)
        status = corrupt(p, token.kind == CER_JSON_INVALID ? p->json.problem
                                                           : "bad header");
    if (status == CER_OK)
        status = expect(p, CER_JSON_END, &token, "bad header");
    if (status == CER_OK && !p->has_structure)
        status = corrupt(p, "it has no \"" STRUCTURE_KEY "\" metadata; was it "
                            "written by something else?");
    return status;
}

static int
compare_places(const void *a, const void *b)
{
    const parsed *x = a, *y = b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Sorts with qsort unless the items are already in order, as is common. */
static void
sort(void *items, size_t n, size_t size,
     int (*compare)(const void *, const void *))
{
    const char *at = items;

    for (size_t i = 1; i < n; i++, at += size) {
        if (compare(at, at + size) > 0) {
            qsort(items, n, size, compare);
            return;
        }
    }
}

/* The tensors must cover the data from end to end, without overlap. */
static cer_status
check_places(parser *p, size_t data_bytes)
{
    size_t at = 0;

    sort(p->tensors, p->n, sizeof(parsed), compare_places);
    for (size_t i = 0; i < p->n; i++) {
        if (p->tensors[i].begin != at)
            return corrupt(p, "its tensors overlap or leave a hole");
        at = p->tensors[i].end;
    }
    if (at != data_bytes)
        return corrupt(p, "its length does not match its header");
    return CER_OK;
}

static int
compare_tensors(const void *a, const void *b)
{
    const cer_state_tensor *x = a, *y = b;

    return compare_paths(x->path, x->path_len, y->path, y->path_len);
}

/* Makes the result's tensors from the parsed ones, sorted by path. */
static cer_status
make_tensors(parser *p, const uint8_t *data)
{
    cer_state_tensor *tensors;

    if (p->n == 0)
        return CER_OK;
    p->memory->tensors = tensors = cer_calloc(p->n, sizeof(cer_state_tensor));
    if (tensors == NULL)
        return no_memory(p);
    for (size_t i = 0; i < p->n; i++) {
        const parsed *from = &p->tensors[i];

        tensors[i].path = p->memory->text + from->path_at;
        tensors[i].path_len = from->path_len;
        tensors[i].dtype = from->dtype;
        tensors[i].ndim = from->ndim;
        if (from->ndim > 0)
            tensors[i].shape = p->memory->dims + from->dims_at;
        tensors[i].data = data + from->begin;
        tensors[i].nbytes = from->end - from->begin;
    }
    sort(tensors, p->n, sizeof(cer_state_tensor), compare_tensors);
    for (size_t i = 1; i < p->n; i++) {
        if (compare_tensors(&tensors[i - 1], &tensors[i]) == 0)
            return corrupt(p, "two tensors have the same name");
    }
    return CER_OK;
}

static uint64_t
get_u64(const uint8_t *from)
{
    uint64_t value = 0;

    for (int i = 7; i >= 0; i--)
        value = value << 8 | from[i];
    return value;
}

cer_status
cer_state_open(const uint8_t *bytes, size_t len_bytes, const char *name,
               cer_state *out, cer_error *err)
{
    memory *memory_ = NULL;
    parser p = {.name = name, .err = err};
    cer_status status;
    uint64_t header_len;

    memset(out, 0, sizeof *out);
    if (len_bytes < 8)
        return corrupt(&p, "too short for a header");
    header_len = get_u64(bytes);
    if (header_len < 2 || header_len > len_bytes - 8 ||
        header_len > CER_STATE_MAX_HEADER)
        return corrupt(&p, "it ends within its header");
    p.memory = memory_ = cer_calloc(1, sizeof *memory_);
    if (memory_ == NULL)
        return no_memory(&p);
    out->memory = memory_;
    memory_->text = cer_alloc((size_t)header_len);
    if (memory_->text == NULL) {
        status = no_memory(&p);
        goto done;
    }
    cer_json_init(&p.json, (const char *)bytes + 8, (size_t)header_len);
    status = parse_header(&p);
    if (status == CER_OK)
        status = check_places(&p, len_bytes - 8 - (size_t)header_len);
    if (status == CER_OK)
        status = make_tensors(&p, bytes + 8 + header_len);

done:
    cer_free(p.tensors);
    if (status == CER_OK) {
        out->tensors = memory_->tensors;
        out->n_tensors = p.n;
        out->structure = memory_->text + p.structure_at;
        out->structure_len = p.structure_len;
    } else {
        cer_state_close(out);
    }
    return status;
}

void
cer_state_close(cer_state *state)
{
    memory *memory_ = state->memory;

    if (memory_ != NULL) {
        cer_free(memory_->tensors);
        cer_free(memory_->dims);
        cer_free(memory_->text);
        cer_free(memory_);
    }
    memset(state, 0, sizeof *state);
}

const cer_state_tensor *
cer_state_find(const cer_state *state, const char *path, size_t path_len)
{
    cer_state_tensor wanted = {.path = path, .path_len = path_len};

    if (state->n_tensors == 0)
        return NULL;
    return bsearch(&wanted, state->tensors, state->n_tensors,
                   sizeof(cer_state_tensor), compare_tensors);
}

/* --- writing back -------------------------------------------------------- */

static uint64_t
magnitude(int64_t stride)
{
    return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
}

/* Whether no two elements share memory: each stride exceeds the reach of all
 * smaller ones. Rejects a few unusual valid layouts but never accepts an
 * invalid one. */
static bool
elements_are_apart(size_t item, uint32_t ndim, const int64_t *shape,
                   const int64_t *strides)
{
    for (uint32_t i = 0; i < ndim; i++) {
        uint64_t step = magnitude(strides[i]), reach = item;

        if (shape[i] < 2)
            continue;
        for (uint32_t j = 0; j < ndim; j++) {
            if (j != i && shape[j] > 1 && magnitude(strides[j]) <= step)
                reach += magnitude(strides[j]) * (uint64_t)(shape[j] - 1);
        }
        if (step < reach)
            return false;
    }
    return true;
}

static bool
tensor_fits(const cer_state_tensor *tensor, const cer_state_writer *writer,
            const path_key *key)
{
    const added *live = &writer->tensors[key->index];
    const int64_t *shape = shape_of(writer, live);

    if (compare_paths(tensor->path, tensor->path_len, key->path, key->len) != 0)
        return false;
    if (tensor->dtype != live->dtype || tensor->ndim != live->ndim)
        return false;
    for (uint32_t i = 0; i < live->ndim; i++) {
        if (tensor->shape[i] != shape[i])
            return false;
    }
    return live->nbytes == 0 ||
           elements_are_apart(cer_dtype_size(live->dtype), live->ndim, shape,
                              strides_of(writer, live));
}

bool
cer_state_fits(const cer_state *state, const cer_state_writer *writer)
{
    if (state->n_tensors != writer->n)
        return false;
    for (size_t i = 0; i < writer->n; i++) {
        if (!tensor_fits(&state->tensors[i], writer, &writer->keys[i]))
            return false;
    }
    return true;
}

void
cer_state_copy_into(const cer_state *state, cer_state_writer *writer)
{
    for (size_t i = 0; i < writer->n; i++) {
        const added *live = &writer->tensors[writer->keys[i].index];

        writer->copies[i] = (cer_copy){
            .dense = (uint8_t *)(uintptr_t)state->tensors[i].data,
            .strided = (uint8_t *)(uintptr_t)live->data,
            .nbytes = live->nbytes,
            .item = cer_dtype_size(live->dtype),
            .ndim = live->ndim,
            .shape = shape_of(writer, live),
            .strides = strides_of(writer, live),
        };
    }
    cer_copy_all(writer->copies, writer->n, CER_COPY_FROM_DENSE, 0);
}
