#include "cut.h"

size_t
cer_cut_count(const cer_cut *cut)
{
    size_t whole = cut->rows / cut->batch_size;
    size_t rest = cut->rows % cut->batch_size;
    size_t short_of = cut->batch_size - rest;

    if (cut->drop_last || cut->rows == 0)
        return whole;
    if (rest > short_of || (rest == short_of && whole % 2 == 1))
        whole++;
    return whole == 0 ? 1 : whole;
}

size_t
cer_cut_first(const cer_cut *cut, size_t batch)
{
    size_t count, longer;

    if (cut->drop_last)
        return batch * cut->batch_size;
    count = cer_cut_count(cut);
    if (count == 0)
        return 0;
    longer = cut->rows % count;
    return batch * (cut->rows / count) + (batch < longer ? batch : longer);
}

size_t
cer_cut_most(const cer_cut *cut)
{
    size_t most = cut->batch_size;

    if (!cut->drop_last && most <= SIZE_MAX - most / 2)
        most += most / 2; /* one batch and a half are one batch */
    return most < cut->rows ? most : cut->rows;
}
