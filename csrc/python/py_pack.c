/* py_pack.c -- walks a nested Python value: tensors go to a cer_state_writer
 * under their paths, everything else into the structure, as JSON. */
#define NO_IMPORT_ARRAY
#include "py_pack.h"

#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>
#include <stdio.h>
#include <string.h>

#include "json.h"

typedef struct packer {
    core_state *core;
    py_packed *packed;
    py_exchange exchange;
    cer_text json;
    cer_text path;
    PyTypeObject *counter; /* collections.Counter, once needed */
    int depth;
    bool in_key; /* inside a dict's key, where tensors are not allowed */
} packer;

static int pack_value(packer *p, PyObject *value);

/* --- errors -------------------------------------------------------------- */
#define ADVICE                                                                 \
    "a state consists of tensors, arrays, numbers, strings, bytes, None, "     \
    "lists, "                                                                  \
    "tuples and dicts: convert it, or leave it out of state_dict()"
#define KEY_ADVICE "keys are made of strings, numbers, bytes, None and tuples"

/* The path for messages: "at '/net/weight'" or "at the top". */
static PyObject *
shown_path(const packer *p)
{
    PyObject *path, *shown;

    if (p->path.len == 0)
        return PyUnicode_FromString("at the top");
    path =
        PyUnicode_DecodeUTF8(p->path.bytes, (Py_ssize_t)p->path.len, "replace");
    if (path == NULL)
        return NULL;
    shown = PyUnicode_FromFormat("at '%U'", path);
    Py_DECREF(path);
    return shown;
}

static int
refuse(const packer *p, const char *what)
{
    PyObject *shown = shown_path(p);

    if (shown != NULL)
        PyErr_Format(p->core->StateError,
                     "cannot pack the state: the value %U %s", shown, what);
    Py_XDECREF(shown);
    return -1;
}

/* "set" or "torch.dtype". */
static PyObject *
type_name(PyTypeObject *type)
{
    PyObject *name = PyObject_GetAttrString((PyObject *)type, "__qualname__");
    PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
    PyObject *whole = NULL;

    if (name != NULL && module != NULL) {
        bool builtin =
            PyUnicode_Check(module) &&
            PyUnicode_CompareWithASCIIString(module, "builtins") == 0;

        whole = builtin ? Py_NewRef(name)
                        : PyUnicode_FromFormat("%S.%S", module, name);
    }
    Py_XDECREF(name);
    Py_XDECREF(module);
    return whole;
}

static int
refuse_type(const packer *p, PyObject *value)
{
    PyObject *shown = shown_path(p);
    PyObject *name = type_name(Py_TYPE(value));

    if (shown != NULL && name != NULL)
        PyErr_Format(p->core->StateError,
                     "cannot pack the state: the value %U is of type %U%s; %s",
                     shown, name, p->in_key ? ", in a key" : "",
                     p->in_key ? KEY_ADVICE : ADVICE);
    Py_XDECREF(shown);
    Py_XDECREF(name);
    return -1;
}

/* Converts the error of an unreadable tensor to a StateError. */
static int
refuse_tensor(const packer *p)
{
    PyObject *type, *reason, *traceback, *shown;

    if (!PyErr_ExceptionMatches(PyExc_Exception) ||
        PyErr_ExceptionMatches(PyExc_MemoryError))
        return -1;
    PyErr_Fetch(&type, &reason, &traceback);
    shown = shown_path(p);
    if (shown != NULL)
        PyErr_Format(p->core->StateError,
                     "cannot pack the state: the tensor %U %S", shown,
                     reason == NULL ? Py_None : reason);
    Py_XDECREF(shown);
    Py_XDECREF(type);
    Py_XDECREF(reason);
    Py_XDECREF(traceback);
    return -1;
}

/* The UTF-8 of a str, valid while the object lives; NULL with a StateError. */
static const char *
utf8_of(const packer *p, PyObject *string, size_t *len)
{
    Py_ssize_t n;
    const char *utf8 = PyUnicode_AsUTF8AndSize(string, &n);

    if (utf8 != NULL) {
        *len = (size_t)n;
    } else if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        (void)refuse(p, "is or has as its key a string with a lone surrogate, "
                        "which is not valid text");
    }
    return utf8;
}

/* --- paths --------------------------------------------------------------- */

