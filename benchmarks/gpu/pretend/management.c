/* The management library (libnvidia-ml.so.1) of the pretended device: what vLLM asks of it. */

#include "driver.h"

#include <stdio.h>
#include <string.h>

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

static int device;

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &device;
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *name, void **handle) { return nvmlDeviceGetHandleByIndex_v2(0, handle); }

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    snprintf(name, length, "%s", PRETEND_NAME);
    return 0;
}

int nvmlDeviceGetUUID(void *handle, char *name, unsigned length) {
    snprintf(name, length, "GPU-00000000-0000-0000-0000-000000000000");
    return 0;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = 9;
    *minor = 0;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    total_free_used[0] = PRETEND_MEMORY;
    total_free_used[1] = PRETEND_MEMORY - PRETEND_RESERVED;
    total_free_used[2] = PRETEND_RESERVED;
    return 0;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "580.00");
    return 0;
}

int nvmlDeviceGetPciInfo_v3(void *handle, void *information) {
    memset(information, 0, 64);
    return 0;
}

int nvmlDeviceGetP2PStatus(void *handle, void *peer, int index, int *status) {
    *status = 1; /* not supported */
    return 0;
}

const char *nvmlErrorString(int error) { return "pretended management library: an error"; }

/* What else vLLM's wrapper looks up succeeds. */
int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
