/* heap.h -- an intrusive priority queue over numbered nodes.
 *
 * The caller keeps one array of nodes; a heap is the number of its first node
 * and owns nothing, so any number of heaps can share the array and no operation
 * allocates. The node with the largest key comes first; among equal keys, the
 * one with the smallest tie. Ties must differ within a heap: the order is then
 * total, and the first node never depends on how the heap was built.
 *
 * It is a pairing heap (Fredman, Sedgewick, Sleator and Tarjan, "The pairing
 * heap: a new form of self-adjusting heap", 1986): a push costs O(1), removal
 * of any node O(log n) amortized. */
#ifndef CER_HEAP_H
#define CER_HEAP_H

#include "base.h"

#define CER_HEAP_EMPTY UINT32_MAX /* the heap without nodes; "no node" */

typedef struct cer_heap_node {
    double key;
    uint32_t tie;
    uint32_t child; /* the first child */
    uint32_t next;  /* the next sibling */
    uint32_t prev;  /* the previous sibling, or a first child's parent */
} cer_heap_node;

/* True when node a comes before node b. */
static inline bool
cer_heap_before(const cer_heap_node *a, const cer_heap_node *b)
{
    return a->key > b->key || (a->key == b->key && a->tie < b->tie);
}

/* Adds `node`, which must be in no heap; key must not be NaN. */
void cer_heap_push(uint32_t *heap, cer_heap_node *nodes, uint32_t node,
                   double key, uint32_t tie);

/* Removes `node`, which must be in this heap. */
void cer_heap_remove(uint32_t *heap, cer_heap_node *nodes, uint32_t node);

#endif
