/* A list of operators out of memory. */
#include "check.h"
#include "elementwise.h"
#include "failing_alloc.h"

static void
a_list_without_memory_leaves_nothing(void)
{
    float value = 0;
    const cer_elementwise_call call = {
        CER_ELEMENTWISE_RELU, 1, &value, {&value}, NULL, NULL};
    size_t live = failing_alloc_live();
    cer_elementwise *list;
    cer_error err = {0};

    failing_alloc_arm(1);
    CHECK_EQ_INT(cer_elementwise_new(&call, 1, true, NULL, &list, &err),
                 CER_NOMEM);
    CHECK(failing_alloc_triggered() && list == NULL);
    failing_alloc_arm(0);
    CHECK_EQ_INT(cer_elementwise_new(&call, 1, true, NULL, &list, &err),
                 CER_OK);
    CHECK_EQ_INT(failing_alloc_live(), live + 1);
    cer_elementwise_free(list);
    CHECK_EQ_INT(failing_alloc_live(), live);
}

CHECK_MAIN(a_list_without_memory_leaves_nothing)
