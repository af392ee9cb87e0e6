#include "cut.h"

#include "check.h"

/* round(n / b) with halves to even, at least one; or n / b. */
static size_t
count_of(size_t rows, size_t batch_size, bool drop_last)
{
    size_t twice = 2 * rows / batch_size; /* in half batches, rounded down */
    size_t count = twice / 2;
    bool half = 2 * rows == twice * batch_size;

    if (drop_last || rows == 0)
        return count;
    if (twice % 2 == 1 && (!half || count % 2 == 1))
        count++;
    return count == 0 ? 1 : count;
}

static void
check_cut(const cer_cut *cut)
{
    size_t count = cer_cut_count(cut), most = 0, least = SIZE_MAX;

    CHECK_EQ_INT(count, count_of(cut->rows, cut->batch_size, cut->drop_last));
    CHECK_EQ_INT(cer_cut_first(cut, 0), 0);
    for (size_t i = 0; i < count; i++) {
        size_t n = cer_cut_first(cut, i + 1) - cer_cut_first(cut, i);

        CHECK(i == 0 || n <= least); /* the longer ones come first */
        most = n > most ? n : most;
        least = n < least ? n : least;
    }
    CHECK(count == 0 || most - least <= 1);
    CHECK(most <= cer_cut_most(cut));
    if (cut->drop_last)
        CHECK_EQ_INT(cer_cut_first(cut, count), count * cut->batch_size);
    else
        CHECK_EQ_INT(cer_cut_first(cut, count), cut->rows);
    CHECK(count == 0 || 2 * cut->rows < cut->batch_size ||
          2 * least >= cut->batch_size);
}

static void
batches_are_even(void)
{
    for (size_t rows = 0; rows < 120; rows++) {
        for (size_t size = 1; size < 40; size++) {
            for (int drop_last = 0; drop_last < 2; drop_last++)
                check_cut(&(cer_cut){rows, size, drop_last != 0});
        }
    }
}

static void
known_counts(void)
{
    static const struct {
        size_t rows, batch_size, count;
    } cases[] = {{0, 4, 0}, {1, 4, 1}, {2, 4, 1},  {5, 4, 1},  {6, 4, 2},
                 {7, 4, 2}, {9, 4, 2}, {10, 4, 2}, {14, 4, 4}, {3, 1, 3}};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_EQ_INT(cer_cut_count(
                         &(cer_cut){cases[i].rows, cases[i].batch_size, false}),
                     cases[i].count);
}

/* No sum of the largest numbers overflows. */
static void
large_numbers(void)
{
    cer_cut all = {SIZE_MAX, SIZE_MAX, false}, half = {SIZE_MAX, 2, false};
    cer_cut few = {10, SIZE_MAX, false};

    CHECK_EQ_INT(cer_cut_count(&all), 1);
    CHECK(cer_cut_first(&all, 1) == SIZE_MAX);
    CHECK(cer_cut_most(&all) == SIZE_MAX);
    CHECK(cer_cut_count(&half) == SIZE_MAX / 2 + 1);
    CHECK(cer_cut_first(&half, SIZE_MAX / 2 + 1) == SIZE_MAX);
    CHECK_EQ_INT(cer_cut_count(&few), 1);
    CHECK_EQ_INT(cer_cut_most(&few), 10);
}

CHECK_MAIN(batches_are_even, known_counts, large_numbers)
