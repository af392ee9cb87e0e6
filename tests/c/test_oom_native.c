/* The native network out of memory: each allocation fails in turn. */
#include "check.h"
#include "failing_alloc.h"
#include "native_net.h"

static const cer_native_net_sizes sizes = {1, 4, 4, {2, 3}, 2};

static void
a_network_without_memory_leaves_nothing(void)
{
    size_t live = failing_alloc_live(), failures = 0;

    for (size_t nth = 1;; nth++) {
        cer_native_net *net = NULL;
        cer_error err = {0};
        cer_status status;

        failing_alloc_arm(nth);
        status = cer_native_net_new(&sizes, &net, &err);
        if (!failing_alloc_triggered()) {
            CHECK_EQ_INT(status, CER_OK);
            cer_native_net_free(net);
            break;
        }
        failures++;
        CHECK_EQ_INT(status, CER_NOMEM);
        CHECK(net == NULL && strstr(err.message, "out of memory") != NULL);
        CHECK_EQ_INT(failing_alloc_live(), live);
    }
    failing_alloc_arm(0);
    CHECK_EQ_INT(failures, 8);
    CHECK_EQ_INT(failing_alloc_live(), live);
}

static void
a_larger_batch_without_memory_changes_nothing(void)
{
    static const float pictures[2 * 16] = {0};
    static const int64_t labels[2] = {0, 1};
    size_t live = failing_alloc_live();
    cer_native_net_metrics metrics;
    cer_native_net *net;

    CHECK_EQ_INT(cer_native_net_new(&sizes, &net, NULL), CER_OK);
    CHECK_EQ_INT(
        cer_native_net_evaluate(net, pictures, labels, 1, &metrics, NULL),
        CER_OK);
    for (size_t nth = 1; nth <= 2; nth++) {
        size_t held = failing_alloc_live();

        failing_alloc_arm(nth);
        CHECK_EQ_INT(cer_native_net_differentiate(net, pictures, labels, 2,
                                                  &metrics, NULL),
                     CER_NOMEM);
        CHECK(failing_alloc_triggered());
        CHECK_EQ_INT(failing_alloc_live(), held);
    }
    failing_alloc_arm(1); /* one row needs no allocation */
    CHECK_EQ_INT(
        cer_native_net_evaluate(net, pictures, labels, 1, &metrics, NULL),
        CER_OK);
    CHECK(!failing_alloc_triggered());
    failing_alloc_arm(0);
    CHECK_EQ_INT(
        cer_native_net_differentiate(net, pictures, labels, 2, &metrics, NULL),
        CER_OK);
    cer_native_net_free(net);
    CHECK_EQ_INT(failing_alloc_live(), live);
}

CHECK_MAIN(a_network_without_memory_leaves_nothing,
           a_larger_batch_without_memory_changes_nothing)
