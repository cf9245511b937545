/* y = W x for many columns x in bfloat16: a prompt's products, on processors that multiply pairs of bfloat16 themselves.
 *
 * Columns are laid out once, pair of numbers by pair of numbers, so that those of WIDE tokens are neighbours; weights are read as they lie in
 * memory, a pair for all of them. A tile's sums stay in registers over DEPTH numbers of a row. A block of weights stays in the second cache
 * while all columns go over it, and the next block is fetched meanwhile. Weights of int8.h and compact.h become a block of bfloat16 just before
 * they are multiplied by. Each result is one sum in one order, from the row's beginning to its end, whatever else is computed with it.
 *
 * A decoding step may ride along: each block of weights is then multiplied by the step's columns too, as it is in the cache.
 */
#ifndef COLROW_MANY_H
#define COLROW_MANY_H

#include "multiply.h"
#include "rows.h"

/* A pair of a tile's rows of weights meets WIDE tokens in registers; rows of a block, a multiple of TILE_ROWS and of PANEL_ROWS; numbers of a row
 * at a time, in bytes a multiple of lines; tokens for which weights are read once. */
enum { WIDE = 4 * LANES, TILE_ROWS = 6, BLOCK_ROWS = 96, DEPTH = 1024, TOKENS = 512 };

/* x [count, n], rows `x_stride` apart; out [count, rows] = x Wᵀ + bias, where there is one. n is even. */
typedef struct {
    Block block; /* weights [rows, n] */
    int64_t dtype; /* BF16, INT8 or COMPACT */
    int64_t n, count, x_stride;
    const uint16_t *x, *bias;
    uint16_t *out;
    const Task *ride; /* a step's products, of which `job` has the same weights; or NULL */
    int64_t job;
} Many;

#if CLONES && HIGHEST >= 5
#include <cpuid.h>
#ifndef bit_AMX_BF16
#define bit_AMX_BF16 (1u << 22)
#endif

/* Weights of a block that will be wanted next, as they are kept: bytes from one pair of rows to the next, to the second half of what a pair has
 * there, and of as many weights as make a line of bfloat16. NULL: nothing is fetched. */
typedef struct {
    const char *at;
    int64_t pair, half, line;
} Soon;

INLINE const char *soon_at(const Soon *soon, int64_t row) { return soon->at + row / 2 * soon->pair + row % 2 * soon->half; }

/* What is read and what is fetched meanwhile: w [rows, 2 * pairs], rows `stride` apart; x [pairs, V * LANES, 2]. */
typedef struct {
    const uint16_t *w, *x;
    int64_t rows, stride, pairs;
    Soon soon;
    uint16_t *out; /* where the sums will go, of tokens `out_stride` apart; NULL: not yet */
    int64_t out_stride;
} Piece;

/* sums [R, V * LANES] += w x, of R rows from `row` on. The first time there are no sums yet. */
PAIRS INLINE void many_tile(const Piece *piece, int64_t row, float *sums, int first, int R, int V) {
    const int64_t stride = piece->stride, pairs = piece->pairs;
    const uint16_t *const w = piece->w + row * stride, *const x = piece->x;
    const Soon soon = piece->soon;
    sums += row * V * LANES;
    __m512 sum[2 * TILE_ROWS][4];
#define EACH_OF_TILE _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
    EACH_OF_TILE sum[r][v] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + (r * V + v) * LANES);
    for (int64_t line = 0; line < pairs; line += LANES) {
        if (soon.at) _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) __builtin_prefetch(soon_at(&soon, row + r) + line / LANES * soon.line, 0, 2);
        const int64_t end = pairs - line < LANES ? pairs : line + LANES;
        for (int64_t p = line; p < end; p++) {
            __m512bh columns[4];
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) columns[v] = (__m512bh)_mm512_load_si512(x + (p * V + v) * 2 * LANES);
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, w + r * stride + 2 * p, sizeof pair);
                const __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], weights, columns[v]);
            }
        }
    }
    EACH_OF_TILE _mm512_store_ps(sums + (r * V + v) * LANES, sum[r][v]);
