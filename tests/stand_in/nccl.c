/* A stand-in of NCCL (libnccl.so.2), with the calls that horovod.comm.nccl makes. It moves the host's memory between processes.
 *
 * As NCCL does with blocking=0, calls return "in progress", and a thread for each finishes them: it meets the other ranks, or
 * puts the group on its stream. ncclCommSplit returns success, as NCCL's does, while the state of the communicator is "in
 * progress". stand_in_nccl changes that:
 *     BLOCKING       groups and the end are done when their calls return; communicators are made later
 *     IN_PROGRESS    everything is done later
 * and stand_in_fail has one of the next calls fail behind the caller's back.
 * Breaches of NCCL's rules are kept for stand_in_breaches (cuda.c).
 */
#define _GNU_SOURCE
#include "collectives.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { BLOCKING, IN_PROGRESS_MODE };
enum { NOTHING, INIT, SPLIT, LAUNCH, KERNEL };
enum { HALF = 6, NO_COLOR = -1, UNDEFINED = -2147483647 - 1, CUSTOM = 1000 };
typedef struct {
    char internal[128];
} Id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
} Config;

static int mode = IN_PROGRESS_MODE, version = 23203;
static long launch_nanoseconds = 10000, abort_nanoseconds, slow_nanoseconds;
static atomic_int live_operations;
static struct {
    int what, after, code;
} failure;

void stand_in_nccl(int how, long launch, long abort) {
    mode = how;
    launch_nanoseconds = launch;
    abort_nanoseconds = abort;
}
void stand_in_slow(long nanoseconds) { slow_nanoseconds = nanoseconds; }
void stand_in_version(int code) { version = code; }
void stand_in_fail(int what, int after, int code) { failure.what = what, failure.after = after, failure.code = code; }
int stand_in_operations(void) { return live_operations; }

/* The code with which this call fails, 0 where it does not. */
static int fails(int what) {
    if (failure.what != what || failure.after-- > 0) return 0;
    failure.what = NOTHING;
    return failure.code;
}

int ncclGetVersion(int *found) {
    *found = version;
    return SUCCESS;
}

int ncclGetUniqueId(Id *made) {
    return getrandom(made, sizeof *made, 0) == sizeof *made ? SUCCESS : SYSTEM_ERROR;
}

const char *ncclGetErrorString(int code) {
    return code == REMOTE_ERROR ? "remote process exited or there was a network error"
           : code == INVALID_USAGE ? "invalid usage" : "unhandled system error";
}

const char *ncclGetLastError(Comm *comm) {
    if (comm) breach("ncclGetLastError with a communicator, which may be gone");
    return "stand-in";
}

/* Calls */

static int entered(Comm *comm, const char *call) {
    if (!comm || comm->magic != MAGIC || comm->ended >= DESTROYED) {
        breach("%s on a communicator that is not there any more", call);
        return 0;
    }
    atomic_fetch_add(&comm->callers, 1);
    return 1;
}

static int left(Comm *comm, int result) {
    atomic_fetch_sub(&comm->callers, 1);
    return result;
}

static int is_busy(Comm *comm, const char *call) {
    if (atomic_load(&comm->jobs)) breach("%s while the call before is in progress", call);
    return atomic_load(&comm->jobs);
}

typedef struct {
    Comm *comm;
    void (*run)(void *);
    void *argument;
} Job;

static void *job_run(void *argument) {
    Job *job = argument;
    job->run(job->argument);
    atomic_fetch_sub(&job->comm->jobs, 1);
    free(job);
    return NULL;
}

/* Do the rest of a call, and return what the call does. */
static int finish(Comm *comm, int blocks, void (*run)(void *), void *argument) {
    Job *job = malloc(sizeof *job);
    *job = (Job){comm, run, argument};
    atomic_fetch_add(&comm->jobs, 1);
    if (blocks) {
        job_run(job);
        return atomic_load(&comm->error);
    }
    pthread_t thread;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_create(&thread, &detached, job_run, job);
    pthread_attr_destroy(&detached);
    return IN_PROGRESS;
}

/* Communicators */

static Comm *comm_new(const char *name, int rank, int size) {
    Comm *comm = calloc(1, sizeof *comm);
    comm->magic = MAGIC;
    comm->rank = rank, comm->size = size;
    snprintf(comm->name, sizeof comm->name, "%s", name);
    return comm;
}

static void comm_meet(Comm *comm) {
    int file = shm_open(comm->name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared)) ||
        (comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) == MAP_FAILED) {
        comm->shared = NULL;
        atomic_store(&comm->error, SYSTEM_ERROR);
        return;
    }
    close(file);
    atomic_store(&comm->shared->process[comm->rank], getpid());
    for (int peer = 0; peer < comm->size; peer++)
        while (!atomic_load(&comm->shared->process[peer]))
            if (!comm_is_patient(comm, comm->rank)) {
                shm_unlink(comm->name);
                return;
            }
    comm_barrier(comm);
    shm_unlink(comm->name); /* all have it, or it is given up */
}

typedef struct {
    Comm *comm, **made;
} Init;

