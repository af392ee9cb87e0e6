#include "order.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "rng.h"

static cer_order *
take(cer_orders *orders, uint64_t epoch, uint32_t mix, uint32_t n)
{
    cer_order_key key = {.seed = 3, .epoch = epoch, .mix = mix, .n = n};
    cer_order *order = NULL;

    if (cer_orders_take(orders, &key, &order, NULL) != CER_OK)
        abort();
    return order;
}

static cer_orders *
new_orders(void)
{
    cer_orders *orders;

    if (cer_orders_new(&orders, NULL) != CER_OK)
        abort();
    return orders;
}

static void
an_order_is_a_keyed_permutation(void)
{
    cer_orders *orders = new_orders();
    cer_order *order = take(orders, 7, 2, 1000);
    uint32_t expected[1000];
    cer_rng rng;

    cer_rng_seed(&rng, 3, CER_RNG_ROWS, 7, 2);
    cer_rng_permute(&rng, expected, 1000);
    CHECK_EQ_INT(order->n, 1000);
    CHECK(memcmp(order->rows, expected, sizeof expected) == 0);
    cer_orders_release(orders);
    CHECK(memcmp(order->rows, expected, sizeof expected) == 0);
    cer_order_release(order);
    cer_order_release(NULL);
    cer_orders_release(NULL);
}

static void
orders_are_shared(void)
{
    cer_orders *orders = new_orders();
    cer_order *a = take(orders, 0, 0, 10), *b = take(orders, 0, 0, 10);
    cer_order *others[] = {take(orders, 1, 0, 10), take(orders, 0, 1, 10),
                           take(orders, 0, 0, 9)};

    CHECK(a == b);
    for (int i = 0; i < 3; i++) {
        CHECK(a != others[i]);
        cer_order_release(others[i]);
    }
    CHECK_EQ_INT(atomic_load(&a->users), 3);
    cer_order_release(b);
    CHECK_EQ_INT(atomic_load(&a->users), 2);
    cer_order_release(a);
    cer_orders_release(orders);
}

/* Whether an order that the caller also holds is still kept. */
static bool
is_kept(cer_order *order)
{
    return atomic_load(&order->users) == 2;
}

/* Of many small orders 64 stay: those that were used last. */
static void
small_orders_stay(void)
{
    cer_orders *orders = new_orders();
    cer_order *held[66];

    for (uint32_t i = 0; i < 64; i++)
        held[i] = take(orders, i, 0, 10);
    for (int i = 0; i < 64; i++)
        CHECK(is_kept(held[i]));
    cer_order_release(take(orders, 0, 0, 10)); /* now 1 is the oldest */
    held[64] = take(orders, 64, 0, 10);
    held[65] = take(orders, 65, 0, 10);
    for (int i = 0; i < 66; i++) {
        CHECK_EQ_INT(is_kept(held[i]), i != 1 && i != 2);
        CHECK_EQ_INT(held[i]->n, 10);
        cer_order_release(held[i]);
    }
    cer_orders_release(orders);
}

/* Of large ones two stay, or as many as fit in 64 MB. */
static void
few_large_orders_stay(void)
{
    enum { LARGE = 9 << 20 };
    cer_orders *orders = new_orders();
    cer_order *held[4];

    held[0] = take(orders, 0, 0, LARGE);
    held[1] = take(orders, 1, 0, LARGE);
    CHECK(is_kept(held[0]) && is_kept(held[1]));
    held[2] = take(orders, 2, 0, LARGE);
    CHECK(!is_kept(held[0]) && is_kept(held[1]) && is_kept(held[2]));
    held[3] = take(orders, 0, 0, 10);
    CHECK(!is_kept(held[1]) && is_kept(held[2]) && is_kept(held[3]));
    for (int i = 0; i < 4; i++)
        cer_order_release(held[i]);
    cer_orders_release(orders);
}