#undef EACH_OF_TILE
}

/* Memory for a few tokens' results is asked for before each tile; when all are made, it is there. */
INLINE void expect(const Piece *piece, int64_t tile) {
    enum { EACH = WIDE * TILE_ROWS / BLOCK_ROWS };
    for (int64_t t = tile * EACH; piece->out && t < tile * EACH + EACH; t++)
        for (int64_t r = 0; r < piece->rows; r += 2 * LANES) __builtin_prefetch(piece->out + t * piece->out_stride + r, 1);
}

#define MANY_TILES(V, R)                                                                    \
    PAIRS static void many_tiles_##V(const Piece *piece, float *sums, int first) {          \
        int64_t r = 0;                                                                      \
        for (; r + R <= piece->rows; r += R) {                                              \
            expect(piece, r / R);                                                           \
            many_tile(piece, r, sums, first, R, V);                                         \
        }                                                                                   \
        for (; r < piece->rows; r++) many_tile(piece, r, sums, first, 1, V);                \
    }
MANY_TILES(4, TILE_ROWS)
MANY_TILES(3, TILE_ROWS)
MANY_TILES(2, 2 * TILE_ROWS)
MANY_TILES(1, 2 * TILE_ROWS)

/* v [16][16] turned. */
PAIRS INLINE void turn_words(__m512i v[LANES]) {
    __m512i a[LANES], b[LANES];
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) _Pragma("GCC unroll 2") for (int h = 0; h < 2; h++) {
        b[i + 2 * h] = _mm512_unpacklo_epi64(a[i + h], a[i + 2 + h]);
        b[i + 2 * h + 1] = _mm512_unpackhi_epi64(a[i + h], a[i + 2 + h]);
    }
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
        const __m512i even = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), odd = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
        const __m512i more = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88), most = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        v[c] = _mm512_shuffle_i32x4(even, more, 0x88), v[8 + c] = _mm512_shuffle_i32x4(even, more, 0xdd);
        v[4 + c] = _mm512_shuffle_i32x4(odd, most, 0x88), v[12 + c] = _mm512_shuffle_i32x4(odd, most, 0xdd);
    }
}

/* V * LANES tokens from x [count, n] to [pairs, V * LANES, 2]; zeros where there are no tokens. */
PAIRS static void many_pack(const uint16_t *x, int64_t stride, int64_t count, int64_t pairs, uint16_t *to, int V) {
    enum { SOON = 4 * LANES }; /* pairs until a line is read that is fetched now */
    for (int64_t p = 0; p < pairs; p += LANES) {
        const __mmask16 there = lanes(pairs - p);
        for (int at = 0; at < V * LANES; at += LANES) {
            __m512i v[LANES];
            for (int t = 0; t < LANES; t++) {
                __builtin_prefetch(x + (at + t) * stride + 2 * (p + SOON));
                v[t] = at + t < count ? _mm512_maskz_loadu_epi32(there, x + (at + t) * stride + 2 * p) : _mm512_setzero_si512();
            }
            turn_words(v);
            for (int i = 0; i < LANES && p + i < pairs; i++) _mm512_store_si512(to + ((p + i) * V * LANES + at) * 2, v[i]);
        }
    }
}

