/* Stands in for libcuda.so.1 and libnvidia-ml.so.1, of which one file has both names: answers from the environment. */
#include <stdlib.h>
#include <string.h>

static long long number(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

int cuInit(unsigned flags) { return (int)number("FAKE_INIT", 0) + (int)flags; }
int cuDriverGetVersion(int *version) { *version = (int)number("FAKE_CUDA", 13000); return 0; }
int cuDeviceGetCount(int *count) { *count = (int)number("FAKE_GPUS", 1); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { (void)device; strncpy(name, "NVIDIA H200", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capability = (int)number("FAKE_SM", 90);
    (void)device;
    if (attribute != 75 && attribute != 76) return 1;
    *value = attribute == 75 ? capability / 10 : capability % 10;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = number("FAKE_TOTAL", 150LL << 30); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0xab, 16); uuid[15] = (char)device; return 0; }

int nvmlInit_v2(void) { return (int)number("FAKE_NVML", 0); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.95.05", size); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    /* The prefix tells a GPU from a slice of one; the last two digits are the number of the device. */
    const char *kind = number("FAKE_MIG", 0) ? "MIG-" : "GPU-";
    if (strncmp(uuid, kind, 4) || strlen(uuid) != 40 || strncmp(uuid + 4, "abababab-abab-abab-abab-ababababab", 34)) return 6;
    *handle = (void *)(1 + strtol(uuid + 38, 0, 16));
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *info) {
    /* Device 0 has FAKE_FREE bytes, each later one a GiB more. */
    info[0] = number("FAKE_TOTAL", 150LL << 30);
    info[1] = number("FAKE_FREE", 140LL << 30) + (((long long)handle - 1) << 30);
    info[2] = info[0] - info[1];
    return 0;
}
