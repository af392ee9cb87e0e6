#include "batch.h"

#include <pthread.h>
#include <stdlib.h>

#include "check.h"

static const cer_tensor kinds[2] = {
    {.dtype = CER_F32, .ndim = 2, .shape = {0, 3}},
    {.dtype = CER_U8, .ndim = 1},
};

static cer_batch_ring *
new_ring(void)
{
    cer_batch_ring *ring;

    if (cer_batch_ring_new(kinds, 2, 10, &ring, NULL) != CER_OK)
        abort();
    return ring;
}

static cer_batch *
take(cer_batch_ring *ring, int64_t n_rows)
{
    cer_batch *b = cer_batch_ring_take(ring);

    if (b == NULL)
        abort();
    b->tensors[0].shape[0] = b->tensors[1].shape[0] = n_rows;
    CHECK_EQ_INT(cer_batch_place(b, NULL), CER_OK);
    return b;
}

static void
tensors_are_aligned_and_apart(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *b = take(ring, 10);
    uint8_t *first = b->tensors[0].data, *second = b->tensors[1].data;

    CHECK_EQ_INT((uintptr_t)first % CER_ALIGNMENT, 0);
    CHECK_EQ_INT(second - first, CER_ALIGNMENT); /* 120 bytes, rounded up */
    memset(first, 1, 120);
    memset(second, 2, 10);
    CHECK(b->tensors[0].owner == &b->owner);
    CHECK_EQ_INT(b->tensors[0].strides[0], 3);
    cer_owner_release(&b->owner);
    cer_batch_ring_close(ring);
}

static void
no_values_have_no_address(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *b = cer_batch_ring_take(ring);

    b->tensors[0].shape[0] = 4;
    b->tensors[0].shape[1] = 0;
    b->tensors[1].shape[0] = 4;
    CHECK_EQ_INT(cer_batch_place(b, NULL), CER_OK);
    CHECK(b->tensors[0].data == NULL);
    CHECK(b->tensors[1].data == b->block.data);
    cer_owner_release(&b->owner);
    cer_batch_ring_close(ring);
}

static void
buffers_are_used_again(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *first = take(ring, 10);
    void *memory = first->block.data;

    for (int i = 0; i < 100; i++) {
        cer_batch *second = take(ring, 10);

        CHECK(second != first);
        cer_owner_release(&first->owner);
        first = second;
    }
    CHECK_EQ_INT(cer_batch_ring_size(ring), 2);
    cer_owner_release(&first->owner);
    first = take(ring, 3); /* fewer rows fit as well */
    CHECK(first->block.bytes >= 130 && memory != NULL);
    cer_owner_release(&first->owner);
    cer_batch_ring_close(ring);
}

static void
memory_grows_for_more(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *b = take(ring, 1);
    size_t before = b->block.bytes;

    b->tensors[0].shape[1] = 1000;
    cer_tensor_pack(&b->tensors[0]);
    CHECK_EQ_INT(cer_batch_place(b, NULL), CER_OK);
    CHECK(b->block.bytes > before);
    memset(b->tensors[0].data, 0, 4000);
    cer_owner_release(&b->owner);
    cer_batch_ring_close(ring);
}

static cer_status
count_memory(void *context, size_t bytes, cer_batch_block *out, cer_error *err)
{
    unsigned *times = context;

    (void)err;
    ++*times;
    *out = (cer_batch_block){.data = cer_aligned_alloc(bytes), .bytes = bytes};
    return CER_OK;
}

static void
free_memory(void *context, cer_batch_block *block)
{
    (void)context;
    cer_aligned_free(block->data);
}

/* Growing batches allocate memory only as often as their size doubles. */
static void
memory_grows_in_few_steps(void)
{
    unsigned times = 0;
    const cer_batch_source source = {
        .context = &times, .get = count_memory, .give = free_memory};
    cer_batch_ring *ring;
    cer_batch *b;

    CHECK_EQ_INT(cer_batch_ring_from(&source, kinds, 2, 10, &ring, NULL),
                 CER_OK);
    b = take(ring, 1);
    for (int64_t length = 1; length <= 1 << 16; length += 100) {
        b->tensors[0].shape[1] = length;
        cer_tensor_pack(&b->tensors[0]);
        CHECK_EQ_INT(cer_batch_place(b, NULL), CER_OK);
    }
    CHECK(b->block.bytes >= 4 << 16 && b->block.bytes <= 8 << 16);
    CHECK(times <= 1 + 10); /* 512 bytes, and up to 512 KB by doubling */
    cer_owner_release(&b->owner);
    cer_batch_ring_close(ring);
}

