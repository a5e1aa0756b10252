/* Collectives of NCCL's stand-in: each rank writes into its slot of the shared memory, and reads those of the others. */
#define _GNU_SOURCE
#include "collectives.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT16 = 6, FLOAT32, FLOAT64, BFLOAT16 };
static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static atomic_int held;

/* While it is held, nothing that was put on a stream begins. */
void stand_in_hold(int hold) { atomic_store(&held, hold); }

/* Numbers of 16 bits, rounded to even as a GPU does. */

static float of_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if ((wide & 0x7fffffff) > 0x7f800000) return (uint16_t)((wide >> 16) | 0x40);
    return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static float of_float16(uint16_t bits) {
    int exponent = (bits >> 10) & 31, sign = bits >> 15;
    float value = (float)(bits & 1023);
    if (exponent == 31) value = value ? __builtin_nanf("") : __builtin_inff();
    else value = exponent ? __builtin_ldexpf(value + 1024, exponent - 25) : __builtin_ldexpf(value, -24);
    return sign ? -value : value;
}

static uint16_t to_float16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    uint16_t sign = (uint16_t)((wide >> 16) & 0x8000);
    float size = __builtin_fabsf(value);
    if (size != size) return sign | 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    int exponent = size < 6.103515625e-5f ? -14 : (int)((wide >> 23) & 255) - 127;
    float scaled = __builtin_ldexpf(size, 10 - exponent); /* exact: below 2048 */
    uint32_t whole = (uint32_t)scaled;
    float rest = scaled - (float)whole;
    whole += rest > 0.5f || (rest == 0.5f && (whole & 1));
    return (uint16_t)(sign | (whole + ((uint32_t)(exponent + 14) << 10)));
}

double element(int type, const void *place) {
    const uint16_t *half = place;
    return type == FLOAT16 ? of_float16(*half) : type == BFLOAT16 ? of_bfloat16(*half)
           : type == FLOAT32 ? *(const float *)place : type == FLOAT64 ? *(const double *)place : 1;
}

#define COMBINE(a, b) (op == PRODUCT ? a * b : op == MAX ? (a > b ? a : b) : op == MIN ? (a < b ? a : b) : a + b)
#define EACH(T)                                                                                 \
    for (size_t n = 0; n < count; n++) ((T *)target)[n] = (T)COMBINE(((T *)target)[n], ((const T *)source)[n])
#define EACH_HALF(of, to)                                                                       \
    for (size_t n = 0; n < count; n++) {                                                        \
        float a = of(((uint16_t *)target)[n]), b = of(((const uint16_t *)source)[n]);           \
        ((uint16_t *)target)[n] = to(COMBINE(a, b));                                            \
    }

static void combine(int type, int op, void *target, const void *source, size_t count) {
    switch (type) {
    case 0: EACH(int8_t); break;
    case 1: EACH(uint8_t); break;
    case 2: EACH(int32_t); break;
    case 3: EACH(uint32_t); break;
    case 4: EACH(int64_t); break;
    case 5: EACH(uint64_t); break;
    case FLOAT16: EACH_HALF(of_float16, to_float16); break;
    case FLOAT32: EACH(float); break;
    case FLOAT64: EACH(double); break;
    case BFLOAT16: EACH_HALF(of_bfloat16, to_bfloat16); break;
    }
}

/* Multiply by a factor that is of the type itself, as NCCL's average and its sums with a factor do. */
static void multiply(int type, double factor, void *place, size_t count) {
    for (size_t n = 0; factor != 1 && n < count; n++) {
        uint16_t *half = (uint16_t *)place + n;
        if (type == FLOAT16) *half = to_float16(of_float16(*half) * of_float16(to_float16((float)factor)));
        if (type == BFLOAT16) *half = to_bfloat16(of_bfloat16(*half) * of_bfloat16(to_bfloat16((float)factor)));
        if (type == FLOAT32) ((float *)place)[n] *= (float)factor;
        if (type == FLOAT64) ((double *)place)[n] *= factor;
    }
}

/* Waiting */

static int is_running(int process) {
    char path[32], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *end = strrchr(text, ')');
    return end && end[2] != 'Z' && end[2] != 'X';
}

int comm_is_patient(Comm *comm, int peer) {
    static __thread unsigned turns;
    if (atomic_load(&comm->aborted)) return 0;
    int process = atomic_load(&comm->shared->process[peer]);
    int gone = atomic_load(&comm->shared->aborted[peer]) || (++turns % 64 == 0 && process && !is_running(process));
    if (!gone) {
        device_sleep(60000);
        return 1;
    }
    atomic_store(&comm->error, REMOTE_ERROR);
    while (!atomic_load(&comm->aborted)) device_sleep(200000); /* a kernel whose peer is gone ends with the abort */
    return 0;
}

int comm_barrier(Comm *comm) {
    unsigned long mine = ++comm->barriers;
    atomic_store(&comm->shared->came[comm->rank], mine);
    for (int peer = 0; peer < comm->size; peer++)
        while (atomic_load(&comm->shared->came[peer]) < mine)
            if (!comm_is_patient(comm, peer)) return 0;
    return 1;
}

/* Collectives. Each returns whether it was carried out. */

