#include "dtype.h"

#include <string.h>

typedef struct dtype_row {
    const char *name, *safetensors, *npy;
    size_t bytes;
    uint8_t code;
} dtype_row;

static const dtype_row rows[CER_DTYPE_COUNT] = {
#define DTYPE_ROW(id, name, safetensors, bytes, code, descr)                   \
    {name, safetensors, descr, bytes, code},
    CER_DTYPE_LIST(DTYPE_ROW)
#undef DTYPE_ROW
};

size_t
cer_dtype_size(cer_dtype dtype)
{
    return rows[dtype].bytes;
}

const char *
cer_dtype_name(cer_dtype dtype)
{
    return rows[dtype].name;
}

const char *
cer_dtype_safetensors(cer_dtype dtype)
{
    return rows[dtype].safetensors;
}

const char *
cer_dtype_npy(cer_dtype dtype)
{
    return rows[dtype].npy;
}

uint8_t
cer_dtype_dlpack_code(cer_dtype dtype)
{
    return rows[dtype].code;
}

bool
cer_dtype_from_name(const char *name, cer_dtype *out)
{
    for (int i = 0; i < CER_DTYPE_COUNT; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            *out = (cer_dtype)i;
            return true;
        }
    }
    return false;
}

bool
cer_dtype_from_safetensors(const char *name, cer_dtype *out)
{
    for (int i = 0; i < CER_DTYPE_COUNT; i++) {
        if (strcmp(rows[i].safetensors, name) == 0) {
            *out = (cer_dtype)i;
            return true;
        }
    }
    return false;
}

bool
cer_dtype_from_dlpack(uint8_t code, uint8_t bits, uint16_t lanes,
                      cer_dtype *out)
{
    if (lanes != 1)
        return false;
    for (int i = 0; i < CER_DTYPE_COUNT; i++) {
        if (rows[i].code == code && rows[i].bytes * 8 == bits) {
            *out = (cer_dtype)i;
            return true;
        }
    }
    return false;
}
