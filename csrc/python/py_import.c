/* py_import.c -- see py_import.h. */
#define NO_IMPORT_ARRAY
#include "py_import.h"

#include <numpy/arrayobject.h>
#include <stdatomic.h>
#include <string.h>

/* A tensor's descriptions for old and new torch versions, and its memory. */
typedef struct tensor_block {
    DLManagedTensorVersioned versioned;
    DLManagedTensor legacy;
    PyObject *keeps;    /* keeps a view's buffer alive; NULL: own memory */
    atomic_int holders; /* the tensor and, while it is made, make_torch */
    int64_t dims[];     /* shape, then strides */
} tensor_block;

int
py_import_torch(py_importer *in)
{
    PyObject *torch;

    if (in->torch_known)
        return 0;
    in->torch_known = true;
    torch = PyImport_ImportModule("torch");
    if (torch == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    in->torch = PyObject_GetAttrString(torch, "Tensor");
    Py_DECREF(torch);
    if (in->torch == NULL)
        return -1;
    in->has_torch = true;
    in->api = py_exchange_api((PyTypeObject *)in->torch);
    return 0;
}

static int
find_jax(py_importer *in)
{
    PyObject *jax;

    if (in->jax_known)
        return 0;
    in->jax_known = true;
    jax = PyImport_ImportModule("jax.numpy");
    if (jax == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(jax);
    in->has_jax = true;
    return 0;
}

/* The kind to return a tensor as: its own if that framework is installed, else
 * the requested one. PY_KIND_NONE: an exception. */
static py_kind
choose_kind(py_importer *in, py_kind kind)
{
    for (int tries = 0; tries < 2; tries++) {
        if (kind == PY_KIND_NUMPY)
            return kind;
        if (kind == PY_KIND_TORCH) {
            if (py_import_torch(in) < 0)
                return PY_KIND_NONE;
            if (in->has_torch)
                return kind;
        }
        if (kind == PY_KIND_JAX) {
            if (find_jax(in) < 0)
                return PY_KIND_NONE;
            if (in->has_jax)
                return kind;
        }
        kind = in->framework;
    }
    PyErr_Format(
        PyExc_ImportError,
        "%s needs %s, which cannot be imported: install it, or ask for "
        "framework='numpy'",
        in->name, py_kind_name(kind));
    return PY_KIND_NONE;
}

/* Adds a copy into a new tensor's memory, done later without the GIL. */
static void
copy_later(py_importer *in, void *to, const cer_state_tensor *tensor)
{
    in->copies[in->n_copies++] = (cer_copy){
        .dense = (uint8_t *)(uintptr_t)tensor->data,
        .strided = to,
        .nbytes = tensor->nbytes,
        .item = cer_dtype_size(tensor->dtype),
    };
}

/* May run on any thread, with or without the GIL, and after Python has exited.
 */
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
let_go(tensor_block *block)
{
    if (atomic_fetch_sub(&block->holders, 1) == 1)
        free_block(block);
}

static void
delete_versioned(DLManagedTensorVersioned *managed)
{
    let_go(managed->manager_ctx);
}

static void
delete_legacy(DLManagedTensor *managed)
{
    let_go(managed->manager_ctx);
}

/* Describes the tensor at `data` in both DLPack forms. */
static void
describe(tensor_block *block, const cer_state_tensor *tensor, void *data)
{
    int64_t *shape = block->dims, *strides = shape + tensor->ndim;
    int64_t stride = 1;
    DLTensor *dl = &block->versioned.dl_tensor;

    memset(block, 0, offsetof(tensor_block, dims));
    atomic_init(&block->holders, 1);
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

/* Makes it through a capsule, for torch without an exchange table. */
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
    /* A capsule that was not consumed keeps its name. */
    if (capsule == NULL || PyCapsule_IsValid(capsule, "dltensor"))
        free_block(block);
    Py_XDECREF(module);
    Py_XDECREF(capsule);
    return result;
}

/* Makes it through the exchange table. A failing call may or may not have
 * called the deleter, so hold the block until it returns. */
static PyObject *
import_by_table(const DLPackExchangeAPI *api, tensor_block *block)
{
    void *result = NULL;

    atomic_store(&block->holders, 2);
    if (api->managed_tensor_to_py_object_no_sync(&block->versioned, &result) !=
        0) {
        free_block(block);
        return NULL;
    }
    let_go(block);
    return result;
}

static PyObject *
make_torch(py_importer *in, const cer_state_tensor *tensor)
{
    size_t head = sizeof(tensor_block) + 2 * tensor->ndim * sizeof(int64_t);
    bool copy = in->copy;
    /* Own data follows the description, on separate cache lines. */
    tensor_block *block =
        cer_alloc(copy ? head + CER_STATE_ALIGNMENT + tensor->nbytes : head);
    void *data;

    if (block == NULL)
        return PyErr_NoMemory();
    if (!copy && in->read_only && !in->trusted) {
        cer_free(block);
        PyErr_Format(PyExc_BufferError,
                     "%s is in read-only memory and torch has no read-only "
                     "tensors: use copy=True, or copy=None to promise that no "
                     "view is written to",
                     in->name);
        return NULL;
    }
    data = copy ? (void *)(((uintptr_t)block + head + CER_STATE_ALIGNMENT - 1) &
                           ~(uintptr_t)(CER_STATE_ALIGNMENT - 1))
                : (void *)(uintptr_t)tensor->data;
    describe(block, tensor, data);
    if (copy)
        copy_later(in, data, tensor);
    else
        block->keeps = Py_NewRef(in->keeps);
    if (!copy && in->read_only)
        block->versioned.flags = DLPACK_FLAG_BITMASK_READ_ONLY;
    return in->api == NULL ? import_by_capsule(block)
                           : import_by_table(in->api, block);
}

PyArray_Descr *
py_import_descr(cer_dtype dtype)
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
make_numpy(py_importer *in, const cer_state_tensor *tensor, bool copy)
{
    PyArray_Descr *descr = py_import_descr(tensor->dtype);
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
            copy_later(in, PyArray_DATA((PyArrayObject *)array), tensor);
        return array;
    }
    array = PyArray_NewFromDescr(&PyArray_Type, descr, (int)tensor->ndim, shape,
                                 NULL, (void *)(uintptr_t)tensor->data,
                                 in->read_only ? 0 : NPY_ARRAY_WRITEABLE, NULL);
    if (array != NULL &&
        PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(in->keeps)) < 0)
        Py_CLEAR(array);
    return array;
}

