/* y = W x for a few columns x: what decoding does for nearly all of its time. W [rows, n] is read once, at the memory's speed.
 *
 * Each result is one sum in one order (sixteen lanes side by side, from the row's beginning to its end), whatever other rows and columns are
 * computed with it. So a column's results are the same bits alone and in any company. Tiles of a few rows and columns share what they read;
 * all columns go over one panel of rows before the next one, so only the first of them meets memory.
 *
 * Weights are float32, bfloat16, float16, or int8 with a scale for each GROUP of a row. Where the processor multiplies pairs of bfloat16
 * itself, the columns of bfloat16 weights are rounded to bfloat16 first, as the modules round them; elsewhere all arithmetic is in float32.
 * Of int8 weights see int8.h, of bfloat16 ones in twelve bits compact.h. What a level of processors can do is there, in tile.h and in
 * pairs.h; which one this is, is asked when a product is made.
 */
#ifndef COLROW_PRODUCT_H
#define COLROW_PRODUCT_H

#include "vector.h"

typedef struct {
    const void *weight;   /* [rows, n]; int8: panels (int8.h), whose last one and whose last group are filled up with zeros; compact.h's */
    const void *scale;    /* int8: [panels, groups of a row, PANEL_ROWS] in float32; compact.h: what lies apart */
    int64_t rows, out;    /* out: where the first row's result goes in every arena, in floats */
} Block;

/* Rows `first` to `last` for `count` columns x of n > 0 numbers, `width` apart. Behind the last one is memory for COLUMNS - 1 more, whose results are
 * dropped. */
typedef void Product(const Block *, int64_t first, int64_t last, int64_t n, const void *x, int64_t width, int count, float *const *y);

enum { COLUMNS = 8, ROWS = 4, PANEL = 24 }; /* at most in a tile; rows that all columns go over, a multiple of each tile's */
enum { NEAR = 4096, PART = 2048 };          /* bytes of a column that stay in the nearest cache beside seven others; else parts of it do */

/* Where a tile is: rows from `row` on, columns from `column` on, numbers `from` to `to` of them. Where these are not the first or not the
 * last, sums come from or go to `kept`. `ahead`: how far away the rows are that are fetched meanwhile, in bytes; 0: none. */
typedef struct {
    int64_t row, from, to, ahead;
    int column;
    Floats (*kept)[COLUMNS];
} Spot;

/* While `length` bytes of R rows are read, from `at` on, as many of later ones are asked for: for one column of the next R rows, in the order
 * in which they lie in memory. For several columns, which fill the nearest cache, of the R rows after those, into the next cache. */
INLINE void fetch(const char *rows, int64_t bytes, int64_t ahead, int64_t at, int64_t length, int R, int C) {
    if (C == 1)
        for (int64_t i = 0; i < R * length; i += 64) __builtin_prefetch(rows + ahead + R * at + i);
    else
        for (int r = 0; r < R; r++)
            for (int64_t i = 0; i < length; i += 64) __builtin_prefetch(rows + 2 * ahead + r * bytes + at + i, 0, 2);
}

#define EACH_SUM _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) _Pragma("GCC unroll 8") for (int c = 0; c < C; c++)

/* Panel by panel: columns in groups of C, the last few in groups of D, a single one by itself. A group's long columns are taken in parts:
 * a panel's tiles go over the first part, then over the next. BYTES: of a row; UNIT: of a column's numbers. A single column goes over ALONE
 * rows at a time: one where a sum is no slower than memory, which is read best in the order in which it lies. */
#define WALK(TILE, BYTES, UNIT, R, C, Q, D, ALONE)                                                 \
    Floats kept[PANEL][COLUMNS];                                                                   \
    const int64_t part = n * (UNIT) <= NEAR ? n : PART / (UNIT);                                   \
    for (int64_t top = first; top < last; top += PANEL) {                                     \
        const int64_t end = top + PANEL < last ? top + PANEL : last;                               \
        for (int c = 0, step; c < count; c += step) {                                              \
            step = count - c > D ? C : count - c > 1 ? D : 1;                                      \
            if (step == C) TILES(TILE, BYTES, part, R, C)                                          \
            else if (C != D && step == D) TILES(TILE, BYTES, n, Q, D)                              \
            else TILES(TILE, BYTES, n, ALONE, 1)                                                   \
        }                                                                                          \
    }
#define TILES(TILE, BYTES, PARTS, R, C)                                                                              \
    for (int64_t from = 0; from < n; from += PARTS) {                                                                \
        const int64_t to = from + (PARTS) < n ? from + (PARTS) : n;                                                  \
        int64_t row = top;                                                                                           \
        for (; row + R <= end; row += R) TILE(R, C, ((Spot){row, from, to, c ? 0 : R * (BYTES), c, kept + row - top})); \
        for (; row < end; row++) TILE(1, C, ((Spot){row, from, to, c ? 0 : (BYTES), c, kept + row - top}));          \
    }

/* ---- int8: how columns are given ---- */

enum { PANEL_ROWS = 2 * LANES, INT8_AHEAD = 4096 }; /* rows that lie side by side; bytes between what is read and what is fetched */

/* A column in numbers of 16 bits: those of whole groups, then a float for each group. */
INLINE int64_t int8_width(int64_t n) {
    const int64_t groups = (n + GROUP - 1) / GROUP;
    return groups * (GROUP + 2);
}

INLINE float *int8_scales(const int16_t *column, int64_t n) { return (float *)(column + (n + GROUP - 1) / GROUP * GROUP); }

