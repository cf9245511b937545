/* Attention of one new position: its keys and values are stored, then every query head looks at all positions it may see.
 *
 * softmax in one pass over the keys that keeps the largest score so far (Milakov and Gimelshein, arXiv:1805.02867, section 3), in blocks of
 * positions so that a block's scores are turned into weights together. Heads that share keys and values follow each other, so what one
 * reads the next finds in the cache. Attention to what an encoder made stores nothing: it has keys and values of its own, which stay.
 */
#ifndef COLROW_ATTEND_H
#define COLROW_ATTEND_H

#include "elementwise.h"

typedef struct {
    int64_t layer, heads, kv_heads, head_dim, value_dim;
    int64_t window; /* positions that are seen, the new one included; 0: all */
    int64_t latent; /* 0, or: values are the keys' first numbers, so many; the cache of values has the rest of the keys */
    const int64_t *kv_of;
    const float *sinks;  /* of each head: a score without a value; or NULL */
    const float *slopes; /* of each head: what is added to a score, times the positions that it lies back, negated; or NULL */
    const float *bias;   /* [heads, reach]: what is added to a score so many positions back, from `reach` - 1 on the same; or NULL */
    int64_t reach;
    int64_t source; /* whether it looks at the encoder's positions; kv_heads is then 0, as there are no new ones */
    float scale, softcap;
    int64_t dtype; /* of the cache */
} Attention;

/* One sequence. Keys are [KV heads, capacity, their numbers] for each layer, values likewise. */
typedef struct {
    float *arena;
    int64_t length, capacity;
    void **keys, **values;
    int64_t sources; /* positions of what an encoder made, in memory that has room for no more */
    void **source_keys, **source_values;
} Row;

enum { POSITIONS = 64 };

INLINE float dot(const float *q, const void *key, int dtype, int64_t at, int64_t d) {
    Floats sum = {0};
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) sum += load_f32(q + i) * load(key, dtype, at + i);
    float rest = 0;
    for (; i < d; i++) rest += q[i] * get(key, dtype, at + i);
    return total(sum) + rest;
}

/* sum [16] += q times each of sixteen keys, from the `i`-th number to the last of whole vectors. */
INLINE void dots_of(const float *q, const void *keys, int dtype, int64_t at, int64_t d, Floats *sum) {
    int64_t i = 0;
#if PARTS
    for (; dtype == BF16 && i + 2 * LANES <= d; i += 2 * LANES) {
        Floats of[2], key[2];
        part(q + i, &of[0], &of[1]);
        _Pragma("GCC unroll 16") for (int j = 0; j < LANES; j++) {
            load_pairs((const uint16_t *)keys + at + j * d + i, &key[0], &key[1]);
            sum[j] += of[0] * key[0];
            sum[j] += of[1] * key[1];
        }
    }
#endif
    for (; i < d; i += LANES) {
        const Floats of = load_f32(q + i);
        _Pragma("GCC unroll 16") for (int j = 0; j < LANES; j++) sum[j] += of * load(keys, dtype, at + j * d + i);
    }
}

/* out [count] = q times each of `count` keys. Sixteen at a time; the last ones with some of those before them. */
INLINE void dots(const float *q, const void *keys, int dtype, int64_t at, int64_t d, int64_t count, float *out) {
    const int together = d % LANES == 0 && count >= LANES;
    for (int64_t next = 0; together && next < count; next += LANES) {
        const int64_t p = next + LANES <= count ? next : count - LANES;
        Floats sum[LANES];
        _Pragma("GCC unroll 16") for (int j = 0; j < LANES; j++) sum[j] = (Floats){0};
        dots_of(q, keys, dtype, at + p * d, d, sum);
        store_f32(out + p, totals(sum));
    }
    for (int64_t p = 0; !together && p < count; p++) out[p] = dot(q, keys, dtype, at + p * d, d);
}

/* out [d] += the values of `count` positions, each times its weight. Sums stay in registers, a few at a time. */
INLINE void weighted(const float *weights, const void *values, int dtype, int64_t at, int64_t d, int64_t count, float *out) {
    enum { SIDE = 4 };
    int64_t i = 0;
#if PARTS
    for (; dtype == BF16 && i + SIDE * LANES <= d; i += SIDE * LANES) {
        Floats sum[SIDE], value[2];
        _Pragma("GCC unroll 2") for (int j = 0; j < SIDE; j += 2) part(out + i + j * LANES, &sum[j], &sum[j + 1]);
        for (int64_t p = 0; p < count; p++)
            _Pragma("GCC unroll 2") for (int j = 0; j < SIDE; j += 2) {
                load_pairs((const uint16_t *)values + at + p * d + i + j * LANES, &value[0], &value[1]);
                sum[j] += weights[p] * value[0], sum[j + 1] += weights[p] * value[1];
            }
        _Pragma("GCC unroll 2") for (int j = 0; j < SIDE; j += 2) join(out + i + j * LANES, sum[j], sum[j + 1]);
    }
#endif
    for (; i + LANES <= d; i += LANES) {
        Floats sum = load_f32(out + i);
        for (int64_t p = 0; p < count; p++) sum += weights[p] * load(values, dtype, at + p * d + i);
        store_f32(out + i, sum);
    }
    for (int64_t p = 0; i < d && p < count; p++)
        for (int64_t k = i; k < d; k++) out[k] += weights[p] * get(values, dtype, at + p * d + k);
}

