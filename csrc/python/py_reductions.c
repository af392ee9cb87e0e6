/* py_reductions.c -- Reduction: a sum of float32 numbers in PyTorch's order.
 *
 * Tensors are addresses here; the caller keeps their memory alive. */
#define NO_IMPORT_ARRAY
#include "py_reductions.h"

#include "reductions.h"

enum {
    WITHOUT_GIL = 65536 /* numbers; fewer are added up before another thread
                           would have taken the GIL */
};

typedef enum reduction_kind {
    SUM_COLUMNS,
    NLL_LOSS,
    NLL_GRADIENT,
    KIND_COUNT
} reduction_kind;

static const char *const kinds[KIND_COUNT] = {"sum_columns", "nll_loss",
                                              "nll_gradient"};

typedef struct reduction_object {
    PyObject_HEAD
    reduction_kind kind;
    cer_nll nll; /* its rows and classes are the size of the matrix */
    size_t block;
    const float *first;
    float *count, *out;
} reduction_object;

static cer_status
reduce(const reduction_object *self, cer_error *err)
{
    const cer_nll *nll = &self->nll;

    switch (self->kind) {
    case NLL_LOSS:
        return cer_nll_loss(nll, self->first, self->out, self->count, err);
    case NLL_GRADIENT:
        return cer_nll_gradient(nll, self->first, self->count, self->out, err);
    case SUM_COLUMNS:
    case KIND_COUNT:
        break;
    }
    cer_sum_columns(self->first, nll->rows, nll->classes, self->block,
                    self->out);
    return CER_OK;
}

static int
check(const reduction_object *self)
{
    size_t n;

    if (self->first == NULL || self->out == NULL || self->nll.rows == 0 ||
        self->nll.classes == 0 ||
        !cer_mul_size(self->nll.rows, self->nll.classes, &n) ||
        n > SIZE_MAX / sizeof(float)) {
        PyErr_SetString(PyExc_ValueError, "a reduction of an empty matrix");
        return -1;
    }
    if (self->kind == SUM_COLUMNS) {
        if (self->block == 0 || self->nll.rows > CER_SUM_MAX_ROWS) {
            PyErr_SetString(PyExc_ValueError,
                            "a sum needs a block, and fewer rows");
            return -1;
        }
    } else if (self->nll.target == NULL || self->count == NULL) {
        PyErr_SetString(PyExc_ValueError, "a loss needs targets and a count");
        return -1;
    }
    return 0;
}

static PyObject *
reduction_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"kind",  "sizes",  "addresses",
                               "block", "target", NULL};
    unsigned long long first, count, out, target = 0;
    Py_ssize_t rows, columns, block = 0;
    long long ignored = 0;
    reduction_object *self;
    const char *kind;
    int mean = 0;
    size_t i = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "s(nn)(KKK)|n(KLp):Reduction", keywords, &kind, &rows,
            &columns, &first, &count, &out, &block, &target, &ignored, &mean))
        return NULL;
    while (i < KIND_COUNT && strcmp(kinds[i], kind) != 0)
        i++;
    if (i == KIND_COUNT || rows < 0 || columns < 0 || block < 0) {
        PyErr_Format(PyExc_ValueError, "no reduction '%s' of %zd x %zd numbers",
                     kind, rows, columns);
        return NULL;
    }
    self = (reduction_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->kind = (reduction_kind)i;
    self->nll = (cer_nll){.rows = (size_t)rows,
                          .classes = (size_t)columns,
                          .target = (const int64_t *)(uintptr_t)target,
                          .ignored = ignored,
                          .mean = mean != 0};
    self->block = (size_t)block;
    self->first = (const float *)(uintptr_t)first;
    self->count = (float *)(uintptr_t)count;
    self->out = (float *)(uintptr_t)out;
    if (check(self) < 0)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
reduction_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    type->tp_free(object);
    Py_DECREF(type);
}

bool
py_reduction_check(const core_state *core, PyObject *object)
{
    return Py_TYPE(object) == core->reduction_type;
}

int
py_reduction_run(PyObject *object)
{
    const reduction_object *self = (reduction_object *)object;
    cer_status status;
    cer_error err = {0};

    if (self->nll.rows * self->nll.classes < WITHOUT_GIL) {
        status = reduce(self, &err);
    } else {
        Py_BEGIN_ALLOW_THREADS
        status = reduce(self, &err);
        Py_END_ALLOW_THREADS
    }
    if (status == CER_OK)
        return 0;
    PyErr_SetString(PyExc_IndexError, err.message); /* as PyTorch has it */
    return -1;
}

static PyObject *
reduction_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {NULL};

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Reduction", keywords) ||
        py_reduction_run(object) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyType_Slot reduction_slots[] = {
    {Py_tp_doc,
     "Reduction(kind, sizes, addresses, block=0, target=(0, 0, False))\n"
     "--\n\n"
     "A sum of float32 numbers in PyTorch's order; called, it computes it.\n\n"
     "`sizes` is (rows, columns) of a matrix that is stored by rows. kind and\n"
     "addresses: 'sum_columns', (matrix, 0, sums), in blocks of columns;\n"
     "'nll_loss', (likelihoods, count of rows, loss); 'nll_gradient',\n"
     "(gradient of the loss, count of rows, gradient). `target` is (address\n"
     "of a class for each row, class that does not count, whether the loss\n"
     "is a mean). Memory must outlive this object."},
    {Py_tp_new, reduction_new},
    {Py_tp_dealloc, reduction_dealloc},
    {Py_tp_call, reduction_call},
    {0, NULL},
};

static PyType_Spec reduction_spec = {
    .name = "cerebro._core.Reduction",
    .basicsize = sizeof(reduction_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reduction_slots,
};

int
core_register_reductions(PyObject *module)
{
    return core_add_type(module, &reduction_spec,
                         &core_state_of_module(module)->reduction_type);
}
