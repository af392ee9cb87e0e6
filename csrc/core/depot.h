/* depot.h -- what all loaders of a device share: shards that are resident in
 * its memory, and blocks of its memory for batches.
 *
 * A column of a shard is brought to the device once, whoever asks first, and
 * stays there for everybody else: trials, views and passes. It may be given
 * back when no pass uses it; that happens, longest unused first, when the
 * device's memory runs short or the depot's limit is reached. What was given
 * back is brought again when somebody asks: shards do not change.
 *
 * Blocks for batches come and go with the batches. Giving one back is one
 * compare-and-swap: no lock, no wait and no call of the device, because the
 * last one to let go of a batch may be anybody, anywhere, at any time. Blocks
 * that came back are used again once their uses are over (uses.h), or freed by
 * the next one that asks.
 *
 * A depot lives until its last user and its last block are gone. */
#ifndef CER_DEPOT_H
#define CER_DEPOT_H

#include "batch.h"
#include "shard.h"
#include "uses.h"

typedef struct cer_depot cer_depot;

/* *out has one reference, the caller's. It is asked for memory when the
 * device's is short. Errors: CER_DEVICE, CER_NOMEM. */
cer_status cer_depot_new(cer_device *device, cer_depot **out, cer_error *err);
void cer_depot_retain(cer_depot *depot);
void cer_depot_release(cer_depot *depot); /* NULL allowed */

cer_device *cer_depot_device(const cer_depot *depot);

/* Streams for everybody's work. They live as long as the depot, because a
 * block's uses name them when the loader that put work there is long gone. */
typedef enum cer_depot_stream_use {
    CER_DEPOT_UPLOADS, /* whole columns, and copies that somebody waits for */
    CER_DEPOT_COPIES,  /* batches on their way to the device */
    CER_DEPOT_KERNELS, /* of batches whose consumer's stream is not known */
    CER_DEPOT_STREAMS
} cer_depot_stream_use;

void *cer_depot_stream(const cer_depot *depot, cer_depot_stream_use use);

/* --- resident columns ----------------------------------------------------- */

typedef struct cer_resident cer_resident;

/* Bytes that may be resident at most; to begin with half of the device's
 * memory. A smaller limit shows when something is next brought. */
void cer_depot_set_limit(cer_depot *depot, size_t bytes);
size_t cer_depot_limit(const cer_depot *depot);
size_t cer_depot_resident_bytes(cer_depot *depot);

/* Whether a column is resident now. */
bool cer_depot_has(cer_depot *depot, const cer_shard *shard, size_t column);

/* The column in the device's memory, all there, with one use that
 * cer_depot_put_back ends. Brings it if need be, below the limit or, unless
 * `limited`, as far as the device's memory goes: waits on the host until the
 * copy is done. Errors: CER_NOMEM (there is no room even when all that nobody
 * uses is given back; the message says what can be done), CER_DEVICE. */
cer_status cer_depot_bring(cer_depot *depot, cer_shard *shard, size_t column,
                           bool limited, cer_resident **out, cer_error *err);
void cer_depot_put_back(cer_depot *depot, cer_resident *resident);

const uint8_t *cer_resident_data(const cer_resident *resident);
const int64_t *cer_resident_offsets(const cer_resident *resident);
/* Says that something on `stream` reads it, before that is put there. */
cer_status cer_resident_join(cer_resident *resident, void *stream,
                             cer_error *err);

/* Gives back what is resident of a shard and not in use; NULL: of all. Returns
 * the bytes. */
size_t cer_depot_drop(cer_depot *depot, const cer_shard *shard);

/* --- blocks --------------------------------------------------------------- */

/* Device memory with its uses; what a cer_place is embedded in. */
typedef struct cer_depot_block {
    cer_place place; /* first */
    cer_uses uses;
    cer_device_block memory;
    cer_depot *depot;
    struct cer_depot_block *next;
} cer_depot_block;

/* A block of at least `bytes`, whose old uses may not be over: see uses.h.
 * Errors: CER_NOMEM (the message says what is resident), CER_DEVICE. */
cer_status cer_depot_get(cer_depot *depot, size_t bytes, cer_depot_block **out,
                         cer_error *err);
void cer_depot_give(cer_depot_block *block);

/* Blocks that nobody has, for a ring's batches. The ring keeps the depot. */
cer_batch_source cer_depot_batches(cer_depot *depot, size_t turns);

/* Copies memory of the host to the device, through pinned memory, and waits. */
cer_status cer_depot_upload(cer_depot *depot, void *to, const void *from,
                            size_t bytes, cer_error *err);

#endif
