/* A stand-in of CUDA's driver library (libcuda.so.1), with the calls that horovod.comm.cuda makes.
 *
 * Breaches of the rules are kept for stand_in_breaches: no current context, memory that is freed while a stream works on it.
 * A capture of a graph is played by stand_in_capture: calls that a capture forbids make it invalid, as in CUDA.
 */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, CAPTURE_UNSUPPORTED = 900 };
enum { GLOBAL, THREAD_LOCAL, RELAXED };
enum { NON_BLOCKING = 1, NONSENSE = 77, CONTEXTS = 1000, DEPTH = 32 };

/* The context stack of each thread, and captures of graphs */

static __thread int contexts[DEPTH];
static __thread int depth;
static __thread int capture_mode = GLOBAL;
static __thread int captures_here;
static struct {
    int active, mode, invalid;
} capture;
static int retained;

static int on_device(const char *call) {
    if (depth == 0) breach("%s while no device is the current one", call);
    return depth > 0;
}

int stream_is_usable(void *stream, const char *call) {
    if (!stream) breach("%s on the default stream", call);
    return stream && (!stream_is_own(stream) || on_device(call));
}

/* Begin a capture on the calling thread, or end it: returns whether it is still valid then. */
int stand_in_capture(int begin, int mode) {
    if (begin) {
        capture.active = captures_here = 1;
        capture.mode = mode;
        capture.invalid = 0;
        return 1;
    }
    capture.active = captures_here = 0;
    return !capture.invalid;
}

