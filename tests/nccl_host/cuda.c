/* CUDA's runtime without a GPU, for NCCL's own host code: it becomes a part of that library (build.py).
 *
 * The memory of a device is the host's. A stream does its work at once, so there is nothing to wait for, and a kernel does
 * nothing but count. A thread that chooses no device uses that of host_code_device, of as many as HOST_CODE_DEVICES says.
 * What the driver would offer beyond that (virtual memory, multicast, sharing memory between processes) is "not supported".
 */
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef cudaStreamGetCaptureInfo

enum { PAGE = 4096, FIRST_BUS = 0x10 };

static int chosen_by_default;
static __thread int chosen = -1;
static atomic_long launches;

/* The device of the calling thread, and of all threads that choose none. */
void host_code_device(int device) { chosen_by_default = chosen = device; }

/* How many kernels were launched. */
long host_code_launches(void) { return atomic_load(&launches); }

static int devices(void) {
    const char *text = getenv("HOST_CODE_DEVICES");
    return text ? atoi(text) : 1;
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices();
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = chosen < 0 ? chosen_by_default : chosen;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return cudaErrorInvalidDevice;
    chosen = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor           ? 8
             : attribute == cudaDevAttrMultiProcessorCount            ? 108
             : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin   ? 166912
                                                                      : 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    found->major = 8;
    found->multiProcessorCount = 108;
    found->pciBusID = FIRST_BUS + device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, (size_t)length, "0000:%02X:00.0", FIRST_BUS + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) { return cudaSuccess; }

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaErrorInvalidDevice; }

cudaError_t cudaDriverGetVersion(int *version) {
    *version = 12040; /* the newest whose driver functions NCCL does not ask for one by one */
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "a call without a GPU"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }

/* Memory */

cudaError_t cudaMalloc(void **made, size_t size) {
    size_t whole = (size + PAGE - 1) / PAGE * PAGE + PAGE;
    *made = aligned_alloc(PAGE, whole);
    if (!*made) return cudaErrorMemoryAllocation;
    memset(*made, 0, whole);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **made, size_t size, unsigned flags) { return cudaMalloc(made, size); }
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }
cudaError_t cudaHostRegister(void *memory, size_t size, unsigned flags) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *memory) { return cudaSuccess; }

cudaError_t cudaHostGetDevicePointer(void **found, void *memory, unsigned flags) {
    *found = memory;
    return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *made, const struct cudaMemPoolProps *properties) {
    *made = (cudaMemPool_t)&launches; /* NCCL keeps it, and looks for nothing in it */
    return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { return cudaSuccess; }

cudaError_t cudaMallocFromPoolAsync(void **made, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
    return cudaMalloc(made, size);
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    memmove(target, source, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return cudaMemcpy(target, source, size, kind);
}

cudaError_t cudaMemset(void *target, int value, size_t size) {
    memset(target, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    return cudaMemset(target, value, size);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *memory) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = (void *)memory;
    return cudaGetDevice(&found->device);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *made, void *memory) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void **made, cudaIpcMemHandle_t handle, unsigned flags) { return cudaErrorNotSupported; }
cudaError_t cudaIpcCloseMemHandle(void *memory) { return cudaSuccess; }

/* Streams, events, captures of graphs */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
    *made = malloc(sizeof(int));
    return *made ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaFree(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    *made = malloc(sizeof(int));
    return *made ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaFree(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

/* What only a capture needs */

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes, const cudaGraphEdgeData *edges,
                                                size_t count, unsigned flags) {
    return cudaErrorNotSupported;
}

cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t *made, cudaGraph_t graph, const cudaGraphNode_t *after, size_t count,
                                        cudaEvent_t event) {
    return cudaErrorNotSupported;
}

cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t *from, const cudaGraphNode_t *to,
                                     const cudaGraphEdgeData *edges, size_t count) {
    return cudaErrorNotSupported;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
    return cudaErrorNotSupported;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *made, void *pointer, cudaHostFn_t destroy, unsigned count, unsigned flags) {
    return cudaErrorNotSupported;
}

/* Kernels */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 640;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }

cudaError_t cudaGetFuncBySymbol(cudaFunction_t *found, const void *kernel) {
    *found = (cudaFunction_t)kernel;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    function(argument);
    return cudaSuccess;
}

/* Functions of the driver, which NCCL asks for by name */

static CUresult launch_kernel(void) {
    atomic_fetch_add(&launches, 1);
    return CUDA_SUCCESS;
}

static CUresult error_text(CUresult error, const char **text) {
    *text = "a call of the driver without a GPU";
    return CUDA_SUCCESS;
}

static CUresult device_of_number(CUdevice *device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}

static CUresult attribute_of_device(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = 0;
    return CUDA_SUCCESS;
}

static CUresult attribute_of_pointer(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(int *)value = 0;
    return CUDA_SUCCESS;
}

static CUresult range_of_address(CUdeviceptr *start, size_t *size, CUdeviceptr pointer) {
    *start = pointer;
    *size = 1 << 20;
    return CUDA_SUCCESS;
}

static CUresult done(void) { return CUDA_SUCCESS; }
static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static const struct {
    const char *name;
    void *function;
} driver[] = {
    {"cuLaunchKernel", launch_kernel},
    {"cuLaunchKernelEx", launch_kernel},
    {"cuGetErrorString", error_text},
    {"cuGetErrorName", error_text},
    {"cuDeviceGet", device_of_number},
    {"cuDeviceGetAttribute", attribute_of_device},
    {"cuPointerGetAttribute", attribute_of_pointer},
    {"cuMemGetAddressRange", range_of_address},
    {"cuCtxGetCurrent", done},
    {"cuCtxSetCurrent", done},
    {"cuCtxGetDevice", done},
    {"cuCtxCreate", done},
    {"cuCtxDestroy", done},
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *found = not_supported;
    for (size_t each = 0; each < sizeof driver / sizeof *driver; each++)
        if (!strcmp(driver[each].name, name)) *found = driver[each].function;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