static void
the_newest_buffer_is_used_first(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *a = take(ring, 10), *b = take(ring, 10), *c = take(ring, 10);

    cer_owner_release(&a->owner);
    cer_owner_release(&b->owner);
    CHECK(take(ring, 10) == b);
    cer_owner_release(&c->owner); /* a is spare since the take */
    CHECK(take(ring, 10) == c);
    CHECK(take(ring, 10) == a);
    cer_owner_release(&a->owner);
    cer_owner_release(&b->owner);
    cer_owner_release(&c->owner);
    cer_batch_ring_close(ring);
}

static void
kept_batches_make_the_ring_grow_and_trim_shrinks_it(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *kept[50];

    for (int i = 0; i < 50; i++)
        kept[i] = take(ring, 10);
    CHECK_EQ_INT(cer_batch_ring_size(ring), 50);
    for (int i = 0; i < 49; i++)
        cer_owner_release(&kept[i]->owner);
    cer_batch_ring_trim(ring, 4);
    CHECK_EQ_INT(cer_batch_ring_size(ring), 5);
    cer_owner_release(&kept[49]->owner);
    cer_batch_ring_trim(ring, 0);
    CHECK_EQ_INT(cer_batch_ring_size(ring), 0);
    cer_batch_ring_close(ring);
}

static void
batches_outlive_the_ring(void)
{
    cer_batch_ring *ring = new_ring();
    cer_batch *a = take(ring, 10), *b = take(ring, 10);

    cer_owner_release(&a->owner);
    cer_batch_ring_close(ring);
    memset(b->tensors[0].data, 7, 120);
    cer_owner_retain(&b->owner, 1);
    cer_owner_release(&b->owner);
    memset(b->tensors[0].data, 8, 120);
    cer_owner_release(&b->owner);
}

/* Other threads return batches while this one takes them, and continue after
 * the ring is closed. */
enum { GIVERS = 3, ROUNDS = 2000 };

typedef struct giver {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    cer_batch *inbox;
    bool done;
} giver;

static void *
give_back(void *argument)
{
    giver *g = argument;

    pthread_mutex_lock(&g->lock);
    for (;;) {
        cer_batch *b = g->inbox;

        if (b == NULL && g->done)
            break;
        if (b == NULL) {
            pthread_cond_wait(&g->changed, &g->lock);
            continue;
        }
        g->inbox = NULL;
        pthread_cond_signal(&g->changed);
        pthread_mutex_unlock(&g->lock);
        ((uint8_t *)b->tensors[0].data)[0]++;
        cer_owner_release(&b->owner);
        pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

static void
hand_over(giver *g, cer_batch *b)
{
    pthread_mutex_lock(&g->lock);
    while (g->inbox != NULL)
        pthread_cond_wait(&g->changed, &g->lock);
    g->inbox = b;
    g->done = b == NULL;
    pthread_cond_signal(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void
any_thread_gives_back(void)
{
    cer_batch_ring *ring = new_ring();
    giver givers[GIVERS] = {0};

    for (int i = 0; i < GIVERS; i++) {
        pthread_mutex_init(&givers[i].lock, NULL);
        pthread_cond_init(&givers[i].changed, NULL);
        pthread_create(&givers[i].thread, NULL, give_back, &givers[i]);
    }
    for (int i = 0; i < ROUNDS; i++) {
        cer_batch *b = take(ring, 10);

        memset(b->tensors[0].data, i, 120);
        if (i == ROUNDS - 1)
            cer_batch_ring_close(ring);
        hand_over(&givers[i % GIVERS], b);
    }
    for (int i = 0; i < GIVERS; i++) {
        hand_over(&givers[i], NULL);
        pthread_join(givers[i].thread, NULL);
        pthread_mutex_destroy(&givers[i].lock);
        pthread_cond_destroy(&givers[i].changed);
    }
}

CHECK_MAIN(tensors_are_aligned_and_apart, no_values_have_no_address,
           buffers_are_used_again, the_newest_buffer_is_used_first,
           memory_grows_for_more, memory_grows_in_few_steps,
           kept_batches_make_the_ring_grow_and_trim_shrinks_it,
           batches_outlive_the_ring, any_thread_gives_back)
