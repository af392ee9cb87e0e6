#include "reductions.h"

#include <string.h>

enum {
    LEVELS = 4,      /* of partial sums of a column */
    LOSS_LEVELS = 8, /* and of a loss */
    POWER = 4,       /* a level takes 2^POWER sums of the level below */
    STEP = 1 << POWER,
    WIDTH = 64,  /* columns that are added up together */
    PARALLEL = 4 /* sums of a column that is left over */
};

/* Moves sums up after `i` rows, a multiple of STEP. */
static void
carry(float sums[LEVELS][WIDTH], size_t i, size_t width)
{
    for (unsigned level = 1; level < LEVELS; level++) {
        for (size_t j = 0; j < width; j++) {
            sums[level][j] += sums[level - 1][j];
            sums[level - 1][j] = 0;
        }
        if ((i & ((size_t)(STEP - 1) << (level * POWER))) != 0)
            break;
    }
}

static void
add_row(float *sums, const float *row, size_t width)
{
    for (size_t j = 0; j < width; j++)
        sums[j] += row[j];
}

/* Sums of up to WIDTH columns. */
static void
cascade(const float *in, size_t rows, size_t stride, size_t width, float *out)
{
    float sums[LEVELS][WIDTH];
    size_t i = 0;

    memset(sums, 0, sizeof sums);
    while (i + STEP <= rows) {
        for (size_t end = i + STEP; i < end; i++)
            add_row(sums[0], in + i * stride, width);
        carry(sums, i, width);
    }
    for (; i < rows; i++)
        add_row(sums[0], in + i * stride, width);
    for (unsigned level = 1; level < LEVELS; level++)
        add_row(sums[0], sums[level], width);
    memcpy(out, sums[0], width * sizeof *out);
}

/* The same for columns that do not fill a block: rows go to four separate sums
 * in turn. */
static void
cascade_apart(const float *in, size_t rows, size_t stride, size_t width,
              float *out)
{
    float sums[PARALLEL][WIDTH];
    size_t whole = rows / PARALLEL;

    for (size_t k = 0; k < PARALLEL; k++)
        cascade(in + k * stride, whole, stride * PARALLEL, width, sums[k]);
    for (size_t i = whole * PARALLEL; i < rows; i++)
        add_row(sums[0], in + i * stride, width);
    for (size_t k = 1; k < PARALLEL; k++)
        add_row(sums[0], sums[k], width);
    memcpy(out, sums[0], width * sizeof *out);
}

void
cer_sum_columns(const float *in, size_t rows, size_t columns, size_t block,
                float *out)
{
    size_t blocked = columns - columns % block;

    for (size_t at = 0, width; at < columns; at += width) {
        size_t left = (at < blocked ? blocked : columns) - at;

        width = left < WIDTH ? left : WIDTH;
        if (at < blocked)
            cascade(in + at, rows, columns, width, out + at);
        else
            cascade_apart(in + at, rows, columns, width, out + at);
    }
}

/* Whether row i counts; false, and an error, if its target is no class. */
static bool
counts(const cer_nll *nll, size_t i, cer_status *status, cer_error *err)
{
    int64_t target = nll->target[i];

    if (target == nll->ignored)
        return false;
    if (target >= 0 && (uint64_t)target < nll->classes)
        return true;
    *status = cer_fail(err, CER_INVALID, "Target %lld is out of bounds.",
                       (long long)target);
    return false;
}

cer_status
cer_nll_loss(const cer_nll *nll, const float *likelihoods, float *loss,
             float *count, cer_error *err)
{
    float sums[LOSS_LEVELS] = {0}, total = 0;
    cer_status status = CER_OK;
    size_t counted = 0;

    for (size_t i = 0; i < nll->rows; i++) {
        if (!counts(nll, i, &status, err)) {
            if (status != CER_OK)
                return status;
            continue;
        }
        counted++;
        sums[0] -= likelihoods[i * nll->classes + (size_t)nll->target[i]];
        for (unsigned level = 0; level + 1 < LOSS_LEVELS; level++) {
            if ((i & ((size_t)(STEP - 1) << (level * POWER))) != 0)
                break;
            sums[level + 1] += sums[level];
            sums[level] = 0;
        }
    }
    for (unsigned level = 0; level < LOSS_LEVELS; level++)
        total += sums[level];
    *count = (float)counted;
    *loss = nll->mean ? total / *count : total;
    return CER_OK;
}

cer_status
cer_nll_gradient(const cer_nll *nll, const float *gradient_of_loss,
                 const float *count, float *gradient, cer_error *err)
{
    float of_row =
        -(nll->mean ? *gradient_of_loss / *count : *gradient_of_loss);
    cer_status status = CER_OK;

    memset(gradient, 0, nll->rows * nll->classes * sizeof *gradient);
    for (size_t i = 0; i < nll->rows; i++) {
        if (counts(nll, i, &status, err))
            gradient[i * nll->classes + (size_t)nll->target[i]] = of_row;
    }
    return status;
}
