/* Products as jobs that threads share. A job is a matrix and the columns that it is multiplied by.
 *
 * PRODUCT: a few matrices, all for the same column of every sequence. EXPERTS: every sequence has a few slots with a column each, and says
 * which of many matrices a slot is multiplied by; each matrix that is asked for is read once, whoever asks for it, the others are not read.
 */
#ifndef COLROW_MULTIPLY_H
#define COLROW_MULTIPLY_H

#include "choose.h"
#include "elementwise.h"
#include "pool.h"
#include "product.h"

typedef struct {
    int64_t dtype, width, count;
    Block *blocks;
} Weights;

typedef struct {
    int64_t dtype, width, rows; /* of each matrix */
    int64_t slots, experts;
    const char *weight;
    int64_t stride; /* from matrix to matrix, bytes */
} Experts;

typedef struct {
    Block block;
    const void *columns;
    int count;
    float *const *y; /* of each column: what the block's `out` counts from */
} Job;

typedef struct {
    const Job *jobs;
    int64_t count, n, width;
    Product *product;
} Task;

/* One job of a task for rows `first` to `last`, a panel's multiple from the beginning. */
INLINE void multiply_rows(const Task *task, int64_t job, int64_t first, int64_t last) {
    const Job *one = &task->jobs[job];
    task->product(&one->block, first, last, task->n, one->columns, task->width, one->count, one->y);
}

/* Memory that is kept from product to product. */
typedef struct {
    void *at;
    int64_t bytes;
} Room;

enum { COLUMN_ROOM, JOB_ROOM, RESULT_ROOM, ORDER_ROOM, ROOMS };

static void *room(Room *room, int64_t bytes) {
    if (room->bytes >= bytes) return room->at;
    free(room->at);
    room->bytes = (bytes + 63) / 64 * 64;
    room->at = aligned_alloc(64, (size_t)room->bytes);
    if (!room->at) room->bytes = 0;
    else memset(room->at, 0, (size_t)room->bytes);
    return room->at;
}

/* Each part gets the same share of every block's rows, in whole panels of int8 weights and whole lines of results, so that two do not
 * write to one. */
static void multiply(void *what, int part, int parts) {
    const Task *task = what;
    for (int64_t i = 0; i < task->count; i++) {
        const Job *job = &task->jobs[i];
        const int64_t rows = job->block.rows, share = (rows + parts - 1) / parts, whole = (share + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
        const int64_t first = part * whole < rows ? part * whole : rows, last = first + whole < rows ? first + whole : rows;
        if (task->n) task->product(&job->block, first, last, task->n, job->columns, task->width, job->count, job->y);
        else /* of a rank that has nothing to add */
            for (int c = 0; c < job->count; c++) memset(job->y[c] + job->block.out + first, 0, (size_t)(last - first) * sizeof(float));
    }
}

/* How columns are given to a product with weights of `dtype`, and which product it is. */
typedef struct {
    int64_t dtype, n, width, unit; /* of the weights; numbers of a column; from column to column; bytes of a number */
    Product *product;
} Form;

/* Columns lie three lines more apart than they need: at a distance of pages they would all want the same lines of the cache. */
static Form form(int64_t dtype, int64_t n) {
    const int64_t unit = dtype == INT8 || dtype == COMPACT || (dtype == BF16 && has_pairs()) ? 2 : 4, line = 64 / unit;
    const int64_t used = dtype == INT8 ? int8_width(n) : n;
    return (Form){dtype, n, (used + line - 1) / line * line + 3 * line, unit, product_of(dtype)};
}

/* A product may read a few columns more than there are. */
static void *columns_room(Room *rooms, const Form *form, int64_t count) {
    return room(&rooms[COLUMN_ROOM], (count + COLUMNS - 1) * form->width * form->unit);
}

static void *column(void *columns, const Form *form, int64_t at) { return (char *)columns + at * form->width * form->unit; }

SIMD static void pack(void *to, const Form *form, const float *from) {
    if (form->dtype == INT8) {
        pack_int8(to, from, form->n);
        return;
    }
    put(to, form->unit == 2 ? BF16 : F32, 0, from, form->n);
    memset((char *)to + form->n * form->unit, 0, (size_t)((form->width - form->n) * form->unit));
}

/* All return 1 where there is no memory. */

/* What is to be done, which points to memory of `rooms`. */
static int products(Room *rooms, const Weights *weights, const Operand *x, float *const *arenas, int count, Task *task) {
    const Form made = form(weights->dtype, weights->width);
    void *columns = columns_room(rooms, &made, count);
    Job *jobs = room(&rooms[JOB_ROOM], weights->count * (int64_t)sizeof(Job));
    if (!columns || !jobs) return 1;
    for (int r = 0; r < count; r++) pack(column(columns, &made, r), &made, place(x, arenas[r]));
    for (int64_t i = 0; i < weights->count; i++) jobs[i] = (Job){weights->blocks[i], columns, count, arenas};
    *task = (Task){jobs, weights->count, made.n, made.width, made.product};
    return 0;
}

static int multiply_all(Room *rooms, Pool *pool, const Weights *weights, const Operand *x, float *const *arenas, int count) {
    Task task;
    if (products(rooms, weights, x, arenas, count, &task)) return 1;
    share_out(pool, multiply, &task);
    return 0;
}

/* x [slots, width], where `stride[0]` says how far apart; chosen [slots]; out [slots, rows]. */
static int multiply_chosen(Room *rooms, Pool *pool, const Experts *e, const Operand *x, const Operand *chosen, const Operand *out,
                           float *const *arenas, int count) {
    const Form made = form(e->dtype, e->width);
    const int64_t pairs = e->slots * count;
    void *columns = columns_room(rooms, &made, pairs);
    Job *jobs = room(&rooms[JOB_ROOM], pairs * (int64_t)sizeof(Job));
    float **y = room(&rooms[RESULT_ROOM], pairs * (int64_t)sizeof *y);
    int64_t *start = room(&rooms[ORDER_ROOM], (e->experts + 1) * (int64_t)sizeof *start), many = 0;
    if (!columns || !jobs || !y || !start) return 1;
    memset(start, 0, (size_t)(e->experts + 1) * sizeof *start);
#define EXPERT(r, s) inside(place(chosen, arenas[r])[s], e->experts)
    for (int r = 0; r < count; r++)
        for (int64_t s = 0; s < e->slots; s++) start[EXPERT(r, s) + 1]++;
    for (int64_t i = 0; i < e->experts; i++) {
        const int asked = (int)start[i + 1];
        start[i + 1] += start[i];
        if (!asked) continue;
        const Block block = {e->weight + i * e->stride, NULL, e->rows, 0};
        jobs[many++] = (Job){block, column(columns, &made, start[i]), asked, y + start[i]};
    }
    for (int r = 0; r < count; r++)
        for (int64_t s = 0; s < e->slots; s++) {
            const int64_t at = start[EXPERT(r, s)]++;
            pack(column(columns, &made, at), &made, place(x, arenas[r]) + s * x->stride[0]);
            y[at] = place(out, arenas[r]) + s * e->rows;
        }
#undef EXPERT
    Task task = {jobs, many, made.n, made.width, made.product};
    share_out(pool, multiply, &task);
    return 0;
}

#endif
