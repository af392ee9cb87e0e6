/* kernels_impl.h -- shared by the kernels' files; no other file includes it.
 *
 *   kernels.c       the table of kernels, the division of work, the launch
 *   kernels_plan.c  from a transform to a kernel and its arguments
 *   kernels_host.c  the references */
#ifndef CER_KERNELS_IMPL_H
#define CER_KERNELS_IMPL_H

#include "kernels.h"
#include "kernels_arith.h"

/* Counts of items, values and blocks have 31 bits. */
#define CER_KERNEL_MOST ((size_t)INT32_MAX)

cer_divider cer_kernels_divider(uint32_t divisor); /* 1 or more */

/* Divides n_rows rows of `items` items into blocks of at most `most_rows` rows.
 * Returns false if that is more than can be counted. */
bool cer_kernels_cut(size_t n_rows, size_t items, uint32_t most_rows,
                     cer_tiling *out);

/* The references, one for each family of kernels. */
void cer_kernels_host_rows(const cer_rows_args *args, cer_value_mode mode);
void cer_kernels_host_values(const cer_values_args *args, cer_value_mode mode);
void cer_kernels_host_planes(const cer_image_args *args, cer_value_mode mode);
void cer_kernels_host_pixels(const cer_image_args *args, cer_value_mode mode);
void cer_kernels_host_ragged(const cer_ragged_args *args, cer_value_mode mode);

#endif
