#include "matmul.h"

#include <stddef.h>

#include "check.h"

/* SGEMM by its definition. */
static void
reference(const char *transpose_a, const char *transpose_b, const int *m,
          const int *n, const int *k, const float *alpha, const float *a,
          const int *lda, const float *b, const int *ldb, const float *beta,
          float *c, const int *ldc)
{
    for (ptrdiff_t j = 0; j < *n; j++) {
        for (ptrdiff_t i = 0; i < *m; i++) {
            float sum = 0, *at = &c[i + j * *ldc];

            for (ptrdiff_t l = 0; l < *k; l++) {
                float x =
                    *transpose_a == 't' ? a[l + i * *lda] : a[i + l * *lda];
                float y =
                    *transpose_b == 't' ? b[j + l * *ldb] : b[l + j * *ldb];

                sum += x * y;
            }
            *at = *alpha * sum + (*beta == 0 ? 0 : *beta * *at);
        }
    }
}

static const float a[] = {1, 2, 3, 4, 5, 6}; /* 2 x 3 by columns */
static const float b[] = {1, 0, 2, 0, 1, 3}; /* 3 x 2 by columns */

static cer_matmul
product(float *c)
{
    return (cer_matmul){.sgemm = reference,
                        .m = 2,
                        .n = 2,
                        .k = 3,
                        .lda = 2,
                        .ldb = 3,
                        .ldc = 3,
                        .a = a,
                        .b = b,
                        .c = c};
}

static void
check_result(const float *c, float x, float y, float z, float w)
{
    CHECK(c[0] == x && c[1] == y && c[3] == z && c[4] == w);
    CHECK(c[2] == -1 && c[5] == -1); /* between and after the columns */
}

static void
a_product_is_blas(void)
{
    float c[6] = {-1, -1, -1, -1, -1, -1};
    cer_matmul one = product(c);

    CHECK_EQ_INT(cer_matmul_check(&one, NULL), CER_OK);
    cer_matmul_run(&one);
    check_result(c, 11, 14, 18, 22);
    CHECK(cer_matmul_size(&one) == 12);
}

static void
transposed_factors_are_told(void)
{
    static const float rows[] = {1, 3, 5, 2, 4, 6}; /* a by rows */
    static const float other[] = {1, 0, 0, 1, 2, 3};
    float c[6] = {-1, -1, -1, -1, -1, -1};
    cer_matmul one = product(c);

    one.a = rows, one.lda = 3, one.transpose_a = true;
    one.b = other, one.ldb = 2, one.transpose_b = true;
    CHECK_EQ_INT(cer_matmul_check(&one, NULL), CER_OK);
    cer_matmul_run(&one);
    check_result(c, 11, 14, 18, 22);
}

static void
a_bias_is_of_rows_or_columns(void)
{
    static const float bias[] = {100, 200};
    float c[6] = {-1, -1, -1, -1, -1, -1};
    cer_matmul one = product(c);

    one.bias = bias;
    cer_matmul_run(&one);
    check_result(c, 111, 214, 118, 222);
    one.bias_of_columns = true;
    cer_matmul_run(&one);
    check_result(c, 111, 114, 218, 222);
}

static void
wrong_products_are_refused(void)
{
    float c[6];
    cer_error err = {0};
    cer_matmul wrong[9];

    for (size_t i = 0; i < 9; i++)
        wrong[i] = product(c);
    wrong[0].sgemm = NULL;
    wrong[1].a = NULL;
    wrong[2].b = NULL;
    wrong[3].c = NULL;
    wrong[4].m = 0;
    wrong[5].k = -1;
    wrong[6].lda = 1;
    wrong[7].ldb = 2;
    wrong[8].ldc = 1;
    for (size_t i = 0; i < 9; i++)
        CHECK_EQ_INT(cer_matmul_check(&wrong[i], &err), CER_INVALID);
}

CHECK_MAIN(a_product_is_blas, transposed_factors_are_told,
           a_bias_is_of_rows_or_columns, wrong_products_are_refused)
