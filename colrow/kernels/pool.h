/* Threads that wait for parts of a product. One product lasts tens of microseconds, so they spin a while before they sleep. */
#ifndef COLROW_POOL_H
#define COLROW_POOL_H

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS = 20000 };

typedef void Work(void *what, int part, int parts);

typedef struct {
    _Alignas(128) _Atomic uint32_t turn; /* the number of the work that is open */
    _Atomic int stop;
    _Alignas(128) _Atomic uint32_t done; /* helpers that have finished it */
    Work *work;
    void *what;
    int helpers;
    struct Helper {
        pthread_t thread;
        void *pool;
        int part;
    } *helper;
} Pool;

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void *help(void *argument) {
    struct Helper *self = argument;
    Pool *pool = self->pool;
    for (uint32_t seen = 0;;) {
        for (int spins = 0; atomic_load(&pool->turn) == seen; spins++) {
            if (spins < SPINS) pause_briefly();
            else syscall(SYS_futex, (uint32_t *)&pool->turn, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        }
        seen++;
        if (atomic_load(&pool->stop)) return NULL;
        pool->work(pool->what, self->part, pool->helpers + 1);
        atomic_fetch_add(&pool->done, 1);
    }
}

/* Runs work(what, part, parts) for every part; returns when all are done. */
static void share_out(Pool *pool, Work *work, void *what) {
    if (!pool->helpers) {
        work(what, 0, 1);
        return;
    }
    pool->work = work;
    pool->what = what;
    atomic_store(&pool->done, 0);
    atomic_fetch_add(&pool->turn, 1);
    syscall(SYS_futex, (uint32_t *)&pool->turn, FUTEX_WAKE_PRIVATE, pool->helpers, NULL, NULL, 0);
    work(what, 0, pool->helpers + 1);
    for (int spins = 0; atomic_load(&pool->done) != (uint32_t)pool->helpers; spins++) {
        if (spins < SPINS) pause_briefly();
        else sched_yield();
    }
}

static Pool *open_pool(int threads) {
    Pool *pool = aligned_alloc(128, (sizeof(Pool) + 127) / 128 * 128);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->helper = calloc((size_t)threads, sizeof *pool->helper);
    if (!pool->helper) {
        free(pool);
        return NULL;
    }
    for (int i = 0; i + 1 < threads; i++) {
        pool->helper[i] = (struct Helper){.pool = pool, .part = i + 1};
        if (pthread_create(&pool->helper[i].thread, NULL, help, &pool->helper[i])) break;
        pool->helpers++;
    }
    return pool;
}

static void close_pool(Pool *pool) {
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->turn, 1);
    syscall(SYS_futex, (uint32_t *)&pool->turn, FUTEX_WAKE_PRIVATE, pool->helpers, NULL, NULL, 0);
    for (int i = 0; i < pool->helpers; i++) pthread_join(pool->helper[i].thread, NULL);
    free(pool->helper);
    free(pool);
}

#endif
