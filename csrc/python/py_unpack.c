/* py_unpack.c -- rebuilds the nested Python value of a state: reads the
 * structure, which must be exactly of the form that py_pack.c writes, and makes
 * a tensor for every place that names one, or finds the live one. */
#define NO_IMPORT_ARRAY
#include "py_state.h"

#include <math.h>
#include <numpy/arrayobject.h>
#include <string.h>

/* What an old torch and a new one want to be told of a tensor, and the memory
 * behind it. */
typedef struct tensor_block {
    DLManagedTensorVersioned versioned;
    DLManagedTensor legacy;
    PyObject *keeps; /* of a view: what keeps the buffer; NULL: own memory */
    int64_t dims[];  /* shape, then strides */
} tensor_block;

typedef struct unpacker {
    core_state *core;
    const cer_state *state;
    const py_unpack_options *options;
    py_packed *live; /* NULL: make new tensors */
    bool misfit;     /* the live ones are not those of the structure */
    cer_json_reader json;
    cer_text path;
    bool *used; /* of each tensor of the state */
    size_t n_used;
    size_t next;      /* the tensor that is expected next */
    cer_copy *copies; /* what is still to be filled, without the GIL */
    size_t n_copies;
    PyObject *keeps; /* memoryview of the buffer, for views */
    PyObject *torch; /* torch.Tensor, once it is needed */
    const DLPackExchangeAPI *api;
    bool has_torch, torch_known, has_jax, jax_known;
} unpacker;

static PyObject *build_value(unpacker *u, const cer_json_token *token);