static int reduce(Comm *comm, const Call *call, const char *source, char *target, int writes) {
    size_t size = sizes[call->type], most = SLOT / size;
    double factor = call->op == AVERAGE ? 1.0 / comm->size : call->factor;
    int op = call->op == AVERAGE ? SUM : call->op;
    for (size_t from = 0; from < call->count; from += most) {
        size_t count = call->count - from < most ? call->count - from : most;
        char *own = comm->shared->slot[comm->rank];
        memcpy(own, source + from * size, count * size);
        multiply(call->type, factor, own, count);
        if (!comm_barrier(comm)) return 0;
        if (writes) {
            memcpy(target + from * size, comm->shared->slot[0], count * size);
            for (int rank = 1; rank < comm->size; rank++)
                combine(call->type, op, target + from * size, comm->shared->slot[rank], count);
        }
        if (!comm_barrier(comm)) return 0;
    }
    return 1;
}

static int gather(Comm *comm, const Call *call, int root) {
    size_t size = sizes[call->type] * call->count;
    for (size_t from = 0; from < size; from += SLOT) {
        size_t length = size - from < SLOT ? size - from : SLOT;
        if (root < 0 || root == comm->rank)
            memcpy(comm->shared->slot[comm->rank], (const char *)call->source + from, length);
        if (!comm_barrier(comm)) return 0;
        for (int rank = 0; rank < comm->size; rank++)
            if (root < 0 || root == rank)
                memcpy((char *)call->target + (root < 0 ? size * rank : 0) + from, comm->shared->slot[rank], length);
        if (!comm_barrier(comm)) return 0;
    }
    return 1;
}

static int collective(Comm *comm, const Call *call) {
    const char *source = call->source;
    size_t part = call->count * sizes[call->type];
    switch (call->kind) {
    case ALL_REDUCE: return reduce(comm, call, source, call->target, 1);
    case REDUCE: return reduce(comm, call, source, call->target, comm->rank == call->root);
    case BROADCAST: return gather(comm, call, call->root);
    case ALL_GATHER: return gather(comm, call, -1);
    case REDUCE_SCATTER:
        for (int root = 0; root < comm->size; root++)
            if (!reduce(comm, call, source + root * part, call->target, comm->rank == root)) return 0;
        return 1;
    }
    return 1; /* between two: exchange() */
}

/* Sends and receives of a group, in turns. Who has none for a peer need not be there. */
static int exchange(Comm *comm, const Group *group) {
    size_t done[CALLS] = {0};
    for (;;) {
        int moved = 0, waits = -1;
        for (int n = 0; n < group->count; n++) {
            const Call *call = &group->calls[n];
            size_t left = call->count * sizes[call->type] - done[n];
            if ((call->kind != SEND && call->kind != RECEIVE) || !left) continue;
            int sends = call->kind == SEND;
            Mail *mail = sends ? &comm->shared->mail[comm->rank][call->root] : &comm->shared->mail[call->root][comm->rank];
            if (atomic_load(&mail->full) == sends) {
                waits = call->root;
                continue;
            }
            if (sends) {
                mail->size = left < MAIL ? left : MAIL;
                memcpy(mail->data, (const char *)call->source + done[n], mail->size);
            } else {
                memcpy((char *)call->target + done[n], mail->data, mail->size);
            }
            done[n] += mail->size;
            atomic_store(&mail->full, sends);
            moved = 1;
        }
        if (!moved && waits < 0) return 1;
        if (!moved && !comm_is_patient(comm, waits)) return 0;
    }
}

/* Whether all ranks came with the same calls. */
static int compare(Comm *comm, const Group *group) {
    uint64_t digest = 14695981039346656037u;
    int count = 0;
    for (int n = 0; n < group->count; n++) {
        const Call *call = &group->calls[n];
        if (call->kind == SEND || call->kind == RECEIVE) continue;
        double told[] = {call->kind, (double)call->count, call->type, call->op, call->root, call->factor};
        for (size_t byte = 0; byte < sizeof told; byte++) digest = (digest ^ ((unsigned char *)told)[byte]) * 1099511628211u;
        count++;
    }
    if (!count) return 1;
    comm->shared->digest[comm->rank] = digest;
    if (!comm_barrier(comm)) return 0;
    for (int rank = 0; rank < comm->size; rank++)
        if (comm->shared->digest[rank] != digest) breach("ranks %d and %d came with other calls", comm->rank, rank);
    return comm_barrier(comm);
}

void group_run(void *argument) {
    Group *group = argument;
    Comm *comm = group->comm;
    int goes_on = 1;
    while (atomic_load(&held) && !atomic_load(&comm->aborted)) device_sleep(200000);
    if (group->fails) {
        atomic_store(&comm->error, group->fails);
        while (!atomic_load(&comm->aborted)) device_sleep(200000);
    }
    goes_on = !atomic_load(&comm->aborted) && compare(comm, group);
    for (int n = 0; goes_on && n < group->count; n++) goes_on = collective(comm, &group->calls[n]);
    if (goes_on) exchange(comm, group);
    for (int n = 0; n < group->count; n++) {
        device_memory_left(group->stream, group->calls[n].source);
        device_memory_left(group->stream, group->calls[n].target);
    }
    atomic_fetch_sub(&comm->queued, 1);
    free(group);
}
