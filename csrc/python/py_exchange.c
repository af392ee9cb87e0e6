/* py_exchange.c -- see py_exchange.h. */
#define NO_IMPORT_ARRAY
#include "py_exchange.h"

#include <numpy/arrayobject.h>
#include <string.h>

/* --- kinds --------------------------------------------------------------- */
static const char *const kind_names[] = {
    [PY_KIND_TORCH] = "torch",
    [PY_KIND_NUMPY] = "numpy",
    [PY_KIND_JAX] = "jax",
    [PY_KIND_DLPACK] = "dlpack",
};

const char *
py_kind_name(py_kind kind)
{
    return kind_names[kind];
}

py_kind
py_kind_of_name(const char *name, size_t len)
{
    for (py_kind kind = PY_KIND_TORCH; kind <= PY_KIND_DLPACK; kind++) {
        if (strlen(kind_names[kind]) == len &&
            memcmp(kind_names[kind], name, len) == 0)
            return kind;
    }
    return PY_KIND_NONE;
}

/* --- types --------------------------------------------------------------- */
const DLPackExchangeAPI *
py_exchange_api(PyTypeObject *type)
{
    const DLPackExchangeAPIHeader *header = NULL;
    const DLPackExchangeAPI *api;
    PyObject *capsule =
        PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");

    if (capsule != NULL) {
        header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        Py_DECREF(capsule);
    }
    PyErr_Clear();
    /* A framework with a later DLPack may chain our version's table to its
     * own. */
    while (header != NULL && header->version.major != DLPACK_MAJOR_VERSION)
        header = header->prev_api;
    api = (const DLPackExchangeAPI *)header;
    if (api != NULL && api->dltensor_from_py_object_no_sync == NULL)
        api = NULL;
    return api;
}

/* Returns 1 if `type` is a subtype of module.name, 0 if not, -1 with an
 * exception. A module that is not imported has no such types, nor has one that
 * lacks the name because another thread is importing it, or whose import is
 * blocked (None). */
static int
is_subtype_of(PyTypeObject *type, const char *module_name, const char *name)
{
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed */
    PyObject *module = PyDict_GetItemString(modules, module_name);
    PyObject *base;
    int result;

    if (module == NULL)
        return 0;
    Py_INCREF(module); /* its __getattr__ may run any code */
    base = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    if (base == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    result = PyType_Check(base) && PyType_IsSubtype(type, (PyTypeObject *)base);
    Py_DECREF(base);
    return result;
}

static bool
has_attribute(PyTypeObject *type, const char *name)
{
    return PyObject_HasAttrString((PyObject *)type, name) != 0;
}

/* Tensor subclasses that compute their value (wrappers, fake tensors) or have
 * no value yet (uninitialized parameters) do not own readable memory. */
static int
is_plain_torch(PyTypeObject *type)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *base = NULL, *mine = NULL, *theirs = NULL;
    int result = -1;

    if (torch == NULL ||
        (base = PyObject_GetAttrString(torch, "Tensor")) == NULL)
        goto done;
    mine = PyObject_GetAttrString((PyObject *)type, "__torch_dispatch__");
    theirs = PyObject_GetAttrString(base, "__torch_dispatch__");
    PyErr_Clear(); /* old torch versions lack it */
    result = mine == theirs && !has_attribute(type, "materialize");

done:
    Py_XDECREF(torch);
    Py_XDECREF(base);
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return result;
}

static bool
is_from_jax(PyTypeObject *type)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
    const char *name = NULL;

    if (module != NULL && PyUnicode_Check(module))
        name = PyUnicode_AsUTF8(module);
    PyErr_Clear();
    Py_XDECREF(module);
    return name != NULL && strncmp(name, "jax", 3) == 0;
}

static int
classify(PyTypeObject *type, py_source *source)
{
    int torch;

    source->type = (PyTypeObject *)Py_NewRef((PyObject *)type);
    source->api = NULL;
    source->kind = PY_KIND_NONE;
    if (type == &PyArray_Type) {
        source->kind = PY_KIND_NUMPY;
        return 0;
    }
    torch = is_subtype_of(type, "torch", "Tensor");
    if (torch < 0)
        return -1;
    if (torch) {
        int plain = is_plain_torch(type);

        if (plain < 0)
            return -1;
        source->kind = plain ? PY_KIND_TORCH : PY_KIND_REFUSED;
        source->api = py_exchange_api(type);
        source->is_conj = PyObject_GetAttrString((PyObject *)type, "is_conj");
        source->is_neg = PyObject_GetAttrString((PyObject *)type, "is_neg");
        if (source->is_conj == NULL || source->is_neg == NULL)
            return -1;
    } else if (!PyType_IsSubtype(type, &PyArray_Type) &&
               has_attribute(type, "__dlpack__") &&
               has_attribute(type, "__dlpack_device__")) {
        source->kind = is_from_jax(type) ? PY_KIND_JAX : PY_KIND_DLPACK;
    }
    return 0;
}

