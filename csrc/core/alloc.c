/* The one place where the core meets malloc; see the seam in base.h. */
#include "base.h"

#include <stdlib.h>

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
    size_t rounded;

    /* aligned_alloc wants a multiple of the alignment. */
    if (size == 0 || !cer_round_up_size(size, CER_ALIGNMENT, &rounded))
        return NULL;
    return aligned_alloc(CER_ALIGNMENT, rounded);
}

void
cer_aligned_free(void *block)
{
    free(block);
}
