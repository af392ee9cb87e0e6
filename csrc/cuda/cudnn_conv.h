/* cudnn_conv.h -- convolutions by cuDNN 9 for the native network. Uses the
 * graph interface through backend descriptors, one operation per graph.
 *
 * No cuDNN header is used. The functions are listed here with our own
 * prototypes, and the constants of descriptors and attributes are in
 * cudnn_conv.c; they are the same in all of cuDNN 9.
 *
 * The first proposed engine is used that accepts the shapes and is neither
 * marked as nondeterministic nor as computing in less than float32. One version
 * of cuDNN on one kind of GPU therefore gives the same bits every time. */
#ifndef CER_CUDNN_CONV_H
#define CER_CUDNN_CONV_H

#include "device_cuda.h"
#include "native_ops.h"

#define CER_CUDNN_LIST(X)                                                      \
    X(size_t, cudnnGetVersion, (void))                                         \
    X(const char *, cudnnGetErrorString, (int status))                         \
    X(int, cudnnCreate, (void **handle))                                       \
    X(int, cudnnDestroy, (void *handle))                                       \
    X(int, cudnnSetStream, (void *handle, void *stream))                       \
    X(int, cudnnBackendCreateDescriptor, (int type, void **out))               \
    X(int, cudnnBackendDestroyDescriptor, (void *descriptor))                  \
    X(int, cudnnBackendFinalize, (void *descriptor))                           \
    X(int, cudnnBackendSetAttribute,                                           \
      (void *descriptor, int name, int type, int64_t count,                    \
       const void *values))                                                    \
    X(int, cudnnBackendGetAttribute,                                           \
      (void *descriptor, int name, int type, int64_t room, int64_t *count,     \
       void *values))                                                          \
    X(int, cudnnBackendExecute, (void *handle, void *plan, void *pack))

/* cuDNN for one device and one stream; for one thread at a time. */
typedef struct cer_cudnn_session {
#define CER_CUDNN_MEMBER(result, name, params) result(*name) params;
    CER_CUDNN_LIST(CER_CUDNN_MEMBER)
#undef CER_CUDNN_MEMBER
    cer_device *device;
    void *handle;
} cer_cudnn_session;

/* Opens the library at `path`, from cer_cudnn_find; it stays loaded. The device
 * is a GPU and outlives the session. CER_DEVICE: no library (NULL), or it does
 * not work here. *out is filled only on success. */
cer_status cer_cudnn_session_open(const char *path, cer_device *device,
                                  void *stream, cer_cudnn_session *out,
                                  cer_error *err);
void cer_cudnn_session_close(cer_cudnn_session *session);

typedef enum cer_cudnn_direction {
    CER_CUDNN_FORWARD, /* writes y */
    CER_CUDNN_DATA,    /* writes the gradient of x */
    CER_CUDNN_FILTERS, /* writes the gradient of w */
    CER_CUDNN_DIRECTION_COUNT
} cer_cudnn_direction;

enum { CER_CUDNN_CONV_PARTS = 7 };

/* A planned convolution of `rows` pictures. */
typedef struct cer_cudnn_conv {
    void *plan;
    size_t workspace; /* bytes that a run needs besides its tensors */
    void *kept[CER_CUDNN_CONV_PARTS]; /* the plan's descriptors */
} cer_cudnn_conv;

/* CER_DEVICE: cuDNN fails or has no deterministic engine. *out is filled only
 * on success. */
cer_status cer_cudnn_conv_plan(const cer_cudnn_session *session,
                               cer_cudnn_direction direction,
                               const cer_native_conv *conv, size_t rows,
                               cer_cudnn_conv *out, cer_error *err);
void cer_cudnn_conv_clear(const cer_cudnn_session *session,
                          cer_cudnn_conv *conv);

/* Queues the convolution on the session's stream. x is rows x channels x height
 * x width, w filters x channels x 3 x 3, y rows x filters x height x width. The
 * direction decides which one is written; the others are read. */
cer_status cer_cudnn_conv_run(const cer_cudnn_session *session,
                              const cer_cudnn_conv *conv, void *x, void *w,
                              void *y, void *workspace, cer_error *err);

#endif
