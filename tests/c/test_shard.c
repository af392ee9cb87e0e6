#include "shard.h"

#include <errno.h>
#include <pthread.h>

#include "check.h"
#include "scratch.h"
#include "shard_files.h"

static cer_shard *
open_good(void)
{
    cer_column_spec specs[SHARD_COLUMNS];
    cer_shard *shard = NULL;
    cer_error err = {0};

    write_shard(specs);
    if (cer_shard_open(scratch_folder, SHARD_ROWS, specs, SHARD_COLUMNS, &shard,
                       &err) != CER_OK) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    return shard;
}

/* Opens with changed specs or files, which must fail with `what` and leak
 * nothing. */
static void
check_refused(const cer_column_spec *specs, size_t n, cer_status status,
              const char *what)
{
    int descriptors = scratch_descriptors();
    cer_shard *shard = (cer_shard *)&descriptors;
    cer_error err = {0};

    CHECK_EQ_INT(
        cer_shard_open(scratch_folder, SHARD_ROWS, specs, n, &shard, &err),
        status);
    CHECK(shard == NULL);
    if (strstr(err.message, what) == NULL)
        CHECK_EQ_STR(err.message, what);
    CHECK_EQ_INT(scratch_descriptors(), descriptors);
}

static void
columns_are_there(void)
{
    int descriptors = scratch_descriptors();
    cer_shard *shard = open_good();
    size_t n;
    const cer_column *columns = cer_shard_columns(shard, &n);

    CHECK_EQ_INT(scratch_descriptors(), descriptors);
    CHECK_EQ_INT(n, 3);
    CHECK_EQ_INT(cer_shard_rows(shard), 3);
    CHECK_EQ_STR(cer_shard_directory(shard), scratch_folder);

    CHECK_EQ_STR(columns[0].name, "x");
    CHECK_EQ_INT(columns[0].dtype, CER_F32);
    CHECK_EQ_INT(columns[0].ndim, 1);
    CHECK_EQ_INT(columns[0].shape[0], 2);
    CHECK_EQ_INT(columns[0].row_bytes, 8);
    CHECK(!columns[0].ragged && columns[0].offsets == NULL);
    CHECK(memcmp(columns[0].data, shard_x, sizeof shard_x) == 0);
    CHECK_EQ_INT((uintptr_t)columns[0].data % 64, 0);
    CHECK_EQ_INT(cer_shard_values(shard, &columns[0]), 3);

    CHECK_EQ_INT(columns[1].dtype, CER_BF16);
    CHECK_EQ_INT(columns[1].ndim, 0);
    CHECK_EQ_INT(columns[1].row_bytes, 2);
    CHECK(memcmp(columns[1].data, shard_y, sizeof shard_y) == 0);

    CHECK(columns[2].ragged);
    CHECK_EQ_INT(columns[2].row_bytes, 4);
    CHECK(memcmp(columns[2].data, shard_t, sizeof shard_t) == 0);
    CHECK(memcmp(columns[2].offsets, shard_t_offsets, sizeof shard_t_offsets) ==
          0);
    CHECK_EQ_INT(cer_shard_values(shard, &columns[2]), 5);

    CHECK(cer_shard_find(shard, "y") == &columns[1]);
    CHECK(cer_shard_find(shard, "z") == NULL);
    cer_shard_release(shard);
    cer_shard_release(NULL);
}

static void
missing_and_changed_files_are_named(void)
{
    cer_column_spec specs[SHARD_COLUMNS];
    cer_error err = {0};
    cer_shard *shard;

    write_shard(specs);
    CHECK_EQ_INT(unlink(scratch("y.npy")), 0);
    check_refused(specs, 3, CER_IO, "/y.npy: No such file");
    CHECK_EQ_INT(
        cer_shard_open(scratch_folder, SHARD_ROWS, specs, 3, &shard, &err),
        CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);

    write_shard(specs);
    CHECK_EQ_INT(truncate(scratch("x.npy"), 151), 0);
    check_refused(specs, 3, CER_CORRUPT,
                  "/x.npy: has 151 bytes where the manifest says 152");
    CHECK_EQ_INT(truncate(scratch("x.npy"), 0), 0);
    check_refused(specs, 3, CER_CORRUPT, "/x.npy: has 0 bytes");

    write_shard(specs);
    CHECK_EQ_INT(rename(scratch("y.npy"), scratch("x.npy")), 0);
    check_refused(specs, 3, CER_CORRUPT, "/x.npy: has 134 bytes");
    specs[0].file_bytes = 134; /* even if the manifest agrees */
    check_refused(specs, 3, CER_CORRUPT,
                  "/x.npy: holds uint16 where the manifest says float32");
}

