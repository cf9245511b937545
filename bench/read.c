/* How fast processes of this host read memory, each its own, all at once: the bound of decoding, which reads every weight once a token.
 *
 *     read BYTES ROUNDS CPU...      one process pinned to each CPU; prints the median GB/s of each process
 *
 * As a library it has `look`, which reads once.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

uint64_t look(const uint64_t *memory, size_t words) {
    uint64_t sum = 0;
    for (size_t i = 0; i < words; i++) sum ^= memory[i];
    return sum;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **words) {
    if (count < 4) return 2;
    const size_t words_of = (size_t)atoll(words[1]) / 8;
    const int rounds = atoi(words[2]), processes = count - 3;
    double *rates = mmap(NULL, (size_t)processes * sizeof *rates, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int p = 0; p < processes; p++) {
        if (fork()) continue;
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET(atoi(words[3 + p]), &cpus);
        sched_setaffinity(0, sizeof cpus, &cpus);
        const size_t page = 2 << 20, bytes = (words_of * 8 + page - 1) / page * page; /* large pages, as weights have them */
        uint64_t *memory = aligned_alloc(page, bytes), sum = 0;
        double *times = malloc((size_t)rounds * sizeof *times);
        if (!memory || !times) _exit(1);
        madvise(memory, bytes, MADV_HUGEPAGE);
        for (size_t i = 0; i < words_of; i++) memory[i] = i;
        for (int r = 0; r < rounds; r++) {
            const double start = now();
            sum ^= look(memory, words_of);
            times[r] = now() - start;
        }
        qsort(times, (size_t)rounds, sizeof *times, by_size);
        rates[p] = (double)words_of * 8 / times[rounds / 2] * 1e-9;
        _exit(sum == 1);
    }
    while (wait(NULL) > 0) {}
    for (int p = 0; p < processes; p++) printf("%.3f\n", rates[p]);
    return 0;
}
