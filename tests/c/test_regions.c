/* Regions saved into a buffer, restored from it and compared with it. */
#include "regions.h"

#include "check.h"

static uint8_t one[5], two[3];
static const cer_region regions[] = {{one, 5}, {NULL, 0}, {two, 3}};

static cer_regions *
made(void)
{
    cer_regions *list = NULL;

    CHECK_EQ_INT(cer_regions_new(regions, 3, &list, NULL), CER_OK);
    memcpy(one, "first", 5);
    memcpy(two, "2nd", 3);
    return list;
}

static void
what_is_saved_is_restored(void)
{
    cer_regions *list = made();
    uint8_t buffer[9] = "........";

    CHECK_EQ_INT(cer_regions_nbytes(list), 8);
    cer_regions_save(list, buffer);
    CHECK_EQ_STR((const char *)buffer, "first2nd");
    memset(one, 0, 5);
    memset(two, 0, 3);
    cer_regions_restore(list, buffer);
    CHECK(memcmp(one, "first", 5) == 0 && memcmp(two, "2nd", 3) == 0);
    cer_regions_free(list);
}

static void
every_byte_is_compared(void)
{
    cer_regions *list = made();
    uint8_t buffer[8], other[8];

    cer_regions_save(list, buffer);
    CHECK_EQ_INT(cer_regions_differing(list, buffer, NULL), 3);
    CHECK_EQ_INT(cer_regions_differing(list, buffer, buffer), 3);
    for (size_t i = 0; i < 8; i++) {
        uint8_t *byte = i < 5 ? one + i : two + i - 5;

        *byte = (uint8_t)(*byte ^ 1);
        CHECK_EQ_INT(cer_regions_differing(list, buffer, NULL), i < 5 ? 0 : 2);
        cer_regions_save(list, other);
        CHECK_EQ_INT(cer_regions_differing(list, other, buffer), i < 5 ? 0 : 2);
        *byte = (uint8_t)(*byte ^ 1);
    }
    cer_regions_free(list);
}

static void
no_regions_are_equal(void)
{
    cer_regions *list;

    CHECK_EQ_INT(cer_regions_new(NULL, 0, &list, NULL), CER_OK);
    CHECK_EQ_INT(cer_regions_nbytes(list), 0);
    cer_regions_save(list, NULL);
    cer_regions_restore(list, NULL);
    CHECK_EQ_INT(cer_regions_differing(list, NULL, NULL), 0);
    cer_regions_free(list);
}

static void
wrong_regions_are_refused(void)
{
    const cer_region nowhere[] = {{one, 5}, {NULL, 1}};
    const cer_region huge[] = {{one, SIZE_MAX}, {two, 1}};
    cer_regions *list;
    cer_error err = {0};

    CHECK_EQ_INT(cer_regions_new(nowhere, 2, &list, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "region 1 has no address");
    CHECK_EQ_INT(cer_regions_new(huge, 2, &list, &err), CER_INVALID);
    CHECK_EQ_STR(err.message, "the regions are too large");
    CHECK(list == NULL);
}

CHECK_MAIN(what_is_saved_is_restored, every_byte_is_compared,
           no_regions_are_equal, wrong_regions_are_refused)