static void
push_token(packer *p, const char *token, size_t len)
{
    cer_text_add_char(&p->path, '/');
    cer_json_add_pointer(&p->path, token, len);
}

/* --- scalars ------------------------------------------------------------- */
static int
add_tag(packer *p, const char *tag)
{
    cer_text_add_cstr(&p->json, "{\"$\":\"");
    cer_text_add_cstr(&p->json, tag);
    cer_text_add_cstr(&p->json, "\"");
    return 0;
}

static void
add_hex(packer *p, const unsigned char *bytes, size_t len)
{
    static const char hex[] = "0123456789abcdef";

    cer_text_add_char(&p->json, '"');
    for (size_t i = 0; i < len; i++) {
        cer_text_add_char(&p->json, hex[bytes[i] >> 4]);
        cer_text_add_char(&p->json, hex[bytes[i] & 15]);
    }
    cer_text_add_char(&p->json, '"');
}

/* 64-bit integers are JSON numbers. Longer ones are hexadecimal strings,
 * because other readers would round them and Python limits decimal digits. */
static int
pack_int(packer *p, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    PyObject *hex;

    if (number == -1 && PyErr_Occurred())
        return -1;
    if (!overflow) {
        cer_text_add_i64(&p->json, number);
        return 0;
    }
    hex = PyNumber_ToBase(value, 16);
    if (hex == NULL)
        return -1;
    add_tag(p, "int");
    cer_text_add_cstr(&p->json, ",\"v\":\"");
    cer_text_add_cstr(&p->json, PyUnicode_AsUTF8(hex));
    cer_text_add_cstr(&p->json, "\"}");
    Py_DECREF(hex);
    return 0;
}

/* Writes the shortest text that reads back as the same bits, with a point or an
 * exponent to distinguish it from an integer. */
static int
pack_float(packer *p, double value)
{
    char *text;

    if (value != value || value - value != 0) {
        add_tag(p, "float");
        cer_text_add_cstr(&p->json, value != value ? ",\"v\":\"nan\"}"
                                    : value > 0    ? ",\"v\":\"inf\"}"
                                                   : ",\"v\":\"-inf\"}");
        return 0;
    }
    text = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
    if (text == NULL)
        return -1;
    cer_text_add_cstr(&p->json, text);
    PyMem_Free(text);
    return 0;
}

static int
pack_string(packer *p, PyObject *value)
{
    size_t len;
    const char *utf8 = utf8_of(p, value, &len);

    if (utf8 == NULL)
        return -1;
    cer_json_add_string(&p->json, utf8, len);
    return 0;
}

static int
pack_bytes(packer *p, PyObject *value)
{
    add_tag(p, "bytes");
    cer_text_add_cstr(&p->json, ",\"v\":");
    add_hex(p, (const unsigned char *)PyBytes_AS_STRING(value),
            (size_t)PyBytes_GET_SIZE(value));
    cer_text_add_char(&p->json, '}');
    return 0;
}

static int
pack_numpy_scalar(packer *p, PyObject *value)
{
    PyArray_Descr *descr = PyArray_DescrFromScalar(value);
    unsigned char bytes[8] = {0};
    cer_dtype dtype;
    int code = descr == NULL ? 0 : descr->kind;
    int bits = descr == NULL ? 0 : (int)PyDataType_ELSIZE(descr) * 8;

    if (descr == NULL)
        return -1;
    Py_DECREF(descr);
    code = code == 'b'   ? kDLBool
           : code == 'i' ? kDLInt
           : code == 'u' ? kDLUInt
           : code == 'f' ? kDLFloat
           : code == 'c' ? kDLComplex
                         : kDLOpaqueHandle;
    if (bits > 64 ||
        !cer_dtype_from_dlpack((uint8_t)code, (uint8_t)bits, 1, &dtype))
        return refuse_type(p, value);
    PyArray_ScalarAsCtype(value, bytes);
    add_tag(p, "scalar");
    cer_text_add_cstr(&p->json, ",\"dtype\":\"");
    cer_text_add_cstr(&p->json, cer_dtype_name(dtype));
    cer_text_add_cstr(&p->json, "\",\"v\":");
    add_hex(p, bytes, cer_dtype_size(dtype));
    cer_text_add_char(&p->json, '}');
    return 0;
}

