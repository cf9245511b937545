/* The floor: the least C that all-reduces between two pinned processes over shared memory. No headers, no deadlines, no liveness, two ranks.
 *
 *     floor BYTES UNIT ROUNDS CPU CPU      UNIT 4: float32, 2: bfloat16 (added in float32)
 *
 * Prints for each of three ways "name median 99th-percentile" in microseconds, copy in and copy out included:
 *   one-shot    copy all in, meet, add
 *   two-shot    copy all in, meet, add half, meet, copy the other half out
 *   in-pieces   two-shot, 256 KiB at a time, so that the peer finds the data in the cache
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 256 << 10 };

typedef struct {
    _Alignas(128) _Atomic uint64_t step;
} Flag;

static Flag *flags;      /* one a rank */
static char *slots[2][2]; /* [rank][parity], each as large as the payload */
static uint64_t step;
static int me, unit;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static void meet(void) {
    atomic_store_explicit(&flags[me].step, ++step, memory_order_release);
    while (atomic_load_explicit(&flags[!me].step, memory_order_acquire) < step) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
}

static void add(char *restrict x, const char *restrict y, size_t bytes) {
    if (unit == 4) {
        float *a = (float *)x;
        const float *b = (const float *)y;
        for (size_t i = 0; i < bytes / 4; i++) a[i] += b[i];
        return;
    }
    uint16_t *a = (uint16_t *)x;
    const uint16_t *b = (const uint16_t *)y;
    for (size_t i = 0; i < bytes / 2; i++) {
        uint32_t p = (uint32_t)a[i] << 16, q = (uint32_t)b[i] << 16, r;
        float f, g;
        memcpy(&f, &p, 4), memcpy(&g, &q, 4);
        f += g;
        memcpy(&r, &f, 4);
        a[i] = (uint16_t)((r + 0x7fff + ((r >> 16) & 1)) >> 16);
    }
}

static void one_shot(char *x, size_t bytes) {
    char **mine = slots[me], **theirs = slots[!me];
    uint64_t parity = (step + 1) & 1;
    memcpy(mine[parity], x, bytes);
    meet();
    add(x, theirs[parity], bytes);
}

static void two_shot(char *x, size_t bytes) {
    char **mine = slots[me], **theirs = slots[!me];
    size_t half = bytes / 2, own = me ? half : 0, other = half - own;
    memcpy(mine[0] + other, x + other, half);
    meet();
    add(x + own, theirs[0] + own, half);
    memcpy(mine[1] + own, x + own, half);
    meet();
    memcpy(x + other, theirs[1] + other, half);
}

static void in_pieces(char *x, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PIECE) two_shot(x + at, bytes - at < PIECE ? bytes - at : PIECE);
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *name, void (*way)(char *, size_t), size_t bytes, int rounds) {
    char *x = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    double *times = malloc((size_t)rounds * sizeof *times);
    memset(x, 0, bytes);
    for (int i = 0; i < rounds + rounds / 10; i++) {
        double start = now();
        way(x, bytes);
        times[i < rounds / 10 ? 0 : i - rounds / 10] = now() - start; /* the first tenth warms up */
    }
    qsort(times, (size_t)rounds, sizeof *times, by_size);
    if (me == 0) printf("%s %.3f %.3f\n", name, times[rounds / 2], times[rounds * 99 / 100]);
    free(times);
    free(x);
}

int main(int count, char **words) {
    if (count != 6) return 2;
    size_t bytes = (size_t)atoll(words[1]);
    int rounds = atoi(words[3]);
    unit = atoi(words[2]);
    size_t total = 4096 + 4 * bytes;
    char *base = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (base == MAP_FAILED) return 1;
    flags = (Flag *)base;
    for (int i = 0; i < 4; i++) slots[i / 2][i % 2] = base + 4096 + (size_t)i * bytes;
    pid_t child = fork();
    me = child == 0;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(atoi(words[4 + me]), &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);
    measure("one-shot", one_shot, bytes, rounds);
    measure("two-shot", two_shot, bytes, rounds);
    measure("in-pieces", in_pieces, bytes, rounds);
    if (me == 0) waitpid(child, NULL, 0);
    return 0;
}
