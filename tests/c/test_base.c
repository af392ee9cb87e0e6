#include "base.h"

#include <errno.h>
#include <string.h>

#include "check.h"
#include "dtype.h"

static void
statuses_have_names(void)
{
    CHECK_EQ_STR(cer_status_name(CER_OK), "ok");
    CHECK_EQ_STR(cer_status_name(CER_CORRUPT), "corrupt data");
}

static void
failures_fill_the_error(void)
{
    cer_error err = {0};

    CHECK_EQ_INT(cer_fail(&err, CER_INVALID, "shards=%d", 0), CER_INVALID);
    CHECK_EQ_INT(err.status, CER_INVALID);
    CHECK_EQ_STR(err.message, "shards=0");
    CHECK_EQ_INT(cer_fail_errno(&err, ENOENT, "cannot open %s", "x.npy"),
                 CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    CHECK_EQ_STR(err.message, "cannot open x.npy: No such file or directory");
    CHECK_EQ_INT(cer_fail(NULL, CER_STATE, "nobody listens"), CER_STATE);
}

static void
long_messages_are_cut(void)
{
    cer_error err = {0};
    char text[2 * CER_ERROR_MESSAGE_BYTES];

    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    cer_fail_errno(&err, EIO, "%s", text);
    CHECK_EQ_INT(strlen(err.message), CER_ERROR_MESSAGE_BYTES - 1);
}

static void
arithmetic_is_checked(void)
{
    size_t out = 7;

    CHECK(!cer_add_size(SIZE_MAX, 1, &out));
    CHECK(!cer_mul_size(SIZE_MAX / 2, 3, &out));
    CHECK(!cer_round_up_size(SIZE_MAX - 3, 64, &out));
    CHECK_EQ_INT(out, 7);
    CHECK(cer_mul_size(SIZE_MAX, 0, &out));
    CHECK_EQ_INT(out, 0);
    CHECK(cer_round_up_size(65, 64, &out));
    CHECK_EQ_INT(out, 128);
}

static void
dtypes_translate_both_ways(void)
{
    cer_dtype dtype;

    for (int i = 0; i < CER_DTYPE_COUNT; i++) {
        cer_dtype d = (cer_dtype)i;

        CHECK(cer_dtype_from_name(cer_dtype_name(d), &dtype) && dtype == d);
        CHECK(cer_dtype_from_safetensors(cer_dtype_safetensors(d), &dtype) &&
              dtype == d);
        CHECK(cer_dtype_from_dlpack(cer_dtype_dlpack_code(d),
                                    (uint8_t)(cer_dtype_size(d) * 8), 1,
                                    &dtype) &&
              dtype == d);
    }
    CHECK(!cer_dtype_from_name("object", &dtype));
    CHECK(!cer_dtype_from_dlpack(2, 32, 4, &dtype));
}

CHECK_MAIN(statuses_have_names, failures_fill_the_error, long_messages_are_cut,
           arithmetic_is_checked, dtypes_translate_both_ways)
