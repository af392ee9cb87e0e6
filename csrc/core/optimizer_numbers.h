/* optimizer_numbers.h -- the numbers that Adam computes anew for every step, as
 * PyTorch does in Python: in float64, with the C library's power. */
#ifndef CER_OPTIMIZER_NUMBERS_H
#define CER_OPTIMIZER_NUMBERS_H

#include "base.h"

typedef enum cer_number_formula {
    CER_NUMBER_STEP_SIZE, /* -(lr / (1 - beta^t)) */
    CER_NUMBER_CORRECTION /* (1 - beta^t)^0.5 */
} cer_number_formula;

/* Finds a formula by its name in Python, "step size" or "correction"; false if
 * there is none. */
bool cer_number_find(const char *name, cer_number_formula *formula);

/* t: the number of the step, from 1. */
double cer_number(cer_number_formula formula, double lr, double beta, double t);

#endif
