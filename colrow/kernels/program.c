/* Runs a recorded decoding step: a list of instructions, for one new position of each of a few sequences. Called by program.py.
 *
 * Every sequence is a Row with an arena of its own for activations (float32) and its own keys and values. A product is made for all rows at
 * once, the rest row by row. Sums over ranks go through comm/'s shared memory, whose functions are given as addresses; without them the
 * run stops at each sum, the caller adds `payload` and goes on. Not here: what the instructions are (engine/compiled.py).
 */
#define _GNU_SOURCE
#include "attend.h"
#include "pool.h"
#include "product.h"

#ifndef COLROW_DIGEST
#define COLROW_DIGEST "unknown"
#endif
#define API __attribute__((visibility("default")))

enum { AGAIN = -1, FAILED = -2, SUM_DUE = -3 }; /* why a run stopped; the first two are comm/shm.h's */
enum { ROWS_MAX = 64 };

typedef struct {
    int64_t op, shape[DIMS];
    Operand out, a, b, c;
    void *more; /* Weights, Attention or Sum */
} Instruction;

typedef struct {
    int64_t dtype, width, count;
    Block *blocks;
} Weights;

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
    int64_t payload_dtype; /* of sums: F32 or BF16 */
    void *group;           /* comm/shm.h's Group, whose first field is the seconds waited; NULL: the caller adds */
    AllReduce *all_reduce;
    Buffer *buffer;
    char *payload, *sent, *columns; /* sums; where they were sent from; columns of a product, as it wants them */
    int64_t room, columns_room;
} Program;

/* ---- Products ---- */

typedef struct {
    const Weights *weights;
    Product *product;
    const void *columns;
    int64_t width;
    int rows;
    float *const *arenas;
} Task;

/* Each part gets the same share of every block's rows, in whole lines of results, so that two do not write to one. */
static void multiply(void *what, int part, int parts) {
    const Task *task = what;
    for (int64_t i = 0; i < task->weights->count; i++) {
        const Block *block = &task->weights->blocks[i];
        const int64_t share = (block->rows + parts - 1) / parts, whole = (share + LANES - 1) / LANES * LANES;
        const int64_t first = part * whole < block->rows ? part * whole : block->rows, last = first + whole < block->rows ? first + whole : block->rows;
        task->product(block, first, last, task->weights->width, task->columns, task->width, task->rows, task->arenas);
    }
}

static void pack_bf16(uint16_t *to, const float *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = to_bf16(from[i]);
}

static int product(Program *p, const Instruction *at, const Row *rows, int count, int pairs) {
    const Weights *weights = at->more;
    const int64_t n = weights->width, width = (n + 63) / 64 * 64;
    const int halves = weights->dtype == BF16 && pairs;
    const int padded = (count + COLUMNS - 1) / COLUMNS * COLUMNS;
    float *arenas[ROWS_MAX];
    if (p->columns_room < padded * width) {
        free(p->columns);
        p->columns = aligned_alloc(64, (size_t)(padded * width) * sizeof(float));
        if (!p->columns) return 1;
        memset(p->columns, 0, (size_t)(padded * width) * sizeof(float));
        p->columns_room = padded * width;
    }
    for (int r = 0; r < count; r++) {
        const float *x = place(&at->a, rows[r].arena);
        arenas[r] = rows[r].arena;
        if (halves) {
            uint16_t *column = (uint16_t *)p->columns + r * width;
            pack_bf16(column, x, n);
            memset(column + n, 0, (size_t)(width - n) * sizeof *column);
        } else {
            float *column = (float *)p->columns + r * width;
            memcpy(column, x, (size_t)n * sizeof *column);
            memset(column + n, 0, (size_t)(width - n) * sizeof *column);
        }
    }
    Product *kind = halves ? product_pairs : weights->dtype == BF16 ? product_bf16 : weights->dtype == F32 ? product_f32 : product_int8;
    Task task = {weights, kind, p->columns, width, count, arenas};
    share_out(p->pool, multiply, &task);
    return 0;
}

/* ---- Sums over ranks ---- */

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void write_payload(const Program *p, char *to, const float *from, int64_t at, int64_t n) {
    if (p->payload_dtype == F32) memcpy((float *)to + at, from, (size_t)n * sizeof *from);
    else pack_bf16((uint16_t *)to + at, from, n);
}

static void read_payload(const Program *p, float *to, int64_t at, int64_t n) {
    if (p->payload_dtype == F32) memcpy(to, (const float *)p->payload + at, (size_t)n * sizeof *to);
    else
        for (int64_t i = 0; i < n; i++) to[i] = from_bf16(((const uint16_t *)p->payload)[at + i]);
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
        for (int r = 0; r < count; r++) write_payload(p, p->sent, place(&at->a, rows[r].arena), r * n, n);
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
    for (int r = 0; r < count; r++) read_payload(p, place(&at->out, rows[r].arena), r * n, n);
    return 0;
}

/* ---- The run ---- */

/* From instruction `*at` on for `count` rows. 0 when all are done, else why it stopped at `*at`: call again with `resumed` 1. */
API int64_t kp_run(Program *p, const Row *rows, int count, int64_t *at, int resumed) {
    const int pairs = has_pairs();
    for (; *at < p->count; ++*at, resumed = 0) {
        const Instruction *now = &p->code[*at];
        int64_t status = 0;
        if (now->op < REDUCTION_END)
            for (int r = 0; r < count; r++) elementwise((int)now->op, now->shape, &now->out, &now->a, &now->b, rows[r].arena);
        else if (now->op == PRODUCT) status = product(p, now, rows, count, pairs) ? FAILED : 0;
        else if (now->op == ATTEND)
            for (int r = 0; r < count; r++) {
                float *arena = rows[r].arena;
                attend(now->more, &rows[r], place(&now->a, arena), place(&now->b, arena), place(&now->c, arena), place(&now->out, arena));
            }
        else status = reduce(p, now, rows, count, resumed);
        if (status) return status;
    }
    return 0;
}

/* ---- Its life ---- */

API const char *kp_digest(void) { return COLROW_DIGEST; }
API int kp_rows(void) { return ROWS_MAX; }
API char *kp_payload(const Program *p) { return p->payload; }

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
    free(p->columns);
    free(p);
}
