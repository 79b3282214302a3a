/* The runtime (libcudart.so.13) of the pretended device of driver.c.
 *
 * Copies with the host are real, and so are short ones on the device: lengths, positions and tables. Long ones on the
 * device are left out, as their values mean nothing and would take the host's memory. Graphs remember how many kernels
 * they have. What a GPU refuses while a graph is captured is refused.
 */

#define _GNU_SOURCE
#include "driver.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHORT ((size_t)64 << 10)
#define ELAPSED 5.0f /* milliseconds between any two events */

static __thread cudaError_t last_error;

static cudaError_t result(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "pretended runtime: no GPU can launch this grid";
        case cudaErrorStreamCaptureUnsupported: return "pretended runtime: not possible while a graph is captured";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        default: return "pretended runtime: an error";
    }
}

const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

/* The device */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return result(device ? cudaErrorInvalidDevice : cudaSuccess); }

cudaError_t cudaDriverGetVersion(int *version) {
    *version = PRETEND_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = pretend_attribute(attribute);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *property, int device) {
    *property = (struct cudaDeviceProp){
        .name = PRETEND_NAME,
        .totalGlobalMem = PRETEND_MEMORY,
        .sharedMemPerBlock = 49152,
        .regsPerBlock = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = PRETEND_MAX_THREADS,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .totalConstMem = 65536,
        .major = 9,
        .minor = 0,
        .textureAlignment = 512,
        .multiProcessorCount = 132,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .ECCEnabled = 1,
        .asyncEngineCount = 3,
        .unifiedAddressing = 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = 50 << 20,
        .maxThreadsPerMultiProcessor = 2048,
        .sharedMemPerMultiprocessor = 233472,
        .regsPerMultiprocessor = 65536,
        .managedMemory = 1,
        .cooperativeLaunch = 1,
        .sharedMemPerBlockOptin = PRETEND_MAX_SHARED,
        .maxBlocksPerMultiProcessor = 32,
    };
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *name, int length, int device) {
    snprintf(name, length, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)&last_error;
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(unsigned long long *)value = 0;
    return cudaSuccess;
}

/* Memory */

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = PRETEND_MEMORY;
    *available = PRETEND_MEMORY - PRETEND_RESERVED - pretend_used();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = pretend_allocate(bytes);
    return result(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }

cudaError_t cudaFree(void *pointer) {
    pretend_free(pointer);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    bytes = bytes ? bytes : 1;
    if (posix_memalign(pointer, 4096, bytes)) return result(cudaErrorMemoryAllocation);
    pretend_register_host(*pointer, bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    pretend_unregister_host(pointer);
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    pretend_register_host(pointer, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    pretend_unregister_host(pointer);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    enum pretend_memory kind = pretend_memory_of(pointer);
    *attributes = (struct cudaPointerAttributes){
        .type = kind == PRETEND_DEVICE ? cudaMemoryTypeDevice
                : kind == PRETEND_HOST ? cudaMemoryTypeHost
                                       : cudaMemoryTypeUnregistered,
        .devicePointer = kind ? (void *)pointer : NULL,
        .hostPointer = kind == PRETEND_HOST ? (void *)pointer : NULL,
    };
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char memory[1 << 20];
    *pointer = memory;
    return cudaSuccess;
}

/* Copies */

static void copy(void *target, const void *source, size_t bytes) {
    bool on_device = pretend_memory_of(target) == PRETEND_DEVICE && pretend_memory_of(source) == PRETEND_DEVICE;
    if (target && source && !(on_device && bytes > SHORT)) memmove(target, source, bytes);
    if (!pretend_captures()) pretend_add(PRETEND_COPIES, 1);
}

static void fill(void *target, int value, size_t bytes) {
    if (bytes <= SHORT) memset(target, value, bytes);
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    if (pretend_captures()) return result(cudaErrorStreamCaptureUnsupported);
    pretend_add(PRETEND_WAITS, 1);
    copy(target, source, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    bool pageable = !pretend_memory_of(target) || !pretend_memory_of(source);
    if (pretend_captures_stream(stream) && pageable) return result(cudaErrorStreamCaptureUnsupported);
    copy(target, source, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t bytes, cudaStream_t stream) {
    copy(target, source, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        memmove((char *)target + row * target_pitch, (const char *)source + row * source_pitch, width);
    pretend_add(PRETEND_COPIES, 1);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *target, int value, size_t bytes) {
    fill(target, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(target, value, bytes);
}

/* Streams and events: handles are small numbers. */

static size_t handles = 0x1000;

static void *handle(void) { return (void *)__atomic_add_fetch(&handles, 16, __ATOMIC_RELAXED); }

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return cudaStreamCreate(stream);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (pretend_captures_stream(stream)) return result(cudaErrorStreamCaptureUnsupported);
    pretend_add(PRETEND_WAITS, 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    if (pretend_captures()) return result(cudaErrorStreamCaptureUnsupported);
    pretend_add(PRETEND_WAITS, 1);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = handle();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    pretend_add(PRETEND_WAITS, 1);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = ELAPSED;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
    callback(stream, cudaSuccess, data);
    return cudaSuccess;
}

/* Graphs: a graph and its executable are the number of their kernels. */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    pretend_begin_capture(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    long *kernels = malloc(sizeof *kernels);
    *kernels = pretend_end_capture();
    *graph = (cudaGraph_t)kernels;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = pretend_captures() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    cudaStreamIsCapturing(stream, status);
    if (id) *id = pretend_counts[PRETEND_CAPTURES] + 1;
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    *mode = cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    long kernels = *(long *)graph;
    for (size_t i = 0; nodes && i < *count; i++) nodes[i] = i < (size_t)kernels ? (cudaGraphNode_t)(i + 1) : NULL;
    *count = kernels;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    long *kernels = malloc(sizeof *kernels);
    *kernels = *(long *)graph;
    *executable = (cudaGraphExec_t)kernels;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    pretend_add(PRETEND_GRAPHS, 1);
    pretend_add(PRETEND_GRAPH_KERNELS, *(long *)executable);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}

/* Kernels of compiled libraries */

static cudaError_t launch(dim3 grid, dim3 block, size_t shared) {
    bool possible = pretend_launch(grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
    return result(possible ? cudaSuccess : cudaErrorInvalidConfiguration);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(grid, block, shared);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(grid, block, shared);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(grid, block, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(config->gridDim, config->blockDim, config->dynamicSmemBytes);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = PRETEND_MAX_THREADS,
        .numRegs = 32,
        .ptxVersion = 90,
        .binaryVersion = 90,
        .maxDynamicSharedSizeBytes = PRETEND_MAX_SHARED,
    };
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                   size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *function = pretend_symbol(name);
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* What the compiler puts around kernel<<<grid, block, shared, stream>>>(...). */

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

void **__cudaRegisterFatBinary(void *binary) {
    static void *module;
    return &module;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