/* --- tensors ------------------------------------------------------------- */
static py_packed_tensor *
new_tensor(py_packed *packed)
{
    if (packed->n_tensors == packed->capacity) {
        size_t capacity = packed->capacity == 0 ? 64 : packed->capacity * 2;
        py_packed_tensor *grown = packed->tensors;

        PyMem_Resize(grown, py_packed_tensor, capacity);
        if (grown == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        packed->tensors = grown;
        packed->capacity = capacity;
    }
    return &packed->tensors[packed->n_tensors];
}

static int
pack_tensor(packer *p, const py_source *source, PyObject *value)
{
    py_packed *packed = p->packed;
    py_packed_tensor *tensor = new_tensor(packed);
    py_kind kind = source->kind;
    cer_error err = {0};
    py_view view;

    if (tensor == NULL)
        return -1;
    if (p->in_key || kind == PY_KIND_REFUSED)
        return refuse_type(p, value);
    if (py_exchange_view(source, value, &view) < 0)
        return refuse_tensor(p);
    tensor->object = Py_NewRef(value);
    tensor->owner = view.owner;
    tensor->api = view.api;
    tensor->kind = kind;
    packed->n_tensors++;
    packed->in_place = packed->in_place && view.in_place;
    if (cer_state_writer_add(packed->writer, p->path.bytes, p->path.len,
                             view.tensor.dtype, view.tensor.ndim,
                             view.tensor.shape, view.tensor.strides,
                             view.tensor.data, &err) != CER_OK) {
        core_raise(p->core, &err);
        return -1;
    }
    add_tag(p, py_kind_name(kind));
    cer_text_add_char(&p->json, '}');
    return 0;
}

/* --- containers ---------------------------------------------------------- */
static int
pack_items(packer *p, PyObject *sequence)
{
    size_t path_len = p->path.len;
    char token[24];

    cer_text_add_char(&p->json, '[');
    /* Read the size each time: __dlpack__ may run any code. */
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(sequence, i));
        int failed;

        if (i > 0)
            cer_text_add_char(&p->json, ',');
        snprintf(token, sizeof token, "%zd", i);
        push_token(p, token, strlen(token));
        failed = pack_value(p, item);
        Py_DECREF(item);
        if (failed)
            return -1;
        p->path.len = path_len;
    }
    cer_text_add_char(&p->json, ']');
    return 0;
}

static int
pack_tagged_items(packer *p, const char *tag, PyObject *sequence)
{
    add_tag(p, tag);
    cer_text_add_cstr(&p->json, ",\"v\":");
    if (pack_items(p, sequence) < 0)
        return -1;
    cer_text_add_char(&p->json, '}');
    return 0;
}

/* Whether a dict can be a plain JSON object: all keys are str, and not "$". */
static bool
is_plain(PyObject *dict)
{
    Py_ssize_t position = 0;
    PyObject *key;

    while (PyDict_Next(dict, &position, &key, NULL)) {
        if (!PyUnicode_CheckExact(key) ||
            PyUnicode_CompareWithASCIIString(key, "$") == 0)
            return false;
    }
    return true;
}

static int
pack_plain_dict(packer *p, PyObject *dict)
{
    Py_ssize_t position = 0;
    size_t path_len = p->path.len;
    PyObject *key, *value;
    bool first = true;

    cer_text_add_char(&p->json, '{');
    while (PyDict_Next(dict, &position, &key, &value)) {
        size_t len;
        const char *utf8 = utf8_of(p, key, &len);
        int failed;

        if (utf8 == NULL)
            return -1;
        if (!first)
            cer_text_add_char(&p->json, ',');
        first = false;
        cer_json_add_string(&p->json, utf8, len);
        cer_text_add_char(&p->json, ':');
        push_token(p, utf8, len);
        Py_INCREF(key);
        Py_INCREF(value);
        failed = pack_value(p, value);
        Py_DECREF(key);
        Py_DECREF(value);
        if (failed)
            return -1;
        p->path.len = path_len;
    }
    cer_text_add_char(&p->json, '}');
    return 0;
}

static int
pack_key(packer *p, PyObject *key)
{
    bool outer = p->in_key;
    int result;

    p->in_key = true;
    result = pack_value(p, key);
    p->in_key = outer;
    return result;
}

