/* The collectives, each built from steps (shm.h). Called by shm.py through ctypes; every function returns the bytes that this rank moved
 * (wrote to its slots or read from its peers'), CR_AGAIN (call again with the same arguments: signals may be handled in between), or
 * CR_FAILED (`error` says why; the group is of no further use).
 */
#define _GNU_SOURCE
#include "shm.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "shm_norm.h"
#include "shm_reduce.h"
#include "shm_wait.h"

#ifndef COLROW_DIGEST
#define COLROW_DIGEST "unknown"
#endif
#define API __attribute__((visibility("default")))

static inline uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

/* ---- Copies, counted ---- */

static inline void put(Group *g, uint64_t offset, const char *from, uint64_t bytes) {
    char *to = slot_of(g, g->rank, g->step) + offset;
    if (to != from) { /* equal where the value was computed in the slot */
        memcpy(to, from, bytes);
        g->moved += (int64_t)bytes;
    }
}

static inline void get(Group *g, int peer, uint64_t offset, char *to, uint64_t bytes) {
    memcpy(to, slot_of(g, peer, g->step) + offset, bytes);
    g->moved += (int64_t)bytes;
}

/* Reduces what all ranks have at `offset` of their slots, in rank order; this rank's own contribution is read from `own`. */
static void reduce_slots(Group *g, Reduce *reduce, size_t unit, uint64_t offset, const char *own, char *to, uint64_t bytes) {
    for (int r = 0; r < g->size; r++) g->inputs[r] = r == g->rank ? own : slot_of(g, r, g->step) + offset;
    reduce(to, g->inputs, g->size, bytes / unit);
    g->moved += (int64_t)(bytes * (uint64_t)(g->size - 1));
}

static uint64_t hash_sizes(const uint64_t *sizes, int n) {
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a, a word at a time */
    for (int i = 0; i < n; i++) hash = (hash ^ sizes[i]) * 0x100000001b3ull;
    return hash;
}

/* ---- All-reduce ---- */

/* Every rank reads everything: one step, (n-1)·B bytes read. */
static int64_t one_shot(Group *g, const char *x, char *out, uint64_t bytes, Reduce *reduce, size_t unit) {
    uint64_t capacity = g->slot_bytes;
    for (uint64_t at = 0;;) {
        uint64_t length = smaller(capacity, bytes - at);
        if (must_write(g)) put(g, 0, x + at, length);
        int64_t status = exchange(g);
        if (status) return status;
        reduce_slots(g, reduce, unit, 0, x + at, out + at, length);
        at += length;
        if (at >= bytes) return g->moved;
        next_step(g);
    }
}

/* Every rank reduces its own part of a chunk and the others fetch it: 2(n-1)/n·B bytes read. Steps overlap: step j carries the parts of
 * chunk j, and in the place of the rank's own part, which nobody needs, the reduced part of chunk j-1. So k chunks take k+1 steps. Chunks
 * are as small as a slot: the peers find them in the cache. */
static int64_t two_shot(Group *g, const char *x, char *out, uint64_t bytes, Reduce *reduce, size_t unit) {
    const uint64_t n = (uint64_t)g->size, me = (uint64_t)g->rank, room = g->slot_bytes / n / 64 * 64;
    const uint64_t chunks = (bytes + room * n - 1) / (room * n), part = round_up((bytes + chunks * n - 1) / (chunks * n), 64), stride = part * n;
    for (uint64_t j = 0; j <= chunks; j++) {
        const uint64_t start = smaller(j * stride, bytes), length = smaller(stride, bytes - start);
        if (must_write(g)) {
            const uint64_t hole = smaller(me * part, length), after = smaller((me + 1) * part, length);
            put(g, 0, x + start, hole);
            put(g, after, x + start + after, length - after);
        }
        int64_t status = exchange(g);
        if (status) return status;
        if (j > 0) { /* fetch what the others reduced of the chunk before, which was a full one unless it is the last */
            const uint64_t before = (j - 1) * stride, had = smaller(stride, bytes - before);
            for (uint64_t i = 1; i < n; i++) {
                const uint64_t q = (me + i) % n, from = smaller(q * part, had), to = smaller(from + part, had);
                get(g, (int)q, q * part, out + before + from, to - from);
            }
        }
        if (j == chunks) return g->moved;
        const uint64_t from = smaller(me * part, length), to = smaller(from + part, length);
        char *next_slot = slot_of(g, g->rank, g->step + 1);
        for (uint64_t at = from; at < to; at += 8192) { /* small pieces: the copy finds the sum in the first-level cache */
            const uint64_t piece = smaller(8192, to - at);
            reduce_slots(g, reduce, unit, at, x + start + at, out + start + at, piece);
            memcpy(next_slot + at, out + start + at, piece);
            g->moved += (int64_t)piece;
        }
        next_step(g);
    }
    return g->moved;
}

