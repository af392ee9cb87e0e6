/* The one place where the core meets malloc; see the seam in base.h. */
#include "base.h"

#include <stdlib.h>
#include <sys/mman.h>

/* Large blocks ask for huge pages: they are gathered into a tenth faster when
 * their thousands of pages are a few. They are rounded up to whole ones, which
 * below LARGE would waste too much: nearly half of a block of 1.1 MB. */
#define HUGE_PAGE ((size_t)1 << 21)
#define LARGE ((size_t)1 << 22)

void *
cer_alloc(size_t size)
{
    return size == 0 ? NULL : malloc(size);
}

void *
cer_calloc(size_t count, size_t size)
{
    return count == 0 || size == 0 ? NULL : calloc(count, size);
}

void *
cer_realloc(void *old, size_t size)
{
    return size == 0 ? NULL : realloc(old, size);
}

void
cer_free(void *block)
{
    free(block);
}

void *
cer_aligned_alloc(size_t size)
{
    size_t alignment = size >= LARGE ? HUGE_PAGE : CER_ALIGNMENT;
    size_t rounded;
    void *block;

    /* aligned_alloc wants a multiple of the alignment. */
    if (size == 0 || !cer_round_up_size(size, alignment, &rounded))
        return NULL;
    block = aligned_alloc(alignment, rounded);
#ifdef MADV_HUGEPAGE
    if (block != NULL && size >= LARGE)
        (void)madvise(block, rounded, MADV_HUGEPAGE); /* a wish, no more */
#endif
    return block;
}

void
cer_aligned_free(void *block)
{
    free(block);
}
