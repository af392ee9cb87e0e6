/* copy.h -- fast copies of many tensors to or from one flat buffer.
 *
 * A tensor is a framework's strided memory; its place in the buffer is dense (C
 * order, no gaps). Large copies bypass the caches (non-temporal stores) and are
 * divided among threads, which live for one call only. */
#ifndef CER_COPY_H
#define CER_COPY_H

#include "base.h"

typedef struct cer_copy {
    uint8_t *dense;
    uint8_t *strided; /* address of the element with all indices 0 */
    size_t nbytes;    /* of the dense side: item x the product of shape */
    size_t item;      /* bytes per element: 1, 2, 4 or 8 */
    uint32_t ndim;
    const int64_t *shape;
    const int64_t *strides; /* in bytes, of the strided side */
} cer_copy;

typedef enum cer_copy_direction {
    CER_COPY_TO_DENSE,
    CER_COPY_FROM_DENSE,
} cer_copy_direction;

/* Whether these strides (in bytes) are those of C order without gaps. */
bool cer_copy_is_dense(size_t item, uint32_t ndim, const int64_t *shape,
                       const int64_t *strides);

/* Makes all copies; no memory of one may overlap a destination. At most
 * `threads` threads work, including the caller; 0 decides by size. If a thread
 * cannot start, the others do its work. */
void cer_copy_all(const cer_copy *copies, size_t n,
                  cer_copy_direction direction, unsigned threads);

#endif
