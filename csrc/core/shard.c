#include "shard.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "fsio.h"
#include "hash.h"
#include "npy.h"

typedef struct shard_file {
    char *name; /* within the folder */
    char *path;
    cer_map map;
} shard_file;

/* The files of column i are files[first_file[i]] and, if it is ragged, the next
 * one. */
struct cer_shard {
    atomic_size_t references;
    size_t rows;
    char *directory;
    size_t n_columns, n_files;
    cer_column *columns;
    char **names;
    size_t *first_file;
    shard_file *files;
};

static char *
copy_string(const char *text)
{
    size_t len_bytes = strlen(text) + 1;
    char *copy = cer_alloc(len_bytes);

    if (copy != NULL)
        memcpy(copy, text, len_bytes);
    return copy;
}

static char *
join_path(const char *directory, const char *name)
{
    size_t room = strlen(directory) + 1 + strlen(name) + 1;
    char *path = cer_alloc(room);

    if (path != NULL)
        (void)snprintf(path, room, "%s/%s", directory, name);
    return path;
}

/* --- the spec ------------------------------------------------------------ */

/* A name from a manifest must not lead out of the shard's folder. */
static bool
is_plain_name(const char *name)
{
    return name != NULL && name[0] != '\0' && strchr(name, '/') == NULL &&
           strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static cer_status
check_spec(const cer_column_spec *specs, size_t i, cer_error *err)
{
    const cer_column_spec *spec = &specs[i];

    if (spec->n_dims > CER_COLUMN_MAX_DIMS)
        return cer_fail(err, CER_INVALID,
                        "column %s: rows of %u dimensions; at most %d are "
                        "supported",
                        spec->name, (unsigned)spec->n_dims,
                        CER_COLUMN_MAX_DIMS);
    if (!is_plain_name(spec->file) ||
        (spec->ragged && !is_plain_name(spec->offsets_file)))
        return cer_fail(err, CER_INVALID,
                        "column %s: its file's name is missing or leads out "
                        "of the shard's folder",
                        spec->name);
    for (size_t other = 0; other < i; other++) {
        if (strcmp(specs[other].name, spec->name) == 0)
            return cer_fail(err, CER_INVALID, "duplicate column %s",
                            spec->name);
    }
    return CER_OK;
}

static cer_status
check_specs(const char *directory, size_t rows, const cer_column_spec *specs,
            size_t n_specs, cer_error *err)
{
    cer_status status;

    if (n_specs == 0)
        return cer_fail(err, CER_INVALID, "%s: a shard without columns",
                        directory);
    /* Row numbers are uint32 in row orders, and offsets have one row more. */
    if (rows >= UINT32_MAX)
        return cer_fail(err, CER_INVALID,
                        "%s: %zu rows; a shard has fewer than 2**32 - 1",
                        directory, rows);
    for (size_t i = 0; i < n_specs; i++) {
        if ((status = check_spec(specs, i, err)) != CER_OK)
            return status;
    }
    return CER_OK;
}

/* --- opening ------------------------------------------------------------- */

/* The expected content of a file: `lead` rows (or any number of values) of
 * `row_shape`. */
typedef struct expected {
    const char *name;
    uint64_t file_bytes;
    cer_dtype dtype;
    bool any_lead;
    size_t lead;
    uint32_t n_dims;
    const size_t *row_shape;
} expected;

static void
format_shape(const cer_npy *npy, char *text, size_t room)
{
    size_t n = 0;

    for (uint32_t i = 0; i < npy->n_dims && n < room; i++)
        n += (size_t)snprintf(text + n, room - n, "%s%zu", i == 0 ? "" : ", ",
                              npy->shape[i]);
}

static bool
shape_fits(const expected *want, const cer_npy *npy)
{
    bool fits = npy->n_dims == want->n_dims + 1 &&
                (want->any_lead || npy->shape[0] == want->lead);

    for (uint32_t i = 0; fits && i < want->n_dims; i++)
        fits = npy->shape[i + 1] == want->row_shape[i];
    return fits;
}

static cer_status
check_header(const expected *want, const cer_npy *npy, const char *path,
             cer_error *err)
{
    char shape[256] = "";

    if (npy->dtype != cer_npy_stored(want->dtype))
        return cer_fail(
            err, CER_CORRUPT, "%s: holds %s where the manifest says %s", path,
            cer_dtype_name(npy->dtype), cer_dtype_name(want->dtype));
    if (shape_fits(want, npy))
        return CER_OK;
    format_shape(npy, shape, sizeof shape);
    return cer_fail(err, CER_CORRUPT,
                    "%s: its shape (%s) is not what the manifest says", path,
                    shape);
}

/* Maps the shard's next file and checks its size and header. The shard owns the
 * file from the first allocation, so this function releases nothing on
 * failure. */
static cer_status
open_file(cer_shard *shard, const expected *want, cer_npy *npy, cer_error *err)
{
    shard_file *file = &shard->files[shard->n_files++];
    cer_status status;

    file->map = (cer_map)CER_MAP_INIT;
    file->name = copy_string(want->name);
    file->path = join_path(shard->directory, want->name);
    if (file->name == NULL || file->path == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory opening %s", want->name);
    status = cer_fsio_map_read(file->path, &file->map, err);
    if (status != CER_OK)
        return status;
    if (file->map.size_bytes != want->file_bytes)
        return cer_fail(err, CER_CORRUPT,
                        "%s: has %zu bytes where the manifest says %" PRIu64,
                        file->path, file->map.size_bytes, want->file_bytes);
    status = cer_npy_parse(file->map.data, file->map.size_bytes, file->path,
                           npy, err);
    if (status == CER_OK)
        status = check_header(want, npy, file->path, err);
    return status;
}

/* Offsets begin at 0, never decrease and end at the number of values. */
static cer_status
check_offsets(const int64_t *offsets, size_t rows, size_t values,
              const char *path, cer_error *err)
{
    size_t bad = 0;

    if (offsets[0] != 0)
        return cer_fail(err, CER_CORRUPT,
                        "%s: the first offset is %" PRId64 " and not 0", path,
                        offsets[0]);
    for (size_t row = 0; row < rows; row++) /* no branch: it vectorizes */
        bad += offsets[row + 1] < offsets[row];
    if (bad != 0)
        return cer_fail(err, CER_CORRUPT, "%s: %zu rows end before they begin",
                        path, bad);
    if ((uint64_t)offsets[rows] != values)
        return cer_fail(err, CER_CORRUPT,
                        "%s: the rows end at value %" PRId64
                        ", but there are %zu values",
                        path, offsets[rows], values);
    return CER_OK;
}

static cer_status
open_offsets(cer_shard *shard, const cer_column_spec *spec, size_t values,
             cer_column *column, cer_error *err)
{
    const expected want = {
        .name = spec->offsets_file,
        .file_bytes = spec->offsets_bytes,
        .dtype = CER_I64,
        .lead = shard->rows + 1,
    };
    const shard_file *file = &shard->files[shard->n_files];
    cer_npy npy = {0};
    cer_status status = open_file(shard, &want, &npy, err);

    if (status != CER_OK)
        return status;
    column->offsets = (const int64_t *)(file->map.data + npy.data_offset);
    return check_offsets(column->offsets, shard->rows, values, file->path, err);
}

static cer_status
open_column(cer_shard *shard, const cer_column_spec *spec, cer_error *err)
{
    size_t at = shard->n_columns++;
    cer_column *column = &shard->columns[at];
    const expected want = {
        .name = spec->file,
        .file_bytes = spec->file_bytes,
        .dtype = spec->dtype,
        .any_lead = spec->ragged,
        .lead = shard->rows,
        .n_dims = spec->n_dims,
        .row_shape = spec->shape,
    };
    cer_npy npy = {0};
    cer_status status;

    shard->first_file[at] = shard->n_files;
    shard->names[at] = copy_string(spec->name);
    if (shard->names[at] == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory opening column %s",
                        spec->name);
    status = open_file(shard, &want, &npy, err);
    if (status != CER_OK)
        return status;
    column->name = shard->names[at];
    column->dtype = spec->dtype;
    column->ragged = spec->ragged;
    column->ndim = spec->n_dims;
    column->data = shard->files[shard->n_files - 1].map.data + npy.data_offset;
    /* No overflow: the parser multiplied these. */
    column->row_bytes = cer_dtype_size(spec->dtype);
    for (uint32_t i = 0; i < spec->n_dims; i++) {
        column->shape[i] = spec->shape[i];
        column->row_bytes *= spec->shape[i];
    }
    if (spec->ragged)
        status = open_offsets(shard, spec, npy.shape[0], column, err);
    return status;
}

static cer_status
allocate(const char *directory, size_t rows, size_t n_specs, cer_shard **out)
{
    cer_shard *shard = cer_calloc(1, sizeof *shard);

    *out = shard;
    if (shard == NULL)
        return CER_NOMEM;
    atomic_init(&shard->references, 1);
    shard->rows = rows;
    shard->directory = copy_string(directory);
    shard->columns = cer_calloc(n_specs, sizeof *shard->columns);
    shard->names = cer_calloc(n_specs, sizeof *shard->names);
    shard->first_file = cer_calloc(n_specs, sizeof *shard->first_file);
    shard->files = cer_calloc(n_specs, 2 * sizeof *shard->files);
    if (shard->directory == NULL || shard->columns == NULL ||
        shard->names == NULL || shard->first_file == NULL ||
        shard->files == NULL)
        return CER_NOMEM;
    return CER_OK;
}

cer_status
cer_shard_open(const char *directory, size_t rows, const cer_column_spec *specs,
               size_t n_specs, cer_shard **out, cer_error *err)
{
    cer_shard *shard = NULL;
    cer_status status;

    *out = NULL;
    status = check_specs(directory, rows, specs, n_specs, err);
    if (status != CER_OK)
        return status;
    if ((status = cer_fsio_check_folder(directory, err)) != CER_OK)
        return status;
    if (allocate(directory, rows, n_specs, &shard) != CER_OK) {
        status =
            cer_fail(err, CER_NOMEM, "out of memory opening %s", directory);
        goto done;
    }
    for (size_t i = 0; i < n_specs; i++) {
        if ((status = open_column(shard, &specs[i], err)) != CER_OK)
            goto done;
    }
    *out = shard;

done:
    if (status != CER_OK)
        cer_shard_release(shard);
    return status;
}

static void
destroy(cer_shard *shard)
{
    for (size_t i = 0; i < shard->n_files; i++) {
        cer_fsio_unmap(&shard->files[i].map);
        cer_free(shard->files[i].name);
        cer_free(shard->files[i].path);
    }
    for (size_t i = 0; i < shard->n_columns; i++)
        cer_free(shard->names[i]);
    cer_free(shard->files);
    cer_free(shard->first_file);
    cer_free(shard->names);
    cer_free(shard->columns);
    cer_free(shard->directory);
    cer_free(shard);
}

cer_shard *
cer_shard_retain(cer_shard *shard)
{
    (void)atomic_fetch_add_explicit(&shard->references, 1,
                                    memory_order_relaxed);
    return shard;
}

void
cer_shard_release(cer_shard *shard)
{
    /* Acquire and release: the thread that unmaps sees every other use as
     * finished. */
    if (shard != NULL && atomic_fetch_sub_explicit(&shard->references, 1,
                                                   memory_order_acq_rel) == 1)
        destroy(shard);
}

/* --- access -------------------------------------------------------------- */

size_t
cer_shard_rows(const cer_shard *shard)
{
    return shard->rows;
}

const char *
cer_shard_directory(const cer_shard *shard)
{
    return shard->directory;
}

const cer_column *
cer_shard_columns(const cer_shard *shard, size_t *n)
{
    *n = shard->n_columns;
    return shard->columns;
}

const cer_column *
cer_shard_find(const cer_shard *shard, const char *name)
{
    for (size_t i = 0; i < shard->n_columns; i++) {
        if (strcmp(shard->columns[i].name, name) == 0)
            return &shard->columns[i];
    }
    return NULL;
}

size_t
cer_shard_values(const cer_shard *shard, const cer_column *column)
{
    return column->ragged ? (size_t)column->offsets[shard->rows] : shard->rows;
}

/* --- hashing ------------------------------------------------------------- */

size_t
cer_shard_n_files(const cer_shard *shard)
{
    return shard->n_files;
}

const char *
cer_shard_file_name(const cer_shard *shard, size_t file)
{
    return shard->files[file].name;
}

/* Hashes the rest of `fd`; *len_bytes is its length. */
static cer_status
hash_rest(int fd, const char *path, uint64_t *hash, size_t *len_bytes,
          cer_error *err)
{
    enum { CHUNK_BYTES = 1 << 18 }; /* stays in the cache */
    cer_hasher *hasher = cer_hasher_new();
    void *chunk = cer_alloc(CHUNK_BYTES);
    cer_status status = CER_OK;
    size_t got = CHUNK_BYTES;

    *len_bytes = 0;
    if (hasher == NULL || chunk == NULL) {
        status = cer_fail(err, CER_NOMEM, "out of memory hashing %s", path);
        goto done;
    }
    while (got == CHUNK_BYTES) {
        status = cer_fsio_read(fd, chunk, CHUNK_BYTES, &got, path, err);
        if (status != CER_OK)
            goto done;
        cer_hasher_update(hasher, chunk, got);
        *len_bytes += got;
    }
    *hash = cer_hasher_result(hasher);

done:
    cer_free(chunk);
    cer_hasher_free(hasher);
    return status;
}

cer_status
cer_shard_hash_file(const cer_shard *shard, size_t file, uint64_t *hash,
                    cer_error *err)
{
    const shard_file *of = &shard->files[file];
    size_t len_bytes = 0;
    cer_status status;
    int fd = -1;

    if ((status = cer_fsio_open_read(of->path, &fd, err)) != CER_OK)
        return status;
    status = hash_rest(fd, of->path, hash, &len_bytes, err);
    if (status == CER_OK && len_bytes != of->map.size_bytes)
        status = cer_fail(err, CER_CORRUPT,
                          "%s: has %zu bytes; it had %zu when it was opened",
                          of->path, len_bytes, of->map.size_bytes);
    (void)close(fd);
    return status;
}
