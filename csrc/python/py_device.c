/* py_device.c -- the CUDA runtime, and Device: host memory or a GPU. */
#include "py_device.h"

#include "cudnn.h"
#include "device_check.h"
#include "device_cuda.h"
#include "kernels_ptx.h"
#include "py_pool.h"

typedef struct device_object {
    PyObject_HEAD
    cer_device *device;
} device_object;

/* --- finding -------------------------------------------------------------- */

/* A sequence of paths as C strings; NULL-terminated. */
typedef struct path_list {
    PyObject *owners; /* a list of bytes */
    const char **paths;
} path_list;

static void
free_paths(path_list *list)
{
    PyMem_Free(list->paths);
    Py_CLEAR(list->owners);
}

/* For "O&": fills a path_list. */
static int
read_paths(PyObject *object, void *out)
{
    path_list *list = out;
    PyObject *items, *bytes;
    Py_ssize_t n;

    if (object == NULL) { /* a later argument was wrong */
        free_paths(list);
        return 1;
    }
    items = core_tuple(object, "folders must be a list of paths");
    if (items == NULL)
        return 0;
    n = PyTuple_GET_SIZE(items);
    list->owners = PyList_New(0);
    list->paths = PyMem_Calloc((size_t)n + 1, sizeof *list->paths);
    if (list->owners == NULL || list->paths == NULL)
        goto failed;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!PyUnicode_FSConverter(PyTuple_GET_ITEM(items, i), &bytes))
            goto failed;
        list->paths[i] = PyBytes_AS_STRING(bytes);
        if (PyList_Append(list->owners, bytes) < 0) {
            Py_DECREF(bytes);
            goto failed;
        }
        Py_DECREF(bytes);
    }
    Py_DECREF(items);
    return Py_CLEANUP_SUPPORTED;

failed:
    if (list->paths == NULL)
        PyErr_NoMemory();
    Py_DECREF(items);
    free_paths(list);
    return 0;
}

static PyObject *
path_or_none(const char *path)
{
    if (path[0] == '\0')
        Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(path);
}

PyDoc_STRVAR(
    cuda_open_doc,
    "cuda_open(folders, *, prefer=0, path=None)\n--\n\n"
    "Find the CUDA runtime of this process; later calls return the same.\n\n"
    "Takes a loaded runtime, else one in `folders`, else the system's;\n"
    "`prefer` (12 or 13) decides if both are present; `path` allows only\n"
    "that library. Returns its path, its version and the driver's, such\n"
    "as 12080. Raises DeviceError naming the missing part.");

static PyObject *
cuda_open(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"folders", "prefer", "path", NULL};
    core_state *state = core_state_of_module(module);
    path_list folders = {NULL, NULL};
    PyObject *path = Py_None, *path_bytes = NULL, *result = NULL;
    int prefer = 0;
    cer_cudart_search search = {0};
    cer_cudart *found = NULL;
    cer_error err = {0};
    cer_status status = CER_OK;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$iO:cuda_open", keywords,
                                     read_paths, &folders, &prefer, &path))
        return NULL;
    if (path != Py_None && !PyUnicode_FSConverter(path, &path_bytes))
        goto done;
    if (state->cudart == NULL) {
        search.folders = folders.paths;
        search.prefer = prefer;
        search.path = path_bytes == NULL ? NULL : PyBytes_AS_STRING(path_bytes);
        Py_BEGIN_ALLOW_THREADS
        status = cer_cudart_open(&search, &found, &err);
        Py_END_ALLOW_THREADS
        if (state->cudart == NULL) {
            state->cudart = found;
        } else { /* another thread was first */
            cer_cudart_release(found);
            status = CER_OK;
        }
    }
    if (status != CER_OK) {
        core_raise(state, &err);
        goto done;
    }
    result = Py_BuildValue(
        "{s:N,s:i,s:i}", "path", path_or_none(state->cudart->path), "version",
        state->cudart->version, "driver", state->cudart->driver);

done:
    Py_XDECREF(path_bytes);
    free_paths(&folders);
    return result;
}

/* The open runtime, or NULL with DeviceError. */
static cer_cudart *
opened(core_state *state)
{
    if (state->cudart == NULL)
        PyErr_SetString(state->DeviceError,
                        "no CUDA runtime is open: call cuda_open first");
    return state->cudart;
}

static PyObject *
describe(core_state *state, int index)
{
    cer_cudart_device about;
    cer_error err = {0};

    if (cer_cudart_describe(state->cudart, index, &about, &err) != CER_OK)
        return core_raise(state, &err);
    return Py_BuildValue("{s:s,s:s,s:(ii),s:i,s:n,s:O}", "name", about.name,
                         "uuid", about.uuid, "capability", about.major,
                         about.minor, "multiprocessors", about.multiprocessors,
                         "memory", (Py_ssize_t)about.total_bytes, "mps",
                         about.mps ? Py_True : Py_False);
}