/* The manifest agrees with a truncated file, but the header does not. */
static void
a_file_cut_anywhere_is_refused(void)
{
    cer_column_spec specs[SHARD_COLUMNS];
    uint8_t whole[256];
    long size;

    write_shard(specs);
    size = scratch_read("t.offsets.npy", whole, sizeof whole);
    CHECK_EQ_INT(size, 160);
    for (long cut = 0; cut < size; cut++) {
        scratch_write("t.offsets.npy", whole, (size_t)cut);
        check_refused(specs, 3, CER_CORRUPT, "/t.offsets.npy: has ");
        specs[2].offsets_bytes = (uint64_t)cut;
        check_refused(specs, 3, CER_CORRUPT, "/t.offsets.npy: ");
        specs[2].offsets_bytes = 160;
    }
}

static void
dtypes_shapes_and_rows_must_agree(void)
{
    cer_column_spec specs[SHARD_COLUMNS];

    write_shard(specs);
    specs[0].dtype = CER_I32;
    check_refused(specs, 3, CER_CORRUPT,
                  "/x.npy: holds float32 where the manifest says int32");
    write_shard(specs);
    specs[0].shape[0] = 3;
    check_refused(specs, 3, CER_CORRUPT,
                  "/x.npy: its shape (3, 2) is not what the manifest says");
    write_shard(specs);
    specs[0].n_dims = 2;
    check_refused(specs, 3, CER_CORRUPT, "its shape (3, 2)");
    write_shard(specs);
    specs[0].n_dims = 0;
    check_refused(specs, 3, CER_CORRUPT, "its shape (3, 2)");
    write_shard(specs);
    specs[1].file_bytes = write_npy(
        "y.npy", (cer_npy){.dtype = CER_U16, .n_dims = 1, .shape = {2}},
        shard_y);
    check_refused(specs, 3, CER_CORRUPT, "/y.npy: its shape (2)");
}

static void
offsets_are_checked(void)
{
    static const struct {
        int64_t offsets[4];
        const char *message;
    } cases[] = {
        {{1, 2, 2, 5}, "the first offset is 1"},
        {{-1, 2, 2, 5}, "the first offset is -1"},
        {{0, 3, 2, 5}, "1 rows end before they begin"},
        {{0, 2, -9, 5}, "1 rows end before they begin"},
        {{0, 2, 2, 4}, "the rows end at value 4, but there are 5 values"},
        {{0, 2, 2, 6}, "the rows end at value 6, but there are 5 values"},
        {{0, 0, 0, INT64_MAX}, "but there are 5 values"},
    };
    const cer_npy npy = {.dtype = CER_I64, .n_dims = 1, .shape = {4}};
    cer_column_spec specs[SHARD_COLUMNS];

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_shard(specs);
        (void)write_npy("t.offsets.npy", npy, cases[i].offsets);
        check_refused(specs, 3, CER_CORRUPT, cases[i].message);
        check_refused(specs, 3, CER_CORRUPT, "/t.offsets.npy: ");
    }
}

static void
impossible_specs_are_refused(void)
{
    static const char *const names[] = {"", ".", "..", "../x.npy", "/etc/x"};
    cer_column_spec specs[SHARD_COLUMNS];
    cer_shard *shard;

    write_shard(specs);
    check_refused(specs, 0, CER_INVALID, "without columns");
    specs[1].name = "x";
    check_refused(specs, 3, CER_INVALID, "duplicate column x");
    write_shard(specs);
    specs[0].n_dims = 9;
    check_refused(specs, 3, CER_INVALID, "column x: rows of 9 dimensions");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        write_shard(specs);
        specs[0].file = names[i];
        check_refused(specs, 3, CER_INVALID, "column x: its file's name");
        write_shard(specs);
        specs[2].offsets_file = names[i];
        check_refused(specs, 3, CER_INVALID, "column t: its file's name");
    }
    write_shard(specs);
    specs[2].offsets_file = NULL;
    check_refused(specs, 3, CER_INVALID, "column t: its file's name");
    write_shard(specs);
    CHECK_EQ_INT(
        cer_shard_open(scratch_folder, UINT32_MAX, specs, 3, &shard, NULL),
        CER_INVALID);
}

