/* The step: publish, wait, check. Waiting spins, then yields, then sleeps on a futex, and while it sleeps it watches whether the
 * awaited ranks live, whether somebody gave up, and the deadline. Nothing here waits without a bound or a watched condition.
 */
#ifndef COLROW_SHM_WAIT_H
#define COLROW_SHM_WAIT_H

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shm.h"

#define SLEEP_NS 20000000      /* longest sleep between two looks at the peers */
#define CONTENDED_NS 100000    /* a yield that took longer let another process run: who sleeps then gets the processor back sooner */
#define PATIENCE_NS 100000000  /* after so long in a first step, return to Python, so that signals are handled there */

static const char *const op_names[CR_OPS] = {"all_reduce(sum)", "all_reduce(max)", "all_gather", "reduce_scatter",
                                             "broadcast", "object", "barrier", "all_reduce+norm"};
static const char *const dtype_names[CR_DTYPES] = {"float32", "bfloat16", "float16", "float64", "int32", "int64", "bytes"};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline Line *line_of(Group *g, int rank) { return &g->desks[rank].line[g->step & 1]; }
static inline char *slot_of(Group *g, int rank, uint64_t step) { return g->slots + (2 * (uint64_t)rank + (step & 1)) * g->slot_bytes; }

/* ---- Giving up: the first rank that fails tells all others why, so that nobody waits for a group that cannot go on. ---- */

static void tell_all(Group *g, const char *why) {
    uint32_t works = CR_WORKS;
    if (!atomic_compare_exchange_strong(&g->area->state, &works, CR_BREAKING)) return;
    snprintf(g->area->why, CR_TEXT, "%s", why);
    atomic_store_explicit(&g->area->state, CR_BROKEN, memory_order_release);
}

static int64_t fail(Group *g, int peer, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(g->error, CR_TEXT, format, args);
    va_end(args);
    g->failed_rank = peer;
    g->pending = 0;
    tell_all(g, g->error);
    return CR_FAILED;
}

static int64_t fail_told(Group *g) {
    snprintf(g->error, CR_TEXT, "the group has failed: %.*s", CR_TEXT - 32, g->area->why);
    g->failed_rank = -1;
    return CR_FAILED;
}

static inline int is_broken(Group *g) { return atomic_load_explicit(&g->area->state, memory_order_acquire) == CR_BROKEN; }

static const char *describe(const Line *line, char *text, size_t room) {
    const Header *h = &line->header;
    snprintf(text, room, "%s of %llu %s at '%s' (operation %llu)", h->op < CR_OPS ? op_names[h->op] : "?", (unsigned long long)h->count,
             h->dtype < CR_DTYPES ? dtype_names[h->dtype] : "?", line->site, (unsigned long long)h->seq);
    return text;
}

static int64_t fail_mismatch(Group *g, int peer) {
    char mine[CR_TEXT / 3], theirs[CR_TEXT / 3];
    const Line *a = line_of(g, g->rank), *b = line_of(g, peer);
    const char *hint = a->header.op == b->header.op && a->header.count == b->header.count && a->header.dtype == b->header.dtype
                               && a->header.site == b->header.site ? "; sizes or source differ" : "";
    return fail(g, peer, "ranks disagree: rank %d entered %s, rank %d %s%s", g->rank, describe(a, mine, sizeof mine), peer,
                describe(b, theirs, sizeof theirs), hint);
}

/* ---- Is the peer there? ---- */

/* The state letter of /proc/PID/stat: R, S, D, T (stopped), t (traced), Z (ended, not yet waited for), or 0 if there is no such process. */
static char process_state(int pid) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *after_name = strrchr(text, ')'); /* the name may hold anything, brackets too */
    return after_name && after_name[1] ? after_name[2] : 0;
}

static int has_ended(Group *g, int peer) {
    if (g->pidfds[peer] >= 0) { /* becomes readable when the process ends, also while it is a zombie; its number cannot be reused */
        struct pollfd watch = {.fd = g->pidfds[peer], .events = POLLIN};
        return poll(&watch, 1, 0) == 1;
    }
    if (g->pids[peer] <= 0) return 0;
    char state = process_state(g->pids[peer]);
    return state == 0 || state == 'Z' || state == 'X';
}

static inline int has_published(Group *g, int peer) {
    return atomic_load_explicit(&line_of(g, peer)->step, memory_order_acquire) == g->step;
}

/* Looks at every rank that is awaited; a rank that published and then ended is no failure of this step, so the line is read again. A rank
 * that left because the group has failed is not the cause: what broke the group is told first. */
static int64_t look_at_peers(Group *g) {
    char text[CR_TEXT / 2];
    for (int r = 0; r < g->size; r++) {
        if (has_published(g, r)) continue;
        int left = atomic_load_explicit(&g->desks[r].left, memory_order_acquire), ended = !left && has_ended(g, r);
        if (!(left || ended) || has_published(g, r)) continue;
        if (is_broken(g)) break;
        return fail(g, r, "rank %d (pid %d) %s while rank %d waited for it in %s", r, g->pids[r],
                    left ? "has closed the group" : "has ended", g->rank, describe(line_of(g, g->rank), text, sizeof text));
    }
    return is_broken(g) ? fail_told(g) : 0;
}