/* A call that the capture of a graph forbids, as CUDA says of cudaThreadExchangeStreamCaptureMode. */
static int forbidden(void) {
    if (!capture.active || capture_mode == RELAXED) return 0;
    int here = captures_here && capture.mode != RELAXED;
    int elsewhere = capture_mode == GLOBAL && capture.mode == GLOBAL;
    if (here || elsewhere) capture.invalid = 1;
    return here || elsewhere;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuGetErrorString(int error, const char **text) {
    *text = error == CAPTURE_UNSUPPORTED ? "operation not permitted when stream is capturing" : "invalid argument";
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 ? SUCCESS : INVALID_VALUE;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(size_t)(CONTEXTS + device);
    __atomic_add_fetch(&retained, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    __atomic_sub_fetch(&retained, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *context) {
    if (depth == DEPTH) return INVALID_VALUE;
    contexts[depth++] = (int)((size_t)context - CONTEXTS);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(size_t)(CONTEXTS + contexts[--depth]);
    return SUCCESS;
}

int cuPointerGetAttribute(void *found, int attribute, const void *address) {
    (void)address;
    *(int *)found = 0;
    return attribute == 9 ? SUCCESS : INVALID_VALUE;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return on_device("cuCtxGetStreamPriorityRange") ? SUCCESS : INVALID_CONTEXT;
}

int cuStreamCreateWithPriority(void **made, unsigned flags, int priority) {
    if (flags != NON_BLOCKING || priority != -5) breach("a stream that waits for the default one, or has no priority");
    if (!on_device("cuStreamCreateWithPriority")) return INVALID_CONTEXT;
    *made = stream_new();
    return SUCCESS;
}

int cuStreamDestroy_v2(void *stream) { return stream_end(stream) ? SUCCESS : INVALID_HANDLE; }

/* Events: each record makes a new marker, which the stream sets when it comes there. */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int set, references;
} Marker;

typedef struct {
    Marker *marker;
} Event;

static int events;

static Marker *marker_new(void) {
    Marker *marker = calloc(1, sizeof *marker);
    pthread_mutex_init(&marker->lock, NULL);
    pthread_cond_init(&marker->changed, NULL);
    marker->references = 1;
    return marker;
}

static Marker *marker_taken(Marker *marker) {
    __atomic_add_fetch(&marker->references, 1, __ATOMIC_SEQ_CST);
    return marker;
}

static void marker_left(Marker *marker) {
    if (!__atomic_sub_fetch(&marker->references, 1, __ATOMIC_SEQ_CST)) free(marker);
}

static void marker_set(void *argument) {
    Marker *marker = argument;
    pthread_mutex_lock(&marker->lock);
    marker->set = 1;
    pthread_cond_broadcast(&marker->changed);
    pthread_mutex_unlock(&marker->lock);
    marker_left(marker);
}

static void marker_wait(void *argument) {
    Marker *marker = argument;
    pthread_mutex_lock(&marker->lock);
    while (!marker->set) pthread_cond_wait(&marker->changed, &marker->lock);
    pthread_mutex_unlock(&marker->lock);
    marker_left(marker);
}

int cuEventCreate(Event **made, unsigned flags) {
    (void)flags;
    if (!on_device("cuEventCreate")) return INVALID_CONTEXT;
    *made = calloc(1, sizeof **made);
    __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuEventRecord(Event *event, void *stream) {
    if (!stream_is_usable(stream, "cuEventRecord")) return INVALID_HANDLE;
    Marker *before = event->marker;
    event->marker = marker_new();
    stream_push(stream, marker_set, marker_taken(event->marker));
    if (before) marker_left(before);
    return SUCCESS;
}

int cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    (void)flags;
    if (!stream_is_usable(stream, "cuStreamWaitEvent")) return INVALID_HANDLE;
    if (event->marker) stream_push(stream, marker_wait, marker_taken(event->marker));
    return SUCCESS;
}

int cuEventQuery(Event *event) {
    if (!on_device("cuEventQuery")) return INVALID_CONTEXT;
    if (forbidden()) return CAPTURE_UNSUPPORTED;
    return !event->marker || __atomic_load_n(&event->marker->set, __ATOMIC_SEQ_CST) ? SUCCESS : NOT_READY;
}

int cuEventSynchronize(Event *event) {
    if (forbidden()) return CAPTURE_UNSUPPORTED;
    if (event->marker) marker_wait(marker_taken(event->marker));
    return SUCCESS;
}

int cuEventDestroy_v2(Event *event) {
    if (event->marker) marker_left(event->marker);
    free(event);
    __atomic_sub_fetch(&events, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

/* Memory */

typedef struct Memory {
    struct Memory *next;
    char *begin;
    size_t size;
    int uses;
} Memory;

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static Memory *memory;

static void (*watcher)(void *stream, const void *address, int change);

/* Tell a framework what uses its memory, on its own streams. */
void stand_in_watcher(void (*watch)(void *, const void *, int)) { watcher = watch; }

static void count_use(void *stream, const void *address, int change) {
    if (watcher && address && !stream_is_own(stream)) watcher(stream, address, change);
    pthread_mutex_lock(&memory_lock);
    for (Memory *each = memory; each; each = each->next)
        if ((char *)address >= each->begin && (char *)address < each->begin + each->size) each->uses += change;
    pthread_mutex_unlock(&memory_lock);
}

void device_memory_used(void *stream, const void *address) { count_use(stream, address, 1); }
void device_memory_left(void *stream, const void *address) { count_use(stream, address, -1); }

static void memory_free(void *argument) {
    pthread_mutex_lock(&memory_lock);
    for (Memory **place = &memory; *place; place = &(*place)->next) {
        Memory *each = *place;
        if (each->begin != argument) continue;
        if (each->uses) breach("memory was freed while a stream works on it");
        memset(each->begin, NONSENSE, each->size);
        *place = each->next;
        if (!each->uses) free(each->begin);
        free(each);
        break;
    }
    pthread_mutex_unlock(&memory_lock);
}

int cuMemAllocAsync(void **made, size_t size, void *stream) {
    if (!stream_is_usable(stream, "cuMemAllocAsync")) return INVALID_HANDLE;
    Memory *mine = malloc(sizeof *mine);
    *mine = (Memory){NULL, malloc(size ? size : 1), size, 0};
    memset(mine->begin, NONSENSE, size);
    *made = mine->begin;
    pthread_mutex_lock(&memory_lock);
    mine->next = memory;
    memory = mine;
    pthread_mutex_unlock(&memory_lock);
    return SUCCESS;
}

int cuMemFreeAsync(void *address, void *stream) {
    if (!stream_is_usable(stream, "cuMemFreeAsync")) return INVALID_HANDLE;
    stream_push(stream, memory_free, address);
    return SUCCESS;
}

typedef struct {
    void *stream;
    char *target;
    const char *source;
    size_t size;
    unsigned char value;
} Copy;

static void copy_run(void *argument) {
    Copy *copy = argument;
    if (copy->source) memmove(copy->target, copy->source, copy->size);
    else memset(copy->target, copy->value, copy->size);
    device_memory_left(copy->stream, copy->target);
    free(copy);
}

static int copy_queue(void *target, const void *source, size_t size, unsigned char value, void *stream, const char *call) {
    if (!stream_is_usable(stream, call)) return INVALID_HANDLE;
    Copy *copy = malloc(sizeof *copy);
    *copy = (Copy){stream, target, source, size, value};
    device_memory_used(stream, target);
    stream_push(stream, copy_run, copy);
    return SUCCESS;
}

int cuMemsetD8Async(void *target, unsigned char value, size_t size, void *stream) {
    return copy_queue(target, NULL, size, value, stream, "cuMemsetD8Async");
}

int cuMemcpyHtoDAsync_v2(void *target, const void *source, size_t size, void *stream) {
    return copy_queue(target, source, size, 0, stream, "cuMemcpyHtoDAsync");
}

int cuMemcpyDtoDAsync_v2(void *target, const void *source, size_t size, void *stream) {
    return copy_queue(target, source, size, 0, stream, "cuMemcpyDtoDAsync");
}

/* What there is still: 0 contexts, 1 events, 2 pieces of memory. */
int stand_in_left(int kind) {
    if (kind == 0) return retained;
    if (kind == 1) return events;
    int count = 0;
    pthread_mutex_lock(&memory_lock);
    for (Memory *each = memory; each; each = each->next) count++;
    pthread_mutex_unlock(&memory_lock);
    return count;
}
