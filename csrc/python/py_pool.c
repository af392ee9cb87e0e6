/* py_pool.c -- see py_pool.h.
 *
 * Blocks are freed on any thread, without the GIL: they go on a list. The main
 * thread releases them when it next runs Python, or the next allocation does.
 */
#include "py_pool.h"

#include <stdatomic.h>

typedef struct returned {
    struct returned *next;
    void *data;
} returned;

typedef struct pool {
    cer_device_allocator allocator; /* the device's part */
    PyObject *allocate, *release;
    _Atomic(returned *) returned;
    atomic_bool scheduled;
} pool;

static void
release_one(pool *self, returned *block)
{
    PyObject *result = PyObject_CallFunction(
        self->release, "K", (unsigned long long)(uintptr_t)block->data);

    if (result == NULL)
        PyErr_WriteUnraisable(self->release);
    Py_XDECREF(result);
    cer_free(block);
}

/* Releases the blocks on the list; needs the GIL. */
static void
drain(pool *self)
{
    returned *block =
        atomic_exchange_explicit(&self->returned, NULL, memory_order_acquire);

    while (block != NULL) {
        returned *next = block->next;

        release_one(self, block);
        block = next;
    }
}

static int
drain_later(void *context)
{
    pool *self = context;

    atomic_store(&self->scheduled, false);
    drain(self);
    return 0;
}

/* Converts the current exception to an error: out of memory, or its message. */
static cer_status
fail_with_exception(cer_error *err)
{
    PyObject *type, *value, *traceback, *text;
    cer_status status = CER_NOMEM;

    if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Clear();
        return cer_fail(err, status, "out of memory");
    }
    PyErr_Fetch(&type, &value, &traceback);
    text = value == NULL ? NULL : PyObject_Str(value);
    if (text != NULL && PyUnicode_AsUTF8(text) != NULL)
        status = cer_fail(err, CER_DEVICE,
                          "the framework's allocator failed: %.400s",
                          PyUnicode_AsUTF8(text));
    else
        status = cer_fail(err, CER_DEVICE, "the framework's allocator failed");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return status;
}

/* Needs the GIL. */
static cer_status
allocate(pool *self, int device, size_t bytes, void **out, cer_error *err)
{
    PyObject *result;
    void *data;

    drain(self);
    result =
        PyObject_CallFunction(self->allocate, "ni", (Py_ssize_t)bytes, device);
    if (result == NULL)
        return fail_with_exception(err);
    data = PyLong_AsVoidPtr(result);
    Py_DECREF(result);
    if (PyErr_Occurred())
        return fail_with_exception(err);
    if (data == NULL)
        return cer_fail(err, CER_DEVICE,
                        "the framework's allocator gave no memory");
    *out = data;
    return CER_OK;
}

static cer_status
pool_alloc(void *context, int device, size_t bytes, void **out, void **ticket,
           cer_error *err)
{
    pool *self = context;
    returned *block;
    PyGILState_STATE gil;
    cer_status status;

    if (bytes > PY_SSIZE_T_MAX || (block = cer_alloc(sizeof *block)) == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory");
    gil = PyGILState_Ensure();
    status = allocate(self, device, bytes, out, err);
    PyGILState_Release(gil);
    if (status != CER_OK) {
        cer_free(block);
        return status;
    }
    block->data = *out;
    *ticket = block;
    return CER_OK;
}

static void
pool_give_back(void *context, int device, void *data, void *ticket)
{
    pool *self = context;
    returned *block = ticket;

    (void)device, (void)data;
    block->next = atomic_load_explicit(&self->returned, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&self->returned, &block->next,
                                                  block, memory_order_release,
                                                  memory_order_relaxed))
        ;
    /* After Python's exit, the process and its memory soon end too. */
    if (Py_IsInitialized() && !atomic_exchange(&self->scheduled, true) &&
        Py_AddPendingCall(drain_later, self) != 0)
        atomic_store(&self->scheduled, false); /* the next block retries */
}

const cer_device_allocator *
py_pool_new(PyObject *allocate_, PyObject *release)
{
    pool *self;

    if (!PyCallable_Check(allocate_) || !PyCallable_Check(release)) {
        PyErr_SetString(PyExc_TypeError,
                        "allocate and release must be functions");
        return NULL;
    }
    if ((self = cer_calloc(1, sizeof *self)) == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    self->allocator = (cer_device_allocator){self, pool_alloc, pool_give_back};
    self->allocate = Py_NewRef(allocate_);
    self->release = Py_NewRef(release);
    atomic_init(&self->returned, NULL);
    atomic_init(&self->scheduled, false);
    return &self->allocator;
}
