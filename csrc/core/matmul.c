#include "matmul.h"

#include <string.h>

cer_status
cer_matmul_check(const cer_matmul *product, cer_error *err)
{
    int rows_a = product->transpose_a ? product->k : product->m;
    int rows_b = product->transpose_b ? product->n : product->k;

    if (product->sgemm == NULL || product->a == NULL || product->b == NULL ||
        product->c == NULL)
        return cer_fail(err, CER_INVALID, "a product lacks a matrix");
    if (product->m < 1 || product->n < 1 || product->k < 1)
        return cer_fail(err, CER_INVALID, "a product of empty matrices");
    if (product->lda < rows_a || product->ldb < rows_b ||
        product->ldc < product->m)
        return cer_fail(err, CER_INVALID,
                        "the columns of a product's matrix overlap");
    return CER_OK;
}

static void
fill_with_bias(const cer_matmul *product)
{
    size_t column = (size_t)product->m * sizeof *product->c;

    for (ptrdiff_t i = 0; i < product->n; i++) {
        float *c = product->c + i * product->ldc;

        if (product->bias_of_columns) {
            for (ptrdiff_t j = 0; j < product->m; j++)
                c[j] = product->bias[i];
        } else {
            memcpy(c, product->bias, column);
        }
    }
}

void
cer_matmul_run(const cer_matmul *product)
{
    const float one = 1, beta = product->bias != NULL ? 1 : 0;

    if (product->bias != NULL)
        fill_with_bias(product);
    product->sgemm(product->transpose_a ? "t" : "n",
                   product->transpose_b ? "t" : "n", &product->m, &product->n,
                   &product->k, &one, product->a, &product->lda, product->b,
                   &product->ldb, &beta, product->c, &product->ldc);
}

double
cer_matmul_size(const cer_matmul *product)
{
    return (double)product->m * product->n * product->k;
}