static void
clear_source(py_source *source)
{
    Py_CLEAR(source->type);
    Py_CLEAR(source->is_conj);
    Py_CLEAR(source->is_neg);
}

const py_source *
py_exchange_find(py_exchange *exchange, PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    py_source *source;

    for (size_t i = 0; i < exchange->n; i++) {
        if (exchange->sources[i].type == type)
            return &exchange->sources[i];
    }
    if (exchange->n < PY_EXCHANGE_TYPES)
        exchange->n++;
    source = &exchange->sources[exchange->n - 1];
    clear_source(source);
    if (classify(type, source) < 0) {
        clear_source(source);
        exchange->n--;
        return NULL;
    }
    return source;
}

void
py_exchange_clear(py_exchange *exchange)
{
    for (size_t i = 0; i < exchange->n; i++)
        clear_source(&exchange->sources[i]);
    exchange->n = 0;
}

/* --- views --------------------------------------------------------------- */
void
py_view_clear(py_view *view)
{
    Py_CLEAR(view->owner);
}

/* The type's own reason is long and about internals, so replace it. */
static int
refuse_torch(PyObject *object)
{
    PyObject *dtype, *layout, *device;

    PyErr_Clear();
    dtype = PyObject_GetAttrString(object, "dtype");
    layout = PyObject_GetAttrString(object, "layout");
    device = PyObject_GetAttrString(object, "device");
    if (dtype != NULL && layout != NULL && device != NULL)
        PyErr_Format(PyExc_TypeError,
                     "is %S, %S, on device %S: only dense tensors of common "
                     "types in the host's memory can be read",
                     dtype, layout, device);
    Py_XDECREF(dtype);
    Py_XDECREF(layout);
    Py_XDECREF(device);
    return -1;
}

static int
refuse_view(const cer_error *err)
{
    PyErr_SetString(PyExc_TypeError, err->message);
    return -1;
}

static int
take_dltensor(const DLTensor *from, cer_tensor_view *out)
{
    cer_error err = {0};

    return cer_tensor_view_take(from, out, &err) == CER_OK ? 0
                                                           : refuse_view(&err);
}

/* The tensor's capsule: versioned from new producers, unversioned from those
 * that predate versions. */
static PyObject *
export_capsule(PyObject *object)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *arguments = PyTuple_New(0), *options, *capsule = NULL;

    options = Py_BuildValue("{s(ii)}", "max_version", DLPACK_MAJOR_VERSION,
                            DLPACK_MINOR_VERSION);
    if (method == NULL || arguments == NULL || options == NULL)
        goto done;
    capsule = PyObject_Call(method, arguments, options);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = PyObject_CallNoArgs(method);
    }

done:
    Py_XDECREF(method);
    Py_XDECREF(arguments);
    Py_XDECREF(options);
    return capsule;
}

/* Reads the tensor of a capsule of either kind. */
static int
take_capsule(PyObject *capsule, py_view *out)
{
    DLManagedTensor *managed;
    cer_error err = {0};

    if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        return cer_tensor_view_take_versioned(
                   PyCapsule_GetPointer(capsule, "dltensor_versioned"),
                   &out->tensor, &err) == CER_OK
                   ? 0
                   : refuse_view(&err);
    managed = PyCapsule_GetPointer(capsule, "dltensor");
    return managed == NULL ? -1
                           : take_dltensor(&managed->dl_tensor, &out->tensor);
}

/* Exports through a capsule, which remains the owner. */
static int
view_capsule(PyObject *object, py_view *out)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    PyObject *capsule = NULL;
    int type, id, result = -1;

    if (device == NULL || !PyArg_ParseTuple(device, "ii", &type, &id))
        goto done;
    if (!cer_tensor_view_is_host(type)) {
        PyErr_Format(PyExc_TypeError,
                     "is on another device (DLPack type %d), not in the host's "
                     "memory",
                     type);
        goto done;
    }
    capsule = export_capsule(object);
    if (capsule == NULL || take_capsule(capsule, out) < 0)
        goto done;
    out->owner = Py_NewRef(capsule);
    out->in_place = !out->tensor.read_only;
    result = 0;

done:
    Py_XDECREF(device);
    Py_XDECREF(capsule);
    return result;
}

/* Returns the resolved copy of a conjugate or negative view, whose memory has
 * the wrong values; any other tensor itself. New reference. A subclass's
 * methods may run any code, so memory is looked up afterwards. */
static PyObject *
resolved(const py_source *source, PyObject *object, cer_dtype dtype)
{
    bool is_complex = dtype == CER_C64;
    PyObject *lazy = PyObject_CallOneArg(
        is_complex ? source->is_conj : source->is_neg, object);
    bool plain = lazy == Py_False;

    if (lazy == NULL)
        return NULL;
    Py_DECREF(lazy);
    if (plain)
        return Py_NewRef(object);
    return PyObject_CallMethod(
        object, is_complex ? "resolve_conj" : "resolve_neg", NULL);
}

