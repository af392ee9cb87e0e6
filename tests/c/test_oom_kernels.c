#include "check.h"
#include "failing_alloc.h"
#include "kernels.h"

/* Plans with the 1st, 2nd, ... allocation failing until no allocation fails. */
static void
a_plan_gives_everything_back(void)
{
    const cer_column column = {.name = "c",
                               .dtype = CER_U8,
                               .ndim = 3,
                               .shape = {4, 4, 3},
                               .row_bytes = 48};
    const cer_op ops[] = {
        {.kind = CER_OP_CROP, .size = {4, 4}, .padding = {1, 1}},
        {.kind = CER_OP_SCALE, .value = 1 / 255.0}};
    cer_transform *t;
    int n = 0;

    CHECK_EQ_INT(cer_transform_new(&column, ops, 2, &t, NULL), CER_OK);
    for (;;) {
        size_t live = failing_alloc_live();
        cer_error err = {0};
        cer_kernel_plan *plan;
        cer_status status;

        failing_alloc_arm((size_t)++n);
        status = cer_kernel_plan_new(t, &plan, &err);
        CHECK((plan != NULL) == (status == CER_OK));
        cer_kernel_plan_free(plan);
        CHECK_EQ_INT(failing_alloc_live(), live);
        if (!failing_alloc_triggered())
            break;
        CHECK_EQ_INT(status, CER_NOMEM);
        CHECK(strncmp(err.message, "out of memory", 13) == 0);
    }
    failing_alloc_arm(0);
    CHECK_EQ_INT(n, 3);
    cer_transform_free(t);
}

CHECK_MAIN(a_plan_gives_everything_back)
