#include <errno.h>

#include "check.h"
#include "failing_alloc.h"
#include "fsio.h"
#include "npy_writer.h"
#include "scratch.h"
#include "shard.h"
#include "shard_files.h"

typedef cer_status (*attempt)(cer_error *err);

/* Runs `action` with its 1st, 2nd, ... allocation failing until no allocation
 * fails. Every failure is CER_NOMEM with a message and leaks nothing. */
static void
fail_every_allocation(attempt action, int at_least)
{
    int n = 0, files = scratch_files();

    for (;;) {
        size_t live = failing_alloc_live();
        int descriptors = scratch_descriptors();
        cer_error err = {0};
        cer_status status;

        failing_alloc_arm((size_t)++n);
        status = action(&err);
        CHECK_EQ_INT(failing_alloc_live(), live);
        CHECK_EQ_INT(scratch_descriptors(), descriptors);
        CHECK_EQ_INT(scratch_files(), files);
        if (!failing_alloc_triggered()) {
            CHECK_EQ_INT(status, CER_OK);
            break;
        }
        CHECK_EQ_INT(status, CER_NOMEM);
        CHECK(strncmp(err.message, "out of memory", 13) == 0);
    }
    failing_alloc_arm(0);
    CHECK(n > at_least);
}

static cer_column_spec specs[SHARD_COLUMNS];

static cer_status
open_shard(cer_error *err)
{
    cer_shard *shard = NULL;
    cer_status status = cer_shard_open(scratch_folder, SHARD_ROWS, specs,
                                       SHARD_COLUMNS, &shard, err);

    cer_shard_release(shard);
    return status;
}

static void
opening_a_shard(void)
{
    write_shard(specs);
    fail_every_allocation(open_shard, 12);
}

static cer_status
hash_file(cer_error *err)
{
    cer_shard *shard = NULL;
    uint64_t hash;
    cer_status status = cer_shard_open(scratch_folder, SHARD_ROWS, specs,
                                       SHARD_COLUMNS, &shard, err);

    if (status == CER_OK)
        status = cer_shard_hash_file(shard, 2, &hash, err);
    cer_shard_release(shard);
    return status;
}

static void
hashing_a_file(void)
{
    write_shard(specs);
    fail_every_allocation(hash_file, 14);
}

static cer_status
write_file(cer_error *err)
{
    static const size_t shape[1] = {2};
    cer_npy_writer *writer = NULL;
    uint64_t file_bytes, hash;
    cer_status status = cer_npy_writer_open(scratch("w.npy"), CER_F32, 1, shape,
                                            3, &writer, err);

    if (status == CER_OK)
        status = cer_npy_writer_write(writer, shard_x, 3, err);
    if (status == CER_OK)
        status = cer_npy_writer_close(writer, &file_bytes, &hash, err);
    cer_npy_writer_free(writer);
    if (status == CER_OK)
        CHECK_EQ_INT(unlink(scratch("w.npy")), 0);
    return status;
}

static void
writing_a_file(void)
{
    (void)scratch("");
    fail_every_allocation(write_file, 4);
}

CHECK_MAIN(opening_a_shard, hashing_a_file, writing_a_file)