/* Looks up the memory of a torch tensor; runs no Python code. */
static int
take_torch(const DLPackExchangeAPI *api, PyObject *object, cer_tensor_view *out)
{
    DLTensor tensor;

    return api->dltensor_from_py_object_no_sync(object, &tensor) == 0 &&
                   take_dltensor(&tensor, out) == 0
               ? 0
               : -1;
}

/* Without an exchange table, torch exports only tensors that need no grad. */
static int
view_old_torch(PyObject *object, py_view *out)
{
    PyObject *detached = PyObject_CallMethod(object, "detach", NULL);
    int result;

    if (detached == NULL)
        return -1;
    result = view_capsule(detached, out);
    Py_DECREF(detached);
    if (result < 0 && PyErr_ExceptionMatches(PyExc_Exception))
        return refuse_torch(object);
    return result;
}

static int
view_torch(const py_source *source, PyObject *object, py_view *out)
{
    const DLPackExchangeAPI *api = source->api;
    PyObject *real;

    if (api == NULL)
        return view_old_torch(object, out);
    if (take_torch(api, object, &out->tensor) < 0) /* for its type */
        return refuse_torch(object);
    real = resolved(source, object, out->tensor.dtype);
    if (real == NULL)
        return -1;
    out->in_place = real == object;
    /* The method may be a subclass's and return anything. */
    if (!out->in_place && py_exchange_api(Py_TYPE(real)) != api) {
        Py_DECREF(real);
        PyErr_SetString(PyExc_TypeError, "has no value that can be read: its "
                                         "resolve_neg or resolve_conj returns "
                                         "no tensor of PyTorch");
        return -1;
    }
    if (take_torch(api, real, &out->tensor) < 0) {
        Py_DECREF(real);
        return refuse_torch(object);
    }
    out->owner = real;
    out->api = api;
    return 0;
}

/* NumPy gets bfloat16 from a separate package (ml_dtypes). */
static bool
is_bfloat16(const PyArray_Descr *descr)
{
    const char *name = descr->typeobj->tp_name;
    const char *dot = strrchr(name, '.');

    return strcmp(dot == NULL ? name : dot + 1, "bfloat16") == 0;
}

static bool
numpy_dtype(PyArray_Descr *descr, cer_dtype *out)
{
    static const struct {
        char kind;
        uint8_t code;
    } kinds[] = {{'b', kDLBool},
                 {'i', kDLInt},
                 {'u', kDLUInt},
                 {'f', kDLFloat},
                 {'c', kDLComplex}};
    uint8_t bits = (uint8_t)(PyDataType_ELSIZE(descr) * 8);

    if (PyDataType_ELSIZE(descr) > 8 || !PyArray_ISNBO(descr->byteorder))
        return false;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (kinds[i].kind == descr->kind)
            return cer_dtype_from_dlpack(kinds[i].code, bits, 1, out);
    }
    *out = CER_BF16;
    return bits == 16 && is_bfloat16(descr);
}

/* Looks up the memory of an array; runs no Python code. */
static int
take_numpy(PyObject *object, cer_tensor_view *tensor)
{
    PyArrayObject *array = (PyArrayObject *)object;
    cer_error err = {0};

    if (!numpy_dtype(PyArray_DESCR(array), &tensor->dtype)) {
        PyErr_Format(PyExc_TypeError,
                     "is an array of %S, which states cannot hold: convert it, "
                     "for example to float32",
                     PyArray_DESCR(array));
        return -1;
    }
    tensor->ndim = (uint32_t)PyArray_NDIM(array);
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        tensor->shape[i] = PyArray_DIM(array, (int)i);
        tensor->strides[i] = PyArray_STRIDE(array, (int)i);
    }
    tensor->data = PyArray_DATA(array);
    tensor->read_only = !PyArray_ISWRITEABLE(array);
    return cer_tensor_view_check(tensor, &err) == CER_OK ? 0
                                                         : refuse_view(&err);
}

static int
view_numpy(PyObject *object, py_view *out)
{
    if (take_numpy(object, &out->tensor) < 0)
        return -1;
    out->owner = Py_NewRef(object);
    out->in_place = !out->tensor.read_only;
    return 0;
}

int
py_exchange_again(const DLPackExchangeAPI *api, PyObject *owner,
                  cer_tensor_view *out)
{
    if (api != NULL)
        return take_torch(api, owner, out) < 0 ? refuse_torch(owner) : 1;
    if (PyArray_Check(owner))
        return take_numpy(owner, out) < 0 ? -1 : 1;
    return 0;
}

int
py_exchange_view(const py_source *source, PyObject *object, py_view *out)
{
    int result;

    out->owner = NULL;
    out->api = NULL;
    switch (source->kind) {
    case PY_KIND_TORCH:
        return view_torch(source, object, out);
    case PY_KIND_NUMPY:
        return view_numpy(object, out);
    default:
        result = view_capsule(object, out);
        if (source->kind == PY_KIND_JAX)
            out->in_place = false; /* JAX's arrays never change */
        return result;
    }
}
