/* thread.h -- how the core starts threads of its own. */
#ifndef CER_THREAD_H
#define CER_THREAD_H

#include <pthread.h>

/* Starts a thread that takes no signals but those about itself (SIGSEGV and the
 * like): Ctrl-C is for the thread that waits for it. 0, or an errno, mostly
 * EAGAIN: a limit on threads or memory. */
int cer_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
