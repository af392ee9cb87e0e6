#include "failing_alloc.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base.h"

static atomic_size_t countdown;
static atomic_size_t live;
static atomic_int triggered;

void
failing_alloc_arm(size_t nth)
{
    atomic_store(&countdown, nth);
    atomic_store(&triggered, 0);
}

size_t
failing_alloc_live(void)
{
    return atomic_load(&live);
}

int
failing_alloc_triggered(void)
{
    return atomic_load(&triggered);
}

static bool
fails_now(void)
{
    size_t left = atomic_load(&countdown);

    while (left != 0) {
        if (atomic_compare_exchange_weak(&countdown, &left, left - 1)) {
            if (left == 1)
                atomic_store(&triggered, 1);
            return left == 1;
        }
    }
    return false;
}

static void *
counted(void *block)
{
    if (block != NULL)
        atomic_fetch_add(&live, 1);
    return block;
}

void *
cer_alloc(size_t size)
{
    return size == 0 || fails_now() ? NULL : counted(malloc(size));
}

void *
cer_calloc(size_t count, size_t size)
{
    return count == 0 || size == 0 || fails_now()
               ? NULL
               : counted(calloc(count, size));
}

void *
cer_realloc(void *old, size_t size)
{
    void *block;

    if (size == 0 || fails_now())
        return NULL;
    block = realloc(old, size);
    return old == NULL ? counted(block) : block;
}

void
cer_free(void *block)
{
    if (block != NULL)
        atomic_fetch_sub(&live, 1);
    free(block);
}

void *
cer_aligned_alloc(size_t size)
{
    size_t rounded;

    if (size == 0 || fails_now() ||
        !cer_round_up_size(size, CER_ALIGNMENT, &rounded))
        return NULL;
    return counted(aligned_alloc(CER_ALIGNMENT, rounded));
}

void
cer_aligned_free(void *block)
{
    cer_free(block);
}
