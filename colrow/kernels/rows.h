/* int8 weights (int8.h), or those of compact.h, as rows of floating-point numbers: what a prompt's products multiply by. */
#ifndef COLROW_ROWS_H
#define COLROW_ROWS_H

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "product.h"

/* to [8, 8 of `to_stride`] = from [8, 8 of `stride`], turned. */
INLINE void turn(const int16_t *from, int64_t stride, int16_t *to, int64_t to_stride) {
#ifdef __SSE2__
    __m128i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm_loadu_si128((const __m128i *)(from + i * stride));
    for (int i = 0; i < 4; i++) b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]), b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
    for (int i = 0; i < 4; i++) a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]), a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
    for (int i = 0; i < 4; i++) b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]), b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
    for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)(to + i * to_stride), b[i]);
#else
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) to[i * to_stride + j] = from[j * stride + i];
#endif
}

/* A group of each of the panel's first `rows` rows, which are `n` apart; `count` of its weights are there. */
SIMD static void group_rows(const int8_t *weights, const float *scales, int dtype, char *out, int64_t rows, int64_t count, int64_t n) {
    enum { PAIRS_OF_GROUP = GROUP / 2 };
    int16_t read[PAIRS_OF_GROUP][PANEL_ROWS], turned[PANEL_ROWS][PAIRS_OF_GROUP];
    memcpy(read, weights, sizeof read);
    for (int p = 0; p < PAIRS_OF_GROUP; p += 8)
        for (int r = 0; r < PANEL_ROWS; r += 8) turn(&read[p][r], PANEL_ROWS, &turned[r][p], PAIRS_OF_GROUP);
    for (int64_t r = 0; r < rows; r++) {
        int8_t row[GROUP];
        float made[GROUP];
        memcpy(row, turned[r], sizeof row);
        for (int i = 0; i < GROUP; i++) made[i] = (float)row[i] * scales[r];
        if (dtype == BF16 && count == GROUP) {
            uint16_t rounded[GROUP];
            for (int i = 0; i < GROUP; i++) {
                uint32_t bits;
                memcpy(&bits, &made[i], sizeof bits);
                rounded[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* as to_bf16, of what is finite */
            }
            memcpy(out + r * n * 2, rounded, sizeof rounded);
        } else put(out, dtype, r * n, made, count);
    }
}

/* The rows of the panel that begins with row `first`, to out [rows, n]. */
static void panel_rows(const Block *block, int64_t first, int64_t n, int dtype, char *out) {
    const int64_t groups = (n + GROUP - 1) / GROUP, unit = dtype == F32 ? 4 : 2;
    const int64_t rows = block->rows - first < PANEL_ROWS ? block->rows - first : PANEL_ROWS;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = g * GROUP, count = n - at < GROUP ? n - at : GROUP;
        group_rows((const int8_t *)block->weight + (first * groups + g * PANEL_ROWS) * GROUP, (const float *)block->scale + first * groups + g * PANEL_ROWS,
                   dtype, out + at * unit, rows, count, n);
    }
}

/* The `part`-th of `parts` shares of out [rows, n], which threads may write at the same time. Weights are int8, out of `dtype`; or COMPACT,
 * out of bfloat16. */
static void rows_of(const Block *block, int64_t n, int dtype, char *out, int64_t part, int64_t parts) {
#if CLONES && HIGHEST >= 5
    if (dtype == COMPACT) {
        const int64_t share = (block->rows + parts - 1) / parts, first = part * share, left = block->rows - first;
        if (left > 0) compact_rows(block, first, left < share ? left : share, n, 0, n, (uint16_t *)out + first * n);
        return;
    }
#endif
    for (int64_t first = part * PANEL_ROWS; first < block->rows; first += parts * PANEL_ROWS)
        panel_rows(block, first, n, dtype, out + first * n * (dtype == F32 ? 4 : 2));
}

#endif
