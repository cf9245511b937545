/* y = W x for a few columns x: what decoding does for nearly all of its time. W [rows, n] is read once, at the memory's speed.
 *
 * Each result is one sum in one order, whatever other columns are computed with it: products of every second vector of 16 go to one of two
 * accumulators, which are added at the end. So a column's results are the same bits alone and in any company. Four columns share a reading
 * of two rows; the next four find those in the cache.
 *
 * Weights are float32, bfloat16, float16, or int8 with a scale for each GROUP of a row. Where the processor multiplies pairs of bfloat16 itself, the
 * columns are rounded to bfloat16 first, as the modules round them; elsewhere all arithmetic is in float32.
 */
#ifndef COLROW_PRODUCT_H
#define COLROW_PRODUCT_H

#include "vector.h"

typedef struct {
    const void *weight;   /* [rows, n] */
    const float *scale;   /* int8: [rows, groups of a row] */
    int64_t rows, out;    /* out: where the first row's result goes in every arena, in floats */
} Block;

enum { STEP = 2 * LANES, COLUMNS = 4, AHEAD = 4096 };

INLINE Floats load_weights(const void *w, const float *scale, int dtype, int64_t at) {
    if (dtype == F32) return load_f32((const float *)w + at);
    if (dtype == BF16) return load_bf16((const uint16_t *)w + at);
    if (dtype == F16) return load_f16((const uint16_t *)w + at);
    return load_int8((const int8_t *)w + at) * (scale[at / GROUP] + (Floats){0});
}

/* The last weights of a row, with zeros behind them. */
INLINE Floats load_rest(const void *w, const float *scale, int dtype, int64_t at, int64_t n) {
    float rest[LANES] = {0};
    for (int64_t i = at; i < n && i < at + LANES; i++)
        rest[i - at] = dtype == INT8 ? (float)((const int8_t *)w)[i] * scale[i / GROUP] : get(w, dtype, i);
    return load_f32(rest);
}

/* R rows times C columns, of which the first `wanted` are written. R and C are constants where this is inlined, so all sums stay in
 * registers. Columns have zeros up to a multiple of 64. */
INLINE void tile(const Block *block, int64_t row, int dtype, int64_t n, const float *x, int64_t width, int R, int C, int wanted,
                 float *const *y) {
    const int64_t unit = dtype == F32 ? 4 : dtype == INT8 ? 1 : 2, groups = (n + GROUP - 1) / GROUP, even = n / STEP * STEP;
    const int64_t ahead = R == 1 ? AHEAD : R * n * unit; /* in a row's own stream, or in the next two rows */
    Floats sum[2][COLUMNS][2];
    const char *w[2];
    const float *scale[2];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        w[r] = (const char *)block->weight + (row + r) * n * unit;
        scale[r] = dtype == INT8 ? block->scale + (row + r) * groups : NULL;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c][0] = sum[r][c][1] = (Floats){0};
    }
    for (int64_t k = 0; k < even; k += STEP)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int a = 0; a < 2; a++) {
                const Floats v = load_weights(w[r], scale[r], dtype, k + a * LANES);
                if (a == 0 || dtype == F32) __builtin_prefetch(w[r] + (k + a * LANES) * unit + ahead);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sum[r][c][a] += v * load_f32(x + c * width + k + a * LANES);
            }
    if (even < n)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int a = 0; a < 2; a++) {
                const Floats v = load_rest(w[r], scale[r], dtype, even + a * LANES, n);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) sum[r][c][a] += v * load_f32(x + c * width + even + a * LANES);
            }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            if (c < wanted) y[c][block->out + row + r] = total(sum[r][c][0] + sum[r][c][1]);
}

/* Rows `first` to `last` for all columns. Behind the last one there is memory up to a multiple of COLUMNS; what comes of it is dropped. */
#define ROWS(TILE, ...)                                                                                   \
    for (int64_t row = first; row < last;) {                                                              \
        const int two = columns > 1 && row + 1 < last;                                                    \
        if (two)                                                                                          \
            for (int c = 0; c < columns; c += COLUMNS) TILE(block, row, __VA_ARGS__ n, x + c * width, width, 2, COLUMNS, columns - c, y + c); \
        else                                                                                              \
            for (int c = 0; c < columns; c++) TILE(block, row, __VA_ARGS__ n, x + c * width, width, 1, 1, 1, y + c); \
        row += two ? 2 : 1;                                                                               \
    }

#define PLAIN(NAME, DTYPE)                                                                                              \
    SIMD static void NAME(const Block *block, int64_t first, int64_t last, int64_t n, const void *columns_, int64_t width, \
                          int columns, float *const *y) {                                                               \
        const float *x = columns_;                                                                                      \
        ROWS(tile, DTYPE, )                                                                                             \
    }

PLAIN(product_f32, F32)
PLAIN(product_bf16, BF16)
PLAIN(product_f16, F16)
PLAIN(product_int8, INT8)

typedef void Product(const Block *, int64_t first, int64_t last, int64_t n, const void *x, int64_t width, int columns, float *const *y);

#if defined(__x86_64__) && CAN_CLONE
#include <immintrin.h>
#define PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16")))
enum { PAIR_STEP = 64 };

/* As `tile`, with 32 pairs' halves at a time. Behind a row's end masked loads give zeros. */
PAIRS INLINE void pair_tile(const Block *block, int64_t row, int64_t n, const uint16_t *x, int64_t width, int R, int C, int wanted,
                            float *const *y) {
    const uint16_t *w[2];
    __m512 sum[2][COLUMNS][2];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        w[r] = (const uint16_t *)block->weight + (row + r) * n;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c][0] = sum[r][c][1] = _mm512_setzero_ps();
    }
    const int64_t even = n / PAIR_STEP * PAIR_STEP, ahead = R == 1 ? AHEAD / 2 : R * n;
    for (int64_t k = 0; k < even; k += PAIR_STEP)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int a = 0; a < 2; a++) {
                const __m512i v = _mm512_loadu_si512(w[r] + k + a * 32);
                __builtin_prefetch(w[r] + k + a * 32 + ahead);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++)
                    sum[r][c][a] = _mm512_dpbf16_ps(sum[r][c][a], (__m512bh)v, (__m512bh)_mm512_loadu_si512(x + c * width + k + a * 32));
            }
    if (even < n)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int a = 0; a < 2; a++) {
                const int64_t left = n - even - a * 32;
                const __mmask32 mask = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
                const __m512i v = _mm512_maskz_loadu_epi16(mask, w[r] + even + a * 32);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++)
                    sum[r][c][a] = _mm512_dpbf16_ps(sum[r][c][a], (__m512bh)v, (__m512bh)_mm512_loadu_si512(x + c * width + even + a * 32));
            }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            if (c < wanted) y[c][block->out + row + r] = _mm512_reduce_add_ps(_mm512_add_ps(sum[r][c][0], sum[r][c][1]));
}

PAIRS static void product_pairs(const Block *block, int64_t first, int64_t last, int64_t n, const void *columns_, int64_t width, int columns,
                                float *const *y) {
    const uint16_t *x = columns_;
    ROWS(pair_tile, )
}

static int has_pairs(void) { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl"); }
#else
#define product_pairs product_bf16
static int has_pairs(void) { return 0; }
#endif

#endif
