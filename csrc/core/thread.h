/* thread.h -- starts the core's threads. */
#ifndef CER_THREAD_H
#define CER_THREAD_H

#include <pthread.h>

/* Starts a thread that blocks all signals except synchronous ones (SIGSEGV and
 * the like): Ctrl-C belongs to the thread that waits for it. Returns 0 or an
 * errno, usually EAGAIN: a limit on threads or memory. */
int cer_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);

#endif
