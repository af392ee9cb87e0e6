/* device_loader.h -- the loader's batches in a device's memory.
 *
 * A cer_loader on the host decides the order of rows, so the order, shapes and
 * bits are those of the CPU. Each column is loaded in one of two ways, chosen
 * for each mix of parts (shards) at the start of a pass:
 *
 * - Resident: the column is in the device's memory, for all parts of the mix.
 *   One kernel gathers and transforms the batch's rows, of all these parts, on
 *   the stream that will use them.
 *
 * - Streamed: the host gathers them into pinned memory, which is copied on a
 *   dedicated stream while others compute. A kernel transforms or pads them
 *   after the copy if that does not shrink them; otherwise the host does so
 *   while it gathers.
 *
 * Columns whose chain no kernel supports are streamed beside resident ones. One
 * copy per batch transfers both the streamed rows and their places for the
 * kernels.
 *
 * No device function makes the host wait, unless the host is several batches
 * ahead of the device: then next() waits until the oldest copy is done and its
 * pinned memory is free. A buffer is overwritten only after the last work that
 * used it (uses.h). Keeping batches never hangs: more buffers are made.
 *
 * Like the device, it does not survive a fork: in the child begin() and next()
 * fail. */
#ifndef CER_DEVICE_LOADER_H
#define CER_DEVICE_LOADER_H

#include "depot.h"
#include "loader.h"

typedef enum cer_residence {
    CER_RESIDENT_AUTO, /* as much as fits within the depot's limit */
    CER_RESIDENT,      /* as much as fits in the device's memory */
    CER_STREAMED,      /* nothing */
} cer_residence;

typedef struct cer_device_loader cer_device_loader;

/* As cer_loader_new; `memory` in the options must be NULL. Retains the depot.
 * Errors: those of cer_loader_new, and CER_DEVICE. */
cer_status cer_device_loader_new(cer_depot *depot, cer_residence residence,
                                 const cer_part *parts, size_t n_parts,
                                 const cer_load_column *columns,
                                 size_t n_columns,
                                 const cer_load_options *options,
                                 cer_device_loader **out, cer_error *err);

/* The host's loader, for names and counts. */
cer_loader *cer_device_loader_plan(cer_device_loader *loader);
cer_device *cer_device_loader_device(const cer_device_loader *loader);

/* As cer_loader_begin. Uploads the parts that can be resident, unless they
 * already are, and waits for them; a mix whose parts do not all fit is streamed
 * in this pass. */
cer_status cer_device_loader_begin(cer_device_loader *loader,
                                   const cer_mix *mixes, size_t n,
                                   uint64_t epoch, size_t start, size_t count,
                                   cer_error *err);

/* The number of parts in the pass that are resident, and one readable line on
 * why other parts or columns are not, "" if all is as requested. Valid until
 * the next begin. */
size_t cer_device_loader_resident(const cer_device_loader *loader);
const char *cer_device_loader_note(const cer_device_loader *loader);

/* Gets the next batch with one reference, owned by the caller; NULL at the end.
 * Kernels run on `stream`: the consumer's if known, else
 * cer_device_loader_stream. In both cases the consumer must join its tensors'
 * place before use. An error ends the pass. Calls must not overlap. Errors:
 * those of cer_loader_next; CER_NOMEM (device memory: the message lists
 * resident memory); CER_DEVICE (a call failed; the stream is being captured
 * into a graph, which does not end the pass). */
cer_status cer_device_loader_next(cer_device_loader *loader, void *stream,
                                  cer_batch **out, cer_error *err);
void *cer_device_loader_stream(const cer_device_loader *loader);
/* CER_INVALID in a forked child, which must not call the device. */
cer_status cer_device_loader_check_process(const cer_device_loader *loader,
                                           cer_error *err);

/* --- batches written elsewhere ----------------------------------------------
 * For lanes.h, whose graphs read batches from memory of their own. */

/* A look at the next batches, as cer_loader_look_ahead. */
typedef struct cer_device_ahead {
    size_t staged; /* that come first */
    cer_loader_ahead plan;
} cer_device_ahead;

cer_device_ahead cer_device_loader_look_ahead(const cer_device_loader *loader);
/* The rows of the next batch, and whether cer_device_loader_places can take it:
 * kernels make all of its tensors from what is resident. False: no batch. */
bool cer_device_loader_look(const cer_device_loader *loader,
                            cer_device_ahead *ahead, size_t *n_rows,
                            bool *resident);

/* Whether the shapes of a batch follow from its number of rows: no column is
 * ragged. Then fills in the tensors' shapes and strides, but no data. */
bool cer_device_loader_shapes(const cer_device_loader *loader, size_t n_rows,
                              cer_tensor *tensors);

/* While set, next() stages no batches ahead. */
void cer_device_loader_hold(cer_device_loader *loader, bool hold);

/* Whether the next batch's places are there without a wait or work here. */
bool cer_device_loader_has_places(cer_device_loader *loader);
/* Takes the next batch, `n_rows` long and resident: copies the places of its
 * rows to main memory. An error ends the pass. Errors as of next(). */
cer_status cer_device_loader_places(cer_device_loader *loader, size_t n_rows,
                                    cer_row_place *to, cer_error *err);

/* Announces the kernels of this pass on a stream, as next() does. */
cer_status cer_device_loader_join(cer_device_loader *loader, void *stream,
                                  cer_error *err);
/* Makes a batch from places in device memory, into one address per tensor. */
cer_status cer_device_loader_write(cer_device_loader *loader,
                                   const cer_row_place *places, size_t n_rows,
                                   void *const *to, void *stream,
                                   cer_error *err);

cer_depot *cer_device_loader_depot(const cer_device_loader *loader);

/* Batch buffers on the device. As cer_loader_buffers. */
size_t cer_device_loader_buffers(const cer_device_loader *loader);

/* Waits for copies from pinned memory and frees everything; batches already
 * returned stay valid. Closing twice is allowed. */
void cer_device_loader_close(cer_device_loader *loader);
void cer_device_loader_free(cer_device_loader *loader); /* NULL allowed */

#endif