/* `out` may be `x`. `x` may be the slot of the coming step (cr_buffer) if out is not. */
API int64_t cr_all_reduce(Group *g, const char *x, char *out, uint64_t count, int dtype, int op, int site) {
    const size_t unit = size_of[dtype];
    const uint64_t bytes = count * unit, in_slot = x == slot_of(g, g->rank, g->pending ? g->step : g->step + 1);
    int64_t status = begin(g, op ? CR_ALL_REDUCE_MAX : CR_ALL_REDUCE_SUM, (uint32_t)dtype, count, 0, site, x);
    if (status) return status;
    if (bytes <= g->one_shot_limit || in_slot || g->size == 1) return one_shot(g, x, out, bytes, reduce_of[dtype][op], unit);
    return two_shot(g, x, out, bytes, reduce_of[dtype][op], unit);
}

/* Sum of all ranks' x [rows, width], added to `residual` in place, and the RMSNorm of that into `out`: as many rows a step as a slot holds,
 * at least one. `x` may be the slot of the coming step if that holds all rows. `out` overlaps neither x nor residual. */
API int64_t cr_reduce_norm(Group *g, const char *x, char *residual, const char *weight, char *out, uint64_t rows, uint64_t width, int dtype,
                           float eps, int site) {
    const uint64_t row = width * size_of[dtype], capacity = g->slot_bytes / (row ? row : 1), detail = (uint64_t)bits_of(eps) << 32 | width;
    int64_t status = begin(g, CR_REDUCE_NORM, (uint32_t)dtype, rows * width, detail, site, x);
    if (status) return status;
    for (uint64_t done = 0;;) {
        const uint64_t now = smaller(capacity, rows - done);
        if (must_write(g)) put(g, 0, x + done * row, now * row);
        if ((status = exchange(g))) return status;
        for (uint64_t i = 0; i < now; i++) {
            const uint64_t at = (done + i) * row;
            reduce_slots(g, reduce_of[dtype][0], size_of[dtype], i * row, x + at, out + at, row);
            norm_of[dtype](out + at, residual + at, weight, width, eps);
        }
        done += now;
        if (done >= rows) return g->moved;
        next_step(g);
    }
}

/* ---- The others: one step per chunk ---- */

/* outs[r] receives sizes[r] bytes from rank r; sizes are the same on all ranks. */
API int64_t cr_all_gather(Group *g, const char *x, char *const *outs, const uint64_t *sizes, int dtype, uint64_t count, int op, int site) {
    uint64_t longest = 0, own = sizes[g->rank];
    for (int r = 0; r < g->size; r++) longest = sizes[r] > longest ? sizes[r] : longest;
    int64_t status = begin(g, (uint32_t)op, (uint32_t)dtype, count, hash_sizes(sizes, g->size), site, x);
    if (status) return status;
    for (uint64_t at = 0;;) {
        if (must_write(g) && at < own) put(g, 0, x + at, smaller(g->slot_bytes, own - at));
        if ((status = exchange(g))) return status;
        for (int r = 0; r < g->size; r++)
            if (at < sizes[r] && r != g->rank) get(g, r, 0, outs[r] + at, smaller(g->slot_bytes, sizes[r] - at));
        at += g->slot_bytes;
        if (at >= longest) break;
        next_step(g);
    }
    if (outs[g->rank] != x) memcpy(outs[g->rank], x, own);
    return g->moved;
}

/* parts[r] is this rank's contribution to rank r, of sizes[r] bytes; out receives the sum of what all ranks have for this one. */
API int64_t cr_reduce_scatter(Group *g, const char *const *parts, const uint64_t *sizes, char *out, int dtype, uint64_t count, int site) {
    const uint64_t room = g->slot_bytes / (uint64_t)g->size / 64 * 64;
    uint64_t longest = 0;
    for (int r = 0; r < g->size; r++) longest = sizes[r] > longest ? sizes[r] : longest;
    int64_t status = begin(g, CR_REDUCE_SCATTER, (uint32_t)dtype, count, hash_sizes(sizes, g->size), site, out);
    if (status) return status;
    for (uint64_t at = 0;;) {
        for (int r = 0; r < g->size && must_write(g); r++)
            if (at < sizes[r] && r != g->rank) put(g, room * (uint64_t)r, parts[r] + at, smaller(room, sizes[r] - at));
        if ((status = exchange(g))) return status;
        if (at < sizes[g->rank])
            reduce_slots(g, reduce_of[dtype][0], size_of[dtype], room * (uint64_t)g->rank, parts[g->rank] + at, out + at,
                         smaller(room, sizes[g->rank] - at));
        at += room;
        if (at >= longest) return g->moved;
        next_step(g);
    }
}

