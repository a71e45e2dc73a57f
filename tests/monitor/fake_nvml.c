/* A library that answers as NVML does, for GPUs that are not there. `libnvidia-ml.so.1` for tests and benchmarks.
 *
 * A GPU's load repeats every PERIOD seconds: HIGH watts for BUSY seconds, LOW for the rest, GPU i 10 i less of both; it
 * is AHEAD of time, so that no edge is at a round moment. Power and energy at any moment are known. Readings are those of the last multiple of the update period, as a sensor's
 * are. Time is CLOCK_MONOTONIC, or what fake_nvml_set_time was told last.
 *
 *   FAKE_NVML_GPUS=2              how many
 *   FAKE_NVML_UPDATE_MS=100       how often readings are new ones
 *   FAKE_NVML_CALL_US=0           what every call costs, asleep
 *   FAKE_NVML_LOST=G:A:B          GPU G is lost from its reading number A on, until its number B
 *   FAKE_NVML_LACKS=name,...      power temperature power_inst energy memory utilization clock throttle: not supported
 *   FAKE_NVML_LACKS_FROM=0        from a GPU's reading of this number on
 *   FAKE_NVML_INIT=CODE           what starting it returns
 *   FAKE_NVML_ECC=PATH            a file with the number of GPU 0's uncorrected memory errors; without it there are none
 *   FAKE_NVML_REMAPPED=P:F        whether GPU 0 waits for a reset to replace rows, and has failed to
 *   FAKE_NVML_COUNT=PATH          a file of 8 bytes that counts the readings of GPU 0's power
 *
 * OLD: without nvmlDeviceGetTemperatureV, field values, memory v2 and event reasons, as drivers of some years ago.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PERIOD 1.3
#define BUSY 1.1
#define HIGH 650.0
#define LOW 250.0
#define AHEAD 0.033

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, LOST = 15 };

static unsigned gpus = 2;
static int started, lost_gpu = -1;
static double update_s = 0.1, call_s, set_time = -1;
static long lost_from, lost_until, lacks_from, readings[64];
static const char *lacks = "";
static uint64_t *power_readings;

static double number(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text ? atof(text) : otherwise;
}

static double now(void) {
  struct timespec t;
  if (set_time >= 0) return set_time;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* A little above, so that a moment that is a multiple but for rounding counts as one. */
static double held(void) { return update_s > 0 ? floor(now() / update_s + 1e-6) * update_s : now(); }

static double energy_j(int i, double t) {
  double periods = floor((t + AHEAD) / PERIOD), rest = t + AHEAD - periods * PERIOD, busy = rest < BUSY ? rest : BUSY;
  return periods * (BUSY * HIGH + (PERIOD - BUSY) * LOW) + busy * HIGH + (rest - busy) * LOW - 10 * i * t;
}

/* What comes before each reading: the GPU's index, or -1 with the code to return. */
static int asked(void *device, const char *name, int *code) {
  int i = (int)((intptr_t)device - 0x1000);
  *code = OK;
  if (!started) return *code = UNINITIALIZED, -1;
  if (i < 0 || i >= (int)gpus) return *code = INVALID, -1;
  if (call_s > 0) {
    struct timespec t = {(time_t)call_s, (long)(1e9 * fmod(call_s, 1))};
    nanosleep(&t, NULL);
  }
  readings[i]++;
  if (i == lost_gpu && readings[i] >= lost_from && readings[i] < lost_until) return *code = LOST, -1;
  if (readings[i] >= lacks_from && strstr(lacks, name)) {
    const char *found = strstr(lacks, name);
    char after = found[strlen(name)];
    if (after == '\0' || after == ',') return *code = NOT_SUPPORTED, -1;
  }
  return i;
}

void fake_nvml_set_time(double t) { set_time = t; }

int nvmlInitWithFlags(unsigned flags) {
  const char *text;
  (void)flags;
  if (getenv("FAKE_NVML_INIT")) return atoi(getenv("FAKE_NVML_INIT"));
  gpus = (unsigned)number("FAKE_NVML_GPUS", 2);
  update_s = number("FAKE_NVML_UPDATE_MS", 100) / 1e3;
  call_s = number("FAKE_NVML_CALL_US", 0) / 1e6;
  if ((text = getenv("FAKE_NVML_LACKS"))) lacks = text;
  lacks_from = (long)number("FAKE_NVML_LACKS_FROM", 0);
  if ((text = getenv("FAKE_NVML_LOST"))) sscanf(text, "%d:%ld:%ld", &lost_gpu, &lost_from, &lost_until);
  if ((text = getenv("FAKE_NVML_COUNT")) && !power_readings) {
    int file = open(text, O_RDWR);
    power_readings = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
  }
  started = 1;
  return OK;
}

