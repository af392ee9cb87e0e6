#include "npy_writer.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "fsio.h"
#include "hash.h"
#include "npy.h"

enum { BUFFER_BYTES = 1 << 18 }; /* rows often come one at a time */

struct cer_npy_writer {
    char *path;
    int fd;        /* -1: closed */
    pid_t process; /* the one that made the file; 0: none did */
    bool finished, failed;
    cer_hasher *hasher;
    uint8_t *buffer;
    size_t buffered; /* bytes */
    size_t row_bytes, rows, rows_written;
    uint64_t file_bytes;
};

static cer_status
flush(cer_npy_writer *writer, cer_error *err)
{
    cer_status status = cer_fsio_write(writer->fd, writer->buffer,
                                       writer->buffered, writer->path, err);

    writer->buffered = 0;
    return status;
}

static void
count(cer_npy_writer *writer, const void *data, size_t len_bytes)
{
    cer_hasher_update(writer->hasher, data, len_bytes);
    writer->file_bytes += len_bytes;
}

/* Hashes and writes. Data that does not fill a buffer is collected; the rest is
 * written directly from `data`, in pieces that stay in the cache between hash
 * and write. */
static cer_status
append(cer_npy_writer *writer, const void *data, size_t len_bytes,
       cer_error *err)
{
    const uint8_t *from = data;
    cer_status status = CER_OK;

    if (len_bytes > BUFFER_BYTES - writer->buffered)
        status = flush(writer, err);
    for (; status == CER_OK && len_bytes >= BUFFER_BYTES;
         from += BUFFER_BYTES, len_bytes -= BUFFER_BYTES) {
        count(writer, from, BUFFER_BYTES);
        status =
            cer_fsio_write(writer->fd, from, BUFFER_BYTES, writer->path, err);
    }
    writer->failed = status != CER_OK;
    if (status == CER_OK && len_bytes != 0) {
        count(writer, from, len_bytes);
        memcpy(writer->buffer + writer->buffered, from, len_bytes);
        writer->buffered += len_bytes;
    }
    return status;
}

/* Allocates a writer; on failure, free accepts a partial one. */
static cer_status
allocate(const char *path, cer_npy_writer **out, cer_error *err)
{
    size_t room = strlen(path) + 1;
    cer_npy_writer *writer = cer_calloc(1, sizeof *writer);

    *out = writer;
    if (writer != NULL) {
        writer->fd = -1;
        writer->path = cer_alloc(room);
        writer->hasher = cer_hasher_new();
        writer->buffer = cer_alloc(BUFFER_BYTES);
    }
    if (writer == NULL || writer->path == NULL || writer->hasher == NULL ||
        writer->buffer == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory writing %s", path);
    memcpy(writer->path, path, room);
    return CER_OK;
}

cer_status
cer_npy_writer_open(const char *path, cer_dtype dtype, uint32_t n_dims,
                    const size_t *row_shape, size_t rows, cer_npy_writer **out,
                    cer_error *err)
{
    cer_npy npy = {.dtype = dtype, .n_dims = n_dims + 1, .shape = {rows}};
    char header[CER_NPY_MAX_HEADER_BYTES];
    cer_npy_writer *writer = NULL;
    cer_status status;

    *out = NULL;
    if (n_dims >= CER_NPY_MAX_DIMS)
        return cer_fail(err, CER_INVALID,
                        "%s: rows of %u dimensions; at most %d are supported",
                        path, (unsigned)n_dims, CER_NPY_MAX_DIMS - 1);
    for (uint32_t i = 0; i < n_dims; i++)
        npy.shape[i + 1] = row_shape[i];
    if ((status = cer_npy_format(&npy, header, err)) != CER_OK)
        return status;
    if ((status = allocate(path, &writer, err)) != CER_OK)
        goto done;
    status = cer_fsio_create(path, &writer->fd, err);
    if (status != CER_OK)
        goto done;
    writer->process = getpid();
    writer->rows = rows;
    writer->row_bytes = rows == 0 ? 0 : npy.data_bytes / rows;
    status = append(writer, header, npy.data_offset, err);
    if (status == CER_OK)
        *out = writer;

done:
    if (status != CER_OK)
        cer_npy_writer_free(writer);
    return status;
}

static cer_status
check_usable(const cer_npy_writer *writer, cer_error *err)
{
    if (writer->failed)
        return cer_fail(err, CER_INVALID,
                        "%s: an earlier write failed; the file is lost",
                        writer->path);
    if (writer->fd < 0)
        return cer_fail(err, CER_INVALID, "%s: is closed", writer->path);
    return CER_OK;
}

cer_status
cer_npy_writer_write(cer_npy_writer *writer, const void *data, size_t n_rows,
                     cer_error *err)
{
    cer_status status = check_usable(writer, err);

    if (status != CER_OK)
        return status;
    if (n_rows > writer->rows - writer->rows_written)
        return cer_fail(err, CER_INVALID,
                        "%s: %zu rows after %zu are more than the %zu "
                        "announced",
                        writer->path, n_rows, writer->rows_written,
                        writer->rows);
    /* No overflow: the header multiplied rows and row_bytes. */
    status = append(writer, data, n_rows * writer->row_bytes, err);
    if (status == CER_OK)
        writer->rows_written += n_rows;
    return status;
}

static cer_status
close_file(cer_npy_writer *writer, cer_error *err)
{
    int result = close(writer->fd);

    writer->fd = -1;
    if (result < 0 && errno != EINTR)
        return cer_fail_errno(err, errno, "cannot close %s", writer->path);
    return CER_OK;
}

cer_status
cer_npy_writer_close(cer_npy_writer *writer, uint64_t *file_bytes,
                     uint64_t *hash, cer_error *err)
{
    cer_status status = check_usable(writer, err);

    if (status != CER_OK)
        return status;
    if (writer->rows_written != writer->rows)
        return cer_fail(err, CER_INVALID,
                        "%s: only %zu of %zu rows were written", writer->path,
                        writer->rows_written, writer->rows);
    status = flush(writer, err);
    if (status == CER_OK)
        status = cer_fsio_sync(writer->fd, writer->path, err);
    if (status == CER_OK)
        status = close_file(writer, err);
    writer->failed = status != CER_OK;
    writer->finished = status == CER_OK;
    *file_bytes = writer->file_bytes;
    *hash = cer_hasher_result(writer->hasher);
    return status;
}

void
cer_npy_writer_free(cer_npy_writer *writer)
{
    if (writer == NULL)
        return;
    if (writer->fd >= 0)
        (void)close(writer->fd);
    /* A forked child drops its copy while its parent is still writing. */
    if (writer->process == getpid() && !writer->finished)
        (void)unlink(writer->path);
    cer_free(writer->buffer);
    cer_hasher_free(writer->hasher);
    cer_free(writer->path);
    cer_free(writer);
}
