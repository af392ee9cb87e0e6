/* depot.h -- the shards resident in a device's memory and the blocks for
 * batches, shared by all loaders of the device.
 *
 * A shard's column is uploaded once, on first request, and stays for all other
 * trials, views and passes. It may be evicted when no pass uses it; that
 * happens, least recently used first, when device memory runs short or the
 * depot's limit is reached. An evicted column is uploaded again on request:
 * shards do not change.
 *
 * Blocks for batches come and go with the batches. Returning one is one
 * compare-and-swap, without a lock, a wait or a device call, because the last
 * release of a batch can happen anywhere at any time. Returned blocks are
 * reused once their uses are over (uses.h), or freed by the next request.
 *
 * A depot lives until its last user and last block are gone. */
#ifndef CER_DEPOT_H
#define CER_DEPOT_H

#include "batch.h"
#include "shard.h"
#include "uses.h"

typedef struct cer_depot cer_depot;

/* *out has one reference, owned by the caller. The depot frees memory when the
 * device runs short. Errors: CER_DEVICE, CER_NOMEM. */
cer_status cer_depot_new(cer_device *device, cer_depot **out, cer_error *err);
void cer_depot_retain(cer_depot *depot);
void cer_depot_release(cer_depot *depot); /* NULL allowed */

cer_device *cer_depot_device(const cer_depot *depot);

/* Streams shared by all loaders. They live as long as the depot, because a
 * block's uses may refer to them long after the loader that used them is
 * gone. */
typedef enum cer_depot_stream_use {
    CER_DEPOT_UPLOADS, /* whole columns, and synchronous copies */
    CER_DEPOT_COPIES,  /* batches being copied to the device */
    CER_DEPOT_KERNELS, /* for batches whose consumer's stream is unknown */
    CER_DEPOT_STREAMS
} cer_depot_stream_use;

void *cer_depot_stream(const cer_depot *depot, cer_depot_stream_use use);

/* --- resident columns ----------------------------------------------------- */

typedef struct cer_resident cer_resident;

/* The most bytes that may be resident; initially half of the device's memory. A
 * smaller limit takes effect at the next upload. */
void cer_depot_set_limit(cer_depot *depot, size_t bytes);
size_t cer_depot_limit(const cer_depot *depot);
size_t cer_depot_resident_bytes(cer_depot *depot);

/* Whether a column is resident now. */
bool cer_depot_has(cer_depot *depot, const cer_shard *shard, size_t column);

/* Gets the complete column in device memory, with one use that
 * cer_depot_put_back ends. Uploads it if needed, within the limit or, unless
 * `limited`, within the device's memory, and waits on the host for the copy.
 * Errors: CER_NOMEM (no room even after evicting all unused columns; the
 * message suggests a remedy), CER_DEVICE. */
cer_status cer_depot_bring(cer_depot *depot, cer_shard *shard, size_t column,
                           bool limited, cer_resident **out, cer_error *err);
void cer_depot_put_back(cer_depot *depot, cer_resident *resident);

const uint8_t *cer_resident_data(const cer_resident *resident);
const int64_t *cer_resident_offsets(const cer_resident *resident);
/* Announces a reader on `stream`, before the read is enqueued there. */
cer_status cer_resident_join(cer_resident *resident, void *stream,
                             cer_error *err);

/* Evicts the unused columns of a shard, or of all shards if NULL. Returns the
 * bytes freed. */
size_t cer_depot_drop(cer_depot *depot, const cer_shard *shard);

/* --- blocks --------------------------------------------------------------- */

/* Device memory with its uses; embeds a cer_place. */
typedef struct cer_depot_block {
    cer_place place; /* first */
    cer_uses uses;
    cer_device_block memory;
    cer_depot *depot;
    struct cer_depot_block *next;
} cer_depot_block;

/* Gets a block of at least `bytes`, whose old uses may not be over (see
 * uses.h). Errors: CER_NOMEM (the message lists resident memory),
 * CER_DEVICE. */
cer_status cer_depot_get(cer_depot *depot, size_t bytes, cer_depot_block **out,
                         cer_error *err);
void cer_depot_give(cer_depot_block *block);

/* Unused blocks for a ring's batches. The ring keeps the depot. */
cer_batch_source cer_depot_batches(cer_depot *depot, size_t turns);

/* Copies host memory to the device, through pinned memory, and waits. */
cer_status cer_depot_upload(cer_depot *depot, void *to, const void *from,
                            size_t bytes, cer_error *err);

#endif
