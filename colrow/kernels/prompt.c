/* Attention of a prompt in bfloat16: all queries of a piece at once, on processors that multiply pairs of bfloat16 themselves.
 *
 * Queries of all heads that share a KV head go together, a block of them at a time. Keys and values of a KV head are laid out once so that
 * sixteen keys (or features) are neighbours, pair by pair. A block's scores are float32 and stay in the cache; its softmax is rounded to
 * bfloat16 before it is divided by its sum, so that the largest weight is exact, and values are added up in float32. A causal block is
 * multiplied with keys up to its own end only. A row's sums have one order, whatever else is computed
 * and however many keys come after it.
 */
#include "vector.h"

#ifndef COLROW_DIGEST
#define COLROW_DIGEST "none"
#endif
#define EXPORT __attribute__((visibility("default")))

enum { PANEL = 64, HEIGHT = 6, BLOCK = 48 }; /* keys or features side by side; rows in registers; rows of a block, about */

/* Strides in numbers; the last dim has none. `mask`: 1 where a query sees a key, the same for all heads, or NULL; `causal` without a mask:
 * the last query sees all keys, each one before it one less. out [batch, queries, heads, value_dim] is contiguous. */
typedef struct {
    int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal;
    const uint16_t *q, *k, *v;
    const uint8_t *mask;
    uint16_t *out;
    int64_t q_stride[3], k_stride[3], v_stride[3]; /* batch, head, position */
    int64_t mask_stride[2];                        /* batch, query */
    float scale;
} Prompt;

EXPORT const char *kq_digest(void) { return COLROW_DIGEST; }

#if defined(__x86_64__) && CAN_CLONE
#include <immintrin.h>
#include <stdlib.h>
#define PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16")))

EXPORT int kq_supported(void) { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl"); }

static int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* c [HEIGHT, PANEL] = a [HEIGHT, 2 * pairs] b, b [pairs, PANEL, 2]. */
PAIRS INLINE void multiply(const uint16_t *a, int64_t width, const uint16_t *b, int64_t pairs, float *c, int64_t stride) {
    __m512 sum[HEIGHT][PANEL / LANES];
#pragma GCC unroll 6
    for (int r = 0; r < HEIGHT; r++)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL / LANES; j++) sum[r][j] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        __m512bh column[PANEL / LANES];
#pragma GCC unroll 4
        for (int j = 0; j < PANEL / LANES; j++) column[j] = (__m512bh)_mm512_loadu_si512(b + (p * PANEL + j * LANES) * 2);
#pragma GCC unroll 6
        for (int r = 0; r < HEIGHT; r++) {
            int32_t pair;
            memcpy(&pair, a + r * width + 2 * p, sizeof pair);
            const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < PANEL / LANES; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], row, column[j]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < HEIGHT; r++)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL / LANES; j++) _mm512_storeu_ps(c + r * stride + j * LANES, sum[r][j]);
}

/* to [panels of keys][pairs of features][PANEL][2] */
static void pack_keys(const uint16_t *k, int64_t stride, int64_t keys, int64_t d, uint16_t *to) {
    const int64_t pairs = up(d, 2) / 2;
    for (int64_t t = 0; t < keys; t++)
        for (int64_t i = 0; i < d; i++) to[((t / PANEL * pairs + i / 2) * PANEL + t % PANEL) * 2 + i % 2] = k[t * stride + i];
}

/* to [panels of features][pairs of keys][PANEL][2] */
static void pack_values(const uint16_t *v, int64_t stride, int64_t keys, int64_t d, uint16_t *to) {
    const int64_t pairs = up(keys, PANEL) / 2;
    for (int64_t t = 0; t < keys; t++)
        for (int64_t i = 0; i < d; i++) to[((i / PANEL * pairs + t / 2) * PANEL + i % PANEL) * 2 + t % 2] = v[t * stride + i];
}

/* e^x of x <= 0, to 4 millionths, which is far below what bfloat16 keeps; 0 of -infinity. x = n ln 2 + r, and a polynomial for e^r. */
PAIRS INLINE __m512 power(__m512 x) {
    const __m512 round = _mm512_set1_ps(12582912.0f); /* adding 1.5 * 2^23 rounds to a whole number */
    x = _mm512_max_ps(_mm512_set1_ps(-105), x);       /* in this order NaN stays */
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), round), round);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.69314718f), x);
    __m512 p = _mm512_set1_ps(1.0f / 120);
    const float rest[] = {1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(rest[i]));
    return _mm512_scalef_ps(p, n);
}

