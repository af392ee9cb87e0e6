/* dtype_list.h -- the element types, in one list: the name in manifests and
 * Python, the safetensors name, the size in bytes, and DLPack's code. The
 * kernels use the same numbers. */
#ifndef CER_DTYPE_LIST_H
#define CER_DTYPE_LIST_H

/*      id        name         safetensors bytes  DLPack code  npy descr */
#define CER_DTYPE_LIST(X)                                                      \
    X(BOOL, "bool", "BOOL", 1, 6, "|b1")                                       \
    X(I8, "int8", "I8", 1, 0, "|i1")                                           \
    X(I16, "int16", "I16", 2, 0, "<i2")                                        \
    X(I32, "int32", "I32", 4, 0, "<i4")                                        \
    X(I64, "int64", "I64", 8, 0, "<i8")                                        \
    X(U8, "uint8", "U8", 1, 1, "|u1")                                          \
    X(U16, "uint16", "U16", 2, 1, "<u2")                                       \
    X(U32, "uint32", "U32", 4, 1, "<u4")                                       \
    X(U64, "uint64", "U64", 8, 1, "<u8")                                       \
    X(F16, "float16", "F16", 2, 2, "<f2")                                      \
    X(BF16, "bfloat16", "BF16", 2, 4, "<u2")                                   \
    X(F32, "float32", "F32", 4, 2, "<f4")                                      \
    X(F64, "float64", "F64", 8, 2, "<f8")                                      \
    X(C64, "complex64", "C64", 8, 5, "<c8")

typedef enum cer_dtype {
#define CER_DTYPE_ENUM(id, name, safetensors, bytes, code, descr) CER_##id,
    CER_DTYPE_LIST(CER_DTYPE_ENUM)
#undef CER_DTYPE_ENUM
        CER_DTYPE_COUNT
} cer_dtype;

#endif
