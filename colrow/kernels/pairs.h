/* Products with bfloat16 weights and columns on processors that multiply pairs of them (AVX512-BF16; they have AVX512-VNNI as well). */
#ifndef COLROW_PAIRS_H
#define COLROW_PAIRS_H

#define PAIRS __attribute__((target("arch=x86-64-v4,avx512bf16,avx512vnni")))
enum { PAIR_STEP = 32 };

/* The first `count` of sixteen, all where there are more. */
INLINE __mmask16 lanes(int64_t count) { return count < LANES ? (__mmask16)((1u << count) - 1) : (__mmask16)-1; }

/* As `tile` (tile.h). Behind a row's end masked loads give zeros. */
PAIRS INLINE void pair_tile(const Block *block, int64_t n, const uint16_t *columns, int64_t width, int count, float *const *y, int R, int C,
                            const Spot spot) {
    const uint16_t *w = (const uint16_t *)block->weight + spot.row * n, *x = columns + spot.column * width;
    __m512 sum[ROWS][COLUMNS];
    __m512i v[ROWS];
    EACH_SUM sum[r][c] = spot.from ? (__m512)spot.kept[r][c] : _mm512_setzero_ps();
#define STEP(WEIGHTS)                                                                                                            \
    {                                                                                                                            \
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) v[r] = WEIGHTS;                                                      \
        _Pragma("GCC unroll 8") for (int c = 0; c < C; c++) {                                                                    \
            const __m512bh column = (__m512bh)_mm512_loadu_si512(x + c * width + k);                                             \
            _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)v[r], column); \
        }                                                                                                                        \
    }
    int64_t k = spot.from;
    for (; k + PAIR_STEP <= spot.to; k += PAIR_STEP) {
        fetch((const char *)w, n * 2, spot.ahead, k * 2, PAIR_STEP * 2, R, C);
        STEP(_mm512_loadu_si512(w + r * n + k))
    }
    if (k < spot.to) STEP(_mm512_maskz_loadu_epi16((1u << (spot.to - k)) - 1, w + r * n + k))
#undef STEP
    if (spot.to < n) EACH_SUM spot.kept[r][c] = (Floats)sum[r][c];
    else EACH_SUM if (spot.column + c < count) y[spot.column + c][block->out + spot.row + r] = _mm512_reduce_add_ps(sum[r][c]);
}

#define PAIR_TILE(...) pair_tile(block, n, columns, width, count, y, __VA_ARGS__)

PAIRS static void product_pairs(const Block *block, int64_t first, int64_t last, int64_t n, const void *columns, int64_t width, int count,
                                float *const *y) {
    WALK(PAIR_TILE, n * 2, 2, 3, 8, 4, 4, 1)
}

#endif
