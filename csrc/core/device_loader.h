/* device_loader.h -- the loader's batches in the memory of a device.
 *
 * A cer_loader on the host says which rows come when, and so the order, the
 * shapes and the bits are those of the CPU. What a column's tensors are made of
 * is one of two things, decided for each part (shard) when a pass begins:
 *
 * - Resident: the part's column is in the device's memory. A kernel gathers
 *   and transforms the batch's rows on the stream that will use them.
 *
 * - Streamed: the host gathers them into pinned memory, which is copied on a
 *   stream of its own while others compute. They are transformed, or padded, by
 *   a kernel after the copy, where that makes no less of them; else by the
 *   host, as it gathers.
 *
 * Columns whose chain no kernel takes are streamed beside resident ones. One
 * copy a batch brings both what is streamed and the row numbers for the
 * kernels.
 *
 * No device function makes the host wait, except where the host is several
 * batches ahead of the device: then next() waits until the oldest copy is done
 * and its pinned memory is free. A buffer is written again only behind the last
 * work that used it (uses.h). Kept batches never hang: more buffers are made.
 *
 * Like the device, it does not survive a fork: in the child begin() and next()
 * say so. */
#ifndef CER_DEVICE_LOADER_H
#define CER_DEVICE_LOADER_H

#include "depot.h"
#include "loader.h"

typedef enum cer_residence {
    CER_RESIDENT_AUTO, /* what fits below the depot's limit */
    CER_RESIDENT,      /* what the device's memory holds */
    CER_STREAMED,      /* nothing */
} cer_residence;

typedef struct cer_device_loader cer_device_loader;

/* As cer_loader_new, with memory of the options left NULL. Keeps the
 * depot. Errors: those of cer_loader_new, and CER_DEVICE. */
cer_status cer_device_loader_new(cer_depot *depot, cer_residence residence,
                                 const cer_part *parts, size_t n_parts,
                                 const cer_load_column *columns,
                                 size_t n_columns,
                                 const cer_load_options *options,
                                 cer_device_loader **out, cer_error *err);

/* The host's side, for names and counts. */
cer_loader *cer_device_loader_plan(cer_device_loader *loader);
cer_device *cer_device_loader_device(const cer_device_loader *loader);

/* As cer_loader_begin. Brings the parts that can be resident, unless they are,
 * and waits for them; a part for which there is no room is streamed in this
 * pass. */
cer_status cer_device_loader_begin(cer_device_loader *loader,
                                   const uint32_t *parts, size_t n,
                                   uint64_t epoch, size_t start,
                                   cer_error *err);

/* Parts of the pass that are resident, and why others, or columns, are not: a
 * line for people, "" where all is as asked. Good until the next begin. */
size_t cer_device_loader_resident(const cer_device_loader *loader);
const char *cer_device_loader_note(const cer_device_loader *loader);

/* The next batch, with one reference, the caller's; NULL at the end. Kernels
 * run on `stream`, which is the consumer's where it is known, or else
 * cer_device_loader_stream. Either way the consumer joins its tensors' place
 * before it uses them. After an error the pass is over. One call at a time.
 * Errors: those of cer_loader_next; CER_NOMEM (the device's memory: the message
 * says what is resident); CER_DEVICE (a call failed; the stream is being
 * captured into a graph, which ends no pass). */
cer_status cer_device_loader_next(cer_device_loader *loader, void *stream,
                                  cer_batch **out, cer_error *err);
void *cer_device_loader_stream(const cer_device_loader *loader);

/* Batch buffers on the device. As cer_loader_buffers. */
size_t cer_device_loader_buffers(const cer_device_loader *loader);

/* Waits for copies out of pinned memory and gives everything back; batches
 * handed out stay valid. Closing twice is fine. */
void cer_device_loader_close(cer_device_loader *loader);
void cer_device_loader_free(cer_device_loader *loader); /* NULL allowed */

#endif