static void
rows_are_drawn_by_weight(void)
{
    static const uint64_t first[] = {1, 1, 5}, last[] = {8, 10, 11};
    const cer_draw_part draws[] = {
        {first, 0, 4, 3}, {NULL, 0, 5, 2}, {last, 5, 6, 3}};
    cer_order_key key = {
        .seed = 3, .epoch = 1, .mix = 4, .n = 8, .draws = draws, .n_draws = 3};
    cer_orders *orders = new_orders();
    cer_order *order;
    uint32_t expected[8];
    cer_rng rng;

    cer_rng_seed(&rng, 3, CER_RNG_DRAWS, 1, 4);
    cer_rng_draw(&rng, 0, first, expected, 3);
    expected[3] = 3;
    expected[4] = 4;
    cer_rng_seed(&rng, 3, CER_RNG_DRAWS, 1, 6);
    cer_rng_draw(&rng, 5, last, expected + 5, 3);
    for (int i = 5; i < 8; i++)
        expected[i] += 5;
    cer_rng_seed(&rng, 3, CER_RNG_ROWS, 1, 4);
    cer_rng_shuffle(&rng, expected, 8);
    CHECK_EQ_INT(cer_orders_take(orders, &key, &order, NULL), CER_OK);
    CHECK(memcmp(order->rows, expected, sizeof expected) == 0);
    cer_order_release(order);

    key.mix = 6; /* one part is not shuffled again */
    key.draws = &draws[2];
    key.n = 3;
    key.n_draws = 1;
    cer_rng_seed(&rng, 3, CER_RNG_DRAWS, 1, 6);
    cer_rng_draw(&rng, 5, last, expected, 3);
    CHECK_EQ_INT(cer_orders_take(orders, &key, &order, NULL), CER_OK);
    CHECK(memcmp(order->rows, expected, 3 * sizeof *expected) == 0);
    cer_order_release(order);
    cer_orders_release(orders);
}

enum { EPOCHS = 40 };

typedef struct taking {
    cer_orders *orders;
    pthread_t thread;
    cer_order *taken[EPOCHS];
} taking;

static void *
take_all(void *argument)
{
    taking *t = argument;

    for (uint32_t i = 0; i < EPOCHS; i++)
        t->taken[i] = take(t->orders, i, 0, 5000);
    return NULL;
}

static void
threads_get_the_same(void)
{
    cer_orders *orders = new_orders();
    taking all[4];

    for (int i = 0; i < 4; i++) {
        all[i].orders = orders;
        CHECK_EQ_INT(pthread_create(&all[i].thread, NULL, take_all, &all[i]),
                     0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(all[i].thread, NULL);
        for (int k = 0; k < EPOCHS; k++)
            CHECK(all[i].taken[k] == all[0].taken[k]);
    }
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < EPOCHS; k++)
            cer_order_release(all[i].taken[k]);
    }
    cer_orders_release(orders);
}

enum { MANY = 60 }; /* all kept, so that finding the last takes long */

static void *
take_until_told(void *argument)
{
    atomic_bool *told = ((void **)argument)[1];

    while (!atomic_load(told))
        cer_order_release(take(((void **)argument)[0], 0, MANY, 100));
    return NULL;
}

/* Forked while a thread most likely has the lock. The thread does not allocate:
 * forks of a sanitizer's allocator wait for a lock that it had. */
static void
a_forked_child_has_its_own(void)
{
    cer_orders *orders = new_orders();
    cer_order *mine;
    atomic_bool told = false;
    void *arguments[] = {orders, &told};
    pthread_t thread;

    for (uint32_t i = 0; i < MANY; i++)
        cer_order_release(take(orders, 0, i, 100));
    mine = take(orders, 0, MANY, 100);
    CHECK_EQ_INT(pthread_create(&thread, NULL, take_until_told, arguments), 0);
    for (int i = 0; i < 30; i++) {
        int code = -1;
        pid_t child = fork();

        if (child == 0) {
            cer_order *a, *b;
            bool good;

            (void)alarm(20); /* a wait here would last forever */
            a = take(orders, 0, MANY, 100);
            b = take(orders, 0, MANY, 100);
            good = a != mine && b != a && memcmp(a->rows, mine->rows, 400) == 0;
            cer_order_release(a);
            cer_order_release(b);
            cer_order_release(mine);
            cer_orders_release(orders);
            _exit(good ? 0 : 1);
        }
        CHECK(waitpid(child, &code, 0) == child && code == 0);
    }
    atomic_store(&told, true);
    pthread_join(thread, NULL);
    cer_order_release(mine);
    cer_orders_release(orders);
}

CHECK_MAIN(an_order_is_a_keyed_permutation, orders_are_shared,
           small_orders_stay, few_large_orders_stay, rows_are_drawn_by_weight,
           threads_get_the_same, a_forked_child_has_its_own)
