/* Runs a recorded decoding step: a list of instructions, for one new position of each of a few sequences. Called by program.py.
 *
 * Every sequence is a Row with an arena of its own for activations (float32) and its own keys and values. A product is made for all rows at
 * once, the rest row by row. Sums over ranks go through comm/'s shared memory, whose functions are given as addresses; without them the
 * run stops at each sum, the caller adds `payload` and goes on. Not here: what the instructions are (engine/compiled.py).
 */
#define _GNU_SOURCE
#include "attend.h"
#include "multiply.h"
#include "norm.h"
#include "many.h"

#ifndef COLROW_DIGEST
#define COLROW_DIGEST "unknown"
#endif
#define API __attribute__((visibility("default")))

enum { AGAIN = -1, FAILED = -2, SUM_DUE = -3, PRODUCT_DUE = -4 }; /* why a run stopped; the first two are comm/shm.h's */
enum { ROWS_MAX = 64 };

typedef struct {
    int64_t op, shape[DIMS];
    Operand out, a, b, c;
    void *more; /* Weights, Experts, Attention, TopK or Sum */
} Instruction;

typedef struct {
    int64_t count, site, calls, moved;
    double seconds, waited, ended; /* added up until the caller takes them; the end of the last one, since the epoch */
} Sum;

typedef int64_t AllReduce(void *group, const void *x, void *out, uint64_t count, int dtype, int op, int site);
typedef char *Buffer(void *group, uint64_t bytes);

typedef struct {
    const Instruction *code;
    int64_t count;
    Pool *pool;
    int64_t payload_dtype; /* of sums */
    void *group;           /* comm/shm.h's Group, whose first field is the seconds waited; NULL: the caller adds */
    AllReduce *all_reduce;
    Buffer *buffer;
    char *payload, *sent; /* sums; where they were sent from */
    int64_t room;
    double *spent; /* seconds of each instruction, added up; NULL: not wanted */
    int rides;     /* whether the caller makes the products: `task` is the one at which the run stopped */
    Task task;
    float *arenas[ROWS_MAX];
    Room rooms[ROOMS];
} Program;

/* ---- Sums over ranks ---- */

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

SIMD static void sent(void *to, int dtype, int64_t at, const float *from, int64_t n) { put(to, dtype, at, from, n); }

SIMD static void received(float *to, const void *from, int dtype, int64_t at, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = get(from, dtype, at + i);
}

/* 0, or why the run stops here. `resumed`: it stopped here before. */
static int64_t reduce(Program *p, const Instruction *at, const Row *rows, int count, int resumed) {
    Sum *sum = at->more;
    const int64_t n = sum->count, bytes = n * count * (p->payload_dtype == F32 ? 4 : 2);
    if (!resumed) {
        if (p->room < bytes) {
            free(p->payload);
            p->payload = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
            if (!p->payload) return FAILED;
            p->room = bytes;
        }
        char *slot = p->group ? p->buffer(p->group, (uint64_t)bytes) : NULL;
        p->sent = slot ? slot : p->payload;
        for (int r = 0; r < count; r++) sent(p->sent, (int)p->payload_dtype, r * n, place(&at->a, rows[r].arena), n);
    }
    if (p->group) {
        const double begun = now(CLOCK_MONOTONIC), waited = *(const double *)p->group;
        const int64_t moved = p->all_reduce(p->group, p->sent, p->payload, (uint64_t)(n * count), (int)p->payload_dtype, 0, (int)sum->site);
        sum->seconds += now(CLOCK_MONOTONIC) - begun;
        sum->waited += *(const double *)p->group - waited;
        if (moved < 0) return moved;
        sum->moved += moved;
        sum->calls++;
        sum->ended = now(CLOCK_REALTIME);
    } else if (!resumed) return SUM_DUE;
    for (int r = 0; r < count; r++) received(place(&at->out, rows[r].arena), p->payload, (int)p->payload_dtype, r * n, n);
    return 0;
}

/* ---- The run ---- */