/* Zeros behind the column's end. What is not finite makes its group's scale NaN, so it is not lost. */
SIMD static void pack_int8(int16_t *to, const float *from, int64_t n) {
    float *scales = int8_scales(to, n);
    for (int64_t at = 0; at < n; at += GROUP) {
        float x[GROUP] = {0}, largest = 0, bad = 0;
        memcpy(x, from + at, (size_t)(n - at < GROUP ? n - at : GROUP) * sizeof *x);
        for (int i = 0; i < GROUP; i++) {
            const float size = fabsf(x[i]);
            largest = size > largest ? size : largest;
        }
        for (int i = 0; i < GROUP; i++) bad += x[i] * 0;
        const float steps = largest > 0 ? 32767 / largest : 0;
        for (int i = 0; i < GROUP; i++) {
            const float rounded = x[i] * steps + 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number, in the last bits */
            int32_t bits;
            memcpy(&bits, &rounded, sizeof bits);
            to[at + i] = (int16_t)bits;
        }
        scales[at / GROUP] = largest / 32767 + bad;
    }
}

/* ---- Levels of processors ---- */

INLINE Ints pairs_any(Ints sums, const int8_t *weights, const int16_t *pair) {
    Shorts both;
    memcpy(&both, weights, sizeof both);
    const Ints even = __builtin_convertvector((Shorts)(both << 8) >> 8, Ints), odd = __builtin_convertvector(both >> 8, Ints);
    return sums + even * (int32_t)pair[0] + odd * (int32_t)pair[1];
}

#define AT(NAME) NAME##_any
#define TARGET
#define SHAPE 2, 2, 2, 2, 2
#define FROM_F16 load_f16
#include "tile.h"

#define AT(NAME) NAME##_any
#define TARGET
#define OF_PAIRS pairs_any
#define HALVES 1
#include "int8.h"

#if CLONES && HIGHEST >= 3
#include <immintrin.h>

#define AT(NAME) NAME##_v3
#define TARGET __attribute__((target("arch=x86-64-v3")))
#define SHAPE 3, 2, 3, 2, 2
TARGET INLINE Floats f16_v3(const uint16_t *at) {
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)), high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at + 1));
    Floats v;
    memcpy(&v, &low, sizeof low);
    memcpy((char *)&v + sizeof low, &high, sizeof high);
    return v;
}
#define FROM_F16 f16_v3
#include "tile.h"

#define AT(NAME) NAME##_v3
#define TARGET __attribute__((target("arch=x86-64-v3")))
TARGET INLINE Ints pairs_v3(Ints sums, const int8_t *weights, const int16_t *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    __m256i of[2];
    memcpy(of, &sums, sizeof of);
    for (int i = 0; i < 2; i++) {
        const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)weights + i));
        of[i] = _mm256_add_epi32(of[i], _mm256_madd_epi16(w, _mm256_set1_epi32(both)));
    }
    memcpy(&sums, of, sizeof of);
    return sums;
}
#define OF_PAIRS pairs_v3
#define HALVES 1
#include "int8.h"

#if HIGHEST >= 4
#define AT(NAME) NAME##_v4
#define TARGET __attribute__((target("arch=x86-64-v4")))
#define SHAPE 3, 8, 4, 4, 1
TARGET INLINE Floats f16_v4(const uint16_t *at) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
#define FROM_F16 f16_v4
#include "tile.h"

#define AT(NAME) NAME##_v4
#define TARGET __attribute__((target("arch=x86-64-v4")))
TARGET INLINE Ints pairs_v4(Ints sums, const int8_t *weights, const int16_t *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights));
    return (Ints)_mm512_add_epi32((__m512i)sums, _mm512_madd_epi16(w, _mm512_set1_epi32(both)));
}
#define OF_PAIRS pairs_v4
#define HALVES 2
#include "int8.h"

#endif
#if HIGHEST >= 5
#include "pairs.h"
#include "compact.h"

#define AT(NAME) NAME##_v5
#define TARGET PAIRS
PAIRS INLINE Ints pairs_v5(Ints sums, const int8_t *weights, const int16_t *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights));
    return (Ints)_mm512_dpwssd_epi32((__m512i)sums, w, _mm512_set1_epi32(both));
}
#define OF_PAIRS pairs_v5
#define HALVES 2
#include "int8.h"

#endif
#endif

/* ---- Which one ---- */

static int level(void) {
    int found = 2;
#if CLONES
    const int four = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found = 3;
    if (four) found = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") ? 5 : 4;
#endif
    return found < HIGHEST ? found : HIGHEST;
}

static int has_pairs(void) { return level() == 5; }

/* With bfloat16 columns where `dtype` is BF16 and there are pairs, else with float32 columns. */
static Product *product_of(int64_t dtype) {
#if CLONES && HIGHEST >= 3
    static Product *const v3[] = {product_f32_v3, product_bf16_v3, product_f16_v3, product_int8_v3};
    if (level() == 3) return v3[dtype];
#endif
#if CLONES && HIGHEST >= 4
    static Product *const v4[] = {product_f32_v4, product_bf16_v4, product_f16_v4, product_int8_v4};
#if HIGHEST >= 5
    if (dtype == BF16 && has_pairs()) return product_pairs;
    if (dtype == INT8 && has_pairs()) return product_int8_v5;
    if (dtype == COMPACT) return product_compact; /* where there are no pairs, nothing makes them */
#endif
    if (level() >= 4) return v4[dtype];
#endif
    static Product *const any[] = {product_f32_any, product_bf16_any, product_f16_any, product_int8_any};
    return any[dtype];
}

#endif