API int64_t cr_broadcast(Group *g, char *x, uint64_t count, int dtype, int source, int site) {
    const uint64_t bytes = count * size_of[dtype];
    int64_t status = begin(g, CR_BROADCAST, (uint32_t)dtype, count, (uint64_t)source, site, x);
    if (status) return status;
    for (uint64_t at = 0;;) {
        const uint64_t length = smaller(g->slot_bytes, bytes - at);
        if (g->rank == source && must_write(g)) put(g, 0, x + at, length);
        if ((status = exchange(g))) return status;
        if (g->rank != source) get(g, source, 0, x + at, length);
        at += length;
        if (at >= bytes) return g->moved;
        next_step(g);
    }
}

/* ---- Life of a group ---- */

API const char *cr_digest(void) { return COLROW_DIGEST; }

static uint64_t desks_at(void) { return round_up(sizeof(Area), 4096); }
static uint64_t slots_at(int size) { return round_up(desks_at() + (uint64_t)size * sizeof(Desk), 4096); }

/* Bytes of the mapping for `size` ranks. */
API uint64_t cr_bytes(int size, uint64_t slot_bytes) { return slots_at(size) + 2 * (uint64_t)size * slot_bytes; }

/* Lays a zeroed mapping out. Done by one rank, before the others attach. */
API void cr_format(char *base, int size, uint64_t slot_bytes, const char *token) {
    Area *area = (Area *)base;
    area->ranks = (uint64_t)size;
    area->slot_bytes = slot_bytes;
    memcpy(area->token, token, sizeof area->token);
    area->magic = CR_MAGIC;
}

/* 0, or 1 where `base` is not the mapping that was meant. */
API int cr_differs(const char *base, int size, uint64_t slot_bytes, const char *token) {
    const Area *area = (const Area *)base;
    return area->magic != CR_MAGIC || area->ranks != (uint64_t)size || area->slot_bytes != slot_bytes || memcmp(area->token, token, sizeof area->token);
}

API char *cr_map(int file, uint64_t bytes) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    return base == MAP_FAILED ? NULL : base;
}

API void cr_unmap(char *base, uint64_t bytes) { munmap(base, bytes); }

API Group *cr_open(char *base, int rank, int size, uint64_t slot_bytes, const int *pids, const int *pidfds, int crowded) {
    Group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->area = (Area *)base;
    g->desks = (Desk *)(base + desks_at());
    g->slots = base + slots_at(size);
    g->slot_bytes = slot_bytes;
    g->rank = rank;
    g->size = size;
    g->failed_rank = -1;
    g->one_shot_limit = slot_bytes;
    /* Where ranks outnumber the processors, the awaited rank may need this one's: give it up at once, and sleep soon. */
    g->spins = crowded ? 20 : 2000;
    g->yield_ns = crowded ? 50000 : 1000000;
    g->pids = calloc((size_t)size, sizeof *g->pids);
    g->pidfds = calloc((size_t)size, sizeof *g->pidfds);
    g->inputs = calloc((size_t)size, sizeof *g->inputs);
    if (!g->pids || !g->pidfds || !g->inputs) return NULL;
    memcpy(g->pids, pids, (size_t)size * sizeof *pids);
    memcpy(g->pidfds, pidfds, (size_t)size * sizeof *pidfds);
    return g;
}

/* The number of a call site, to be passed to operations; -1 without memory. */
API int cr_site(Group *g, const char *name) {
    if (g->site_count == g->site_room) {
        int room = g->site_room ? 2 * g->site_room : 64;
        Site *sites = realloc(g->sites, (size_t)room * sizeof *sites);
        if (!sites) return -1;
        g->sites = sites;
        g->site_room = room;
    }
    Site *site = &g->sites[g->site_count];
    memset(site, 0, sizeof *site);
    strncpy(site->name, name, CR_NAME - 1);
    site->hash = 0xcbf29ce484222325ull;
    for (const char *c = name; *c; c++) site->hash = (site->hash ^ (unsigned char)*c) * 0x100000001b3ull;
    return g->site_count++;
}

API void cr_forget_sites(Group *g) { g->site_count = 0; }

/* Where the next operation of `bytes` bytes will be read by the others: a value computed there need not be copied. NULL if it is too large. */
API char *cr_buffer(Group *g, uint64_t bytes) { return bytes <= g->slot_bytes ? slot_of(g, g->rank, g->step + 1) : NULL; }

/* This rank cannot go on: the others fail at their next step instead of waiting. */
API void cr_give_up(Group *g, const char *why) {
    char text[CR_TEXT / 2];
    fail(g, g->rank, "rank %d gave up in %s: %s", g->rank, describe(line_of(g, g->rank), text, sizeof text), why);
}

API void cr_close(Group *g) {
    atomic_store_explicit(&g->desks[g->rank].left, 1, memory_order_release);
    for (int parity = 0; parity < 2; parity++)
        syscall(SYS_futex, (uint32_t *)&g->desks[g->rank].line[parity].step, FUTEX_WAKE, g->size, NULL, NULL, 0);
    free(g->pids);
    free(g->pidfds);
    free(g->inputs);
    free(g->sites);
    free(g);
}
