/* float_env.h -- the default floating-point mode, whatever the thread's mode
 * is.
 *
 * Rounding and flushing of denormals are modes of a thread, which a library or
 * torch.set_flush_denormal may have changed. Results that need the same bits on
 * every thread are computed between enter and leave. */
#ifndef CER_FLOAT_ENV_H
#define CER_FLOAT_ENV_H

#include <fenv.h>

static inline void
cer_float_enter(fenv_t *before)
{
    (void)fegetenv(before);
    (void)fesetenv(FE_DFL_ENV);
}

/* Discards exceptions raised since enter. */
static inline void
cer_float_leave(const fenv_t *before)
{
    (void)fesetenv(before);
}

#endif
