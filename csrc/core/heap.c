#include "heap.h"

/* Makes the later of two roots the first child of the earlier one. */
static uint32_t
link_roots(cer_heap_node *nodes, uint32_t a, uint32_t b)
{
    uint32_t first = a, later = b;

    if (a == CER_HEAP_EMPTY)
        return b;
    if (b == CER_HEAP_EMPTY)
        return a;
    if (cer_heap_before(&nodes[b], &nodes[a])) {
        first = b;
        later = a;
    }
    nodes[later].prev = first;
    nodes[later].next = nodes[first].child;
    if (nodes[first].child != CER_HEAP_EMPTY)
        nodes[nodes[first].child].prev = later;
    nodes[first].child = later;
    return first;
}

/* Merges a list of siblings into one heap: first in pairs, then from the
 * back. */
static uint32_t
merge_siblings(cer_heap_node *nodes, uint32_t first)
{
    uint32_t pairs = CER_HEAP_EMPTY; /* a stack, linked through next */
    uint32_t root = CER_HEAP_EMPTY;

    while (first != CER_HEAP_EMPTY) {
        uint32_t a = first;
        uint32_t b = nodes[a].next;
        uint32_t pair;

        first = b == CER_HEAP_EMPTY ? CER_HEAP_EMPTY : nodes[b].next;
        pair = link_roots(nodes, a, b);
        nodes[pair].next = pairs;
        pairs = pair;
    }
    while (pairs != CER_HEAP_EMPTY) {
        uint32_t pair = pairs;

        pairs = nodes[pair].next;
        root = link_roots(nodes, root, pair);
    }
    if (root != CER_HEAP_EMPTY)
        nodes[root].next = nodes[root].prev = CER_HEAP_EMPTY;
    return root;
}

void
cer_heap_push(uint32_t *heap, cer_heap_node *nodes, uint32_t node, double key,
              uint32_t tie)
{
    cer_heap_node *n = &nodes[node];

    n->key = key;
    n->tie = tie;
    n->child = n->next = n->prev = CER_HEAP_EMPTY;
    *heap = link_roots(nodes, *heap, node);
}

void
cer_heap_remove(uint32_t *heap, cer_heap_node *nodes, uint32_t node)
{
    cer_heap_node *n = &nodes[node];
    uint32_t below = merge_siblings(nodes, n->child);

    if (node == *heap) {
        *heap = below;
        return;
    }
    if (nodes[n->prev].child == node)
        nodes[n->prev].child = n->next;
    else
        nodes[n->prev].next = n->next;
    if (n->next != CER_HEAP_EMPTY)
        nodes[n->next].prev = n->prev;
    *heap = link_roots(nodes, *heap, below);
}
