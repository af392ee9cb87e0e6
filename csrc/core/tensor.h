/* tensor.h -- a strided array in memory that somebody else may own, and its
 * export as DLPack.
 *
 * Memory is kept alive by a cer_owner, a count embedded in whatever holds the
 * memory. The last release may happen on any thread, without Python, after the
 * loader closed and while the process exits: it calls `drop`, and `drop` does
 * nothing but atomics and free.
 *
 * Memory of a device has a cer_place beside its owner, which says which device
 * and puts consumers' streams in order. Nothing in this file touches a device:
 * whoever has the memory fills in the place's functions.
 *
 * An export is one block that serves both kinds of capsule. It counts its two
 * holders, the capsule and the consumer's tensor, apart from a flag that says
 * whether the deleter has run: a consumer that calls the deleter and leaves the
 * capsule's name as it was (TensorFlow does, after an error) frees nothing
 * twice. */
#ifndef CER_TENSOR_H
#define CER_TENSOR_H

#include <stdatomic.h>

#include "base.h"
#include "dlpack.h"
#include "dtype.h"

/* Rows of 8 dimensions, the batch's rows, and the length where ragged. */
#define CER_TENSOR_MAX_DIMS 10

typedef struct cer_owner {
    atomic_size_t count;
    void (*drop)(struct cer_owner *owner); /* the count fell to 0 */
} cer_owner;

void cer_owner_init(cer_owner *owner, size_t count,
                    void (*drop)(cer_owner *owner));
void cer_owner_retain(cer_owner *owner, size_t count);
void cer_owner_release(cer_owner *owner);

/* Streams as DLPack's handshake counts them: pointers, but for these. */
#define CER_STREAM_NOBODY (-1)  /* the consumer sees to the order by itself */
#define CER_STREAM_LEGACY 1     /* the legacy default stream */
#define CER_STREAM_PER_THREAD 2 /* the calling thread's default stream */

typedef struct cer_tensor cer_tensor;

/* Where memory is that is not the host's. It lives as long as somebody holds a
 * reference to the memory's owner, and its functions are called by holders
 * only. Neither makes the host wait for the device, but for a copy to it.
 * Errors: CER_DEVICE (a call failed, or the stream is being captured into a
 * graph), CER_NOMEM. */
typedef struct cer_place {
    DLDevice device;
    /* What is put on `stream` from now on finds the memory filled, and the
     * memory is not written again before that work is done, wherever it is
     * put there before the consumer lets go. */
    cer_status (*join)(struct cer_place *place, intptr_t stream,
                       cer_error *err);
    /* cer_tensor_copy, put on `stream`; or to main memory, done on return. */
    cer_status (*copy)(const cer_tensor *tensor, bool to_host, intptr_t stream,
                       cer_tensor *out, cer_error *err);
} cer_place;

/* A description: copying it takes no reference. Where there are no elements,
 * `data` is NULL. */
struct cer_tensor {
    cer_owner *owner;
    cer_place *place; /* NULL: main memory */
    void *data;       /* on CER_ALIGNMENT where Cerebro allocated it */
    cer_dtype dtype;
    bool read_only;
    int32_t ndim;
    int64_t shape[CER_TENSOR_MAX_DIMS];
    int64_t strides[CER_TENSOR_MAX_DIMS]; /* in elements, always row-major */
};

/* Fills the strides from the shape. */
void cer_tensor_pack(cer_tensor *tensor);
size_t cer_tensor_elements(const cer_tensor *tensor);
size_t cer_tensor_bytes(const cer_tensor *tensor);

/* {kDLCPU, 0} or what its place says. */
DLDevice cer_tensor_device(const cer_tensor *tensor);

/* New main memory for a tensor of this type and shape, writable, with one
 * reference, the caller's; nothing is written. Errors: CER_NOMEM. */
cer_status cer_tensor_new(const cer_tensor *like, cer_tensor *out,
                          cer_error *err);

/* A copy of a tensor in main memory, in memory of its own, writable, with one
 * reference, the caller's. */
cer_status cer_tensor_copy(const cer_tensor *tensor, cer_tensor *out,
                           cer_error *err);

typedef struct cer_export {
    DLManagedTensorVersioned versioned;
    DLManagedTensor legacy;
    cer_owner *owner;
    atomic_uint holders; /* of this block, where it is on the heap */
    atomic_bool done;    /* the deleter has run */
    bool on_heap;
    int64_t shape[CER_TENSOR_MAX_DIMS];
    int64_t strides[CER_TENSOR_MAX_DIMS];
} cer_export;

/* Makes an export in memory that lives as long as its owner, to be handed out
 * once without a capsule (through a C exchange table): nothing is allocated.
 * The deleter gives back one reference, which the caller has taken. The shape
 * is the tensor's own and must stay. */
void cer_export_embed(cer_export *block, cer_tensor *tensor);

/* Makes an export on the heap for a capsule, and takes a reference for it.
 * `flags` are DLPack's. NULL: out of memory. */
cer_export *cer_export_new(const cer_tensor *tensor, uint64_t flags);

/* The capsule is gone. `consumed`: its name was changed, so that the deleter
 * is the consumer's to call. */
void cer_export_capsule_gone(cer_export *block, bool consumed);

#endif
