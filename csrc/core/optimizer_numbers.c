#include "optimizer_numbers.h"

#include <math.h>
#include <string.h>

bool
cer_number_find(const char *name, cer_number_formula *formula)
{
    *formula = CER_NUMBER_STEP_SIZE;
    if (strcmp(name, "step size") == 0)
        return true;
    *formula = CER_NUMBER_CORRECTION;
    return strcmp(name, "correction") == 0;
}

double
cer_number(cer_number_formula formula, double lr, double beta, double t)
{
    double rest = 1 - pow(beta, t);

    return formula == CER_NUMBER_STEP_SIZE ? -(lr / rest) : pow(rest, 0.5);
}
