/* A libnvidia-ml.so.1 for machines without a GPU. What it answers is in the environment:
 *
 *   NVML_GPUS=8           how many; 0 by default
 *   NVML_NAME, NVML_MEMORY_GIB, NVML_DRIVER, NVML_CUDA (13000)
 *   NVML_LOST, NVML_MIG, NVML_EXCLUSIVE, NVML_PROHIBITED, NVML_ECC, NVML_REMAP_PENDING, NVML_REMAP_FAILED, NVML_BUSY
 *                         GPUs in that condition, as 0,3; of a busy one NVML_HOLDERS (7:100,8:0) are the pids and GiB
 *   NVML_SILENT           GPUs whose modes and defects can't be read: NVML answers with an error of its own
 *   NVML_XIDS=3:79,0:31   what each GPU's Xid events are; an event set tells those that were added after it was made
 *   NVML_NO_EVENTS=1      GPUs that have none, and NVML_OLD_EVENTS=1: the driver has no call that waits for them
 *   NVML_NO_DRIVER=1      the library is there, and the kernel's part is not
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, TOO_SMALL = 7, DRIVER_NOT_LOADED = 9, TIMED_OUT = 10, NO_FUNCTION = 13,
       IS_LOST = 15, UNKNOWN = 999 };
enum { MOST = 64 };

typedef struct { unsigned int index; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } Process;

static Device devices[MOST];

static const char *given(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : otherwise;
}

static int listed(const char *name, unsigned int index) {
    const char *at = given(name, "");
    while (*at != '\0') {
        char *end;
        unsigned long one = strtoul(at, &end, 10);
        if (end == at) return 0;
        if (one == index) return 1;
        at = *end == ',' ? end + 1 : end;
    }
    return 0;
}

static unsigned int count(void) { return (unsigned int)atoi(given("NVML_GPUS", "0")); }

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    int refused = atoi(given("NVML_INIT", "0")); /* the number of an error */
    return atoi(given("NVML_NO_DRIVER", "0")) ? DRIVER_NOT_LOADED : refused;
}
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int result) {
    switch (result) {
    case IS_LOST: return "GPU is lost";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_FUNCTION: return "Function Not Found";
    default: return "Driver Not Loaded";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    snprintf(text, length, "%s", given("NVML_DRIVER", "580.95.05"));
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = atoi(given("NVML_CUDA", "13000")); return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned int *found) { *found = count(); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    if (index >= count() || index >= MOST) return INVALID;
    if (listed("NVML_LOST", index)) return IS_LOST;
    devices[index].index = index;
    *device = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetUUID(Device *device, char *text, unsigned int length) {
    if (listed("NVML_LOST", device->index)) return IS_LOST;
    snprintf(text, length, "GPU-%08x-0000-0000-0000-000000000000", device->index + 0xa0);
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *text, unsigned int length) {
    (void)device;
    snprintf(text, length, "%s", given("NVML_NAME", "NVIDIA H200"));
    return SUCCESS;
}

static int holders(Process *into) {
    const char *at = given("NVML_HOLDERS", "4242:100");
    int found = 0;
    while (*at != '\0' && found < MOST) {
        char *end;
        into[found].pid = (unsigned int)strtoul(at, &end, 10);
        into[found++].used = strtoull(end + 1, &end, 10) << 30;
        at = *end == ',' ? end + 1 : end;
    }
    return found;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    Process held[MOST];
    if (listed("NVML_NO_MEMORY", device->index)) return NOT_SUPPORTED;
    memory->total = strtoull(given("NVML_MEMORY_GIB", "140"), NULL, 10) << 30;
    memory->used = 0;
    for (int each = listed("NVML_BUSY", device->index) ? holders(held) : 0; each > 0; each--)
        memory->used += held[each - 1].used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *room, Process *into) {
    Process held[MOST] = {{0}};
    unsigned int found = listed("NVML_BUSY", device->index) ? (unsigned int)holders(held) : 0;
    if (*room < found) { *room = found; return TOO_SMALL; }
    if (into != NULL) memcpy(into, held, found * sizeof(Process));
    *room = found;
    return SUCCESS;
}
int nvmlDeviceGetMigMode(Device *device, unsigned int *now, unsigned int *pending) {
    if (listed("NVML_SILENT", device->index)) return UNKNOWN;
    *now = *pending = (unsigned int)listed("NVML_MIG", device->index);
    return SUCCESS;
}
int nvmlDeviceGetComputeMode(Device *device, int *mode) {
    if (listed("NVML_SILENT", device->index)) return UNKNOWN;
    *mode = listed("NVML_PROHIBITED", device->index) ? 2 : listed("NVML_EXCLUSIVE", device->index) ? 3 : 0;
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(Device *device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending,
                              unsigned int *failed) {
    if (listed("NVML_SILENT", device->index)) return UNKNOWN;
    *corrected = *uncorrected = 0;
    *pending = (unsigned int)listed("NVML_REMAP_PENDING", device->index);
    *failed = (unsigned int)listed("NVML_REMAP_FAILED", device->index);
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int counter, unsigned long long *errors) {
    (void)kind; (void)counter;
    if (!strcmp(given("NVML_NAME", ""), "no ECC")) return NOT_SUPPORTED;
    if (listed("NVML_SILENT", device->index)) return UNKNOWN;
    *errors = listed("NVML_ECC", device->index) ? 3 : 0;
    return SUCCESS;
}

enum { XID_EVENT = 8 };
typedef struct { unsigned int registered, told; } EventSet;
typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} Event;

static int xid(unsigned int position, unsigned int *index, unsigned long long *number) {
    const char *at = given("NVML_XIDS", "");
    for (unsigned int each = 0; *at != '\0'; each++) {
        char *end;
        *index = (unsigned int)strtoul(at, &end, 10);
        *number = strtoull(end + 1, &end, 10);
        if (each == position) return 1;
        at = *end == ',' ? end + 1 : end;
    }
    return 0;
}

int nvmlEventSetCreate(EventSet **set) {
    unsigned int index;
    unsigned long long number;
    *set = calloc(1, sizeof(EventSet));
    while (xid((*set)->told, &index, &number)) (*set)->told++;
    return SUCCESS;
}
int nvmlEventSetFree(EventSet *set) { free(set); return SUCCESS; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    if (listed("NVML_NO_EVENTS", device->index) || types != XID_EVENT) return NOT_SUPPORTED;
    set->registered |= 1u << device->index;
    return SUCCESS;
}
int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned int wait_ms) {
    unsigned int index, lost = 0;
    unsigned long long number;
    (void)wait_ms;
    if (atoi(given("NVML_OLD_EVENTS", "0"))) return NO_FUNCTION;
    while (xid(set->told, &index, &number)) {
        set->told++;
        if (!(set->registered >> index & 1)) continue;
        *event = (Event){ &devices[index], XID_EVENT, number, 0xFFFFFFFF, 0xFFFFFFFF };
        return SUCCESS;
    }
    for (index = 0; index < count(); index++) lost |= listed("NVML_LOST", index) && set->registered >> index & 1;
    return lost ? IS_LOST : TIMED_OUT;
}
