/* Unused tables stay while they are few or small: two epochs of a
 * large dataset, many of a small one. */
#include "order.h"

#include <pthread.h>
#include <unistd.h>

#include "rng.h"

enum { ALWAYS_KEPT = 2, MOST_KEPT = 64, KEPT_BYTES = 1 << 26 };

struct cer_orders {
    atomic_size_t users;
    pid_t process;
    pthread_mutex_t lock; /* guards the fields below */
    uint64_t uses;
    size_t n_kept;
    cer_order *kept[MOST_KEPT];
};

cer_status
cer_orders_new(cer_orders **out, cer_error *err)
{
    cer_orders *orders = cer_calloc(1, sizeof *orders);

    *out = NULL;
    if (orders == NULL || pthread_mutex_init(&orders->lock, NULL) != 0) {
        cer_free(orders);
        return cer_fail(err, CER_NOMEM, "out of memory for the rows' order");
    }
    atomic_init(&orders->users, 1);
    orders->process = getpid();
    *out = orders;
    return CER_OK;
}

void
cer_orders_retain(cer_orders *orders)
{
    atomic_fetch_add_explicit(&orders->users, 1, memory_order_relaxed);
}

void
cer_orders_release(cer_orders *orders)
{
    if (orders == NULL ||
        atomic_fetch_sub_explicit(&orders->users, 1, memory_order_acq_rel) != 1)
        return;
    for (size_t i = 0; i < orders->n_kept; i++)
        cer_order_release(orders->kept[i]);
    if (orders->process == getpid())
        pthread_mutex_destroy(&orders->lock);
    cer_free(orders);
}

void
cer_order_release(cer_order *order)
{
    if (order != NULL &&
        atomic_fetch_sub_explicit(&order->users, 1, memory_order_acq_rel) == 1)
        cer_free(order);
}

static void
draw_part(const cer_order_key *key, const cer_draw_part *p, uint32_t *rows)
{
    cer_rng rng;

    if (p->sums == NULL) {
        for (uint32_t k = 0; k < p->n; k++)
            rows[k] = k;
        return;
    }
    cer_rng_seed(&rng, key->seed, CER_RNG_DRAWS, key->epoch, p->part);
    cer_rng_draw(&rng, p->before, p->sums, rows, p->n);
}

/* Draws within each part; then the parts' draws are mixed. */
static void
draw(const cer_order_key *key, uint32_t *rows)
{
    uint32_t first = 0;
    cer_rng rng;

    for (size_t i = 0; i < key->n_draws; i++) {
        const cer_draw_part *p = &key->draws[i];

        draw_part(key, p, rows + first);
        for (uint32_t k = 0; first != 0 && k < p->n; k++)
            rows[first + k] += first;
        first += p->n;
    }
    if (key->n_draws < 2)
        return;
    cer_rng_seed(&rng, key->seed, CER_RNG_ROWS, key->epoch, key->mix);
    cer_rng_shuffle(&rng, rows, key->n);
}

static cer_order *
make(const cer_order_key *key)
{
    cer_order *order;
    cer_rng rng;
    size_t bytes;

    if (!cer_mul_size(key->n, sizeof order->rows[0], &bytes) ||
        !cer_add_size(bytes, sizeof *order, &bytes))
        return NULL;
    order = cer_alloc(bytes);
    if (order == NULL)
        return NULL;
    atomic_init(&order->users, 1);
    order->seed = key->seed;
    order->epoch = key->epoch;
    order->mix = key->mix;
    order->n = key->n;
    if (key->n_draws != 0) {
        draw(key, order->rows);
        return order;
    }
    cer_rng_seed(&rng, key->seed, CER_RNG_ROWS, key->epoch, key->mix);
    cer_rng_permute(&rng, order->rows, key->n);
    return order;
}

static bool
is_of(const cer_order *order, const cer_order_key *key)
{
    return order->seed == key->seed && order->epoch == key->epoch &&
           order->mix == key->mix && order->n == key->n;
}

static cer_order *
find(cer_orders *orders, const cer_order_key *key)
{
    for (size_t i = 0; i < orders->n_kept; i++) {
        if (is_of(orders->kept[i], key))
            return orders->kept[i];
    }
    return NULL;
}

/* Drops the kept orders that were used longest ago until `bytes` more fit. */
static void
make_room(cer_orders *orders, size_t bytes)
{
    for (;;) {
        size_t all = bytes, oldest = 0;

        for (size_t i = 0; i < orders->n_kept; i++) {
            const cer_order *order = orders->kept[i];

            all += order->n * sizeof order->rows[0];
            if (order->last_use < orders->kept[oldest]->last_use)
                oldest = i;
        }
        if (orders->n_kept < ALWAYS_KEPT ||
            (orders->n_kept < MOST_KEPT && all <= KEPT_BYTES))
            return;
        cer_order_release(orders->kept[oldest]);
        orders->kept[oldest] = orders->kept[--orders->n_kept];
    }
}

static cer_order *
find_or_make(cer_orders *orders, const cer_order_key *key)
{
    cer_order *order = find(orders, key);

    if (order == NULL) {
        make_room(orders, key->n * sizeof order->rows[0]);
        order = make(key);
        if (order != NULL)
            orders->kept[orders->n_kept++] = order;
    }
    if (order != NULL) {
        order->last_use = ++orders->uses;
        atomic_fetch_add_explicit(&order->users, 1, memory_order_relaxed);
    }
    return order;
}

cer_status
cer_orders_take(cer_orders *orders, const cer_order_key *key, cer_order **out,
                cer_error *err)
{
    if (orders->process != getpid()) {
        *out = make(key);
    } else {
        pthread_mutex_lock(&orders->lock);
        *out = find_or_make(orders, key);
        pthread_mutex_unlock(&orders->lock);
    }
    return *out != NULL ? CER_OK
                        : cer_fail(err, CER_NOMEM,
                                   "out of memory for the order of %u "
                                   "rows",
                                   (unsigned)key->n);
}
