/* Streams of the stand-ins, and the list of breaches of the rules. */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Breaches */

static pthread_mutex_t breaches_lock = PTHREAD_MUTEX_INITIALIZER;
static char breaches[1 << 14];

void breach(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&breaches_lock);
    size_t length = strlen(breaches);
    if (length < sizeof breaches - 512) {
        vsnprintf(breaches + length, 500, format, arguments);
        strcat(breaches, "\n");
    }
    pthread_mutex_unlock(&breaches_lock);
    va_end(arguments);
}

/* All breaches so far, one a line; the list begins anew. */
void stand_in_breaches(char *target, size_t size) {
    pthread_mutex_lock(&breaches_lock);
    snprintf(target, size, "%s", breaches);
    breaches[0] = 0;
    pthread_mutex_unlock(&breaches_lock);
}

/* Streams */

typedef struct Item {
    struct Item *next;
    Work work;
    void *argument;
} Item;

typedef struct Stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Item *first, *last;
    int running, destroyed;
    unsigned seed;
    struct Stream *next; /* of all streams */
} Stream;

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *streams;
static long late_nanoseconds = 300000;
static void (*launcher)(void *stream, void *item);

void stand_in_late(long nanoseconds) { late_nanoseconds = nanoseconds; }
void stand_in_launcher(void (*launch)(void *, void *)) { launcher = launch; }

void device_sleep(long nanoseconds) {
    if (nanoseconds < 50000) { /* a sleep takes longer */
        double end = device_clock() + nanoseconds * 1e-9;
        while (device_clock() < end) sched_yield();
        return;
    }
    struct timespec pause = {nanoseconds / 1000000000, nanoseconds % 1000000000};
    nanosleep(&pause, NULL);
}

double device_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void *stream_run(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    while (stream->first) {
        Item *item = stream->first;
        long late = late_nanoseconds ? rand_r(&stream->seed) % (late_nanoseconds + 1) : 0;
        pthread_mutex_unlock(&stream->lock);
        if (late) device_sleep(late);
        item->work(item->argument);
        pthread_mutex_lock(&stream->lock);
        stream->first = item->next;
        free(item);
    }
    stream->running = 0;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

int stream_is_own(const void *address) {
    int found = 0;
    pthread_mutex_lock(&streams_lock);
    for (Stream *each = streams; each && !found; each = each->next) found = (each == address && !each->destroyed);
    pthread_mutex_unlock(&streams_lock);
    return found;
}

static void push(Stream *stream, Work work, void *argument) {
    Item *item = malloc(sizeof *item);
    *item = (Item){NULL, work, argument};
    pthread_mutex_lock(&stream->lock);
    if (stream->first) stream->last->next = item;
    else stream->first = item;
    stream->last = item;
    if (!stream->running) {
        pthread_t thread;
        pthread_attr_t detached;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        stream->running = 1;
        pthread_create(&thread, &detached, stream_run, stream);
        pthread_attr_destroy(&detached);
    }
    pthread_mutex_unlock(&stream->lock);
}

void stream_push(void *stream, Work work, void *argument) {
    if (stream_is_own(stream)) {
        push(stream, work, argument);
        return;
    }
    if (!launcher) {
        breach("work for a stream that there is not");
        return;
    }
    Item *item = malloc(sizeof *item);
    *item = (Item){NULL, work, argument};
    launcher(stream, item);
}

/* Do a piece of work that the launcher was given, on the framework's stream. */
void stand_in_run(void *item) {
    Item *mine = item;
    mine->work(mine->argument);
    free(mine);
}

void *stream_new(void) {
    static unsigned seed;
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_mutex_lock(&streams_lock);
    stream->seed = ++seed;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
    return stream;
}

int stream_end(void *stream) {
    if (!stream_is_own(stream)) return 0;
    ((Stream *)stream)->destroyed = 1;
    return 1;
}
