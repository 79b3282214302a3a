/* A driver (libcuda.so.1) of an H100 that is not there.
 *
 * Memory of the device is memory of the process that takes no space until it is written. Kernels do nothing. What the
 * host does is as with a GPU: modules must be device code, launches must fit, pointers must be the device's.
 */

#define _GNU_SOURCE
#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)2 << 20)
#define MAX_RANGES 100000
#define ELF_MACHINE_CUDA 190

long pretend_counts[PRETEND_COUNTS];

void pretend_add(enum pretend_count what, long number) { __atomic_fetch_add(&pretend_counts[what], number, __ATOMIC_RELAXED); }

/* Memory */

static struct range {
    char *begin;
    size_t bytes;
    enum pretend_memory kind;
} ranges[MAX_RANGES];
static int range_count;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool add_range(void *begin, size_t bytes, enum pretend_memory kind) {
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < range_count && ranges[i].begin) i++;
    bool fits = i < MAX_RANGES;
    if (fits) {
        ranges[i] = (struct range){begin, bytes, kind};
        if (i == range_count) range_count++;
        if (kind == PRETEND_DEVICE) used += bytes;
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

static size_t remove_range(const void *begin, enum pretend_memory kind) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; begin && i < range_count && !bytes; i++) {
        if (ranges[i].begin != begin || ranges[i].kind != kind) continue;
        bytes = ranges[i].bytes;
        ranges[i].begin = NULL;
        if (kind == PRETEND_DEVICE) used -= bytes;
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Return memory of the device in whole pages, or NULL if the device has no more. */
void *pretend_allocate(size_t bytes) {
    bytes = bytes ? (bytes + PAGE - 1) & ~(PAGE - 1) : PAGE;
    if (used + bytes > PRETEND_MEMORY - PRETEND_RESERVED) return NULL;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *memory = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    memory = (char *)(((size_t)memory + PAGE - 1) & ~(PAGE - 1));
    return add_range(memory, bytes, PRETEND_DEVICE) ? memory : NULL;
}

void pretend_free(void *pointer) {
    size_t bytes = remove_range(pointer, PRETEND_DEVICE);
    if (bytes) munmap(pointer, bytes);
}

void pretend_register_host(void *pointer, size_t bytes) { add_range(pointer, bytes ? bytes : 1, PRETEND_HOST); }

void pretend_unregister_host(void *pointer) { remove_range(pointer, PRETEND_HOST); }

enum pretend_memory pretend_memory_of(const void *pointer) {
    enum pretend_memory kind = PRETEND_UNKNOWN;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < range_count && !kind; i++) {
        char *begin = ranges[i].begin;
        if (begin && (char *)pointer >= begin && (char *)pointer < begin + ranges[i].bytes) kind = ranges[i].kind;
    }
    pthread_mutex_unlock(&lock);
    return kind;
}

size_t pretend_used(void) { return used; }

/* Launches and captures */

static void *capturing; /* the stream, or NULL */
static long captured;   /* kernels of the present capture */

bool pretend_launch(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, size_t shared) {
    size_t threads = (size_t)bx * by * bz;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535) return false;
    if (!threads || threads > PRETEND_MAX_THREADS || shared > PRETEND_MAX_SHARED) return false;
    if (capturing)
        captured++;
    else
        pretend_add(PRETEND_LAUNCHES, 1);
    return true;
}

void pretend_begin_capture(void *stream) {
    capturing = stream;
    captured = 0;
}

long pretend_end_capture(void) {
    pretend_add(PRETEND_CAPTURES, 1);
    if (!captured) pretend_add(PRETEND_EMPTY_CAPTURES, 1);
    capturing = NULL;
    return captured;
}

bool pretend_captures(void) { return capturing != NULL; }

bool pretend_captures_stream(const void *stream) { return capturing && stream == capturing; }

/* The device */

int pretend_attribute(int attribute) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return PRETEND_MAX_THREADS;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return PRETEND_MAX_SHARED;
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
        default: return 0;
    }
}

static CUcontext context = (CUcontext)&context;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
    *version = PRETEND_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 0;
    return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, length, "%s", PRETEND_NAME);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = pretend_attribute(attribute);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    *bytes = PRETEND_MEMORY;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *current) {
    *current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *primary, CUdevice device) {
    *primary = context;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

/* Modules */

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    const unsigned char *elf = image;
    if (memcmp(elf, "\177ELF", 4) || elf[18] != ELF_MACHINE_CUDA) return CUDA_ERROR_INVALID_IMAGE;
    *module = (CUmodule)image;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 64
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? PRETEND_MAX_THREADS
                                                                    : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    *clusters = 16;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    *blocks = 2;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **parameters, void **extra) {
    return pretend_launch(gx, gy, gz, bx, by, bz, shared) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                          config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, parameters, extra);
}

/* Pointers: Triton asks before it launches a kernel, and refuses memory that is not the device's or pinned. */

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    enum pretend_memory kind = pretend_memory_of((void *)pointer);
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            if (!kind && pointer) return CUDA_ERROR_INVALID_VALUE;
            *(CUdeviceptr *)value = pointer;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *(unsigned *)value = kind == PRETEND_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            return CUDA_SUCCESS;
        default: *(unsigned *)value = 0; return CUDA_SUCCESS;
    }
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *property,
                                       CUmemAllocationGranularity_flags option) {
    *bytes = PAGE;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **words) {
    *words = error == CUDA_ERROR_INVALID_IMAGE   ? "pretended driver: this is no device code"
             : error == CUDA_ERROR_INVALID_VALUE ? "pretended driver: no GPU takes this value"
                                                 : "pretended driver: an error";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) { return cuGetErrorString(error, name); }

/* Symbols: what is not defined succeeds and does nothing. */

static CUresult succeed(void) { return CUDA_SUCCESS; }

void *pretend_symbol(const char *name) {
    char second[200];
    void *symbol = dlsym(RTLD_DEFAULT, name);
    snprintf(second, sizeof second, "%s_v2", name);
    if (!symbol) symbol = dlsym(RTLD_DEFAULT, second);
    return symbol ? symbol : (void *)succeed;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
    *function = pretend_symbol(name);
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
