/* py_unpack.c -- rebuilds the nested Python value of a state. Reads the
 * structure, which must have exactly the form written by py_pack.c, and creates
 * each tensor that it names, or finds the live one. */
#define NO_IMPORT_ARRAY
#include "py_unpack.h"

#include <math.h>
#include <numpy/arrayobject.h>
#include <string.h>

#include "json.h"

typedef struct unpacker {
    core_state *core;
    const cer_state *state;
    const char *name; /* for errors */
    py_packed *live;  /* NULL: make new tensors */
    const char *only; /* a key of the root: build only its value */
    bool misfit;      /* the live tensors do not match the structure */
    cer_json_reader json;
    cer_text path;
    bool *used; /* for each tensor of the state */
    size_t n_used;
    size_t next; /* the tensor expected next */
    py_importer importer;
} unpacker;

static PyObject *build_value(unpacker *u, const cer_json_token *token);

/* --- errors and tokens --------------------------------------------------- */
static PyObject *
corrupt(unpacker *u, const char *what)
{
    PyErr_Format(u->core->CorruptDataError, "%s is corrupt: %s", u->name, what);
    return NULL;
}

static int
expect(unpacker *u, cer_json_kind kind, cer_json_token *token)
{
    if (cer_json_next(&u->json, token) == kind)
        return 0;
    corrupt(u, token->kind == CER_JSON_INVALID ? u->json.problem
                                               : "unexpected structure");
    return -1;
}

static int
expect_key(unpacker *u, const char *key)
{
    cer_json_token token;

    if (expect(u, CER_JSON_KEY, &token) < 0)
        return -1;
    if (cer_json_is(&token, key))
        return 0;
    corrupt(u, "unexpected structure");
    return -1;
}

/* Makes a str of a key or string. */
static PyObject *
text_of(unpacker *u, const cer_json_token *token)
{
    PyObject *result = NULL;
    char *plain;
    size_t len;

    if (!token->escaped)
        return PyUnicode_DecodeUTF8(token->text, (Py_ssize_t)token->len, NULL);
    plain = PyMem_Malloc(token->len);
    if (plain == NULL)
        return PyErr_NoMemory();
    len = cer_json_unescape(token, plain);
    if (len == SIZE_MAX)
        corrupt(u, "a string in its structure is not valid text");
    else
        result = PyUnicode_DecodeUTF8(plain, (Py_ssize_t)len, NULL);
    PyMem_Free(plain);
    return result;
}

/* --- paths --------------------------------------------------------------- */
static int
push_string(unpacker *u, PyObject *string)
{
    Py_ssize_t len;
    const char *utf8 = PyUnicode_AsUTF8AndSize(string, &len);

    if (utf8 == NULL)
        return -1;
    cer_text_add_char(&u->path, '/');
    cer_json_add_pointer(&u->path, utf8, (size_t)len);
    return 0;
}

/* --- tensors ------------------------------------------------------------- */
static PyObject *
find_live(unpacker *u, py_kind kind)
{
    size_t i =
        cer_state_writer_find(u->live->writer, u->path.bytes, u->path.len);

    if (i == SIZE_MAX || u->live->tensors[i].kind != kind) {
        u->misfit = true;
        Py_RETURN_NONE;
    }
    return Py_NewRef(u->live->tensors[i].object);
}

/* Finds the tensor of the current path, which is usually the next one. */
static const cer_state_tensor *
find_tensor(unpacker *u)
{
    const cer_state_tensor *next = u->state->tensors + u->next;

    if (u->next >= u->state->n_tensors || next->path_len != u->path.len ||
        (u->path.len > 0 && /* the root's path is empty, possibly NULL */
         memcmp(next->path, u->path.bytes, u->path.len) != 0))
        next = cer_state_find(u->state, u->path.bytes, u->path.len);
    if (next != NULL)
        u->next = (size_t)(next - u->state->tensors) + 1;
    return next;
}

