/* kernels_ptx.h -- the kernels as PTX, which the driver compiles for its GPU:
 * compute_75 or later, driver 520 (CUDA 11.8) or later. cer_kernel_name gives
 * the entries' names. */
#ifndef CER_KERNELS_PTX_H
#define CER_KERNELS_PTX_H

extern const char cer_kernels_ptx[]; /* ends with a 0 */

#endif
