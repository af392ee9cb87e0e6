/* py_rng.c -- trial_seed, visit_order, permutation and keyed random numbers. */
#define NO_IMPORT_ARRAY
#include "module.h"
#include "rng.h"

#include <numpy/arrayobject.h>

PyDoc_STRVAR(
    trial_seed_doc,
    "trial_seed(seed, trial)\n--\n\n"
    "Return the seed of a trial's generators, 0 <= result < 2**32.\n\n"
    "Different trials of one search never get the same result. The result\n"
    "fits random.seed, numpy.random.seed and torch.manual_seed.");

static PyObject *
trial_seed(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"seed", "trial", NULL};
    PyObject *seed_arg, *trial_arg;
    uint64_t seed = 0, trial = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:trial_seed", keywords,
                                     &seed_arg, &trial_arg) ||
        core_read_number(seed_arg, "seed", UINT64_MAX, &seed) < 0 ||
        core_read_number(trial_arg, "trial", UINT32_MAX, &trial) < 0)
        return NULL;
    return PyLong_FromUnsignedLong(cer_trial_seed(seed, (uint32_t)trial));
}

PyDoc_STRVAR(
    visit_order_doc,
    "visit_order(trial, epoch, shards, *, stagger=True)\n--\n\n"
    "Return the order in which a trial visits the parts of an epoch.\n\n"
    "Trial t starts epoch e at part (t + e) mod shards and wraps around;\n"
    "without stagger every trial starts at part 0. With shuffle=\"shards\",\n"
    "a part is a group of shards.");

static PyObject *
visit_order(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"trial", "epoch", "shards", "stagger", NULL};
    PyObject *trial_arg, *epoch_arg, *shards_arg, *order;
    uint64_t trial = 0, epoch = 0, shards = 0;
    int stagger = 1;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$p:visit_order",
                                     keywords, &trial_arg, &epoch_arg,
                                     &shards_arg, &stagger) ||
        core_read_number(trial_arg, "trial", UINT32_MAX, &trial) < 0 ||
        core_read_number(epoch_arg, "epoch", UINT32_MAX, &epoch) < 0 ||
        core_read_number(shards_arg, "shards", UINT32_MAX, &shards) < 0)
        return NULL;
    if (shards == 0) {
        PyErr_SetString(PyExc_ValueError, "shards must be 1 or more, not 0");
        return NULL;
    }
    order = PyList_New((Py_ssize_t)shards);
    for (uint64_t step = 0; order != NULL && step < shards; step++) {
        PyObject *shard = PyLong_FromUnsignedLong(
            cer_visit_shard((uint32_t)trial, (uint32_t)epoch, (uint32_t)step,
                            (uint32_t)shards, stagger != 0));

        if (shard == NULL)
            Py_CLEAR(order);
        else
            PyList_SET_ITEM(order, (Py_ssize_t)step, shard);
    }
    return order;
}

/* Reads the key of a random stream. */
static int
read_key(PyObject *seed_arg, PyObject *a_arg, PyObject *b_arg, uint64_t *seed,
         uint64_t *a, uint64_t *b)
{
    if (core_read_number(seed_arg, "seed", UINT64_MAX, seed) < 0 ||
        core_read_number(a_arg, "a", UINT64_MAX, a) < 0)
        return -1;
    return core_read_number(b_arg, "b", UINT64_MAX, b);
}

PyDoc_STRVAR(
    permutation_doc,
    "permutation(n, seed, use, a=0, b=0)\n--\n\n"
    "Return a random order of 0..n-1 as uint32, keyed by all arguments.\n\n"
    "`use` is 'rows' (a=epoch, b=first shard), 'write', 'split' or\n"
    "'groups' (a=epoch, b=pool).");

