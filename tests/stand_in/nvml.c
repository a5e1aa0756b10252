/* A stand-in of NVIDIA's management library (libnvidia-ml.so.1), with the calls that tell the identities of GPUs. */
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NO_PERMISSION = 4, MOST = 8 };
static char identities[MOST][64];
static unsigned identity_count;

/* Identities of GPUs, separated by commas; one that begins with "-" is there, and not permitted. The slice MIG-x-3 is one of the
 * GPU whose identity is GPU-x. */
void stand_in_gpus(const char *text) {
    identity_count = 0;
    for (const char *from = text; *from && identity_count < MOST; identity_count++) {
        size_t length = strcspn(from, ",");
        snprintf(identities[identity_count], sizeof identities[0], "%.*s", (int)length, from);
        from += length + (from[length] == ',');
    }
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = identity_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= identity_count) return INVALID_ARGUMENT;
    if (identities[index][0] == '-') return NO_PERMISSION;
    *device = identities[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *identity, void **device) {
    for (unsigned index = 0; index < identity_count; index++) {
        const char *name = identities[index] + strlen("GPU-");
        int is_slice = !strncmp(identity, "MIG-", 4) && !strncmp(identity + 4, name, strlen(name));
        if (!is_slice && strcmp(identity, identities[index])) continue;
        *device = identities[index];
        return SUCCESS;
    }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *part, void **device) {
    *device = part;
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *target, unsigned size) {
    snprintf(target, size, "%s", (char *)device);
    return SUCCESS;
}
