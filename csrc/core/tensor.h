/* tensor.h -- a strided array, perhaps in external memory, and its export as
 * DLPack.
 *
 * A cer_owner, a reference count embedded in the holder of the memory, keeps
 * memory alive. The last release may happen on any thread, without Python,
 * after the loader closed and while the process exits: it calls `drop`, which
 * uses only atomics and free.
 *
 * Device memory has a cer_place beside its owner, which names the device and
 * orders consumers' streams. Nothing in this file touches a device: the holder
 * of the memory provides the place's functions.
 *
 * An export is one block that serves both kinds of capsule. It counts its two
 * holders, the capsule and the consumer's tensor. A separate flag records that
 * the deleter has run, so a consumer that calls the deleter without renaming
 * the capsule (TensorFlow does, after an error) frees nothing twice. */
#ifndef CER_TENSOR_H
#define CER_TENSOR_H

#include <stdatomic.h>

#include "base.h"
#include "dlpack.h"
#include "dtype.h"

/* 8 dimensions of a row, the batch's rows, and the length if ragged. */
#define CER_TENSOR_MAX_DIMS 10

typedef struct cer_owner {
    atomic_size_t count;
    void (*drop)(struct cer_owner *owner); /* the count fell to 0 */
} cer_owner;

void cer_owner_init(cer_owner *owner, size_t count,
                    void (*drop)(cer_owner *owner));
void cer_owner_retain(cer_owner *owner, size_t count);
void cer_owner_release(cer_owner *owner);

/* Streams as numbered in DLPack's handshake: pointers, except these. */
#define CER_STREAM_NOBODY (-1)  /* the consumer synchronizes by itself */
#define CER_STREAM_LEGACY 1     /* the legacy default stream */
#define CER_STREAM_PER_THREAD 2 /* the calling thread's default stream */

typedef struct cer_tensor cer_tensor;

/* The place of memory that is not the host's. It lives as long as the memory's
 * owner has references; only holders call its functions. Neither makes the host
 * wait for the device, except for a copy to the host. Errors: CER_DEVICE (a
 * call failed, or the stream is being captured into a graph), CER_NOMEM. */
typedef struct cer_place {
    DLDevice device;
    /* Later work on `stream` finds the memory filled. The memory is not
     * overwritten before that work is done, if it is enqueued before the
     * consumer's release. */
    cer_status (*join)(struct cer_place *place, intptr_t stream,
                       cer_error *err);
    /* cer_tensor_copy, enqueued on `stream`; or to main memory, done on
     * return. */
    cer_status (*copy)(const cer_tensor *tensor, bool to_host, intptr_t stream,
                       cer_tensor *out, cer_error *err);
} cer_place;

/* A description: copying it takes no reference. `data` is NULL if there are no
 * elements. */
struct cer_tensor {
    cer_owner *owner;
    cer_place *place; /* NULL: main memory */
    void *data;       /* on CER_ALIGNMENT if Cerebro allocated it */
    cer_dtype dtype;
    bool read_only;
    bool channels_last; /* shape (n, c, h, w), memory (n, h, w, c) */
    int32_t ndim;
    int64_t shape[CER_TENSOR_MAX_DIMS];
    int64_t strides[CER_TENSOR_MAX_DIMS]; /* in elements; row-major otherwise */
};

/* Fills the strides from the shape. */
void cer_tensor_pack(cer_tensor *tensor);
size_t cer_tensor_elements(const cer_tensor *tensor);
size_t cer_tensor_bytes(const cer_tensor *tensor);

/* {kDLCPU, 0} or the device of its place. */
DLDevice cer_tensor_device(const cer_tensor *tensor);

/* Allocates main memory for a tensor of this type and shape, writable and not
 * initialized, with one reference, owned by the caller. Errors: CER_NOMEM. */
cer_status cer_tensor_new(const cer_tensor *like, cer_tensor *out,
                          cer_error *err);

/* Copies a tensor in main memory to new memory, writable, with one reference,
 * owned by the caller. */
cer_status cer_tensor_copy(const cer_tensor *tensor, cer_tensor *out,
                           cer_error *err);

typedef struct cer_export {
    DLManagedTensorVersioned versioned;
    DLManagedTensor legacy;
    cer_owner *owner;
    atomic_uint holders; /* of this block, if it is on the heap */
    atomic_bool done;    /* the deleter has run */
    bool on_heap;
    int64_t shape[CER_TENSOR_MAX_DIMS];
    int64_t strides[CER_TENSOR_MAX_DIMS];
} cer_export;

/* Makes an export in memory that lives as long as its owner, to be passed on
 * once without a capsule (through a C exchange table): nothing is allocated.
 * The deleter releases one reference, which the caller has taken. The export
 * points to the tensor's shape, which must stay valid. */
void cer_export_embed(cer_export *block, cer_tensor *tensor);

/* Makes an export on the heap for a capsule, and takes a reference for it.
 * `flags` are DLPack's. NULL: out of memory. */
cer_export *cer_export_new(const cer_tensor *tensor, uint64_t flags);

/* The capsule is gone. `consumed`: it was renamed, so the consumer calls the
 * deleter. */
void cer_export_capsule_gone(cer_export *block, bool consumed);

#endif