static PyObject *
permutation(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"n", "seed", "use", "a", "b", NULL};
    PyObject *n_arg, *seed_arg, *a_arg = NULL, *b_arg = NULL;
    uint64_t n = 0, seed = 0, a = 0, b = 0;
    const char *use_name;
    cer_rng_use use;
    npy_intp dims[1];
    PyObject *array;
    uint32_t *order;
    cer_rng rng;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOs|OO:permutation",
                                     keywords, &n_arg, &seed_arg, &use_name,
                                     &a_arg, &b_arg) ||
        core_read_number(n_arg, "n", UINT32_MAX, &n) < 0 ||
        read_key(seed_arg, a_arg, b_arg, &seed, &a, &b) < 0)
        return NULL;
    if (strcmp(use_name, "rows") == 0) {
        use = CER_RNG_ROWS;
    } else if (strcmp(use_name, "write") == 0) {
        use = CER_RNG_WRITE;
    } else if (strcmp(use_name, "split") == 0) {
        use = CER_RNG_SPLIT;
    } else if (strcmp(use_name, "groups") == 0) {
        use = CER_RNG_GROUPS;
    } else {
        PyErr_Format(PyExc_ValueError,
                     "unknown use '%s': must be rows, write, split or groups",
                     use_name);
        return NULL;
    }
    dims[0] = (npy_intp)n;
    array = PyArray_SimpleNew(1, dims, NPY_UINT32);
    if (array == NULL)
        return NULL;
    order = PyArray_DATA((PyArrayObject *)array);
    cer_rng_seed(&rng, seed, use, a, b);
    Py_BEGIN_ALLOW_THREADS
    cer_rng_permute(&rng, order, (uint32_t)n);
    Py_END_ALLOW_THREADS
    return array;
}

PyDoc_STRVAR(
    random_doubles_doc,
    "random_doubles(n, seed, use, a=0, b=0)\n--\n\n"
    "Return n floats, uniform in [0, 1), keyed by all arguments.\n\n"
    "`use` is 'space' (a=trial, b=hash of the dimension's name),\n"
    "'eval' (a=trial, b=epoch) or 'search' (a, b: the searcher's own).");

static PyObject *
random_doubles(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"n", "seed", "use", "a", "b", NULL};
    PyObject *n_arg, *seed_arg, *a_arg = NULL, *b_arg = NULL, *list;
    uint64_t n = 0, seed = 0, a = 0, b = 0;
    const char *use_name;
    cer_rng_use use;
    cer_rng rng;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOs|OO:random_doubles",
                                     keywords, &n_arg, &seed_arg, &use_name,
                                     &a_arg, &b_arg) ||
        core_read_number(n_arg, "n", PY_SSIZE_T_MAX, &n) < 0 ||
        read_key(seed_arg, a_arg, b_arg, &seed, &a, &b) < 0)
        return NULL;
    if (strcmp(use_name, "space") == 0) {
        use = CER_RNG_SPACE;
    } else if (strcmp(use_name, "eval") == 0) {
        use = CER_RNG_EVAL;
    } else if (strcmp(use_name, "search") == 0) {
        use = CER_RNG_SEARCH;
    } else {
        PyErr_Format(PyExc_ValueError,
                     "unknown use '%s': must be space, eval or search",
                     use_name);
        return NULL;
    }
    cer_rng_seed(&rng, seed, use, a, b);
    list = PyList_New((Py_ssize_t)n);
    for (Py_ssize_t i = 0; list != NULL && i < (Py_ssize_t)n; i++) {
        PyObject *value = PyFloat_FromDouble(cer_rng_double(&rng));

        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, value);
    }
    return list;
}

static PyMethodDef functions[] = {
    {"trial_seed", (PyCFunction)(void (*)(void))trial_seed,
     METH_VARARGS | METH_KEYWORDS, trial_seed_doc},
    {"visit_order", (PyCFunction)(void (*)(void))visit_order,
     METH_VARARGS | METH_KEYWORDS, visit_order_doc},
    {"permutation", (PyCFunction)(void (*)(void))permutation,
     METH_VARARGS | METH_KEYWORDS, permutation_doc},
    {"random_doubles", (PyCFunction)(void (*)(void))random_doubles,
     METH_VARARGS | METH_KEYWORDS, random_doubles_doc},
    {NULL, NULL, 0, NULL},
};

int
core_register_rng(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
