#include "thread.h"

#include <signal.h>

#include "check.h"

static void *
take_mask(void *mask)
{
    (void)pthread_sigmask(SIG_SETMASK, NULL, mask);
    return NULL;
}

static void
threads_take_no_signals_but_their_own(void)
{
    static const int own[] = {SIGBUS, SIGFPE, SIGILL, SIGSEGV};
    static const int others[] = {SIGINT, SIGTERM, SIGCHLD, SIGUSR1, SIGALRM};
    sigset_t before, after, mask;
    pthread_t thread;

    (void)pthread_sigmask(SIG_SETMASK, NULL, &before);
    CHECK_EQ_INT(cer_thread_start(&thread, take_mask, &mask), 0);
    CHECK_EQ_INT(pthread_join(thread, NULL), 0);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (size_t i = 0; i < 4; i++)
        CHECK_EQ_INT(sigismember(&mask, own[i]), 0);
    for (size_t i = 0; i < 5; i++) {
        CHECK_EQ_INT(sigismember(&mask, others[i]), 1);
        CHECK_EQ_INT(sigismember(&before, others[i]), 0);
        CHECK_EQ_INT(sigismember(&after, others[i]), 0);
    }
}

CHECK_MAIN(threads_take_no_signals_but_their_own)