/* sums [rows, V * LANES] to out [count, rows of all]: two rows become one of pairs, which are turned like words. */
PAIRS static void many_out(const float *sums, int64_t rows, int V, const uint16_t *bias, uint16_t *out, int64_t stride, int64_t count) {
    uint16_t order[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) order[i] = (uint16_t)(i / 2 + i % 2 * LANES);
    const __m512i pairs = _mm512_loadu_si512(order);
    for (int64_t r = 0; r < rows; r += 2 * LANES)
        for (int at = 0; at < V * LANES && at < count; at += LANES) {
            __m512i v[LANES];
            for (int i = 0; i < LANES; i++) {
                __m512 row[2];
                for (int j = 0; j < 2; j++) {
                    const int64_t k = r + 2 * i + j;
                    row[j] = k < rows ? _mm512_load_ps(sums + k * V * LANES + at) : _mm512_setzero_ps();
                    if (bias && k < rows) row[j] = _mm512_add_ps(row[j], _mm512_set1_ps(from_bf16(bias[k])));
                }
                v[i] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(row[1], row[0]));
            }
            turn_words(v);
            const __mmask32 there = rows - r < 2 * LANES ? (1u << (rows - r)) - 1 : ~0u;
            for (int t = 0; t < LANES && at + t < count; t++) _mm512_mask_storeu_epi16(out + (at + t) * stride + r, there, v[t]);
        }
}

/* A group of the panel's rows, n apart, as panel_rows makes it: two pairs of a row become a word, words are turned, and each is scaled. */
PAIRS static void many_group(const int8_t *weights, const float *scales, uint16_t *out, int64_t rows, int64_t n) {
    __m512i v[2][LANES]; /* of half the rows, four weights of each a word */
    for (int i = 0; i < LANES; i++) {
        const __m512i a = _mm512_loadu_si512(weights + 2 * i * 2 * PANEL_ROWS), b = _mm512_loadu_si512(weights + (2 * i + 1) * 2 * PANEL_ROWS);
        v[0][i] = _mm512_unpacklo_epi16(a, b), v[1][i] = _mm512_unpackhi_epi16(a, b);
    }
    for (int h = 0; h < 2; h++) {
        turn_words(v[h]);
        for (int i = 0; i < LANES; i++) {
            const int row = i / 4 * 8 + h * 4 + i % 4; /* unpacking takes four rows of every eight */
            if (row >= rows) continue;
            const __m512 scale = _mm512_set1_ps(scales[row]);
            __m512 part[4];
#define PART(q) part[q] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(v[h][i], q))), scale)
            PART(0), PART(1), PART(2), PART(3);
#undef PART
            _mm512_storeu_si512(out + row * n, (__m512i)_mm512_cvtne2ps_pbh(part[1], part[0]));
            _mm512_storeu_si512(out + row * n + 2 * LANES, (__m512i)_mm512_cvtne2ps_pbh(part[3], part[2]));
        }
    }
}

/* The panel that begins with row `first`, in bfloat16. */
static void many_panel(const Block *block, int64_t first, int64_t n, uint16_t *out) {
    const int64_t rows = block->rows - first < PANEL_ROWS ? block->rows - first : PANEL_ROWS, groups = n / GROUP;
    if (n % GROUP) panel_rows(block, first, n, BF16, (char *)out);
    else
        for (int64_t g = 0; g < groups; g++)
            many_group((const int8_t *)block->weight + (first * groups + g * PANEL_ROWS) * GROUP,
                       (const float *)block->scale + first * groups + g * PANEL_ROWS, out + g * GROUP, rows, n);
}

/* Of the tokens that go together, where `count` are left. */
INLINE int vectors(int64_t count) { return (int)((least(WIDE, count) + LANES - 1) / LANES); }

/* The weights from row `first` and number `k` on, up to DEPTH of each, as they are kept; int8 panels as if their rows lay one after the other. */
static Soon many_kept(const Many *m, int64_t first, int64_t k) {
    const char *const w = m->block.weight;
    const int64_t bytes = compact_bytes(m->n), whole = (m->n + GROUP - 1) / GROUP * GROUP;
    if (m->dtype == COMPACT) {
        const int64_t there = compact_bytes(least(DEPTH, m->n - k));
        return (Soon){w + compact_at(first, m->n) + 2 * compact_bytes(k), 2 * bytes, there, COMPACT_BYTES / 4};
    }
    if (m->dtype == INT8) return (Soon){w + first * whole + k, 2 * whole, whole, LINE / 2};
    return (Soon){w + 2 * (first * m->n + k), 4 * m->n, 2 * m->n, LINE};
}