static PyObject *
build_tensor(unpacker *u, py_kind kind)
{
    const cer_state_tensor *tensor = find_tensor(u);
    size_t i;

    if (u->path.failed)
        return PyErr_NoMemory();
    if (tensor == NULL)
        return corrupt(u, "its structure names a tensor that does not exist");
    i = (size_t)(tensor - u->state->tensors);
    if (u->used[i])
        return corrupt(u, "its structure names a tensor twice");
    u->used[i] = true;
    u->n_used++;
    if (u->live != NULL)
        return find_live(u, kind);
    return py_import_tensor(&u->importer, tensor, kind);
}

/* --- scalars ------------------------------------------------------------- */
static PyObject *
build_number(unpacker *u, const cer_json_token *token)
{
    char text[64];
    int64_t integer;
    double value;

    if (cer_json_i64(token, &integer))
        return PyLong_FromLongLong(integer);
    if (token->len >= sizeof text || memchr(token->text, '.', token->len) ==
                                         memchr(token->text, 'e', token->len))
        return corrupt(u, "a number in its structure is out of range");
    memcpy(text, token->text, token->len);
    text[token->len] = '\0';
    value = PyOS_string_to_double(text, NULL, NULL);
    if (value == -1.0 && PyErr_Occurred())
        return NULL;
    if (!isfinite(value))
        return corrupt(u, "a number in its structure is out of range");
    return PyFloat_FromDouble(value);
}

static PyObject *
build_special_float(unpacker *u)
{
    cer_json_token token;

    if (expect_key(u, "v") < 0 || expect(u, CER_JSON_STRING, &token) < 0)
        return NULL;
    if (cer_json_is(&token, "nan"))
        return PyFloat_FromDouble((double)NAN);
    if (cer_json_is(&token, "inf"))
        return PyFloat_FromDouble((double)INFINITY);
    if (cer_json_is(&token, "-inf"))
        return PyFloat_FromDouble(-(double)INFINITY);
    return corrupt(u, "an unknown float in its structure");
}

static PyObject *
build_long_int(unpacker *u)
{
    cer_json_token token;
    PyObject *text, *result = NULL;

    if (expect_key(u, "v") < 0 || expect(u, CER_JSON_STRING, &token) < 0)
        return NULL;
    text = text_of(u, &token);
    if (text == NULL)
        return NULL;
    result = PyLong_FromUnicodeObject(text, 16);
    if (result == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        corrupt(u, "a broken integer in its structure");
    }
    Py_DECREF(text);
    return result;
}

static int
hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* Decodes the next string, hexadecimal, to bytes. */
static PyObject *
build_bytes(unpacker *u)
{
    cer_json_token token;
    PyObject *bytes;
    char *to;

    if (expect_key(u, "v") < 0 || expect(u, CER_JSON_STRING, &token) < 0)
        return NULL;
    if (token.len % 2 != 0)
        return corrupt(u, "broken bytes in its structure");
    bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(token.len / 2));
    if (bytes == NULL)
        return NULL;
    to = PyBytes_AS_STRING(bytes);
    for (size_t i = 0; i < token.len; i += 2) {
        int high = hex_digit(token.text[i]), low = hex_digit(token.text[i + 1]);

        if (high < 0 || low < 0) {
            Py_DECREF(bytes);
            return corrupt(u, "broken bytes in its structure");
        }
        *to++ = (char)(high << 4 | low);
    }
    return bytes;
}

static PyObject *
build_numpy_scalar(unpacker *u)
{
    cer_json_token token;
    char name[16] = "";
    cer_dtype dtype;
    PyObject *bytes, *result = NULL;
    PyArray_Descr *descr;

    if (expect_key(u, "dtype") < 0 || expect(u, CER_JSON_STRING, &token) < 0)
        return NULL;
    if (token.len < sizeof name)
        memcpy(name, token.text, token.len);
    if (!cer_dtype_from_name(name, &dtype) || dtype == CER_BF16)
        return corrupt(u, "an unknown dtype in its structure");
    bytes = build_bytes(u);
    if (bytes == NULL)
        return NULL;
    if ((size_t)PyBytes_GET_SIZE(bytes) != cer_dtype_size(dtype)) {
        corrupt(u, "a broken scalar in its structure");
    } else if ((descr = py_import_descr(dtype)) != NULL) {
        result = PyArray_Scalar(PyBytes_AS_STRING(bytes), descr, NULL);
        Py_DECREF(descr);
    }
    Py_DECREF(bytes);
    return result;
}

