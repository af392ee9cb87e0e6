/* py_dlpack.c -- the core's tensors as tensors of a framework.
 *
 * Each framework gets the shortest way it offers: torch its C exchange table,
 * NumPy an ndarray around the memory, others from_dlpack. */
#define NO_IMPORT_ARRAY
#include "py_dlpack.h"

#include <numpy/arrayobject.h>

#include "py_dtype.h"
#include "py_exchange.h"
#include "py_tensor.h"

static PyObject *
import_attribute(const char *module_name, const char *name)
{
    PyObject *module = PyImport_ImportModule(module_name);
    PyObject *attribute =
        module == NULL ? NULL : PyObject_GetAttrString(module, name);

    Py_XDECREF(module);
    return attribute;
}

static int
init_torch(py_framework *framework)
{
    PyObject *type = import_attribute("torch", "Tensor");

    if (type == NULL)
        return -1;
    if (PyType_Check(type))
        framework->api = py_exchange_api((PyTypeObject *)type);
    Py_DECREF(type);
    if (framework->api != NULL)
        return 0;
    framework->from_dlpack =
        import_attribute("torch.utils.dlpack", "from_dlpack");
    return framework->from_dlpack == NULL ? -1 : 0;
}

int
py_framework_init(py_framework *framework, const char *name)
{
    *framework = (py_framework){FRAMEWORK_DLPACK, NULL, NULL};
    if (strcmp(name, "dlpack") == 0)
        return 0;
    if (strcmp(name, "numpy") == 0) {
        framework->kind = FRAMEWORK_NUMPY;
        return 0;
    }
    if (strcmp(name, "torch") == 0) {
        framework->kind = FRAMEWORK_TORCH;
        return init_torch(framework);
    }
    if (strcmp(name, "jax") == 0) {
        framework->kind = FRAMEWORK_JAX;
        framework->from_dlpack = import_attribute("jax.dlpack", "from_dlpack");
        return framework->from_dlpack == NULL ? -1 : 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "unknown framework '%s': must be torch, numpy, jax or dlpack",
                 name);
    return -1;
}

void
py_framework_clear(py_framework *framework)
{
    Py_CLEAR(framework->from_dlpack);
}

/* --- one tensor ----------------------------------------------------------- */

static PyObject *
through_table(const DLPackExchangeAPI *api, cer_tensor *tensor,
              cer_export *block)
{
    void *object = NULL;

    cer_owner_retain(tensor->owner, 1);
    cer_export_embed(block, tensor);
    if (api->managed_tensor_to_py_object_no_sync(&block->versioned, &object) <
        0) {
        /* Correct whether or not it has already called the deleter. */
        block->versioned.deleter(&block->versioned);
        return NULL;
    }
    return object;
}

static PyObject *
as_array(core_state *state, const cer_tensor *tensor)
{
    npy_intp shape[CER_TENSOR_MAX_DIMS];
    PyObject *array, *base;

    for (int32_t i = 0; i < tensor->ndim; i++)
        shape[i] = (npy_intp)tensor->shape[i];
    array = PyArray_New(&PyArray_Type, tensor->ndim, shape,
                        py_dtype_number(tensor->dtype), NULL, tensor->data, 0,
                        NPY_ARRAY_CARRAY, NULL);
    if (array == NULL || tensor->data == NULL)
        return array; /* no values: NumPy's own empty memory */
    base = py_tensor_new(state, tensor);
    /* Steals the reference to `base`, even when it fails. */
    if (base == NULL || PyArray_SetBaseObject((PyArrayObject *)array, base) < 0)
        Py_CLEAR(array);
    return array;
}

/* JAX names one of the four streams on which it waits for tensors. It computes
 * on a different stream and calls the deleter while that work is pending,
 * because it reuses its own memory on that stream only. */
static PyObject *
through_from_dlpack(core_state *state, const py_framework *framework,
                    const cer_tensor *tensor)
{
    PyObject *ours = py_tensor_new(state, tensor), *theirs;

    if (ours == NULL)
        return NULL;
    theirs = PyObject_CallOneArg(framework->from_dlpack, ours);
    Py_DECREF(ours);
    if (framework->kind == FRAMEWORK_JAX)
        py_tensor_use_anywhere(tensor);
    return theirs;
}

PyObject *
py_framework_tensor(core_state *state, const py_framework *framework,
                    cer_tensor *tensor, cer_export *block)
{
    if (framework->kind == FRAMEWORK_NUMPY)
        return as_array(state, tensor);
    if (framework->kind == FRAMEWORK_DLPACK)
        return py_tensor_new(state, tensor);
    if (framework->api != NULL)
        return through_table(framework->api, tensor, block);
    return through_from_dlpack(state, framework, tensor);
}

/* Older versions take tensors through from_dlpack, which names the stream then.
 */
int
py_framework_stream(const py_framework *framework, int index, void **stream,
                    bool *known)
{
    const DLPackExchangeAPI *api = framework->api;

    if (api == NULL || api->current_work_stream == NULL)
        return 0;
    if (api->current_work_stream(kDLCUDA, index, stream) != 0)
        return -1; /* with an exception */
    *known = true;
    return 0;
}
