/* Collectives over shared memory between the processes of one host: the shape of the shared mapping and of one rank's private context.
 *
 * One mapping serves one group. It holds, in this order: `Area` (what the group has in common), one `Desk` per rank, and per rank two
 * slots for payload. Everything is built from ONE primitive, the step:
 *
 *     write into my slot [step % 2]; publish `step` on my line [step % 2]; wait until all ranks have published `step`; read their slots.
 *
 * Two slots are enough: a rank writes slot [s % 2] again only for step s+2, which it starts after all have published s+1, and a rank
 * publishes s+1 only when it has finished reading what step s brought. So there is one wait per step and no barrier after it. A line
 * carries the header of the operation in the same cache line as the step number: checking it costs no extra transfer.
 *
 * Not here: how the mapping is made and shared (shm_setup.py), which collective a model needs, several hosts.
 */
#ifndef COLROW_SHM_H
#define COLROW_SHM_H

#include <stdatomic.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the low half of a step number must be its first four bytes: a futex looks at those"
#endif

#define CR_MAGIC 0x636f6c726f773031ull /* "colrow01": layout version included */
#define CR_LINE 128                    /* two cache lines: the adjacent-line prefetcher must not couple ranks */
#define CR_NAME 168                    /* bytes of a call site's name that peers can read, with its ending zero */
#define CR_TEXT 640                    /* bytes of an error text */

enum { CR_AGAIN = -1, CR_FAILED = -2 }; /* what an operation returns instead of the bytes it moved */

enum { CR_ALL_REDUCE_SUM, CR_ALL_REDUCE_MAX, CR_ALL_GATHER, CR_REDUCE_SCATTER, CR_BROADCAST, CR_OBJECT, CR_BARRIER, CR_REDUCE_NORM, CR_OPS };
enum { CR_F32, CR_BF16, CR_F16, CR_F64, CR_I32, CR_I64, CR_BYTES, CR_DTYPES };

/* What every rank must agree on, compared field by field by every rank in every step. */
typedef struct {
    uint64_t seq;    /* number of the operation in this group, from 1 */
    uint32_t op, dtype;
    uint64_t count;  /* elements of the logical tensor */
    uint64_t site;   /* hash of the call site's name and detail */
    uint64_t detail; /* hash of the sizes, or the source: what else must agree */
} Header;

/* What a rank publishes in one step: 256 bytes, of which peers read the first cache line unless there is an error to explain. */
typedef struct {
    _Alignas(CR_LINE) _Atomic uint64_t step; /* its low half is also the futex word */
    Header header;
    char pad[64 - 8 - sizeof(Header)];
    char site[CR_NAME + 24];
} Line;

typedef struct {
    Line line[2];
    _Alignas(CR_LINE) _Atomic uint32_t sleepers; /* ranks that sleep until this one publishes */
    _Atomic uint32_t left;                       /* this rank has closed the group */
} Desk;

enum { CR_WORKS, CR_BREAKING, CR_BROKEN };

typedef struct {
    uint64_t magic, ranks, slot_bytes;
    char token[32];                 /* random: proves that the opened file is the one that was meant */
    _Alignas(CR_LINE) _Atomic uint32_t state; /* CR_WORKS until the first rank gives up, and never again */
    char why[CR_TEXT];              /* readable once state is CR_BROKEN */
} Area;

typedef struct {
    uint64_t hash;
    char name[CR_NAME];
} Site;

/* One rank's private view of one group. The first fields are read by shm.py through a ctypes Structure: keep both alike. */
typedef struct {
    double waited;          /* seconds spent waiting for peers, all operations together */
    double deadline;        /* seconds to wait for a peer that is alive; 0 is for ever */
    uint64_t one_shot_limit; /* all-reduces of at most so many bytes take one step */
    uint64_t seq;
    int64_t failed_rank;    /* the peer an error is about, -1 if none */
    char error[CR_TEXT];
    /* private from here on */
    Area *area;
    Desk *desks;
    char *slots;
    uint64_t mapped_bytes, slot_bytes, step;
    int rank, size, spins, yield_ns;
    int first, pending;     /* in the first step of an operation; that step is published and its wait was interrupted */
    const void *pending_data;
    int64_t wait_began;     /* ns; 0 while nothing is awaited */
    int64_t moved;          /* bytes read from peers' slots by the current operation */
    int *pids, *pidfds;     /* per rank; 0 / -1 where liveness cannot be watched (ranks as threads) */
    const void **inputs;    /* scratch: one pointer per rank */
    Site *sites;
    int site_count, site_room;
} Group;

#endif
