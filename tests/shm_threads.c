/* The C part of comm/shm with ranks as threads over one mapping, to be compiled with -fsanitize=thread (tests/test_shm_threads.py).
 *
 *     shm_threads RANKS OPERATIONS SEED
 *
 * Every thread draws the same random operations, sizes and pauses from the seed, runs them and compares every element with what it computes
 * itself of all ranks' inputs. At the end one rank disagrees, and all must fail. Prints "ok", or what is wrong; exit code 0 or 1.
 */
#include "../colrow/comm/shm.c"

#include <pthread.h>

enum { SLOT = 4096, MOST = 5000 };

static int ranks, operations;
static uint64_t seed;
static char *base;
static _Atomic int failures;

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static float value(int rank, uint64_t turn, uint64_t i) { return (float)(int64_t)(mix(seed ^ mix(turn * 64 + (uint64_t)rank) ^ i) % 2001) / 7.0f; }

static void expect(int rank, uint64_t turn, const char *what, int right) {
    if (!right && !atomic_fetch_add(&failures, 1)) fprintf(stderr, "rank %d, operation %llu: wrong %s\n", rank, (unsigned long long)turn, what);
}

static float sum(uint64_t turn, uint64_t i) {
    float total = value(0, turn, i);
    for (int r = 1; r < ranks; r++) total += value(r, turn, i);
    return total;
}

/* Calls again while the library asks for it; the library must not fail. */
#define DONE(CALL)                                                                       \
    do {                                                                                 \
        int64_t status;                                                                  \
        while ((status = (CALL)) == CR_AGAIN) {}                                         \
        if (status < 0) {                                                                \
            fprintf(stderr, "rank %d, operation %llu: %s\n", rank, (unsigned long long)turn, g->error); \
            atomic_fetch_add(&failures, 1);                                              \
            return;                                                                      \
        }                                                                                \
    } while (0)

static void one_operation(Group *g, int rank, uint64_t turn, int site, float *x, float *out) {
    const uint64_t draw = mix(seed + turn), kind = draw % 5, count = (draw >> 8) % MOST, source = (draw >> 32) % (uint64_t)ranks;
    const uint64_t share = count / (uint64_t)ranks;
    uint64_t sizes[64];
    char *places[64];
    for (int r = 0; r < ranks; r++) sizes[r] = (share + (uint64_t)r % 3) * 4, places[r] = (char *)(out + (share + 3) * (uint64_t)r);
    g->one_shot_limit = (draw >> 40) % 2 ? 1 << 20 : 0;
    for (uint64_t i = 0; i < MOST + 64 * 3; i++) x[i] = value(rank, turn, i);
    int right = 1;
    if (kind <= 1) {
        DONE(cr_all_reduce(g, (char *)x, (char *)(kind ? out : x), count, CR_F32, 0, site));
        for (uint64_t i = 0; i < count; i++) right &= (kind ? out : x)[i] == sum(turn, i);
    } else if (kind == 2) {
        DONE(cr_all_gather(g, (char *)x, places, sizes, CR_F32, count, CR_ALL_GATHER, site));
        for (int r = 0; r < ranks; r++)
            for (uint64_t i = 0; i < sizes[r] / 4; i++) right &= ((float *)places[r])[i] == value(r, turn, i);
    } else if (kind == 3) {
        const char *parts[64];
        for (int r = 0; r < ranks; r++) parts[r] = (char *)(x + (share + 3) * (uint64_t)r);
        DONE(cr_reduce_scatter(g, parts, sizes, (char *)out, CR_F32, count, site));
        for (uint64_t i = 0; i < sizes[rank] / 4; i++) right &= out[i] == sum(turn, (share + 3) * (uint64_t)rank + i);
    } else {
        DONE(cr_broadcast(g, (char *)x, count, CR_F32, (int)source, site));
        for (uint64_t i = 0; i < count; i++) right &= x[i] == value((int)source, turn, i);
    }
    expect(rank, turn, op_names[line_of(g, rank)->header.op], right);
}

static void *run(void *number) {
    const int rank = (int)(intptr_t)number;
    int none[64] = {0}, files[64];
    for (int r = 0; r < ranks; r++) files[r] = -1;
    Group *g = cr_open(base, rank, ranks, SLOT, none, files, ranks > 2);
    float *x = calloc(MOST + 64 * 3, 4), *out = calloc(MOST + 64 * 8, 4);
    const int site = cr_site(g, "threads"), other = cr_site(g, "elsewhere");
    for (uint64_t turn = 0; turn < (uint64_t)operations && !failures; turn++) {
        if (mix(seed ^ turn * 97 ^ (uint64_t)rank) % 64 == 0) usleep(mix(turn + (uint64_t)rank) % 30000); /* beyond spinning: they sleep */
        one_operation(g, rank, turn, site, x, out);
    }
    if (!failures && ranks > 1) {
        int64_t status;
        while ((status = cr_all_reduce(g, (char *)x, (char *)x, 10, CR_F32, 0, rank == ranks - 1 ? other : site)) == CR_AGAIN) {}
        expect(rank, (uint64_t)operations, "silence of ranks that disagree", status == CR_FAILED && strstr(g->error, "disagree") != NULL);
    }
    cr_close(g);
    free(x);
    free(out);
    return NULL;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    ranks = atoi(words[1]), operations = atoi(words[2]), seed = (uint64_t)atoll(words[3]);
    if (ranks < 1 || ranks > 64) return 2;
    base = mmap(NULL, cr_bytes(ranks, SLOT), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return 2;
    cr_format(base, ranks, SLOT, "0123456789abcdef0123456789abcdef");
    pthread_t threads[64];
    for (int r = 0; r < ranks; r++) pthread_create(&threads[r], NULL, run, (void *)(intptr_t)r);
    for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
    puts(failures ? "failed" : "ok");
    return failures ? 1 : 0;
}
