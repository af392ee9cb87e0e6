/* cudnn.h -- finds cuDNN 9 and its version. */
#ifndef CER_CUDNN_H
#define CER_CUDNN_H

#include "library.h"

typedef struct cer_cudnn {
    int version; /* 91300 is 9.13.0; 0: not found */
    int cudart;  /* the CUDA it was built for, as 13000 */
    char path[CER_LIBRARY_PATH_BYTES];
} cer_cudnn;

/* Searches the process, the folders (ends with NULL) and the system; the
 * library stays loaded. A missing cuDNN is not an error. CER_DEVICE: the
 * library does not load or is not cuDNN. */
cer_status cer_cudnn_find(const char *const *folders, cer_cudnn *out,
                          cer_error *err);

#endif