static void init_run(void *argument) {
    Init *init = argument;
    int code = fails(INIT);
    device_sleep(__atomic_exchange_n(&slow_nanoseconds, 0, __ATOMIC_SEQ_CST));
    if (code) atomic_store(&init->comm->error, code);
    else comm_meet(init->comm);
    __atomic_store_n(init->made, init->comm, __ATOMIC_RELEASE); /* once more, as NCCL does: it must still be there */
    free(init);
}

static void check_config(const Config *config) {
    if (config->blocking != 0 || config->size != sizeof *config || config->magic != 0xCAFEBEEF)
        breach("a communicator that is not non-blocking, or whose configuration has another layout");
    if (config->minCTAs != UNDEFINED || config->splitShare != UNDEFINED) breach("a configuration that sets something else");
}

int ncclCommInitRankConfig(Comm **made, int size, Id id, int rank, const Config *config) {
    char name[64] = "/hvd-stand-in-";
    check_config(config);
    if (size > RANKS || rank < 0 || rank >= size) return INVALID_USAGE;
    for (int each = 0; each < 12; each++) sprintf(name + strlen(name), "%02x", (unsigned char)id.internal[each]);
    Comm *comm = *made = comm_new(name, rank, size);
    Init *init = malloc(sizeof *init);
    *init = (Init){comm, made};
    return finish(comm, 0, init_run, init);
}

typedef struct {
    Comm *whole, **made;
    int color, key;
} Split;

static void split_run(void *argument) {
    Split split = *(Split *)argument;
    Comm *whole = split.whole;
    free(argument);
    int code = fails(SPLIT);
    if (code) {
        atomic_store(&whole->error, code);
        return;
    }
    Shared *shared = whole->shared;
    shared->split[whole->rank].color = split.color;
    shared->split[whole->rank].key = split.key;
    if (!comm_barrier(whole)) return;
    int place = 0, size = 0;
    for (int rank = 0; rank < whole->size; rank++) {
        int key = shared->split[rank].key;
        if (shared->split[rank].color != split.color) continue;
        size++;
        place += key < split.key || (key == split.key && rank < whole->rank);
    }
    int turn = ++whole->splits;
    if (!comm_barrier(whole)) return;
    Comm *part = NULL;
    if (split.color != NO_COLOR) {
        char name[80];
        snprintf(name, sizeof name, "%.48s-%d-%d", whole->name, turn, split.color);
        part = comm_new(name, place, size);
        atomic_store(&whole->part, part);
        comm_meet(part);
        atomic_store(&whole->part, NULL);
    }
    __atomic_store_n(split.made, part, __ATOMIC_RELEASE); /* as NCCL does, also for a rank that is no part of it */
}

int ncclCommSplit(Comm *whole, int color, int key, Comm **made, const Config *config) {
    if (!entered(whole, "ncclCommSplit")) return INVALID_USAGE;
    check_config(config);
    if (is_busy(whole, "ncclCommSplit")) return left(whole, INVALID_USAGE);
    if (atomic_load(&whole->queued)) breach("ncclCommSplit while the device is at work");
    *made = NULL;
    Split *split = malloc(sizeof *split);
    *split = (Split){whole, made, color, key};
    finish(whole, 0, split_run, split);
    return left(whole, SUCCESS);
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
    if (!entered(comm, "ncclCommGetAsyncError")) return INVALID_USAGE;
    int at_work = atomic_load(&comm->jobs) || (comm->ended == FINALIZED && atomic_load(&comm->queued));
    *state = atomic_load(&comm->error) ? atomic_load(&comm->error) : at_work ? IN_PROGRESS : SUCCESS;
    return left(comm, SUCCESS);
}

static void comm_end(Comm *comm, int how) {
    comm->ended = how;
    shm_unlink(comm->name);
    if (atomic_load(&comm->jobs) || atomic_load(&comm->queued)) return; /* its memory stays */
    if (comm->shared) munmap(comm->shared, sizeof(Shared));
    for (int each = 0; each < OPERATIONS; each++)
        if (comm->operations[each].used) atomic_fetch_sub(&live_operations, 1);
}

int ncclCommFinalize(Comm *comm) {
    if (!entered(comm, "ncclCommFinalize")) return INVALID_USAGE;
    is_busy(comm, "ncclCommFinalize");
    comm->ended = FINALIZED;
    while (mode == BLOCKING && atomic_load(&comm->queued)) device_sleep(60000);
    return left(comm, mode == BLOCKING ? SUCCESS : IN_PROGRESS);
}

int ncclCommDestroy(Comm *comm) {
    if (!entered(comm, "ncclCommDestroy")) return INVALID_USAGE;
    if (comm->ended != FINALIZED || atomic_load(&comm->queued)) breach("ncclCommDestroy before ncclCommFinalize is done");
    left(comm, SUCCESS);
    comm_end(comm, DESTROYED);
    return SUCCESS;
}

