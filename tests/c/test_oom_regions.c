/* A list of regions out of memory. */
#include "check.h"
#include "failing_alloc.h"
#include "regions.h"

static void
a_list_without_memory_leaves_nothing(void)
{
    uint8_t byte = 0;
    const cer_region region = {&byte, 1};
    size_t live = failing_alloc_live();
    cer_regions *list;
    cer_error err = {0};

    failing_alloc_arm(1);
    CHECK_EQ_INT(cer_regions_new(&region, 1, &list, &err), CER_NOMEM);
    CHECK(failing_alloc_triggered() && list == NULL);
    failing_alloc_arm(0);
    CHECK_EQ_INT(cer_regions_new(&region, 1, &list, &err), CER_OK);
    CHECK_EQ_INT(failing_alloc_live(), live + 1);
    cer_regions_free(list);
    CHECK_EQ_INT(failing_alloc_live(), live);
}

CHECK_MAIN(a_list_without_memory_leaves_nothing)
