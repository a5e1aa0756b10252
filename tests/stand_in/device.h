/* What the stand-ins of CUDA's driver library and of NCCL share: streams that do their work late, and the list of breaches.
 *
 * The memory of the device is the host's. A stream is a queue of work with a thread of its own, so that only events order the
 * work of two streams. A stream that is not one of these belongs to a framework: its work goes to the launcher that the
 * framework has set.
 */
#ifndef STAND_IN_DEVICE_H
#define STAND_IN_DEVICE_H

#include <stddef.h>

typedef void (*Work)(void *argument);

void *stream_new(void);
/* Its work is carried out, and it takes no more. Returns whether it was one of this library. */
int stream_end(void *stream);
int stream_is_own(const void *stream);
/* Queue work on a stream, of this library or of a framework. */
void stream_push(void *stream, Work work, void *argument);
/* Whether the calling thread has a device, and a stream is one. Tells of a breach otherwise. */
int stream_is_usable(void *stream, const char *call);
/* Memory is used by work on a stream from now on, until device_memory_left. */
void device_memory_used(void *stream, const void *address);
void device_memory_left(void *stream, const void *address);
void device_sleep(long nanoseconds);
double device_clock(void);

/* Note that a caller has broken a rule of the library. */
void breach(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
