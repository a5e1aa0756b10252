/* What NCCL's stand-in does on a stream: collectives between processes, in memory that they share. */
#ifndef STAND_IN_COLLECTIVES_H
#define STAND_IN_COLLECTIVES_H

#include "device.h"

#include <stdatomic.h>
#include <stdint.h>

enum { RANKS = 8, SLOT = 1 << 17, MAIL = 1 << 14, CALLS = 512, OPERATIONS = 64, MAGIC = 0x4e43434c };
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { FINALIZED = 1, DESTROYED, ABORTED };
enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };

typedef struct {
    atomic_int full;
    size_t size;
    char data[MAIL];
} Mail;

/* Of all ranks of a communicator. */
typedef struct {
    atomic_int process[RANKS], aborted[RANKS];
    atomic_ulong came[RANKS]; /* to how many barriers */
    uint64_t digest[RANKS];   /* of the calls of the group */
    struct {
        int color, key;
    } split[RANKS];
    Mail mail[RANKS][RANKS];  /* by sender and receiver */
    char slot[RANKS][SLOT];
} Shared;

typedef struct {
    int used;
    double factor;
} Operation;

/* One rank's. It is never freed, so that its use after the end is seen. */
typedef struct Comm {
    int magic, rank, size, ended, splits;
    char name[80];
    Shared *shared;
    unsigned long barriers;
    atomic_int error, aborted, jobs, queued, callers;
    _Atomic(struct Comm *) part; /* that a split is making */
    Operation operations[OPERATIONS];
} Comm;

typedef struct {
    int kind;
    const void *source;
    void *target;
    size_t count;
    int type, op, root; /* or the peer */
    double factor;
} Call;

typedef struct {
    Comm *comm;
    void *stream;
    int count, broken, fails;
    Call calls[CALLS];
} Group;

/* Carry out a group; it is freed. */
void group_run(void *group);
/* Wait until all ranks have come: whether they have. */
int comm_barrier(Comm *comm);
/* Wait a moment for a peer: whether to go on. Where the peer is gone, it returns when the communicator is aborted. */
int comm_is_patient(Comm *comm, int peer);
/* One element of a data type as a number. */
double element(int type, const void *place);

#endif