/* A non-str key uses its JSON text as its token in paths. Returns 1 if the dict
 * also has a str key equal to `prefix` plus that text, 0 if not. */
static int
token_collides(packer *p, PyObject *items, PyObject *dict, const char *prefix)
{
    Py_ssize_t n = PyList_GET_SIZE(items);

    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(PyList_GET_ITEM(items, i), 0);
        size_t json_len = p->json.len;
        PyObject *token;
        int found;

        if (PyUnicode_CheckExact(key))
            continue;
        if (pack_key(p, key) < 0)
            return -1;
        if (p->json.failed)
            return 0; /* reported at the end */
        token =
            PyUnicode_DecodeUTF8(p->json.bytes + json_len,
                                 (Py_ssize_t)(p->json.len - json_len), NULL);
        p->json.len = json_len;
        if (token == NULL)
            return -1;
        Py_SETREF(token, PyUnicode_FromFormat("%s%U", prefix, token));
        found = token == NULL ? -1 : PyDict_Contains(dict, token);
        Py_XDECREF(token);
        if (found != 0)
            return found;
    }
    return 0;
}

#define MAX_PREFIX 16

/* Returns enough '#' to distinguish these tokens from the str keys. */
static int
choose_prefix(packer *p, PyObject *items, PyObject *dict,
              char prefix[MAX_PREFIX + 1])
{
    for (int len = 0; len < MAX_PREFIX; len++) {
        int collides = token_collides(p, items, dict, prefix);

        if (collides <= 0)
            return collides;
        prefix[len] = '#';
        prefix[len + 1] = '\0';
    }
    return refuse(p, "is a dict whose keys are the same as text: rename them");
}

/* Writes one [key, value] of a tagged dict. */
static int
pack_pair(packer *p, PyObject *key, PyObject *value, const char *prefix)
{
    size_t path_len = p->path.len, from, len;
    const char *token;

    cer_text_add_char(&p->json, '[');
    from = p->json.len;
    if (pack_key(p, key) < 0)
        return -1;
    if (PyUnicode_CheckExact(key)) {
        token = utf8_of(p, key, &len);
        if (token == NULL)
            return -1;
        push_token(p, token, len);
    } else if (!p->json.failed) {
        push_token(p, prefix, strlen(prefix));
        cer_json_add_pointer(&p->path, p->json.bytes + from,
                             p->json.len - from);
    }
    cer_text_add_char(&p->json, ',');
    if (pack_value(p, value) < 0)
        return -1;
    cer_text_add_char(&p->json, ']');
    p->path.len = path_len;
    return 0;
}

static int
pack_tagged_dict(packer *p, const char *tag, PyObject *dict)
{
    /* Call the method: an OrderedDict keeps a separate order. */
    PyObject *items = PyMapping_Items(dict);
    char prefix[MAX_PREFIX + 1] = "";
    int result = -1;

    if (items == NULL || choose_prefix(p, items, dict, prefix) < 0)
        goto done;
    add_tag(p, tag);
    if (prefix[0] != '\0') {
        cer_text_add_cstr(&p->json, ",\"p\":");
        cer_json_add_string(&p->json, prefix, strlen(prefix));
    }
    cer_text_add_cstr(&p->json, ",\"v\":[");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *pair = PyList_GET_ITEM(items, i);

        if (i > 0)
            cer_text_add_char(&p->json, ',');
        if (pack_pair(p, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1),
                      prefix) < 0)
            goto done;
    }
    cer_text_add_cstr(&p->json, "]}");
    result = 0;

done:
    Py_XDECREF(items);
    return result;
}

/* --- any value ----------------------------------------------------------- */
static int
is_counter(packer *p, PyTypeObject *type)
{
    if (p->counter == NULL) {
        PyObject *collections = PyImport_ImportModule("collections");

        if (collections == NULL)
            return -1;
        p->counter =
            (PyTypeObject *)PyObject_GetAttrString(collections, "Counter");
        Py_DECREF(collections);
        if (p->counter == NULL)
            return -1;
    }
    return type == p->counter;
}

