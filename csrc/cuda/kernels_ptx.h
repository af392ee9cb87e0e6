/* kernels_ptx.h -- the kernels as PTX, which the driver translates for its GPU:
 * compute_75 and later, drivers from 520 (CUDA 11.8) on. Their entries are
 * named as cer_kernel_name says. */
#ifndef CER_KERNELS_PTX_H
#define CER_KERNELS_PTX_H

extern const char cer_kernels_ptx[]; /* ends with a 0 */

#endif
