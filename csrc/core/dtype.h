/* dtype.h -- the element types that columns, batches and states can have.
 */
#ifndef CER_DTYPE_H
#define CER_DTYPE_H

#include "base.h"
#include "dtype_list.h"

size_t cer_dtype_size(cer_dtype dtype);             /* bytes per element */
const char *cer_dtype_name(cer_dtype dtype);        /* "float32" */
const char *cer_dtype_safetensors(cer_dtype dtype); /* "F32" */
const char *cer_dtype_npy(cer_dtype dtype);         /* "<f4" */
uint8_t cer_dtype_dlpack_code(cer_dtype dtype);     /* DLDataTypeCode */

/* Each returns false for a type that is not in the list. */
bool cer_dtype_from_name(const char *name, cer_dtype *out);
bool cer_dtype_from_safetensors(const char *name, cer_dtype *out);
bool cer_dtype_from_dlpack(uint8_t code, uint8_t bits, uint16_t lanes,
                           cer_dtype *out);

#endif
