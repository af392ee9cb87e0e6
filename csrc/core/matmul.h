/* matmul.h -- the product of two float32 matrices, by a function of BLAS. */
#ifndef CER_MATMUL_H
#define CER_MATMUL_H

#include "base.h"

/* SGEMM of the Reference BLAS, with int for Fortran's integers: matrices are
 * stored by columns, and c = alpha op(a) op(b) + beta c. */
typedef void (*cer_sgemm)(const char *transpose_a, const char *transpose_b,
                          const int *m, const int *n, const int *k,
                          const float *alpha, const float *a, const int *lda,
                          const float *b, const int *ldb, const float *beta,
                          float *c, const int *ldc);

typedef struct cer_matmul {
    cer_sgemm sgemm;
    bool transpose_a, transpose_b;
    int m, n, k;       /* c is m x n, op(a) m x k and op(b) k x n */
    int lda, ldb, ldc; /* elements from one column to the next */
    const float *a, *b;
    const float *bias;    /* NULL: none */
    bool bias_of_columns; /* a number for each column, not for each row */
    float *c;             /* apart from what is read */
} cer_matmul;

/* Errors: CER_INVALID if a matrix is missing or empty, or if its columns
 * overlap. */
cer_status cer_matmul_check(const cer_matmul *product, cer_error *err);

/* Needs a checked product. */
void cer_matmul_run(const cer_matmul *product);

/* Multiplications: a measure of the time it takes. */
double cer_matmul_size(const cer_matmul *product);

#endif