int nvmlShutdown(void) { return started = 0, OK; }

const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported" : "?"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "999.99.fake"), OK; }

int nvmlDeviceGetCount_v2(unsigned *count) { return *count = gpus, started ? OK : UNINITIALIZED; }

int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device) {
  if (i >= gpus) return INVALID;
  *device = (void *)(intptr_t)(0x1000 + i);
  return OK;
}

int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  (void)device;
  return snprintf(text, size, "Fake H100 80GB HBM3"), OK;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  return snprintf(text, size, "GPU-%04d-fake", (int)((intptr_t)device - 0x1000)), OK;
}

int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw) { return (void)device, *mw = 700000, OK; }

/* The mean of the last second, as of cards since Ampere. */
int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) {
  int code, i = asked(device, "power", &code);
  if (power_readings && (intptr_t)device == 0x1000) ++*power_readings;
  if (i >= 0) *mw = (unsigned)lround(1e3 * (energy_j(i, held()) - energy_j(i, held() - 1)));
  return code;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj) {
  int code, i = asked(device, "energy", &code);
  if (i >= 0) *mj = (unsigned long long)llround(1e3 * energy_j(i, held()));
  return code;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) {
  int code, i = asked(device, "temperature", &code);
  (void)sensor;
  if (i >= 0) *celsius = 60 + (unsigned)i;
  return code;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *errors) {
  int code, i = asked(device, "ecc", &code);
  const char *path = getenv("FAKE_NVML_ECC");
  FILE *file = i == 0 && path && kind == 1 && counter == 0 ? fopen(path, "r") : NULL;
  if (i >= 0) *errors = 0;
  if (file) code = fscanf(file, "%llu", errors) == 1 ? OK : INVALID, fclose(file);
  return code;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  int code, i = asked(device, "remapped", &code);
  const char *text = getenv("FAKE_NVML_REMAPPED");
  if (i >= 0) *corrected = *uncorrected = *pending = *failed = 0;
  if (i == 0 && text) sscanf(text, "%u:%u", pending, failed);
  return code;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned *percent) { /* struct: gpu, memory */
  int code, i = asked(device, "utilization", &code);
  if (i >= 0) percent[0] = 90 + (unsigned)i, percent[1] = 40;
  return code;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *bytes) { /* struct: total, free, used */
  int code, i = asked(device, "memory", &code);
  if (i >= 0) bytes[0] = 80ull << 30, bytes[1] = 59ull << 30, bytes[2] = 21ull << 30;
  return code;
}

int nvmlDeviceGetClockInfo(void *device, int which, unsigned *mhz) {
  int code, i = asked(device, "clock", &code);
  if (i >= 0) *mhz = which == 2 ? 2619 : 1755;
  return code;
}

int nvmlDeviceGetMaxClockInfo(void *device, int which, unsigned *mhz) {
  return (void)device, *mhz = which == 2 ? 2619 : 1980, OK;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
  int code, i = asked(device, "throttle", &code);
  if (i >= 0) *bits = 0x4 | (i ? 0x20 : 0);
  return code;
}

#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits) {
  return nvmlDeviceGetCurrentClocksThrottleReasons(device, bits);
}

typedef struct { unsigned version; int sensor; int celsius; } Temperature;
int nvmlDeviceGetTemperatureV(void *device, Temperature *t) {
  int code, i = asked(device, "temperature", &code);
  if (i >= 0) t->celsius = 60 + i;
  return code;
}

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *m) {
  int code, i = asked(device, "memory", &code);
  if (i >= 0) m->total = 80ull << 30, m->reserved = 1ull << 30, m->free = 59ull << 30, m->used = 20ull << 30;
  return code;
}

static double power_w(int i, double t) { return (fmod(t + AHEAD, PERIOD) < BUSY ? HIGH : LOW) - 10 * i; }

typedef union { double d; unsigned u; unsigned long long ull; } Value;
typedef struct { unsigned field, scope; long long time_us, latency_us; int type, code; Value value; } Field;
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
  int code, i = asked(device, "fields", &code);
  for (int k = 0; i >= 0 && k < count; k++) {
    int of_field = OK;
    readings[i]--;
    if (asked(device, "power_inst", &of_field) < 0 || fields[k].field != 186 || fields[k].scope != 0)
      fields[k].code = of_field ? of_field : NOT_SUPPORTED;
    else
      fields[k].code = OK, fields[k].type = 1, fields[k].value.u = (unsigned)lround(1e3 * power_w(i, held()));
  }
  return code;
}
#endif