static double seconds(void) { return now(CLOCK_MONOTONIC); }

/* What is done for each sequence by itself. */
static void one_row(const Instruction *now, const Row *row) {
    float *arena = row->arena, *a = place(&now->a, arena), *b = place(&now->b, arena), *out = place(&now->out, arena);
    switch (now->op) {
    case ATTEND: attend(now->more, row, a, b, place(&now->c, arena), out); break;
    case TOPK: topk(now->more, a, out, b); break;
    case TAKE: take(now->shape, a, b, out); break;
    case SCATTER: scatter(now->shape, (float)now->c.number, b, out); break;
    default: elementwise((int)now->op, now->shape, &now->out, &now->a, &now->b, (float)now->c.number, arena);
    }
}

/* From instruction `*at` on for `count` rows. 0 when all are done, else why it stopped at `*at`: call again with `resumed` 1. */
API int64_t kp_run(Program *p, const Row *rows, int count, int64_t *at, int resumed) {
    float **const arenas = p->arenas;
    for (int r = 0; r < count; r++) arenas[r] = rows[r].arena;
    for (; *at < p->count; ++*at, resumed = 0) {
        const Instruction *now = &p->code[*at];
        const double begun = p->spent ? seconds() : 0;
        int64_t status = 0;
        if (now->op == PRODUCT && p->rides) status = resumed ? 0 : products(p->rooms, now->more, &now->a, arenas, count, &p->task) ? FAILED : PRODUCT_DUE;
        else if (now->op == PRODUCT) status = multiply_all(p->rooms, p->pool, now->more, &now->a, arenas, count) ? FAILED : 0;
        else if (now->op == EXPERTS)
            status = multiply_chosen(p->rooms, p->pool, now->more, &now->a, &now->b, &now->out, arenas, count) ? FAILED : 0;
        else if (now->op == REDUCE) status = reduce(p, now, rows, count, resumed);
        else
            for (int r = 0; r < count; r++) one_row(now, &rows[r]);
        if (p->spent) p->spent[*at] += seconds() - begun;
        if (status) return status;
    }
    return 0;
}

/* ---- Beside it ---- */

API void kp_rows(const Block *block, int64_t n, int dtype, void *out, int64_t part, int64_t parts) { rows_of(block, n, dtype, out, part, parts); }

#if CLONES && HIGHEST >= 5
API void kp_compact(const Compacting *c, int64_t part, int64_t parts) { compact_make(c, part, parts); }
#endif
API int kp_has_pairs(void) { return has_pairs(); }

API int kp_many_helps(void) { return many_helps(); }
API int kp_many(const Many *m, int64_t part, int64_t parts) { return many(m, part, parts); }
API void kp_norm(const Norm *norm, int64_t part, int64_t parts) { norms(norm, part, parts); }

/* ---- Its life ---- */

API const char *kp_digest(void) { return COLROW_DIGEST; }
API char *kp_payload(const Program *p) { return p->payload; }
API const Task *kp_ride(Program *p, int rides) {
    p->rides = rides;
    return &p->task;
}
API void kp_make(Program *p, int64_t job) {
    Task task = p->task;
    task.jobs += job, task.count = 1;
    share_out(p->pool, multiply, &task);
}
API void kp_spend(Program *p, double *spent) { p->spent = spent; }

/* `code` stays the caller's, and stays where it is. NULL without memory. */
API Program *kp_open(const Instruction *code, int64_t count, int threads, int payload_dtype, void *group, AllReduce *all_reduce, Buffer *buffer) {
    Program *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    *p = (Program){.code = code, .count = count, .payload_dtype = payload_dtype, .group = group, .all_reduce = all_reduce, .buffer = buffer};
    p->pool = open_pool(threads);
    if (p->pool) return p;
    free(p);
    return NULL;
}

API void kp_close(Program *p) {
    close_pool(p->pool);
    free(p->payload);
    for (int i = 0; i < ROOMS; i++) free(p->rooms[i].at);
    free(p);
}