static void
empty_shards_and_hollow_rows_open(void)
{
    static const int64_t zero[1] = {0};
    cer_column_spec specs[3] = {
        {.name = "x",
         .dtype = CER_F32,
         .n_dims = 1,
         .shape = {39},
         .file = "x.npy"},
        {.name = "h",
         .dtype = CER_F64,
         .n_dims = 2,
         .shape = {0, 7},
         .file = "h.npy"},
        {.name = "t",
         .dtype = CER_U8,
         .ragged = true,
         .n_dims = 1,
         .shape = {3},
         .file = "t.values.npy",
         .offsets_file = "t.offsets.npy"},
    };
    cer_shard *shard = NULL;
    const cer_column *columns;
    size_t n;

    specs[0].file_bytes = write_npy(
        "x.npy", (cer_npy){.dtype = CER_F32, .n_dims = 2, .shape = {0, 39}},
        "");
    specs[1].file_bytes = write_npy(
        "h.npy", (cer_npy){.dtype = CER_F64, .n_dims = 3, .shape = {0, 0, 7}},
        "");
    specs[2].file_bytes =
        write_npy("t.values.npy",
                  (cer_npy){.dtype = CER_U8, .n_dims = 2, .shape = {0, 3}}, "");
    specs[2].offsets_bytes =
        write_npy("t.offsets.npy",
                  (cer_npy){.dtype = CER_I64, .n_dims = 1, .shape = {1}}, zero);
    CHECK_EQ_INT(cer_shard_open(scratch_folder, 0, specs, 3, &shard, NULL),
                 CER_OK);
    columns = cer_shard_columns(shard, &n);
    CHECK_EQ_INT(columns[0].row_bytes, 156);
    CHECK_EQ_INT(columns[1].row_bytes, 0);
    CHECK_EQ_INT(columns[2].row_bytes, 3);
    for (size_t i = 0; i < n; i++) {
        CHECK(columns[i].data != NULL);
        CHECK_EQ_INT(cer_shard_values(shard, &columns[i]), 0);
    }
    cer_shard_release(shard);
}

static void
hashes_are_of_the_file_as_it_is_now(void)
{
    cer_shard *shard = open_good();
    uint8_t content[256];
    uint64_t hash = 0;
    cer_error err = {0};

    CHECK_EQ_INT(cer_shard_n_files(shard), SHARD_FILES);
    CHECK_EQ_STR(cer_shard_file_name(shard, 3), "t.offsets.npy");
    for (size_t i = 0; i < SHARD_FILES; i++) {
        long size = scratch_read(cer_shard_file_name(shard, i), content,
                                 sizeof content);

        CHECK_EQ_INT(cer_shard_hash_file(shard, i, &hash, NULL), CER_OK);
        CHECK_EQ_HEX(hash, cer_hash64(content, (size_t)size));
    }
    /* Damage after opening is an error naming the file, not a signal. */
    CHECK_EQ_INT(truncate(scratch("x.npy"), 5), 0);
    CHECK_EQ_INT(cer_shard_hash_file(shard, 0, &hash, &err), CER_CORRUPT);
    CHECK(strstr(err.message, "/x.npy: has 5 bytes; it had 152") != NULL);
    CHECK_EQ_INT(unlink(scratch("x.npy")), 0);
    CHECK_EQ_INT(cer_shard_hash_file(shard, 0, &hash, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
    cer_shard_release(shard);
}

/* Larger than a read chunk, and a multiple of it. */
static void
large_files_hash_in_chunks(void)
{
    enum { VALUES = 1 << 20 };
    uint8_t *values = calloc(VALUES, 1);
    cer_column_spec spec = {.name = "b", .dtype = CER_U8, .file = "b.npy"};
    cer_shard *shard = NULL;
    uint64_t hash = 0;
    uint8_t *whole = malloc(VALUES + 512);
    long size;

    for (size_t i = 0; i < VALUES; i++)
        values[i] = (uint8_t)(i * 7);
    for (size_t n = VALUES - 128; n <= VALUES; n += 128) {
        spec.file_bytes = write_npy(
            "b.npy", (cer_npy){.dtype = CER_U8, .n_dims = 1, .shape = {n}},
            values);
        size = scratch_read("b.npy", whole, VALUES + 512);
        CHECK_EQ_INT(cer_shard_open(scratch_folder, n, &spec, 1, &shard, NULL),
                     CER_OK);
        CHECK_EQ_INT(cer_shard_hash_file(shard, 0, &hash, NULL), CER_OK);
        CHECK_EQ_HEX(hash, cer_hash64(whole, (size_t)size));
        cer_shard_release(shard);
    }
    free(whole);
    free(values);
}

static void *
use_and_release(void *arg)
{
    cer_shard *shard = arg;

    for (int i = 0; i < 1000; i++)
        cer_shard_release(cer_shard_retain(shard));
    CHECK_EQ_INT(cer_shard_rows(shard), SHARD_ROWS);
    cer_shard_release(shard);
    return NULL;
}

static void
the_last_reference_of_any_thread_unmaps(void)
{
    cer_shard *shard = open_good();
    pthread_t threads[4];

    for (size_t i = 0; i < 4; i++)
        CHECK_EQ_INT(pthread_create(&threads[i], NULL, use_and_release,
                                    cer_shard_retain(shard)),
                     0);
    cer_shard_release(shard);
    for (size_t i = 0; i < 4; i++)
        CHECK_EQ_INT(pthread_join(threads[i], NULL), 0);
}

CHECK_MAIN(columns_are_there, missing_and_changed_files_are_named,
           a_file_cut_anywhere_is_refused, dtypes_shapes_and_rows_must_agree,
           offsets_are_checked, impossible_specs_are_refused,
           empty_shards_and_hollow_rows_open,
           hashes_are_of_the_file_as_it_is_now, large_files_hash_in_chunks,
           the_last_reference_of_any_thread_unmaps)