/* --- containers ---------------------------------------------------------- */
static PyObject *
build_list(unpacker *u)
{
    PyObject *list = PyList_New(0);
    size_t path_len = u->path.len;
    cer_json_token token;

    while (list != NULL &&
           cer_json_next(&u->json, &token) != CER_JSON_ARRAY_END) {
        PyObject *item;

        cer_text_add_char(&u->path, '/');
        cer_text_add_u64(&u->path, (uint64_t)PyList_GET_SIZE(list));
        item = build_value(u, &token);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
        u->path.len = path_len;
    }
    return list;
}

/* Reads the array under "v" as a list. */
static PyObject *
build_listed(unpacker *u)
{
    cer_json_token token;

    if (expect_key(u, "v") < 0 || expect(u, CER_JSON_ARRAY, &token) < 0)
        return NULL;
    return build_list(u);
}

static PyObject *
build_tuple(unpacker *u)
{
    PyObject *list = build_listed(u);
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);

    Py_XDECREF(list);
    return tuple;
}

/* module.name(*args); new reference. */
static PyObject *
call(const char *module_name, const char *name, PyObject *argument)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *result = NULL, *callable;

    if (module == NULL)
        return NULL;
    callable = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    if (callable == NULL)
        return NULL;
    result = argument == NULL ? PyObject_CallNoArgs(callable)
                              : PyObject_CallOneArg(callable, argument);
    Py_DECREF(callable);
    return result;
}

static bool
are_ints(PyObject *tuple)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        if (!PyLong_CheckExact(PyTuple_GET_ITEM(tuple, i)))
            return false;
    }
    return true;
}

/* torch.Size if torch is installed, else a tuple. Only of integers: torch.Size
 * would also accept a tensor, read it before it is filled, and drop it. */
static PyObject *
build_size(unpacker *u)
{
    PyObject *tuple = build_tuple(u);
    PyObject *size = NULL;

    if (tuple == NULL)
        return NULL;
    if (!are_ints(tuple))
        corrupt(u, "a broken size in its structure");
    else if (py_import_torch(&u->importer) == 0)
        size = u->importer.has_torch ? call("torch", "Size", tuple)
                                     : Py_NewRef(tuple);
    Py_DECREF(tuple);
    return size;
}

/* Adds to a dict or a dict subclass; a duplicate key is an error. */
static int
add_item(unpacker *u, PyObject *dict, PyObject *key, PyObject *value)
{
    Py_ssize_t before = PyDict_GET_SIZE(dict);
    int failed = PyDict_CheckExact(dict) ? PyDict_SetItem(dict, key, value)
                                         : PyObject_SetItem(dict, key, value);

    if (!failed && PyDict_GET_SIZE(dict) > before)
        return 0;
    if (!failed)
        corrupt(u, "a duplicate key in one dict");
    else if (PyErr_ExceptionMatches(PyExc_TypeError)) /* not hashable */
        corrupt(u, "a list or dict as a key in its structure");
    return -1;
}