/* Types other than Python's plain ones. */
static int
pack_other(packer *p, PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    const py_source *source;
    int counter;

    if (PyArray_IsScalar(value, Generic))
        return pack_numpy_scalar(p, value);
    source = py_exchange_find(&p->exchange, value);
    if (source == NULL)
        return -1;
    if (source->kind != PY_KIND_NONE)
        return pack_tensor(p, source, value);
    if (p->in_key)
        return refuse_type(p, value);
    if (PyODict_CheckExact(value))
        return pack_tagged_dict(p, "ordered", value);
    if (PyTuple_Check(value) && strcmp(type->tp_name, "torch.Size") == 0)
        return pack_tagged_items(p, "size", value);
    counter = is_counter(p, type);
    if (counter < 0)
        return -1;
    return counter ? pack_tagged_dict(p, "counter", value)
                   : refuse_type(p, value);
}

static int
pack_any(packer *p, PyObject *value)
{
    if (value == Py_None || value == Py_True || value == Py_False) {
        cer_text_add_cstr(&p->json, value == Py_None   ? "null"
                                    : value == Py_True ? "true"
                                                       : "false");
        return 0;
    }
    if (PyLong_CheckExact(value))
        return pack_int(p, value);
    if (PyFloat_CheckExact(value))
        return pack_float(p, PyFloat_AS_DOUBLE(value));
    if (PyUnicode_CheckExact(value))
        return pack_string(p, value);
    if (PyBytes_CheckExact(value))
        return pack_bytes(p, value);
    if (PyTuple_CheckExact(value))
        return pack_tagged_items(p, "tuple", value);
    if (PyList_CheckExact(value) && !p->in_key)
        return pack_items(p, value);
    if (PyDict_CheckExact(value) && !p->in_key)
        return is_plain(value) ? pack_plain_dict(p, value)
                               : pack_tagged_dict(p, "dict", value);
    return pack_other(p, value);
}

static int
pack_value(packer *p, PyObject *value)
{
    int result;

    if (p->depth == PY_STATE_DEPTH)
        return refuse(p, "is nested too deep, or contains itself");
    p->depth++;
    result = pack_any(p, value);
    p->depth--;
    return result;
}

static int
finish(packer *p)
{
    cer_error err = {0};

    if (p->json.failed || p->path.failed) {
        PyErr_NoMemory();
        return -1;
    }
    if (cer_state_writer_finish(p->packed->writer, p->json.bytes, p->json.len,
                                &p->packed->nbytes, &err) != CER_OK) {
        core_raise(p->core, &err);
        return -1;
    }
    return 0;
}

int
py_packed_check(const py_packed *packed, core_state *core)
{
    for (size_t i = 0; i < packed->n_tensors; i++) {
        const py_packed_tensor *tensor = &packed->tensors[i];
        cer_error err = {0};
        cer_tensor_view now;
        int looked = py_exchange_again(tensor->api, tensor->owner, &now);

        /* What cannot be read any more has been replaced, too. */
        if (looked == 0)
            continue;
        if (looked < 0) {
            PyErr_Clear();
            now = (cer_tensor_view){.ndim = UINT32_MAX};
        }
        if (cer_state_writer_check(packed->writer, i, now.dtype, now.ndim,
                                   now.shape, now.strides, now.data,
                                   &err) != CER_OK) {
            core_raise(core, &err);
            return -1;
        }
    }
    return 0;
}

int
py_packed_init(py_packed *packed, core_state *core, PyObject *state)
{
    packer p = {.core = core, .packed = packed};
    int result = -1;

    memset(packed, 0, sizeof *packed);
    packed->in_place = true;
    packed->writer = cer_state_writer_new();
    if (packed->writer == NULL)
        PyErr_NoMemory();
    else if (pack_value(&p, state) == 0 && finish(&p) == 0)
        result = py_packed_check(packed, core);
    cer_text_clear(&p.json);
    cer_text_clear(&p.path);
    py_exchange_clear(&p.exchange);
    Py_XDECREF(p.counter);
    if (result < 0)
        py_packed_clear(packed);
    return result;
}

void
py_packed_clear(py_packed *packed)
{
    for (size_t i = 0; i < packed->n_tensors; i++) {
        Py_DECREF(packed->tensors[i].object);
        Py_DECREF(packed->tensors[i].owner);
    }
    PyMem_Free(packed->tensors);
    cer_state_writer_free(packed->writer);
    memset(packed, 0, sizeof *packed);
}
