/* order.h -- the shuffled order of the rows of a mix, kept for those who need
 * it again.
 *
 * A mix is some parts of a view (shards), whose rows are shuffled together: all
 * of them in one permutation. Rows of a mix are numbered through its parts. The
 * order is a Fisher-Yates table keyed by (seed, epoch, the mix's first part
 * that has rows). It depends on nothing else: trials, batch sizes and workers
 * read the same order.
 *
 * A table of all rows of a dataset takes four bytes a row and up to 9 ns a row
 * to make, so the loaders of a process share the tables: each is made once, and
 * the last few stay. They are locked while a table is made. In a forked child
 * the lock could be held forever, so there tables are neither found nor kept.
 *
 * Rows with weights are drawn instead, as many as there are, with replacement.
 * Such a table depends on the weights too, so its loader does not share it. */
#ifndef CER_ORDER_H
#define CER_ORDER_H

#include <stdatomic.h>

#include "base.h"

typedef struct cer_order {
    atomic_size_t users;
    uint64_t seed, epoch, last_use;
    uint32_t mix; /* its first part */
    uint32_t n;
    uint32_t rows[]; /* n numbers of rows of the mix */
} cer_order;

/* Rows drawn by weight. `sums` has running sums of the weights, as for
 * cer_rng_draw; NULL, among several parts: each row once. */
typedef struct cer_draw_part {
    const uint64_t *sums;
    uint64_t before; /* the sum before the first */
    uint32_t part, n;
} cer_draw_part;

/* What an order is made of; without draws, each row comes once. */
typedef struct cer_order_key {
    uint64_t seed, epoch;
    uint32_t mix; /* its first part */
    uint32_t n;   /* its rows */
    const cer_draw_part *draws;
    size_t n_draws; /* these parts, each drawn within itself */
} cer_order_key;

typedef struct cer_orders cer_orders;

/* *out has one reference. Errors: CER_NOMEM. */
cer_status cer_orders_new(cer_orders **out, cer_error *err);
void cer_orders_retain(cer_orders *orders);
void cer_orders_release(cer_orders *orders); /* NULL allowed */

/* Finds or makes an order; *out has one reference, owned by the caller. Keys
 * with draws must always have the same draws. From any thread. Errors:
 * CER_NOMEM. */
cer_status cer_orders_take(cer_orders *orders, const cer_order_key *key,
                           cer_order **out, cer_error *err);
void cer_order_release(cer_order *order); /* NULL allowed */

#endif
