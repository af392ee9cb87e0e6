/* mt19937.h -- draws from PyTorch's random generator of the CPU, the Mersenne
 * Twister of Matsumoto and Nishimura (1998), with PyTorch's bits.
 *
 * PyTorch makes one number at a time. Here a whole table of 624 numbers is made
 * at once, in vectors. */
#ifndef CER_MT19937_H
#define CER_MT19937_H

#include "base.h"

enum { CER_MT19937_BYTES = 5056 }; /* of torch.Generator.get_state() */

/* Sets each of n numbers to 1 with probability p (0 to 1), else to 0, as
 * Tensor.bernoulli_(p) does, and advances `state`, the bytes of a generator's
 * get_state(). Errors: CER_INVALID if those are not the bytes of such a
 * generator, or p is not a probability; nothing is changed then. */
cer_status cer_mt19937_bernoulli(void *state, size_t nbytes, double p,
                                 float *out, size_t n, cer_error *err);

#endif
