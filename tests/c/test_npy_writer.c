#include "npy_writer.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "check.h"
#include "hash.h"
#include "npy.h"
#include "scratch.h"

enum { ROW = 24, ROWS = 50000 }; /* rows of 3 float64; several buffers */

static double values[ROWS * 3];

static cer_npy_writer *
open_writer(const char *name)
{
    static const size_t shape[1] = {3};
    cer_npy_writer *writer = NULL;

    CHECK_EQ_INT(cer_npy_writer_open(scratch(name), CER_F64, 1, shape, ROWS,
                                     &writer, NULL),
                 CER_OK);
    return writer;
}

/* Reads the file back: size, hash, header and every element. */
static void
check_file(const char *name, uint64_t file_bytes, uint64_t hash)
{
    size_t room = sizeof values + 4096;
    uint8_t *file = malloc(room);
    long size = scratch_read(name, file, room);
    cer_npy npy = {0};

    CHECK_EQ_INT(size, file_bytes);
    CHECK_EQ_HEX(hash, cer_hash64(file, (size_t)size));
    CHECK_EQ_INT(cer_npy_parse(file, (size_t)size, name, &npy, NULL), CER_OK);
    CHECK_EQ_INT(npy.shape[0], ROWS);
    CHECK_EQ_INT(npy.shape[1], 3);
    CHECK(memcmp(file + npy.data_offset, values, sizeof values) == 0);
    free(file);
}

/* The same file for all piece sizes: below, at and above the buffer's size. */
static void
pieces_of_any_size_make_the_same_file(void)
{
    static const size_t pieces[] = {1, 7, 10922, 10923, 11000, ROWS};
    uint64_t file_bytes = 0, hash = 0, first_hash = 0;

    for (size_t i = 0; i < ROWS * 3; i++)
        values[i] = (double)i / 7;
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        cer_npy_writer *writer = open_writer("w.npy");
        size_t row = 0, n;

        for (; row < ROWS; row += n) {
            n = pieces[i] < ROWS - row ? pieces[i] : ROWS - row;
            CHECK_EQ_INT(
                cer_npy_writer_write(writer, &values[row * 3], n, NULL),
                CER_OK);
        }
        CHECK_EQ_INT(cer_npy_writer_close(writer, &file_bytes, &hash, NULL),
                     CER_OK);
        cer_npy_writer_free(writer);
        check_file("w.npy", file_bytes, hash);
        first_hash = i == 0 ? hash : first_hash;
        CHECK_EQ_HEX(hash, first_hash);
        CHECK_EQ_INT(unlink(scratch("w.npy")), 0);
    }
}

static void
a_file_that_was_not_closed_is_removed(void)
{
    int descriptors = scratch_descriptors();
    cer_npy_writer *writer = open_writer("gone.npy");

    CHECK_EQ_INT(cer_npy_writer_write(writer, values, 5, NULL), CER_OK);
    CHECK_EQ_INT(access(scratch("gone.npy"), F_OK), 0);
    cer_npy_writer_free(writer);
    CHECK_EQ_INT(access(scratch("gone.npy"), F_OK), -1);
    CHECK_EQ_INT(scratch_descriptors(), descriptors);
    cer_npy_writer_free(NULL);
}

