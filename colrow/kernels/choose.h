/* Choosing by scores, as routers of experts do: the largest of a line, and what lies at given places.
 *
 * Places are whole numbers written as floats, as everything in an arena is. Those that lie outside are taken to be the nearest inside, so
 * a score that is no number cannot lead to memory that is not there.
 */
#ifndef COLROW_CHOOSE_H
#define COLROW_CHOOSE_H

#include "vector.h"

/* `forced`: for comparisons, the places [lines, k] that are chosen instead of the largest; then `gap` becomes the most that such a choice
 * gives away, of the largest finite score's size. */
typedef struct {
    int64_t lines, n, k;
    const int64_t *forced;
    float gap;
} TopK;

INLINE int64_t inside(float place, int64_t n) { return place > 0 ? place < (float)n ? (int64_t)place : n - 1 : 0; }

/* The k largest of each line of x, the largest first, of equals the first one first. */
static void topk(TopK *t, const float *x, float *values, float *places) {
    for (int64_t line = 0; line < t->lines; line++, x += t->n, values += t->k, places += t->k) {
        float lowest = INFINITY, size = 0, last = -INFINITY;
        for (int64_t i = 0; i < t->n; i++) size = fabsf(x[i]) > size && fabsf(x[i]) < INFINITY ? fabsf(x[i]) : size;
        for (int64_t i = 0; i < t->k; i++) {
            int64_t best = -1;
            for (int64_t j = 0; j < t->n; j++) {
                int taken = 0;
                for (int64_t before = 0; before < i; before++) taken |= places[before] == (float)j;
                if (!taken && (best < 0 || x[j] > x[best])) best = j;
            }
            places[i] = (float)best;
            last = values[i] = x[best];
        }
        if (!t->forced) continue;
        for (int64_t i = 0; i < t->k; i++) {
            places[i] = (float)t->forced[line * t->k + i];
            values[i] = x[inside(places[i], t->n)];
            lowest = values[i] < lowest ? values[i] : lowest;
        }
        const float gap = last > lowest ? (last - lowest) / (size > 0 ? size : 1) : 0;
        t->gap = gap > t->gap ? gap : t->gap;
    }
}

/* out [lines, k, n] = of each line's table [rows, n] those at places [lines, k]. */
static void take(const int64_t *shape, const float *table, const float *places, float *out) {
    const int64_t rows = shape[1], n = shape[2], k = shape[3];
    for (int64_t line = 0; line < shape[0]; line++, table += rows * n)
        for (int64_t i = 0; i < k; i++, places++, out += n) memcpy(out, table + inside(*places, rows) * n, (size_t)n * sizeof *out);
}

/* out [lines, n] gets `number` at places [lines, k]. */
static void scatter(const int64_t *shape, float number, const float *places, float *out) {
    for (int64_t line = 0; line < shape[0]; line++, out += shape[2])
        for (int64_t i = 0; i < shape[3]; i++, places++) out[inside(*places, shape[2])] = number;
}

#endif
