/* A libcuda with one GPU on which nothing runs. It has the functions that Triton's launcher calls.
 * Kernels can be loaded and launched; a launch is checked and counted, and does nothing. Numbers
 * are those of cuda.h, which is not needed here. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1 };
enum { MAX_GRID_X = 2147483647, MAX_GRID_YZ = 65535, MAX_THREADS = 1024 };
enum { MAX_SHARED = 232448, SHARED_OF_ALL = 233472, REGISTERS = 65536, PROCESSORS = 132 };

typedef struct Kernel {
    char *name;
    long launches;
    struct Kernel *next;
} Kernel;

/* CUlaunchConfig. */
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    const void *attributes;
    unsigned count;
} Launch;

static Kernel *kernels;
static int here;

/* How often kernels of this name were launched. */
long stub_launches(const char *name) {
    long found = 0;
    for (Kernel *k = kernels; k != NULL; k = k->next)
        if (strcmp(k->name, name) == 0) found += k->launches;
    return found;
}

int cuLaunchKernelEx(const Launch *how, Kernel *kernel, void **arguments, void **extra) {
    (void)arguments, (void)extra;
    const unsigned *grid = how->grid, *block = how->block;
    if (grid[0] < 1 || grid[0] > MAX_GRID_X || grid[1] < 1 || grid[1] > MAX_GRID_YZ ||
        grid[2] < 1 || grid[2] > MAX_GRID_YZ)
        return INVALID_VALUE;
    if (block[0] * block[1] * block[2] > MAX_THREADS || how->shared > MAX_SHARED)
        return INVALID_VALUE;
    kernel->launches++;
    return OK;
}

int cuModuleGetFunction(Kernel **out, void *module, const char *name) {
    (void)module;
    Kernel *made = malloc(sizeof *made);
    if (made == NULL) return INVALID_VALUE;
    *made = (Kernel){strdup(name), 0, kernels};
    *out = kernels = made;
    return OK;
}

int cuGetErrorString(int error, const char **out) {
    *out = error == INVALID_VALUE ? "a launch that no GPU takes" : "an error";
    return OK;
}

/* By attribute: threads of a warp, registers, processors, compute capability, shared memory. */
static const int FACTS[][2] = {{10, 32}, {12, REGISTERS},     {16, PROCESSORS}, {75, 9},
                               {76, 0},  {81, SHARED_OF_ALL}, {97, MAX_SHARED}};

int cuDeviceGetAttribute(int *out, int attribute, int device) {
    (void)device, *out = 1000;
    for (size_t i = 0; i < sizeof FACTS / sizeof *FACTS; i++)
        if (FACTS[i][0] == attribute) *out = FACTS[i][1];
    return OK;
}

int cuFuncGetAttribute(int *out, int attribute, void *function) {
    (void)function;
    *out = attribute == 0 ? MAX_THREADS : 0;
    return OK;
}

/* A tensor's address is what it is. */
int cuPointerGetAttribute(void *out, int attribute, unsigned long long pointer) {
    (void)attribute;
    memcpy(out, &pointer, sizeof pointer);
    return OK;
}

int cuPointerGetAttributes(
    unsigned count, int *attributes, void **out, unsigned long long pointer
) {
    for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(out[i], attributes[i], pointer);
    return OK;
}

int cuCtxGetCurrent(void **out) { return *out = &here, OK; }
int cuCtxGetDevice(int *out) { return *out = 0, OK; }
int cuCtxGetLimit(size_t *out, int limit) { return *out = (size_t)limit * 0, OK; }
int cuDeviceGet(int *out, int index) { return *out = index, OK; }
int cuDeviceGetCount(int *out) { return *out = 1, OK; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return (void)device, *out = &here, OK; }
int cuDriverGetVersion(int *out) { return *out = 13000, OK; }
int cuModuleLoadData(void **out, const void *image) { return (void)image, *out = &here, OK; }
int cuOccupancyMaxActiveClusters(int *out) { return *out = 1, OK; }
int cuStreamIsCapturing(void *stream, int *out) { return (void)stream, *out = 0, OK; }

/* What they are given does not matter. */
int cuCtxSetCurrent(void) { return OK; }
int cuCtxSetLimit(void) { return OK; }
int cuFuncSetAttribute(void) { return OK; }
int cuFuncSetCacheConfig(void) { return OK; }
int cuInit(void) { return OK; }
int cuModuleUnload(void) { return OK; }
int cuTensorMapEncodeIm2col(void) { return OK; }
int cuTensorMapEncodeTiled(void) { return OK; }
