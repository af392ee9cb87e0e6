/* The pairing heap against a plain search, with random pushes and removals. */
#include "check.h"
#include "heap.h"
#include "rng.h"

enum { NODES = 64 };

static cer_heap_node nodes[NODES];
static bool inside[2][NODES]; /* the nodes in each of two heaps */

static uint32_t
first_by_search(int heap)
{
    uint32_t first = CER_HEAP_EMPTY;

    for (uint32_t i = 0; i < NODES; i++) {
        if (inside[heap][i] && (first == CER_HEAP_EMPTY ||
                                cer_heap_before(&nodes[i], &nodes[first])))
            first = i;
    }
    return first;
}

static void
test_random_pushes_and_removals(void)
{
    uint32_t heaps[2] = {CER_HEAP_EMPTY, CER_HEAP_EMPTY};
    cer_rng rng;

    cer_rng_seed(&rng, 1, CER_RNG_SPACE, 0, 0);
    for (int round = 0; round < 20000; round++) {
        uint32_t node = (uint32_t)cer_rng_below(&rng, NODES);
        int heap = (int)cer_rng_below(&rng, 2);

        if (inside[0][node] || inside[1][node]) {
            heap = inside[1][node];
            cer_heap_remove(&heaps[heap], nodes, node);
            inside[heap][node] = false;
        } else {
            /* Few distinct keys, so that ties are common. */
            cer_heap_push(&heaps[heap], nodes, node,
                          (double)cer_rng_below(&rng, 8), node);
            inside[heap][node] = true;
        }
        CHECK_EQ_INT(heaps[heap], first_by_search(heap));
    }
}

static void
test_order_is_by_key_then_tie(void)
{
    uint32_t heap = CER_HEAP_EMPTY;
    static const double keys[] = {1.0, 3.0, 3.0, 2.0, 3.0};
    static const uint32_t ties[] = {0, 9, 2, 3, 5};
    static const uint32_t order[] = {2, 4, 1, 3, 0};

    for (uint32_t i = 0; i < 5; i++)
        cer_heap_push(&heap, nodes, i, keys[i], ties[i]);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ_INT(heap, order[i]);
        cer_heap_remove(&heap, nodes, heap);
    }
    CHECK_EQ_INT(heap, CER_HEAP_EMPTY);
}

CHECK_MAIN(test_random_pushes_and_removals, test_order_is_by_key_then_tie)
