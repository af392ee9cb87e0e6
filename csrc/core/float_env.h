/* float_env.h -- floating point as it is by default, whatever the thread's
 * mode.
 *
 * Rounding and the flushing of denormal numbers are modes of a thread, and a
 * library or torch.set_flush_denormal may have changed them. What must have the
 * same bits on every thread is computed between enter and leave. */
#ifndef CER_FLOAT_ENV_H
#define CER_FLOAT_ENV_H

#include <fenv.h>

static inline void
cer_float_enter(fenv_t *before)
{
    (void)fegetenv(before);
    (void)fesetenv(FE_DFL_ENV);
}

/* Exceptions that were raised since are forgotten. */
static inline void
cer_float_leave(const fenv_t *before)
{
    (void)fesetenv(before);
}

#endif