/* Positions `first` to `last`, which is the new one and one more. `rest`: the keys' second part, where they have one. */
INLINE void one_head(const Attention *t, int dtype, int64_t head, const float *q, const void *keys, const void *values, const void *rest,
                     int64_t first, int64_t last, float *out) {
    const int64_t d = t->value_dim, own = rest ? t->latent : t->head_dim, other = t->head_dim - own;
    const float slope = t->slopes ? t->slopes[head] : 0, *bias = t->bias ? t->bias + head * t->reach : NULL;
    float best = t->sinks ? t->sinks[head] : -INFINITY, sum = t->sinks ? 1 : 0, scores[POSITIONS];
    for (int64_t i = 0; i < d; i++) out[i] = 0;
    for (int64_t start = first; start < last; start += POSITIONS) {
        const int64_t count = last - start < POSITIONS ? last - start : POSITIONS;
        float top = best;
        dots(q, keys, dtype, start * own, own, count, scores);
        if (other) {
            float more[POSITIONS];
            dots(q + own, rest, dtype, start * other, other, count, more);
            for (int64_t p = 0; p < count; p++) scores[p] += more[p];
        }
        for (int64_t p = 0; p < count; p++) scores[p] = t->scale * scores[p] + slope * (float)(start + p + 1 - last);
        if (bias)
            for (int64_t p = 0; p < count; p++) {
                const int64_t back = last - 1 - (start + p);
                scores[p] += bias[back < t->reach ? back : t->reach - 1];
            }
        if (t->softcap > 0)
            for (int64_t p = 0; p < count; p++) scores[p] = t->softcap * tangent(scores[p] / t->softcap);
        for (int64_t p = 0; p < count; p++) top = scores[p] > top ? scores[p] : top;
        const float shrink = exponential(best - top);
        for (int64_t p = 0; p < count; p++) scores[p] = exponential(scores[p] - top);
        sum *= shrink;
        for (int64_t p = 0; p < count; p++) sum += scores[p];
        for (int64_t i = 0; i < d; i++) out[i] *= shrink;
        weighted(scores, values, dtype, start * d, d, count, out);
        best = top;
    }
    for (int64_t i = 0; i < d; i++) out[i] /= sum;
}

#define HEAD(NAME, DTYPE)                                                                                                          \
    SIMD static void NAME(const Attention *t, int64_t head, const float *q, const void *k, const void *v, const void *rest, int64_t first, \
                          int64_t last, float *out) {                                                                              \
        one_head(t, DTYPE, head, q, k, v, rest, first, last, out);                                                                 \
    }

HEAD(head_f32, F32)
HEAD(head_bf16, BF16)
HEAD(head_f16, F16)

/* q [heads, head_dim], k and v [KV heads, ...], out [heads, value_dim]: contiguous, in the row's arena. */
static void attend(const Attention *t, const Row *row, const float *q, const float *k, const float *v, float *out) {
    char *keys = (t->source ? row->source_keys : row->keys)[t->layer], *values = (t->source ? row->source_values : row->values)[t->layer];
    const int64_t capacity = t->source ? row->sources : row->capacity;
    const int64_t unit = t->dtype == F32 ? 4 : 2, last = t->source ? row->sources : row->length + 1, first = t->window && last > t->window ? last - t->window : 0;
    const int64_t width = t->latent ? t->latent : t->head_dim, other = t->latent ? t->head_dim - t->latent : t->value_dim;
    for (int64_t h = 0; h < t->kv_heads; h++) {
        put(keys, (int)t->dtype, (h * row->capacity + row->length) * width, k + h * width, width);
        put(values, (int)t->dtype, (h * row->capacity + row->length) * other, v + h * other, other);
    }
    for (int64_t h = 0; h < t->heads; h++) {
        const int64_t from = t->kv_of[h] * capacity;
        const char *key = keys + from * width * unit, *value = values + from * other * unit;
        (t->dtype == F32 ? head_f32 : t->dtype == BF16 ? head_bf16 : head_f16)(
            t, h, q + h * t->head_dim, key, t->latent ? key : value, t->latent ? value : NULL, first, last, out + h * t->value_dim);
    }
}

#endif