/* JAX takes a NumPy array, and copies it immediately. */
static PyObject *
make_jax(py_importer *in, const cer_state_tensor *tensor)
{
    PyObject *jax = PyImport_ImportModule("jax.numpy");
    PyObject *array = NULL, *result = NULL;

    if (jax == NULL)
        return NULL;
    array = make_numpy(in, tensor, true);
    if (array != NULL) {
        in->n_copies--;
        memcpy(PyArray_DATA((PyArrayObject *)array), tensor->data,
               tensor->nbytes);
        result = PyObject_CallMethod(jax, "array", "O", array);
    }
    Py_DECREF(jax);
    Py_XDECREF(array);
    return result;
}

PyObject *
py_import_tensor(py_importer *in, const cer_state_tensor *tensor, py_kind kind)
{
    switch (choose_kind(in, kind)) {
    case PY_KIND_TORCH:
        return make_torch(in, tensor);
    case PY_KIND_NUMPY:
        return make_numpy(in, tensor, in->copy);
    case PY_KIND_JAX:
        return make_jax(in, tensor);
    default:
        return NULL;
    }
}

void
py_importer_fill(py_importer *in)
{
    Py_BEGIN_ALLOW_THREADS
    cer_copy_all(in->copies, in->n_copies, CER_COPY_FROM_DENSE, 0);
    Py_END_ALLOW_THREADS
}

int
py_importer_init(py_importer *in, const py_import_options *options,
                 size_t n_tensors)
{
    memset(in, 0, sizeof *in);
    in->name = options->name;
    in->framework = options->framework;
    in->copy = options->copy;
    in->read_only = options->read_only;
    in->trusted = options->trusted;
    in->copies = PyMem_Calloc(n_tensors + 1, sizeof(cer_copy));
    if (in->copies == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (!in->copy)
        in->keeps = PyMemoryView_FromObject(options->buffer);
    return in->copy || in->keeps != NULL ? 0 : -1;
}

void
py_importer_clear(py_importer *in)
{
    PyMem_Free(in->copies);
    Py_CLEAR(in->torch);
    Py_CLEAR(in->keeps);
}