/* Reads a plain dict from its first member on. */
static PyObject *
build_plain_dict(unpacker *u, cer_json_token *token)
{
    PyObject *dict = PyDict_New();
    size_t path_len = u->path.len;

    while (dict != NULL && token->kind == CER_JSON_KEY) {
        PyObject *key = text_of(u, token), *value = NULL;

        if (key != NULL && push_string(u, key) == 0) {
            cer_json_next(&u->json, token);
            value = build_value(u, token);
        }
        if (value == NULL || add_item(u, dict, key, value) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(value);
        u->path.len = path_len;
        if (dict != NULL)
            cer_json_next(&u->json, token);
    }
    if (dict != NULL && token->kind != CER_JSON_OBJECT_END) {
        Py_CLEAR(dict);
        corrupt(u, "unexpected structure");
    }
    return dict;
}

/* Reads the rest of a pair after its '[': key, value and ']'. */
static int
build_pair(unpacker *u, PyObject *dict, const cer_json_token *prefix)
{
    size_t path_len = u->path.len;
    cer_json_token token;
    const char *from;
    PyObject *key, *value = NULL;
    int result = -1;

    from = cer_json_peek(&u->json);
    cer_json_next(&u->json, &token);
    key = build_value(u, &token);
    if (key == NULL)
        return -1;
    if (PyUnicode_Check(key)) {
        if (push_string(u, key) < 0)
            goto done;
    } else {
        cer_text_add_char(&u->path, '/');
        cer_json_add_pointer(&u->path, prefix->text, prefix->len);
        cer_json_add_pointer(&u->path, from, (size_t)(u->json.at - from));
    }
    cer_json_next(&u->json, &token);
    value = build_value(u, &token);
    if (value == NULL || add_item(u, dict, key, value) < 0 ||
        expect(u, CER_JSON_ARRAY_END, &token) < 0)
        goto done;
    result = 0;

done:
    Py_DECREF(key);
    Py_XDECREF(value);
    u->path.len = path_len;
    return result;
}

/* Fills `dict` (steals the reference) from [[key, value], ...]. */
static PyObject *
build_pairs(unpacker *u, PyObject *dict)
{
    cer_json_token token, prefix = {.text = ""};

    if (dict == NULL || expect(u, CER_JSON_KEY, &token) < 0)
        goto failed;
    if (cer_json_is(&token, "p")) {
        if (expect(u, CER_JSON_STRING, &prefix) < 0 ||
            expect(u, CER_JSON_KEY, &token) < 0)
            goto failed;
    }
    if (!cer_json_is(&token, "v")) {
        corrupt(u, "unexpected structure");
        goto failed;
    }
    if (expect(u, CER_JSON_ARRAY, &token) < 0)
        goto failed;
    while (cer_json_next(&u->json, &token) == CER_JSON_ARRAY) {
        if (build_pair(u, dict, &prefix) < 0)
            goto failed;
    }
    if (token.kind == CER_JSON_ARRAY_END)
        return dict;
    corrupt(u, "unexpected structure");

failed:
    Py_XDECREF(dict);
    return NULL;
}

/* --- any value ----------------------------------------------------------- */

/* Reads what follows {"$": tag, without the closing brace. */
static PyObject *
build_tagged(unpacker *u, const cer_json_token *tag)
{
    py_kind kind = py_kind_of_name(tag->text, tag->len);

    if (kind != PY_KIND_NONE)
        return build_tensor(u, kind);
    if (cer_json_is(tag, "tuple"))
        return build_tuple(u);
    if (cer_json_is(tag, "dict"))
        return build_pairs(u, PyDict_New());
    if (cer_json_is(tag, "ordered"))
        return build_pairs(u, call("collections", "OrderedDict", NULL));
    if (cer_json_is(tag, "counter"))
        return build_pairs(u, call("collections", "Counter", NULL));
    if (cer_json_is(tag, "float"))
        return build_special_float(u);
    if (cer_json_is(tag, "int"))
        return build_long_int(u);
    if (cer_json_is(tag, "bytes"))
        return build_bytes(u);
    if (cer_json_is(tag, "scalar"))
        return build_numpy_scalar(u);
    if (cer_json_is(tag, "size"))
        return build_size(u);
    return corrupt(u, "an unknown tag in its structure");
}

static PyObject *
build_object(unpacker *u)
{
    cer_json_token token;
    PyObject *value;

    if (cer_json_next(&u->json, &token) != CER_JSON_KEY ||
        !cer_json_is(&token, "$"))
        return build_plain_dict(u, &token);
    if (expect(u, CER_JSON_STRING, &token) < 0)
        return NULL;
    value = build_tagged(u, &token);
    if (value != NULL && expect(u, CER_JSON_OBJECT_END, &token) < 0)
        Py_CLEAR(value);
    return value;
}

static PyObject *
build_value(unpacker *u, const cer_json_token *token)
{
    switch (token->kind) {
    case CER_JSON_OBJECT:
        return build_object(u);
    case CER_JSON_ARRAY:
        return build_list(u);
    case CER_JSON_STRING:
        return text_of(u, token);
    case CER_JSON_NUMBER:
        return build_number(u, token);
    case CER_JSON_TRUE:
        Py_RETURN_TRUE;
    case CER_JSON_FALSE:
        Py_RETURN_FALSE;
    case CER_JSON_NULL:
        Py_RETURN_NONE;
    case CER_JSON_INVALID:
        return corrupt(u, u->json.problem);
    default:
        return corrupt(u, "unexpected structure");
    }
}

/* Reads the value under u->only in the root, a dict. Skips the members before
 * it and does not read those after it. */
static PyObject *
build_member(unpacker *u)
{
    cer_json_token token;

    if (expect(u, CER_JSON_OBJECT, &token) < 0)
        return NULL;
    while (cer_json_next(&u->json, &token) == CER_JSON_KEY) {
        bool found = cer_json_is(&token, u->only);
        uint32_t depth = u->json.depth;

        cer_json_next(&u->json, &token);
        if (found) {
            cer_text_add_char(&u->path, '/');
            cer_json_add_pointer(&u->path, u->only, strlen(u->only));
            return build_value(u, &token);
        }
        while (u->json.depth > depth && token.kind != CER_JSON_INVALID)
            cer_json_next(&u->json, &token);
    }
    return corrupt(u, token.kind == CER_JSON_INVALID
                          ? u->json.problem
                          : "its structure lacks the requested key");
}

/* Reads the whole structure, which must use every tensor once. */
static PyObject *
build_root(unpacker *u)
{
    cer_json_token token;
    PyObject *value;

    cer_json_init(&u->json, u->state->structure, u->state->structure_len);
    if (u->only != NULL)
        return build_member(u);
    cer_json_next(&u->json, &token);
    value = build_value(u, &token);
    if (value == NULL)
        return NULL;
    if (expect(u, CER_JSON_END, &token) < 0) {
        Py_CLEAR(value);
    } else if (u->n_used != u->state->n_tensors) {
        corrupt(u, "it has a tensor that its structure does not name");
        Py_CLEAR(value);
    }
    return value;
}

static PyObject *
build_all(unpacker *u)
{
    size_t n = u->state->n_tensors;
    PyObject *value;
    int collects;

    u->used = PyMem_Calloc(n + 1, sizeof(bool));
    if (u->used == NULL)
        return PyErr_NoMemory();
    /* Hundreds of new objects, none of them garbage, would only trigger
     * collections that scan all other objects. */
    collects = PyGC_Disable();
    value = build_root(u);
    if (collects)
        PyGC_Enable();
    return value;
}

static void
clear(unpacker *u)
{
    PyMem_Free(u->used);
    cer_text_clear(&u->path);
    py_importer_clear(&u->importer);
}

PyObject *
py_unpack(core_state *core, const cer_state *state,
          const py_import_options *options, const char *only)
{
    unpacker u = {
        .core = core, .state = state, .name = options->name, .only = only};
    PyObject *value = NULL;

    if (py_importer_init(&u.importer, options, state->n_tensors) == 0)
        value = build_all(&u);
    if (value != NULL)
        py_importer_fill(&u.importer);
    clear(&u);
    return value;
}

PyObject *
py_unpack_into(core_state *core, const cer_state *state, const char *name,
               py_packed *live)
{
    unpacker u = {.core = core, .state = state, .name = name, .live = live};
    PyObject *value;

    if (!live->in_place || !cer_state_fits(state, live->writer))
        Py_RETURN_NONE;
    value = build_all(&u);
    if (value != NULL && u.misfit) {
        Py_SETREF(value, Py_NewRef(Py_None));
    } else if (value != NULL && py_packed_check(live, core) < 0) {
        Py_CLEAR(value);
    } else if (value != NULL) {
        Py_BEGIN_ALLOW_THREADS
        cer_state_copy_into(state, live->writer);
        Py_END_ALLOW_THREADS
    }
    clear(&u);
    return value;
}
