/* state_files.h -- a small state for tests: three tensors and a structure. */
#ifndef STATE_FILES_H
#define STATE_FILES_H

#include "state.h"

#define STATE_STRUCTURE "{\"a\":1}"

/* Adds: "/w" 2 x 3 float32, transposed in memory; "/s" a scalar of float64;
 * "/flags" 5 bools. */
static inline cer_status
add_state(cer_state_writer *writer, cer_error *err)
{
    static const float w[6] = {0, 3, 1, 4, 2, 5};
    static const double s = 0.5;
    static const uint8_t flags[5] = {1, 0, 1, 1, 0};
    cer_status status =
        cer_state_writer_add(writer, "/w", 2, CER_F32, 2, (int64_t[]){2, 3},
                             (int64_t[]){4, 8}, w, err);

    if (status == CER_OK)
        status = cer_state_writer_add(writer, "/s", 2, CER_F64, 0, NULL, NULL,
                                      &s, err);
    if (status == CER_OK)
        status =
            cer_state_writer_add(writer, "/flags", 6, CER_BOOL, 1,
                                 (int64_t[]){5}, (int64_t[]){1}, flags, err);
    return status;
}

/* Writes that state to `bytes`, which holds 1024. */
static inline cer_status
write_state(uint8_t *bytes, size_t *nbytes, cer_error *err)
{
    cer_state_writer *writer = cer_state_writer_new();
    cer_status status;

    if (writer == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory");
    status = add_state(writer, err);
    if (status == CER_OK)
        status = cer_state_writer_finish(writer, STATE_STRUCTURE,
                                         strlen(STATE_STRUCTURE), nbytes, err);
    if (status == CER_OK)
        cer_state_writer_write(writer, bytes);
    cer_state_writer_free(writer);
    return status;
}

#endif
