/* The only file of the core that calls malloc; see the allocator in base.h. */
#include "base.h"

#include <stdlib.h>
#include <sys/mman.h>

/* Large blocks request huge pages: a gather into a few pages is a tenth faster
 * than into thousands. Sizes are rounded up to whole huge pages, which would
 * waste too much below LARGE: nearly half of a block of 1.1 MB. */
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

    /* aligned_alloc requires a multiple of the alignment. */
    if (size == 0 || !cer_round_up_size(size, alignment, &rounded))
        return NULL;
    block = aligned_alloc(alignment, rounded);
#ifdef MADV_HUGEPAGE
    if (block != NULL && size >= LARGE)
        (void)madvise(block, rounded, MADV_HUGEPAGE); /* only a hint */
#endif
    return block;
}

void
cer_aligned_free(void *block)
{
    free(block);
}
