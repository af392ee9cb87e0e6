/* py_matmul.c -- MatMul: a product of two float32 matrices.
 *
 * Matrices are addresses here; the caller keeps their memory alive. */
#define NO_IMPORT_ARRAY
#include "py_matmul.h"

#include "matmul.h"

/* Multiplications; shorter products are done before another thread would have
 * taken the GIL. */
#define WITHOUT_GIL 1e6

typedef struct matmul_object {
    PyObject_HEAD
    cer_matmul product;
} matmul_object;

static PyObject *
matmul_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "sgemm", "transposed", "sizes",           "a", "b",
        "c",     "bias",       "bias_of_columns", NULL};
    unsigned long long sgemm, a, b, c, bias;
    int transpose_a, transpose_b, bias_of_columns;
    matmul_object *self;
    cer_matmul read = {0};
    cer_error err = {0};

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "K(pp)(iii)(Ki)(Ki)(Ki)Kp:MatMul", keywords, &sgemm,
            &transpose_a, &transpose_b, &read.m, &read.n, &read.k, &a,
            &read.lda, &b, &read.ldb, &c, &read.ldc, &bias, &bias_of_columns))
        return NULL;
    read.sgemm = (cer_sgemm)(uintptr_t)sgemm;
    read.transpose_a = transpose_a != 0;
    read.transpose_b = transpose_b != 0;
    read.a = (const float *)(uintptr_t)a;
    read.b = (const float *)(uintptr_t)b;
    read.c = (float *)(uintptr_t)c;
    read.bias = (const float *)(uintptr_t)bias;
    read.bias_of_columns = bias_of_columns != 0;
    if (cer_matmul_check(&read, &err) != CER_OK) {
        core_raise(core_state_of_type(type), &err);
        return NULL;
    }
    self = (matmul_object *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->product = read;
    return (PyObject *)self;
}

static void
matmul_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    type->tp_free(object);
    Py_DECREF(type);
}

bool
py_matmul_check(const core_state *core, PyObject *object)
{
    return Py_TYPE(object) == core->matmul_type;
}

int
py_matmul_run(PyObject *object)
{
    const cer_matmul *product = &((matmul_object *)object)->product;

    if (cer_matmul_size(product) < WITHOUT_GIL) {
        cer_matmul_run(product);
    } else {
        Py_BEGIN_ALLOW_THREADS
        cer_matmul_run(product);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

static PyObject *
matmul_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {NULL};

    if ((kwargs != NULL || PyTuple_GET_SIZE(args) != 0) &&
        !PyArg_ParseTupleAndKeywords(args, kwargs, ":MatMul", keywords))
        return NULL;
    py_matmul_run(object);
    Py_RETURN_NONE;
}

static PyType_Slot matmul_slots[] = {
    {Py_tp_doc,
     "MatMul(sgemm, transposed, sizes, a, b, c, bias, bias_of_columns)\n"
     "--\n\n"
     "A product of two float32 matrices; called, it computes c.\n\n"
     "`sgemm` is the address of BLAS' function. `transposed` says which of\n"
     "a and b are, `sizes` is (m, n, k). A matrix is stored by columns, as\n"
     "(address, elements from one column to the next); its memory must\n"
     "outlive this object. `bias`: the address of a number for each row, or\n"
     "with `bias_of_columns` for each column; 0: none."},
    {Py_tp_new, matmul_new},
    {Py_tp_dealloc, matmul_dealloc},
    {Py_tp_call, matmul_call},
    {0, NULL},
};

static PyType_Spec matmul_spec = {
    .name = "cerebro._core.MatMul",
    .basicsize = sizeof(matmul_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = matmul_slots,
};

int
core_register_matmul(PyObject *module)
{
    return core_add_type(module, &matmul_spec,
                         &core_state_of_module(module)->matmul_type);
}
