/* cut.h -- how rows are cut into batches of even sizes.
 *
 * A pass of n rows in batches of b has round(n / b) batches, at least one; a
 * half is rounded to the even number, as Python's round does. The first n %
 * count batches have one row more than the others. So no batch has fewer than
 * b / 2 rows, unless n is smaller, and none has more than 3 b / 2.
 *
 * With drop_last there are n / b batches of b rows; the rest of the rows is
 * left out. */
#ifndef CER_CUT_H
#define CER_CUT_H

#include "base.h"

typedef struct cer_cut {
    size_t rows, batch_size;
    bool drop_last;
} cer_cut;

/* The number of batches. batch_size > 0. */
size_t cer_cut_count(const cer_cut *cut);

/* The first row of a batch; of batch `count`, the number of rows in all
 * batches. */
size_t cer_cut_first(const cer_cut *cut, size_t batch);

/* The most rows of a batch, over all numbers of rows up to cut->rows. */
size_t cer_cut_most(const cer_cut *cut);

#endif
