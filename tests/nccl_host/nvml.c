/* NVIDIA's management library without a GPU (libnvidia-ml.so.1), for NCCL's own host code: as many devices as HOST_CODE_DEVICES
 * says, on the buses that cuda.c gives them, without NVLink. */
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, FIRST_BUS = 0x10, NO_PEER_ACCESS = 1 };

static unsigned devices(void) {
    const char *text = getenv("HOST_CODE_DEVICES");
    return text ? (unsigned)atoi(text) : 1;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "not without a GPU" : "success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = devices();
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

/* A device is its number and one. */
int nvmlDeviceGetHandleByIndex(unsigned number, void **device) {
    *device = (void *)(size_t)(number + 1);
    return number < devices() ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId(const char *text, void **device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex(bus - FIRST_BUS, device);
}

int nvmlDeviceGetIndex(void *device, unsigned *number) {
    *number = (unsigned)(size_t)device - 1;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = 8, *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *device, void *peer, int what, int *status) {
    *status = NO_PEER_ACCESS;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) {
    *active = 0;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo(void *device, unsigned link, void *found) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkCapability(void *device, unsigned link, int what, unsigned *found) { return NOT_SUPPORTED; }
int nvmlDeviceGetFieldValues(void *device, int count, void *found) { return NOT_SUPPORTED; }