/* Turns the first `count` scores of a row into weights, of which those that are not seen are 0, like those up to `end`. Returns their sum. */
PAIRS static float weigh(float *s, uint16_t *weights, int64_t count, int64_t end, float scale, const uint8_t *seen) {
    const __m512 scales = _mm512_set1_ps(scale), none = _mm512_set1_ps(-INFINITY);
    __m512 tops = none, sums = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t += LANES) {
        __mmask16 known = count - t < LANES ? (__mmask16)((1u << (count - t)) - 1) : (__mmask16)-1;
        if (seen) known &= _mm_test_epi8_mask(_mm_maskz_loadu_epi8(known, seen + t), _mm_set1_epi8(-1));
        const __m512 v = _mm512_mask_mul_ps(none, known, _mm512_loadu_ps(s + t), scales);
        _mm512_storeu_ps(s + t, v);
        tops = _mm512_max_ps(v, tops);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(tops));
    for (int64_t t = 0; t < count; t += LANES) {
        const __m512 v = power(_mm512_sub_ps(_mm512_loadu_ps(s + t), top));
        const __m256bh rounded = _mm512_cvtneps_pbh(v);
        sums = _mm512_add_ps(sums, v);
        memcpy(weights + t, &rounded, sizeof rounded);
    }
    for (int64_t t = up(count, LANES); t < end; t++) weights[t] = 0;
    return _mm512_reduce_add_ps(sums);
}

/* The attention of one KV head's queries, of every `parts`-th block from `part` on. 0, or 1 where there is no memory. */
PAIRS static int one_head(const Prompt *p, int64_t batch, int64_t kv, int64_t part, int64_t parts) {
    const int64_t group = p->heads / p->kv_heads, d = up(p->head_dim, 2), e = up(p->value_dim, PANEL), width = up(p->keys, PANEL);
    const int64_t each = group < BLOCK ? BLOCK / group : 1, rows = up(each * group, HEIGHT); /* queries and rows of a block */
    const size_t bytes = (size_t)(2 * (d * width + e * width + rows * (d + width)) + 4 * rows * (width + e + 1));
    char *memory = aligned_alloc(64, (size_t)up((int64_t)bytes, 64));
    if (!memory) return 1;
    uint16_t *keys = (uint16_t *)memory, *values = keys + d * width, *q = values + e * width, *weights = q + rows * d;
    float *scores = (float *)(weights + rows * width), *sums = scores + rows * width, *out = sums + rows;
    memset(memory, 0, bytes);
    pack_keys(p->k + batch * p->k_stride[0] + kv * p->k_stride[1], p->k_stride[2], p->keys, p->head_dim, keys);
    pack_values(p->v + batch * p->v_stride[0] + kv * p->v_stride[1], p->v_stride[2], p->keys, p->value_dim, values);
    for (int64_t first = part * each; first < p->queries; first += parts * each) {
        const int64_t count = p->queries - first < each ? p->queries - first : each, used = count * group;
        const int64_t before = p->keys - p->queries + first, all = p->causal ? before + count : p->keys, end = up(all, PANEL);
        for (int64_t r = 0; r < used; r++) /* row r: head r / count of the group, query r % count */
            memcpy(q + r * d, p->q + batch * p->q_stride[0] + (kv * group + r / count) * p->q_stride[1] + (first + r % count) * p->q_stride[2],
                   (size_t)p->head_dim * sizeof *q);
        for (int64_t t = 0; t < end; t += PANEL)
            for (int64_t r = 0; r < used; r += HEIGHT) multiply(q + r * d, d, keys + t * d, d / 2, scores + r * width + t, width);
        for (int64_t r = 0; r < used; r++) {
            const int64_t at = r % count;
            const uint8_t *seen = p->mask ? p->mask + batch * p->mask_stride[0] + (first + at) * p->mask_stride[1] : NULL;
            sums[r] = weigh(scores + r * width, weights + r * width, p->causal ? before + at + 1 : all, end, p->scale, seen);
        }
        for (int64_t i = 0; i < e; i += PANEL)
            for (int64_t r = 0; r < used; r += HEIGHT) multiply(weights + r * width, width, values + i * width, end / 2, out + r * e + i, e);
        for (int64_t r = 0; r < used; r++) {
            uint16_t *to = p->out + ((batch * p->queries + first + r % count) * p->heads + kv * group + r / count) * p->value_dim;
            const float scale = 1 / sums[r];
            for (int64_t i = 0; i < p->value_dim; i++) to[i] = to_bf16(out[r * e + i] * scale);
        }
    }
    free(memory);
    return 0;
}

/* The `part`-th of `parts` shares of the work, which threads may do at the same time. */
EXPORT int kq_attend(const Prompt *p, int64_t part, int64_t parts) {
    int failed = 0;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t kv = 0; kv < p->kv_heads; kv++) failed |= one_head(p, b, kv, part, parts);
    return failed;
}
#else
EXPORT int kq_supported(void) { return 0; }
EXPORT int kq_attend(const Prompt *p, int64_t part, int64_t parts) { return (void)p, (void)part, (void)parts, 1; }
#endif