PyDoc_STRVAR(
    cuda_devices_doc,
    "cuda_devices()\n--\n\n"
    "Describe the GPUs that this process may use, in order.\n\n"
    "Returns dictionaries with name, uuid, capability, multiprocessors,\n"
    "memory (bytes) and mps. Does not create a context.");

static PyObject *
cuda_devices(PyObject *module, PyObject *Py_UNUSED(unused))
{
    core_state *state = core_state_of_module(module);
    cer_cudart *runtime = opened(state);
    cer_error err = {0};
    cer_status status;
    PyObject *list, *item;
    int count;

    if (runtime == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_cudart_devices(runtime, &count, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(state, &err);
    if ((list = PyList_New(count)) == NULL)
        return NULL;
    for (int i = 0; i < count; i++) {
        if ((item = describe(state, i)) == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

PyDoc_STRVAR(cudnn_find_doc,
             "cudnn_find(folders, /)\n--\n\n"
             "Find cuDNN 9: its path, its version and the CUDA version it was\n"
             "built for, such as 91300 and 13000; None if not found. Raises\n"
             "DeviceError if it does not load.");

static PyObject *
cudnn_find(PyObject *module, PyObject *argument)
{
    path_list folders = {NULL, NULL};
    cer_cudnn found;
    cer_error err = {0};
    cer_status status;

    if (!read_paths(argument, &folders))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = cer_cudnn_find(folders.paths, &found, &err);
    Py_END_ALLOW_THREADS
    free_paths(&folders);
    if (status != CER_OK)
        return core_raise(core_state_of_module(module), &err);
    if (found.version == 0)
        Py_RETURN_NONE;
    return Py_BuildValue("{s:N,s:i,s:i}", "path", path_or_none(found.path),
                         "version", found.version, "cuda", found.cudart);
}

/* --- Device --------------------------------------------------------------- */

cer_device *
py_device_get(core_state *state, PyObject *object)
{
    if (Py_IS_TYPE(object, state->device_type))
        return ((device_object *)object)->device;
    PyErr_Format(PyExc_TypeError, "expected a Device, not %.100s",
                 Py_TYPE(object)->tp_name);
    return NULL;
}

/* -1: the host; -2 with ValueError: not a device name. */
static int
read_name(const char *name)
{
    const char *digits = name + 5;

    if (strcmp(name, "cpu") == 0)
        return -1;
    if (strncmp(name, "cuda:", 5) == 0 && strlen(digits) >= 1 &&
        strlen(digits) <= 4 && strspn(digits, "0123456789") == strlen(digits))
        return atoi(digits);
    PyErr_Format(PyExc_ValueError,
                 "a device is 'cpu' or 'cuda:0' and so on, not '%.100s'", name);
    return -2;
}

static PyObject *
device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"name", NULL};
    core_state *state = core_state_of_type(type);
    cer_device *device = NULL;
    cer_error err = {0};
    cer_status status;
    device_object *self;
    const char *name;
    int index;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Device", keywords,
                                     &name) ||
        (index = read_name(name)) == -2 ||
        (index >= 0 && opened(state) == NULL))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = index < 0 ? cer_device_host_new(&device, &err)
                       : cer_device_cuda_new(state->cudart, index,
                                             cer_kernels_ptx, &device, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(state, &err);
    self = (device_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        cer_device_release(device);
    else
        self->device = device;
    return (PyObject *)self;
}

static void
device_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    cer_device *device = ((device_object *)object)->device;

    Py_BEGIN_ALLOW_THREADS
    cer_device_release(device);
    Py_END_ALLOW_THREADS
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
device_repr(PyObject *object)
{
    device_object *self = (device_object *)object;

    return PyUnicode_FromFormat("Device('%s')", cer_device_name(self->device));
}

static PyObject *
device_name(PyObject *object, void *Py_UNUSED(closure))
{
    device_object *self = (device_object *)object;

    return PyUnicode_FromString(cer_device_name(self->device));
}

static PyObject *
device_index(PyObject *object, void *Py_UNUSED(closure))
{
    device_object *self = (device_object *)object;

    return PyLong_FromLong(cer_device_index(self->device));
}

static PyObject *
device_unpinned(PyObject *object, void *Py_UNUSED(closure))
{
    device_object *self = (device_object *)object;
    const char *why = cer_device_unpinned(self->device);

    if (why == NULL)
        Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(why, (Py_ssize_t)strlen(why), "replace");
}

PyDoc_STRVAR(memory_doc,
             "memory()\n--\n\n"
             "Return the device's free and total bytes. Memory cached by a\n"
             "framework's allocator counts as used.");

static PyObject *
device_memory(PyObject *object, PyObject *Py_UNUSED(unused))
{
    device_object *self = (device_object *)object;
    size_t free_bytes = 0, total = 0;
    cer_error err = {0};
    cer_status status;

    Py_BEGIN_ALLOW_THREADS
    status = cer_device_memory(self->device, &free_bytes, &total, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    return Py_BuildValue("nn", (Py_ssize_t)free_bytes, (Py_ssize_t)total);
}

PyDoc_STRVAR(
    held_doc,
    "held()\n--\n\n"
    "Return the bytes of device memory that Cerebro holds in this\n"
    "process, as a dictionary with shards, batches, states and other.");

static PyObject *
device_held(PyObject *object, PyObject *Py_UNUSED(unused))
{
    device_object *self = (device_object *)object;

#define HELD(use) (Py_ssize_t) cer_device_held(self->device, CER_USE_##use)
    return Py_BuildValue("{s:n,s:n,s:n,s:n}", "shards", HELD(SHARDS), "batches",
                         HELD(BATCHES), "states", HELD(STATES), "other",
                         HELD(OTHER));
#undef HELD
}

PyDoc_STRVAR(
    set_allocator_doc,
    "set_allocator(allocate, release, /)\n--\n\n"
    "Take device memory from this allocator from now on.\n\n"
    "`allocate(bytes, device) -> address` raises MemoryError when out of\n"
    "memory; `release(address)` is called in the main thread, soon after\n"
    "a block is freed. Both live as long as the process.");

static PyObject *
device_set_allocator(PyObject *object, PyObject *args)
{
    device_object *self = (device_object *)object;
    PyObject *allocate, *release;
    const cer_device_allocator *pool;

    if (!PyArg_ParseTuple(args, "OO:set_allocator", &allocate, &release) ||
        (pool = py_pool_new(allocate, release)) == NULL)
        return NULL;
    cer_device_set_allocator(self->device, pool);
    Py_RETURN_NONE;
}

static PyObject *
without_gil(device_object *self,
            cer_status (*action)(cer_device *device, cer_error *err))
{
    cer_error err = {0};
    cer_status status;

    Py_BEGIN_ALLOW_THREADS
    status = action(self->device, &err);
    Py_END_ALLOW_THREADS
    if (status != CER_OK)
        return core_raise(core_state_of((PyObject *)self), &err);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    check_doc,
    "check()\n--\n\n"
    "Test the device's memory, streams and kernels. Raises DeviceError\n"
    "naming the part and the call that failed, or the wrong result.");

static PyObject *
device_check(PyObject *object, PyObject *Py_UNUSED(unused))
{
    device_object *self = (device_object *)object;

    return without_gil(self, cer_device_check);
}

PyDoc_STRVAR(synchronize_doc,
             "synchronize()\n--\n\n"
             "Wait until the device has finished all work of this process.");

static PyObject *
device_synchronize(PyObject *object, PyObject *Py_UNUSED(unused))
{
    device_object *self = (device_object *)object;

    return without_gil(self, cer_device_sync);
}

static PyGetSetDef device_members[] = {
    {"name", device_name, NULL, "'cpu', 'cuda:1'", NULL},
    {"index", device_index, NULL, "0 for the host", NULL},
    {"unpinned", device_unpinned, NULL,
     "Why memory could not be pinned the first time; None: it always could.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef device_methods[] = {
    {"memory", device_memory, METH_NOARGS, memory_doc},
    {"held", device_held, METH_NOARGS, held_doc},
    {"set_allocator", device_set_allocator, METH_VARARGS, set_allocator_doc},
    {"check", device_check, METH_NOARGS, check_doc},
    {"synchronize", device_synchronize, METH_NOARGS, synchronize_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, "Device(name)\n--\n\n"
                "Host memory ('cpu') or a GPU ('cuda:0'), after cuda_open."},
    {Py_tp_new, device_new},
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_repr, device_repr},
    {Py_tp_getset, device_members},
    {Py_tp_methods, device_methods},
    {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "cerebro._core.Device",
    .basicsize = sizeof(device_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = device_slots,
};

static PyMethodDef functions[] = {
    {"cuda_open", (PyCFunction)(void (*)(void))cuda_open,
     METH_VARARGS | METH_KEYWORDS, cuda_open_doc},
    {"cuda_devices", cuda_devices, METH_NOARGS, cuda_devices_doc},
    {"cudnn_find", cudnn_find, METH_O, cudnn_find_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_device(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    return core_add_type(module, &device_spec,
                         &core_state_of_module(module)->device_type);
}
