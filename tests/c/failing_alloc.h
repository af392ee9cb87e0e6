/* failing_alloc.h -- replaces csrc/core/alloc.c in the out-of-memory tests: the
 * nth allocation fails, and live blocks are counted. */
#ifndef FAILING_ALLOC_H
#define FAILING_ALLOC_H

#include <stddef.h>

/* The nth allocation from now (1 = the next) fails; 0: no failure. */
void failing_alloc_arm(size_t nth);
size_t failing_alloc_live(void);   /* blocks not yet released */
int failing_alloc_triggered(void); /* whether the armed one was reached */

#endif