static void
rows_are_counted(void)
{
    cer_npy_writer *writer = open_writer("count.npy");
    uint64_t file_bytes = 0, hash = 0;
    cer_error err = {0};

    CHECK_EQ_INT(cer_npy_writer_write(writer, values, ROWS - 1, NULL), CER_OK);
    CHECK_EQ_INT(cer_npy_writer_close(writer, &file_bytes, &hash, &err),
                 CER_INVALID);
    CHECK(strstr(err.message, "only 49999 of 50000 rows") != NULL);
    CHECK_EQ_INT(cer_npy_writer_write(writer, values, 2, &err), CER_INVALID);
    CHECK(strstr(err.message, "2 rows after 49999") != NULL);
    CHECK_EQ_INT(cer_npy_writer_write(writer, values, SIZE_MAX, &err),
                 CER_INVALID);
    CHECK_EQ_INT(cer_npy_writer_write(writer, &values[(ROWS - 1) * 3], 1, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_npy_writer_close(writer, &file_bytes, &hash, NULL),
                 CER_OK);
    CHECK_EQ_INT(cer_npy_writer_write(writer, values, 0, &err), CER_INVALID);
    CHECK(strstr(err.message, "is closed") != NULL);
    CHECK_EQ_INT(cer_npy_writer_close(writer, &file_bytes, &hash, NULL),
                 CER_INVALID);
    cer_npy_writer_free(writer);
    check_file("count.npy", file_bytes, hash);
}

static void
what_is_there_is_never_touched(void)
{
    static const size_t shape[1] = {3};
    cer_npy_writer *writer = (cer_npy_writer *)values;
    cer_error err = {0};
    char back[8] = "";

    scratch_write("there.npy", "mine", 4);
    CHECK_EQ_INT(cer_npy_writer_open(scratch("there.npy"), CER_F64, 1, shape,
                                     ROWS, &writer, &err),
                 CER_IO);
    CHECK_EQ_INT(err.os_errno, EEXIST);
    CHECK(writer == NULL);
    CHECK_EQ_INT(scratch_read("there.npy", back, sizeof back), 4);
    CHECK_EQ_STR(back, "mine");
    CHECK_EQ_INT(cer_npy_writer_open(scratch("no/where.npy"), CER_F64, 1, shape,
                                     ROWS, &writer, &err),
                 CER_IO);
    CHECK_EQ_INT(err.os_errno, ENOENT);
}

/* The limit simulates a full disk. At 0 rows after it, the excess is still in
 * the buffer, and close reports it. */
static void
a_disk_that_fills_is_an_error(void)
{
    struct rlimit old_limit, limit;
    uint64_t file_bytes = 0, hash = 0;
    cer_error err = {0};
    int files = scratch_files(), descriptors = scratch_descriptors();
    cer_npy_writer *large = open_writer("large.npy");
    cer_npy_writer *small = NULL;

    CHECK_EQ_INT(cer_npy_writer_open(scratch("small.npy"), CER_U8, 0, NULL,
                                     2000, &small, NULL),
                 CER_OK);
    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ_INT(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    limit = old_limit;
    limit.rlim_cur = 1000;
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_EQ_INT(cer_npy_writer_write(large, values, ROWS, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EFBIG);
    CHECK(strstr(err.message, "/large.npy: ") != NULL);
    CHECK_EQ_INT(cer_npy_writer_write(large, values, 0, &err), CER_INVALID);
    CHECK_EQ_INT(cer_npy_writer_close(large, &file_bytes, &hash, &err),
                 CER_INVALID);
    CHECK(strstr(err.message, "an earlier write failed") != NULL);
    CHECK_EQ_INT(cer_npy_writer_write(small, values, 2000, &err), CER_OK);
    CHECK_EQ_INT(cer_npy_writer_close(small, &file_bytes, &hash, &err), CER_IO);
    CHECK_EQ_INT(err.os_errno, EFBIG);
    CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
    cer_npy_writer_free(large);
    cer_npy_writer_free(small);
    CHECK_EQ_INT(scratch_files(), files);
    CHECK_EQ_INT(scratch_descriptors(), descriptors);
}

static void
no_rows_and_hollow_rows_are_written(void)
{
    static const size_t shapes[2][2] = {{39, 1}, {0, 7}};

    for (size_t i = 0; i < 2; i++) {
        size_t rows = i * 5; /* (0, 39, 1) and (5, 0, 7) */
        cer_npy_writer *writer = NULL;
        uint64_t file_bytes = 0, hash = 0;
        uint8_t back[256];
        cer_npy npy = {0};

        CHECK_EQ_INT(cer_npy_writer_open(scratch("e.npy"), CER_BF16, 2,
                                         shapes[i], rows, &writer, NULL),
                     CER_OK);
        CHECK_EQ_INT(cer_npy_writer_write(writer, values, rows, NULL), CER_OK);
        CHECK_EQ_INT(cer_npy_writer_close(writer, &file_bytes, &hash, NULL),
                     CER_OK);
        cer_npy_writer_free(writer);
        CHECK_EQ_INT(file_bytes, 128);
        CHECK_EQ_INT(scratch_read("e.npy", back, sizeof back), 128);
        CHECK_EQ_INT(cer_npy_parse(back, 128, "e.npy", &npy, NULL), CER_OK);
        CHECK_EQ_INT(npy.dtype, CER_U16);
        CHECK_EQ_INT(npy.shape[0], rows);
        CHECK_EQ_INT(npy.shape[1], shapes[i][0]);
        CHECK_EQ_INT(unlink(scratch("e.npy")), 0);
    }
}

static void
a_forked_child_leaves_the_file_to_its_parent(void)
{
    cer_npy_writer *writer = open_writer("f.npy");
    uint64_t file_bytes = 0, hash = 0;
    pid_t child = fork();
    int status;

    if (child == 0) {
        cer_npy_writer_free(writer);
        _exit(0);
    }
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    CHECK_EQ_INT(cer_npy_writer_write(writer, values, ROWS, NULL), CER_OK);
    CHECK_EQ_INT(cer_npy_writer_close(writer, &file_bytes, &hash, NULL),
                 CER_OK);
    cer_npy_writer_free(writer);
    check_file("f.npy", file_bytes, hash);
    CHECK_EQ_INT(unlink(scratch("f.npy")), 0);
}

static void
impossible_shapes_make_no_file(void)
{
    size_t shape[CER_NPY_MAX_DIMS] = {SIZE_MAX, SIZE_MAX};
    cer_npy_writer *writer = NULL;

    CHECK_EQ_INT(cer_npy_writer_open(scratch("i.npy"), CER_U8, 2, shape, 1,
                                     &writer, NULL),
                 CER_INVALID);
    CHECK_EQ_INT(cer_npy_writer_open(scratch("i.npy"), CER_U8, CER_NPY_MAX_DIMS,
                                     shape, 1, &writer, NULL),
                 CER_INVALID);
    CHECK_EQ_INT(cer_npy_writer_open(scratch("i.npy"), CER_U8, UINT32_MAX,
                                     shape, 1, &writer, NULL),
                 CER_INVALID);
    CHECK_EQ_INT(access(scratch("i.npy"), F_OK), -1);
}

CHECK_MAIN(pieces_of_any_size_make_the_same_file,
           a_file_that_was_not_closed_is_removed, rows_are_counted,
           what_is_there_is_never_touched, a_disk_that_fills_is_an_error,
           no_rows_and_hollow_rows_are_written,
           a_forked_child_leaves_the_file_to_its_parent,
           impossible_shapes_make_no_file)
