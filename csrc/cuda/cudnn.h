/* cudnn.h -- whether there is a cuDNN 9, and which. */
#ifndef CER_CUDNN_H
#define CER_CUDNN_H

#include "library.h"

typedef struct cer_cudnn {
    int version; /* 91300 is 9.13.0; 0: there is none */
    int cudart;  /* the CUDA that it was made for, as 13000 */
    char path[CER_LIBRARY_PATH_BYTES];
} cer_cudnn;

/* Looks in the process, in the folders (ends with NULL) and in the system; the
 * library stays loaded. Having none is no error. CER_DEVICE: the one that is
 * there does not load, or is no cuDNN. */
cer_status cer_cudnn_find(const char *const *folders, cer_cudnn *out,
                          cer_error *err);

#endif
