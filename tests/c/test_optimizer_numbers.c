#include "optimizer_numbers.h"

#include <math.h>

#include "check.h"

static void
numbers_are_adams(void)
{
    CHECK(cer_number(CER_NUMBER_STEP_SIZE, 0.5, 0.75, 1) == -2.0);
    CHECK(cer_number(CER_NUMBER_STEP_SIZE, 0.4375, 0.75, 2) == -1.0);
    CHECK(cer_number(CER_NUMBER_CORRECTION, 9, 0.75, 1) == 0.5);
    CHECK(cer_number(CER_NUMBER_CORRECTION, 9, 0.5, 2) ==
          pow(1 - 0.5 * 0.5, 0.5));
}

static void
formulas_are_found_by_name(void)
{
    cer_number_formula formula;

    CHECK(cer_number_find("step size", &formula));
    CHECK_EQ_INT(formula, CER_NUMBER_STEP_SIZE);
    CHECK(cer_number_find("correction", &formula));
    CHECK_EQ_INT(formula, CER_NUMBER_CORRECTION);
    CHECK(!cer_number_find("lr", &formula));
}

CHECK_MAIN(numbers_are_adams, formulas_are_found_by_name)