/* One block of weights, `rows` from `first` on, for the packed columns of `count` tokens. `next`: the first row of the block after it, or the same
 * one. `made`: room for [rows, n] that are not kept in bfloat16. */
static void many_block(const Many *m, int64_t first, int64_t next, int64_t rows, uint16_t *made, const uint16_t *columns, int64_t token,
                       int64_t count, float *sums) {
    typedef void Tiles(const Piece *, float *, int);
    static Tiles *const tiles[] = {many_tiles_1, many_tiles_2, many_tiles_3, many_tiles_4};
    for (int64_t r = 0; m->dtype == INT8 && r < rows; r += PANEL_ROWS) many_panel(&m->block, first + r, m->n, made + r * m->n);
    for (int64_t k = 0; k < m->n; k += DEPTH) {
        const int64_t depth = least(DEPTH, m->n - k), after = k + depth < m->n ? k + depth : 0;
        const int64_t stride = m->dtype == COMPACT ? depth : m->n;
        const uint16_t *w = m->dtype == BF16 ? (const uint16_t *)m->block.weight + first * m->n + k : m->dtype == INT8 ? made + k : made;
        const Soon soon = m->dtype == INT8 ? many_kept(m, next, k) : after ? many_kept(m, first, after) : many_kept(m, next, 0);
        if (m->dtype == COMPACT) compact_rows(&m->block, first, rows, m->n, k, k + depth, made);
        for (int64_t t = 0; t < count; t += WIDE) {
            const int V = vectors(count - t), last = t + WIDE >= count;
            const uint16_t *x = columns + t * m->n + k * V * LANES;
            uint16_t *const out = m->out + (token + t) * m->block.rows + first;
            const Piece piece = {w, x, rows, stride, depth / 2, last ? soon : (Soon){0}, after ? NULL : out, m->block.rows};
            tiles[V - 1](&piece, sums + t * BLOCK_ROWS, k == 0);
            if (after) continue;
            many_out(sums + t * BLOCK_ROWS, rows, V, m->bias ? m->bias + first : NULL, out, m->block.rows, count - t);
        }
    }
}

/* The `part`-th of `parts` shares of the rows, which threads may make at the same time. 0, or 1 where there is no memory. */
static int many(const Many *m, int64_t part, int64_t parts) {
    const int64_t rows = m->block.rows, room = (least(m->count, TOKENS) + LANES - 1) / LANES * LANES;
    const size_t bytes = (size_t)((room + (m->dtype == BF16 ? 0 : BLOCK_ROWS)) * m->n * 2 + room * BLOCK_ROWS * 4);
    float *const sums = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!sums) return 1;
    uint16_t *const columns = (uint16_t *)(sums + room * BLOCK_ROWS), *const made = columns + room * m->n;
    for (int64_t token = 0; token < m->count; token += TOKENS) {
        const int64_t count = least(TOKENS, m->count - token);
        for (int64_t t = 0; t < count; t += WIDE)
            many_pack(m->x + (token + t) * m->x_stride, m->x_stride, count - t, m->n / 2, columns + t * m->n, vectors(count - t));
        for (int64_t first = part * BLOCK_ROWS; first < rows; first += parts * BLOCK_ROWS) {
            const int64_t used = least(BLOCK_ROWS, rows - first), after = first + parts * BLOCK_ROWS;
            many_block(m, first, after + BLOCK_ROWS <= rows ? after : first, used, made, columns, token, count, sums);
            if (m->ride && token == 0) multiply_rows(m->ride, m->job, first, first + used);
        }
    }
    free(sums);
    return 0;
}

/* Where there are tiles of matrices (AMX), torch's products are several times faster. */
static int many_helps(void) {
    unsigned a, b, c, d;
    return has_pairs() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && !(d & bit_AMX_BF16);
}
#else
static int many(const Many *m, int64_t part, int64_t parts) { return (void)m, (void)part, (void)parts, 1; }
static int many_helps(void) { return 0; }
#endif
#endif
