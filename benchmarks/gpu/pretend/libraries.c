/* Functions of CUDA's other libraries that must give something back; all others succeed and do nothing (see build.py).
 * Each library is compiled with its macro. */

#include <string.h>

static int handle;

#ifdef CUBLAS
int cublasCreate_v2(void **created) {
    *created = &handle;
    return 0;
}
int cublasGetVersion_v2(void *of, int *version) {
    *version = 130000;
    return 0;
}
int cublasGetMathMode(void *of, int *mode) {
    *mode = 0;
    return 0;
}
int cublasGetPointerMode_v2(void *of, int *mode) {
    *mode = 0;
    return 0;
}
#endif

#ifdef CUBLASLT
int cublasLtCreate(void **created) {
    *created = &handle;
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *of, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, void *results, int *count) {
    *count = 1;
    return 0;
}
#endif

#ifdef CUDNN
int cudnnCreate(void **created) {
    *created = &handle;
    return 0;
}
size_t cudnnGetVersion(void) { return 91900; }
const char *cudnnGetErrorString(int error) { return "pretended library: an error"; }
#endif

#ifdef CUSOLVER
int cusolverDnCreate(void **created) {
    *created = &handle;
    return 0;
}
#endif

#ifdef CUSPARSE
int cusparseCreate(void **created) {
    *created = &handle;
    return 0;
}
#endif

#ifdef NCCL
int ncclGetVersion(int *version) {
    *version = 22900;
    return 0;
}
int ncclCommInitRank(void **created) {
    *created = &handle;
    return 0;
}
int ncclCommInitRankConfig(void **created) { return ncclCommInitRank(created); }
int ncclCommGetAsyncError(void *of, int *error) {
    *error = 0;
    return 0;
}
int ncclGetUniqueId(void *id) {
    memset(id, 1, 128);
    return 0;
}
const char *ncclGetErrorString(int error) { return "pretended library: an error"; }
const char *ncclGetLastError(void *of) { return ""; }
#endif