int ncclCommAbort(Comm *comm) {
    if (!entered(comm, "ncclCommAbort")) return INVALID_USAGE;
    if (left(comm, atomic_load(&comm->callers)) > 1) breach("ncclCommAbort while a thread is inside a call");
    atomic_store(&comm->aborted, 1);
    Comm *part = atomic_load(&comm->part);
    if (part) atomic_store(&part->aborted, 1);
    if (comm->shared) atomic_store(&comm->shared->aborted[comm->rank], 1);
    device_sleep(abort_nanoseconds);
    double end = device_clock() + 5;
    while ((atomic_load(&comm->jobs) || atomic_load(&comm->queued)) && device_clock() < end) device_sleep(60000);
    comm_end(comm, ABORTED);
    return SUCCESS;
}

/* Groups */

static __thread Group *group;

int ncclGroupStart(void) {
    if (group) breach("ncclGroupStart inside a group");
    group = calloc(1, sizeof *group);
    return SUCCESS;
}

static void launch_run(void *argument) {
    Group *mine = argument;
    Comm *comm = mine->comm;
    device_sleep(launch_nanoseconds);
    int code = fails(LAUNCH);
    if (code) {
        atomic_store(&comm->error, code);
        free(mine);
        return;
    }
    mine->fails = fails(KERNEL);
    for (int each = 0; each < mine->count; each++) {
        device_memory_used(mine->stream, mine->calls[each].source);
        device_memory_used(mine->stream, mine->calls[each].target);
    }
    atomic_fetch_add(&comm->queued, 1);
    stream_push(mine->stream, group_run, mine);
}

int ncclGroupEnd(void) {
    Group *mine = group;
    group = NULL;
    if (!mine) {
        breach("ncclGroupEnd without ncclGroupStart");
        return INVALID_USAGE;
    }
    if (!mine->count || mine->broken || !stream_is_usable(mine->stream, "ncclGroupEnd")) {
        int result = mine->count ? INVALID_USAGE : SUCCESS;
        free(mine);
        return result;
    }
    if (is_busy(mine->comm, "ncclGroupEnd")) return INVALID_USAGE;
    return finish(mine->comm, mode == BLOCKING, launch_run, mine);
}

static int call(Call made, Comm *comm, void *stream, const char *name) {
    if (!entered(comm, name)) return INVALID_USAGE;
    if (!group) {
        breach("%s outside of a group", name);
        return left(comm, INVALID_USAGE);
    }
    if (group->count && (group->comm != comm || group->stream != stream)) breach("a group of several communicators");
    if (group->count == CALLS) group->broken = 1;
    else group->calls[group->count++] = made;
    group->comm = comm, group->stream = stream;
    if (made.op >= CUSTOM) { /* it may be destroyed when this call has returned */
        Operation *known = &comm->operations[made.op - CUSTOM];
        if (made.op - CUSTOM >= OPERATIONS || !known->used) breach("%s with an operation that is not there", name);
        group->calls[group->count - 1].op = SUM;
        group->calls[group->count - 1].factor = known->factor;
    }
    return left(comm, SUCCESS);
}

int ncclRedOpCreatePreMulSum(int *op, const void *scalar, int type, int residence, Comm *comm) {
    if (!entered(comm, "ncclRedOpCreatePreMulSum")) return INVALID_USAGE;
    if (residence != 1) breach("a factor that is not in the memory of the host");
    for (int each = 0; each < OPERATIONS; each++) {
        if (comm->operations[each].used) continue;
        comm->operations[each] = (Operation){1, element(type, scalar)};
        atomic_fetch_add(&live_operations, 1);
        *op = CUSTOM + each;
        return left(comm, SUCCESS);
    }
    return left(comm, SYSTEM_ERROR);
}

int ncclRedOpDestroy(int op, Comm *comm) {
    if (!entered(comm, "ncclRedOpDestroy")) return INVALID_USAGE;
    if (op < CUSTOM || op >= CUSTOM + OPERATIONS || !comm->operations[op - CUSTOM].used) {
        breach("ncclRedOpDestroy of an operation that is not there");
        return left(comm, INVALID_USAGE);
    }
    comm->operations[op - CUSTOM].used = 0;
    atomic_fetch_sub(&live_operations, 1);
    return left(comm, SUCCESS);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return call((Call){ALL_REDUCE, from, to, count, type, op, 0, 1}, comm, stream, "ncclAllReduce");
}

int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *comm, void *stream) {
    return call((Call){REDUCE, from, to, count, type, op, root, 1}, comm, stream, "ncclReduce");
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    return call((Call){BROADCAST, from, to, count, type, 0, root, 1}, comm, stream, "ncclBroadcast");
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    return call((Call){ALL_GATHER, from, to, count, type, 0, 0, 1}, comm, stream, "ncclAllGather");
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    return call((Call){REDUCE_SCATTER, from, to, count, type, op, 0, 1}, comm, stream, "ncclReduceScatter");
}

int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return call((Call){SEND, from, NULL, count, type, 0, peer, 1}, comm, stream, "ncclSend");
}

int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return call((Call){RECEIVE, NULL, to, count, type, 0, peer, 1}, comm, stream, "ncclRecv");
}