/* Objects carry decisions, which an idle server makes when work comes: for them a rank that lives may be late, one that is stopped not. */
static int64_t look_at_deadline(Group *g, int peer, int64_t time) {
    if (g->deadline <= 0 || (double)(time - g->wait_began) <= g->deadline * 1e9) return 0;
    char text[CR_TEXT / 2], state = g->pids[peer] > 0 ? process_state(g->pids[peer]) : '?';
    if (line_of(g, g->rank)->header.op == CR_OBJECT && state != 'T' && state != 't') {
        g->wait_began = time;
        return 0;
    }
    return fail(g, peer, "rank %d (pid %d) did not come within %.3g s to %s on rank %d; its process is %s", peer, g->pids[peer], g->deadline,
                describe(line_of(g, g->rank), text, sizeof text), g->rank,
                state == 'T' || state == 't' ? "stopped (SIGSTOP or a debugger)" : state == 'R' ? "running" : state == 'D' ? "waiting for a disk" : "alive");
}

/* ---- Waiting ---- */

/* Sleeps until the peer publishes, at most SLEEP_NS. The sleeper counts itself before it looks again; the publisher stores before it
 * reads the count: sequential consistency of the four makes a lost wake-up impossible. */
static void doze(Group *g, int peer) {
    Line *line = line_of(g, peer);
    Desk *desk = &g->desks[peer];
    struct timespec limit = {.tv_nsec = SLEEP_NS};
    atomic_fetch_add(&desk->sleepers, 1);
    uint64_t seen = atomic_load(&line->step);
    if (seen != g->step) syscall(SYS_futex, (uint32_t *)&line->step, FUTEX_WAIT, (uint32_t)seen, &limit, NULL, 0);
    atomic_fetch_sub(&desk->sleepers, 1);
}

static int64_t wait_long(Group *g, int peer) {
    int64_t entered = now_ns(), time = entered, yield_until = entered + g->yield_ns, status = 0;
    if (!g->wait_began) g->wait_began = entered;
    while (!has_published(g, peer)) {
        if (time < yield_until) {
            int64_t before = time;
            sched_yield();
            time = now_ns();
            if (time - before > CONTENDED_NS) yield_until = 0;
            continue;
        }
        doze(g, peer);
        if (has_published(g, peer)) break;
        time = now_ns();
        if ((status = look_at_peers(g)) || (status = look_at_deadline(g, peer, time))) break;
        if (g->first && time - entered > PATIENCE_NS) {
            status = CR_AGAIN;
            break;
        }
    }
    g->waited += (double)(now_ns() - entered) * 1e-9;
    return status;
}

static int64_t wait_for(Group *g, int peer) {
    if (has_published(g, peer)) return 0;
    int64_t entered = now_ns();
    for (int i = 0; i < g->spins; i++) {
        relax();
        if (has_published(g, peer)) {
            g->waited += (double)(now_ns() - entered) * 1e-9;
            return 0;
        }
    }
    g->waited += (double)(now_ns() - entered) * 1e-9;
    return wait_long(g, peer);
}

static void publish(Group *g) {
    Line *line = line_of(g, g->rank);
    atomic_store(&line->step, g->step); /* sequentially consistent: see doze() */
    if (atomic_load(&g->desks[g->rank].sleepers)) syscall(SYS_futex, (uint32_t *)&line->step, FUTEX_WAKE, g->size, NULL, NULL, 0);
}

/* ---- The step ---- */

static inline int same_header(const Header *a, const Header *b) {
    return ((a->seq ^ b->seq) | (a->op ^ b->op) | (a->dtype ^ b->dtype) | (a->count ^ b->count) | (a->site ^ b->site) | (a->detail ^ b->detail)) == 0;
}

/* Must this rank write its payload now? Not when it comes back to a step that it has already published. */
static inline int must_write(const Group *g) { return !g->pending; }

/* Publishes my slot and returns 0 when all ranks have published theirs, with the same header. Peers' slots of g->step may be read until
 * the next call; afterwards g->step is the number of this step. */
static int64_t exchange(Group *g) {
    if (!g->pending) publish(g);
    g->pending = 0;
    const Header *mine = &line_of(g, g->rank)->header;
    for (int i = 1; i < g->size; i++) { /* the next rank first, so that not all read the same line at once */
        int peer = g->rank + i < g->size ? g->rank + i : g->rank + i - g->size;
        int64_t status = wait_for(g, peer);
        if (status) {
            g->pending = status == CR_AGAIN;
            return status;
        }
        if (!same_header(mine, &line_of(g, peer)->header)) return fail_mismatch(g, peer);
    }
    g->wait_began = 0;
    g->first = 0;
    return 0;
}

/* Opens the next step with the same header as the last one. */
static void next_step(Group *g) {
    const Line *old = line_of(g, g->rank);
    g->step++;
    Line *line = line_of(g, g->rank);
    line->header = old->header;
    memcpy(line->site, old->site, CR_NAME);
}

/* Opens an operation: its number, its header, its first step. `data` only recognises a call that comes back after CR_AGAIN. */
static int64_t begin(Group *g, uint32_t op, uint32_t dtype, uint64_t count, uint64_t detail, int site, const void *data) {
    if (site < 0 || site >= g->site_count) return fail(g, g->rank, "rank %d: unknown call site number %d", g->rank, site);
    Header header = {g->seq + !g->pending, op, dtype, count, g->sites[site].hash, detail};
    if (g->pending) {
        if (same_header(&header, &line_of(g, g->rank)->header) && data == g->pending_data) return 0;
        char text[CR_TEXT / 2];
        return fail(g, g->rank, "rank %d left %s before it was done", g->rank, describe(line_of(g, g->rank), text, sizeof text));
    }
    if (is_broken(g)) return fail_told(g);
    g->seq++;
    g->step++;
    g->first = 1;
    g->moved = 0;
    g->pending_data = data;
    Line *line = line_of(g, g->rank);
    line->header = header;
    memcpy(line->site, g->sites[site].name, CR_NAME);
    return 0;
}

#endif
