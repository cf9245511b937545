/* Attention of one new position: its keys and values are stored, then every query head looks at all positions it may see.
 *
 * softmax in one pass over the keys that keeps the largest score so far (Milakov and Gimelshein, arXiv:1805.02867, section 3), in blocks of
 * positions so that a block's scores are turned into weights together. Heads that share keys and values follow each other, so what one
 * reads the next finds in the cache.
 */
#ifndef COLROW_ATTEND_H
#define COLROW_ATTEND_H

#include "elementwise.h"

typedef struct {
    int64_t layer, heads, kv_heads, head_dim, value_dim;
    int64_t window; /* positions that are seen, the new one included; 0: all */
    const int64_t *kv_of;
    float scale, softcap;
    int64_t dtype; /* of the cache: F32 or BF16 */
} Attention;

/* One sequence. Keys are [KV heads, capacity, head_dim] for each layer, values likewise with value_dim. */
typedef struct {
    float *arena;
    int64_t length, capacity;
    void **keys, **values;
} Row;

enum { POSITIONS = 64, HEAD_MAX = 512 };

INLINE float dot(const float *q, const void *key, int dtype, int64_t at, int64_t d) {
    Floats sum = {0};
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES)
        sum += load_f32(q + i) * (dtype == F32 ? load_f32((const float *)key + at + i) : load_bf16((const uint16_t *)key + at + i));
    float rest = 0;
    for (; i < d; i++) rest += q[i] * (dtype == F32 ? ((const float *)key)[at + i] : from_bf16(((const uint16_t *)key)[at + i]));
    return total(sum) + rest;
}

INLINE void one_head(const Attention *t, int dtype, const float *q, const void *keys, const void *values, int64_t first, int64_t last, float *out) {
    float best = -INFINITY, sum = 0, scores[POSITIONS];
    const int64_t d = t->value_dim;
    for (int64_t i = 0; i < d; i++) out[i] = 0;
    for (int64_t start = first; start < last; start += POSITIONS) {
        const int64_t count = last - start < POSITIONS ? last - start : POSITIONS;
        float top = best;
        for (int64_t p = 0; p < count; p++) scores[p] = t->scale * dot(q, keys, dtype, (start + p) * t->head_dim, t->head_dim);
        if (t->softcap > 0)
            for (int64_t p = 0; p < count; p++) scores[p] = t->softcap * tangent(scores[p] / t->softcap);
        for (int64_t p = 0; p < count; p++) top = scores[p] > top ? scores[p] : top;
        const float shrink = exponential(best - top);
        for (int64_t p = 0; p < count; p++) scores[p] = exponential(scores[p] - top);
        sum *= shrink;
        for (int64_t p = 0; p < count; p++) sum += scores[p];
        for (int64_t i = 0; i < d; i++) out[i] *= shrink;
        for (int64_t p = 0; p < count; p++) {
            const float weight = scores[p];
            const int64_t at = (start + p) * d;
            if (dtype == F32)
                for (int64_t i = 0; i < d; i++) out[i] += weight * ((const float *)values)[at + i];
            else
                for (int64_t i = 0; i < d; i++) out[i] += weight * from_bf16(((const uint16_t *)values)[at + i]);
        }
        best = top;
    }
    for (int64_t i = 0; i < d; i++) out[i] /= sum;
}

SIMD static void head_f32(const Attention *t, const float *q, const void *k, const void *v, int64_t first, int64_t last, float *out) {
    one_head(t, F32, q, k, v, first, last, out);
}

SIMD static void head_bf16(const Attention *t, const float *q, const void *k, const void *v, int64_t first, int64_t last, float *out) {
    one_head(t, BF16, q, k, v, first, last, out);
}

static void append(void *cache, int dtype, int64_t at, const float *from, int64_t n) {
    if (dtype == F32) memcpy((float *)cache + at, from, (size_t)n * sizeof *from);
    else
        for (int64_t i = 0; i < n; i++) ((uint16_t *)cache)[at + i] = to_bf16(from[i]);
}

/* q [heads, head_dim], k and v [KV heads, ...], out [heads, value_dim]: contiguous, in the row's arena. */
static void attend(const Attention *t, const Row *row, const float *q, const float *k, const float *v, float *out) {
    char *keys = row->keys[t->layer], *values = row->values[t->layer];
    const int64_t unit = t->dtype == F32 ? 4 : 2, last = row->length + 1, first = t->window && last > t->window ? last - t->window : 0;
    for (int64_t h = 0; h < t->kv_heads; h++) {
        append(keys, (int)t->dtype, (h * row->capacity + row->length) * t->head_dim, k + h * t->head_dim, t->head_dim);
        append(values, (int)t->dtype, (h * row->capacity + row->length) * t->value_dim, v + h * t->value_dim, t->value_dim);
    }
    for (int64_t h = 0; h < t->heads; h++) {
        const int64_t from = t->kv_of[h] * row->capacity;
        (t->dtype == F32 ? head_f32 : head_bf16)(t, q + h * t->head_dim, keys + from * t->head_dim * unit, values + from * t->value_dim * unit,
                                                 first, last, out + h * t->value_dim);
    }
}

#endif