/* --- errors and tokens --------------------------------------------------- */
static PyObject *
corrupt(unpacker *u, const char *what)
{
    PyErr_Format(u->core->CorruptDataError, "%s is corrupt: %s",
                 u->options->name, what);
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

/* A new str of a key or string. */
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
        corrupt(u, "a string in its structure is no text");
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
static int
find_torch(unpacker *u)
{
    PyObject *torch;

    if (u->torch_known)
        return 0;
    u->torch_known = true;
    torch = PyImport_ImportModule("torch");
    if (torch == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    u->torch = PyObject_GetAttrString(torch, "Tensor");
    Py_DECREF(torch);
    if (u->torch == NULL)
        return -1;
    u->has_torch = true;
    u->api = py_exchange_api((PyTypeObject *)u->torch);
    return 0;
}

static int
find_jax(unpacker *u)
{
    PyObject *jax;

    if (u->jax_known)
        return 0;
    u->jax_known = true;
    jax = PyImport_ImportModule("jax.numpy");
    if (jax == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(jax);
    u->has_jax = true;
    return 0;
}

/* The kind as which a tensor comes back: its own where that framework is
 * there, else the one asked for. PY_KIND_NONE: an exception. */
static py_kind
choose_kind(unpacker *u, py_kind kind)
{
    for (int tries = 0; tries < 2; tries++) {
        if (kind == PY_KIND_NUMPY)
            return kind;
        if (kind == PY_KIND_TORCH) {
            if (find_torch(u) < 0)
                return PY_KIND_NONE;
            if (u->has_torch)
                return kind;
        }
        if (kind == PY_KIND_JAX) {
            if (find_jax(u) < 0)
                return PY_KIND_NONE;
            if (u->has_jax)
                return kind;
        }
        kind = u->options->framework;
    }
    PyErr_Format(
        PyExc_ImportError,
        "%s needs %s, which cannot be imported: install it, or ask for "
        "framework='numpy'",
        u->options->name, py_kind_name(kind));
    return PY_KIND_NONE;
}

/* Fills memory of a new tensor, later and without the GIL. */
static void
copy_later(unpacker *u, void *to, const cer_state_tensor *tensor)
{
    u->copies[u->n_copies++] = (cer_copy){
        .dense = (uint8_t *)(uintptr_t)tensor->data,
        .strided = to,
        .nbytes = tensor->nbytes,
        .item = cer_dtype_size(tensor->dtype),
    };
}

/* May run on any thread, with or without the GIL, and after Python's end. */
static void
free_block(tensor_block *block)
{
    if (block->keeps != NULL && Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();

        Py_DECREF(block->keeps);
        PyGILState_Release(gil);
    }
    cer_free(block);
}

static void
delete_versioned(DLManagedTensorVersioned *managed)
{
    free_block(managed->manager_ctx);
}

static void
delete_legacy(DLManagedTensor *managed)
{
    free_block(managed->manager_ctx);
}

/* Describes the tensor at `data` in both of DLPack's forms. */
static void
describe(tensor_block *block, const cer_state_tensor *tensor, void *data)
{
    int64_t *shape = block->dims, *strides = shape + tensor->ndim;
    int64_t stride = 1;
    DLTensor *dl = &block->versioned.dl_tensor;

    memset(block, 0, offsetof(tensor_block, dims));
    for (uint32_t i = tensor->ndim; i-- > 0;) {
        shape[i] = tensor->shape[i];
        strides[i] = stride;
        stride *= shape[i] == 0 ? 1 : shape[i];
    }
    dl->data = tensor->nbytes == 0 ? NULL : data;
    dl->device.device_type = kDLCPU;
    dl->ndim = (int32_t)tensor->ndim;
    dl->dtype.code = cer_dtype_dlpack_code(tensor->dtype);
    dl->dtype.bits = (uint8_t)(cer_dtype_size(tensor->dtype) * 8);
    dl->dtype.lanes = 1;
    dl->shape = shape;
    dl->strides = strides;
    block->legacy.dl_tensor = *dl;
    block->legacy.manager_ctx = block;
    block->legacy.deleter = delete_legacy;
    block->versioned.version.major = DLPACK_MAJOR_VERSION;
    block->versioned.version.minor = DLPACK_MINOR_VERSION;
    block->versioned.manager_ctx = block;
    block->versioned.deleter = delete_versioned;
}

/* Through a capsule, for a torch without an exchange table. */
static PyObject *
import_by_capsule(tensor_block *block)
{
    PyObject *module = PyImport_ImportModule("torch.utils.dlpack");
    PyObject *capsule = NULL, *result = NULL;

    if (module == NULL)
        goto done;
    capsule = PyCapsule_New(&block->legacy, "dltensor", NULL);
    if (capsule == NULL)
        goto done;
    result = PyObject_CallMethod(module, "from_dlpack", "O", capsule);

done:
    /* A capsule that was not taken has kept its name. */
    if (capsule == NULL || PyCapsule_IsValid(capsule, "dltensor"))
        free_block(block);
    Py_XDECREF(module);
    Py_XDECREF(capsule);
    return result;
}

static PyObject *
make_torch(unpacker *u, const cer_state_tensor *tensor)
{
    size_t head = sizeof(tensor_block) + 2 * tensor->ndim * sizeof(int64_t);
    bool copy = u->options->copy;
    /* Own data lies behind the description, on its own cache lines. */
    tensor_block *block =
        cer_alloc(copy ? head + CER_STATE_ALIGNMENT + tensor->nbytes : head);
    void *data, *result = NULL;

    if (block == NULL)
        return PyErr_NoMemory();
    data = copy ? (void *)(((uintptr_t)block + head + CER_STATE_ALIGNMENT - 1) &
                           ~(uintptr_t)(CER_STATE_ALIGNMENT - 1))
                : (void *)(uintptr_t)tensor->data;
    describe(block, tensor, data);
    if (copy)
        copy_later(u, data, tensor);
    else
        block->keeps = Py_NewRef(u->keeps);
    if (u->api == NULL) {
        result = import_by_capsule(block);
    } else if (u->api->managed_tensor_to_py_object_no_sync(&block->versioned,
                                                           &result) != 0) {
        free_block(block);
        return NULL;
    }
    return result;
}

static PyArray_Descr *
numpy_descr(cer_dtype dtype)
{
    PyObject *module, *type;
    PyArray_Descr *descr = NULL;

    if (dtype != CER_BF16) {
        PyObject *name = PyUnicode_FromString(cer_dtype_name(dtype));

        if (name == NULL || !PyArray_DescrConverter(name, &descr))
            descr = NULL;
        Py_XDECREF(name);
        return descr;
    }
    module = PyImport_ImportModule("ml_dtypes");
    if (module == NULL)
        return NULL;
    type = PyObject_GetAttrString(module, "bfloat16");
    if (type == NULL || !PyArray_DescrConverter(type, &descr))
        descr = NULL;
    Py_XDECREF(type);
    Py_DECREF(module);
    return descr;
}

static PyObject *
make_numpy(unpacker *u, const cer_state_tensor *tensor, bool copy)
{
    PyArray_Descr *descr = numpy_descr(tensor->dtype);
    npy_intp shape[CER_STATE_MAX_DIMS];
    PyObject *array;

    if (descr == NULL)
        return NULL;
    for (uint32_t i = 0; i < tensor->ndim; i++)
        shape[i] = (npy_intp)tensor->shape[i];
    if (copy) {
        array = PyArray_NewFromDescr(&PyArray_Type, descr, (int)tensor->ndim,
                                     shape, NULL, NULL, 0, NULL);
        if (array != NULL)
            copy_later(u, PyArray_DATA((PyArrayObject *)array), tensor);
        return array;
    }
    array = PyArray_NewFromDescr(
        &PyArray_Type, descr, (int)tensor->ndim, shape, NULL,
        (void *)(uintptr_t)tensor->data,
        u->options->read_only ? 0 : NPY_ARRAY_WRITEABLE, NULL);
    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(u->keeps)) < 0)
        Py_CLEAR(array);
    return array;
}

/* JAX takes a NumPy array, and at once. */
static PyObject *
make_jax(unpacker *u, const cer_state_tensor *tensor)
{
    PyObject *jax = PyImport_ImportModule("jax.numpy");
    PyObject *array = NULL, *result = NULL;

    if (jax == NULL)
        return NULL;
    array = make_numpy(u, tensor, true);
    if (array != NULL) {
        u->n_copies--;
        memcpy(PyArray_DATA((PyArrayObject *)array), tensor->data,
               tensor->nbytes);
        result = PyObject_CallMethod(jax, "array", "O", array);
    }
    Py_DECREF(jax);
    Py_XDECREF(array);
    return result;
}

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

/* The tensor of the path at hand, which often is the one after the last. */
static const cer_state_tensor *
find_tensor(unpacker *u)
{
    const cer_state_tensor *next = u->state->tensors + u->next;

    if (u->next >= u->state->n_tensors || next->path_len != u->path.len ||
        memcmp(next->path, u->path.bytes, u->path.len) != 0)
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
        return corrupt(u, "its structure names a tensor that is not there");
    i = (size_t)(tensor - u->state->tensors);
    if (u->used[i])
        return corrupt(u, "its structure names a tensor twice");
    u->used[i] = true;
    u->n_used++;
    if (u->live != NULL)
        return find_live(u, kind);
    switch (choose_kind(u, kind)) {
    case PY_KIND_TORCH:
        return make_torch(u, tensor);
    case PY_KIND_NUMPY:
        return make_numpy(u, tensor, u->options->copy);
    case PY_KIND_JAX:
        return make_jax(u, tensor);
    default:
        return NULL;
    }
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

/* The next string, which is hexadecimal, as bytes. */
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
    } else if ((descr = numpy_descr(dtype)) != NULL) {
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

/* The array under "v" as a list. */
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

/* torch.Size where torch is, else a tuple. */
static PyObject *
build_size(unpacker *u)
{
    PyObject *tuple = build_tuple(u);
    PyObject *size;

    if (tuple == NULL || find_torch(u) < 0) {
        Py_XDECREF(tuple);
        return NULL;
    }
    if (!u->has_torch)
        return tuple;
    size = call("torch", "Size", tuple);
    Py_DECREF(tuple);
    if (size == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        corrupt(u, "a broken size in its structure");
    }
    return size;
}

/* Adds to a dict, or a subclass of it; a key that is there already is an
 * error. */
static int
add_item(unpacker *u, PyObject *dict, PyObject *key, PyObject *value)
{
    Py_ssize_t before = PyDict_GET_SIZE(dict);
    int failed = PyDict_CheckExact(dict) ? PyDict_SetItem(dict, key, value)
                                         : PyObject_SetItem(dict, key, value);

    if (failed)
        return -1;
    if (PyDict_GET_SIZE(dict) > before)
        return 0;
    corrupt(u, "a key twice in one dict");
    return -1;
}

/* A plain dict from its first member on. */
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

/* The rest of a pair behind its '[': key, value and ']'. */
static int
build_pair(unpacker *u, PyObject *dict, const cer_json_token *prefix)
{
    size_t path_len = u->path.len;
    cer_json_token token;
    const char *from;
    PyObject *key, *value = NULL;
    int result = -1;

    cer_json_next(&u->json, &token);
    from = u->json.at; /* of a container: behind its bracket */
    if (token.kind == CER_JSON_OBJECT)
        from--;
    else
        from = token.text;
    key = build_value(u, &token);
    if (key == NULL)
        return -1;
    if (PyUnicode_Check(key)) {
        if (push_string(u, key) < 0)
            goto done;
    } else {
        if (token.kind == CER_JSON_TRUE || token.kind == CER_JSON_FALSE ||
            token.kind == CER_JSON_NULL)
            from = u->json.at - (token.kind == CER_JSON_FALSE ? 5 : 4);
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

/* Fills `dict` (a reference it takes over) from [[key, value], ...]. */
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

/* What follows {"$": tag, without the closing brace. */
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

/* The whole structure, every tensor used once. */
static PyObject *
build_root(unpacker *u)
{
    cer_json_token token;
    PyObject *value;

    cer_json_init(&u->json, u->state->structure, u->state->structure_len);
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
    u->copies = PyMem_Calloc(n + 1, sizeof(cer_copy));
    if (u->used == NULL || u->copies == NULL)
        return PyErr_NoMemory();
    /* Hundreds of new objects, none of them garbage, would only make the
     * collector look at all the others. */
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
    PyMem_Free(u->copies);
    cer_text_clear(&u->path);
    Py_CLEAR(u->torch);
    Py_CLEAR(u->keeps);
}

PyObject *
py_unpack(core_state *core, const cer_state *state,
          const py_unpack_options *options)
{
    unpacker u = {.core = core, .state = state, .options = options};
    PyObject *value = NULL;

    if (!options->copy) {
        u.keeps = PyMemoryView_FromObject(options->buffer);
        if (u.keeps == NULL)
            return NULL;
    }
    value = build_all(&u);
    if (value != NULL) {
        Py_BEGIN_ALLOW_THREADS
        cer_copy_all(u.copies, u.n_copies, CER_COPY_FROM_DENSE, 0);
        Py_END_ALLOW_THREADS
    }
    clear(&u);
    return value;
}

PyObject *
py_unpack_into(core_state *core, const cer_state *state, const char *name,
               py_packed *live)
{
    py_unpack_options options = {.name = name, .framework = PY_KIND_NUMPY};
    unpacker u = {
        .core = core, .state = state, .options = &options, .live = live};
    PyObject *value;

    if (!live->in_place || !cer_state_fits(state, live->writer))
        Py_RETURN_NONE;
    value = build_all(&u);
    if (value != NULL && u.misfit) {
        Py_SETREF(value, Py_NewRef(Py_None));
    } else if (value != NULL) {
        Py_BEGIN_ALLOW_THREADS
        cer_state_copy_into(state, live->writer);
        Py_END_ALLOW_THREADS
    }
    clear(&u);
    return value;
}
