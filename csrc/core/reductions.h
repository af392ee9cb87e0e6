/* reductions.h -- sums of float32 numbers in the order in which PyTorch adds
 * them up on one thread, so that they have PyTorch's bits. */
#ifndef CER_REDUCTIONS_H
#define CER_REDUCTIONS_H

#include "base.h"

enum {
    CER_SUM_MAX_ROWS = 1 << 16 /* PyTorch adds more in another order */
};

/* The sums of the columns of a matrix that is stored by rows. `block`: as many
 * columns as PyTorch takes at once, 32 or 64, by its vectors; the columns left
 * over are added up in another order. At most
 * CER_SUM_MAX_ROWS rows; of matrices of 4 to block / 4 - 1 columns, PyTorch's
 * order is another. */
void cer_sum_columns(const float *in, size_t rows, size_t columns, size_t block,
                     float *out);

/* The negative log likelihood of classes, and its gradient. */
typedef struct cer_nll {
    size_t rows, classes;
    const int64_t *target; /* a class for each row */
    int64_t ignored;       /* rows with this target do not count */
    bool mean;             /* over the rows that count; else the sum */
} cer_nll;

/* likelihoods: rows x classes. count: of the rows that count.
 * Errors: CER_INVALID if a target is no class. */
cer_status cer_nll_loss(const cer_nll *nll, const float *likelihoods,
                        float *loss, float *count, cer_error *err);
cer_status cer_nll_gradient(const cer_nll *nll, const float *gradient_of_loss,
                            const float *count, float *gradient,
                            cer_error *err);

#endif
