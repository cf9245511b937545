/* bfloat16 weights in twelve bits each, to the bit the same; for processors that multiply pairs of bfloat16 themselves.
 *
 * The weights of a matrix are of much the same size, so of the 256 upper bytes that a bfloat16 can have (its sign and seven bits of the
 * exponent) sixteen are nearly all that occur. A weight is its lower byte as it is and four bits that say which of the sixteen its upper one
 * is. The few others are listed row by row, and put in when their turn comes. So a product reads three quarters of the bytes, and adds up
 * the same numbers in the same order as with the weights themselves (pairs.h).
 *
 * Rows are in blocks of three lines: two lines of lower bytes, then one of codes, whose lower halves are those of the first line. Two rows
 * lie together, block by block, so that they are read in one stretch, and the sum of one need not wait for the other's. Within a line bytes
 * lie so that unpacking, which works on quarters of it, gives weights in their order. The table and what is listed lie apart: sixteen bytes,
 * for each row where its list begins, then the lists, of words: where in the row, and the upper byte. Each list ends with a word of ones.
 * The last block of a row is filled up with zeros; behind an odd number of rows there is room for one.
 */
#ifndef COLROW_COMPACT_H
#define COLROW_COMPACT_H

#include "product.h"

enum { LINE = 64, COMPACT_BLOCK = 2 * LINE, COMPACT_BYTES = 3 * LINE, TABLE = 16 };

INLINE int64_t compact_bytes(int64_t n) { return (n + COMPACT_BLOCK - 1) / COMPACT_BLOCK * COMPACT_BYTES; }

/* Where the first block of a row lies; the next is two blocks away. */
INLINE int64_t compact_at(int64_t row, int64_t n) { return row / 2 * 2 * compact_bytes(n) + row % 2 * COMPACT_BYTES; }

/* The list of a row. */
INLINE const uint32_t *compact_list(const uint32_t *beside, int64_t rows, int64_t row) {
    const uint32_t *const starts = beside + TABLE / 4;
    return starts + rows + 1 + starts[row];
}

#if CLONES && HIGHEST >= 5

/* ---- Making it ---- */

typedef struct {
    const uint16_t *weight; /* [rows, n] */
    int64_t rows, n;
    uint32_t *beside; /* the table is there; where lists begin, when `out` is asked for */
    uint8_t *out;     /* NULL: how many words the list of each row will have is written to `counts` */
    uint32_t *counts;
} Compacting;

/* Of 64 upper bytes their codes, 0 for those that are `unlisted` in the table. */
PAIRS INLINE __m512i codes_of(__m512i upper, const uint8_t *table, __mmask64 *unlisted) {
    __m512i codes = _mm512_setzero_si512();
    __mmask64 known = 0;
    for (int i = 0; i < TABLE; i++) {
        const __mmask64 these = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8((char)table[i]));
        codes = _mm512_mask_mov_epi8(codes, these, _mm512_set1_epi8((char)i));
        known |= these;
    }
    *unlisted = ~known;
    return codes;
}

/* Where in its line the i-th of 64 weights lies: unpacking takes eight bytes of each quarter, then the other eight. */
INLINE int compact_place(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

/* One row; its list's words behind `list`. */
PAIRS static void compact_row(const Compacting *c, const uint16_t *from, uint8_t *to, uint32_t *list) {
    for (int64_t k = 0; k < c->n; k += COMPACT_BLOCK, to += 2 * COMPACT_BYTES) {
        uint16_t row[COMPACT_BLOCK] = {0};
        memcpy(row, from + k, (size_t)least(COMPACT_BLOCK, c->n - k) * sizeof *row);
        __m512i codes[2];
        for (int half = 0; half < 2; half++) {
            const __m512i a = _mm512_loadu_si512(row + half * LINE), b = _mm512_loadu_si512(row + half * LINE + PAIR_STEP);
            const __m512i low = _mm512_set1_epi16(0xff);
            const __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
            __mmask64 unlisted;
            codes[half] = codes_of(upper, (const uint8_t *)c->beside, &unlisted);
            _mm512_storeu_si512(to + half * LINE, _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
            for (int i = 0; unlisted && i < LINE && k + half * LINE + i < c->n; i++)
                if (unlisted >> compact_place(i) & 1) *list++ = (uint32_t)(k + half * LINE + i) << 8 | row[half * LINE + i] >> 8;
        }
        _mm512_storeu_si512(to + 2 * LINE, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
    }
    *list = ~0u;
}

/* The words of a row's list. */
PAIRS static uint32_t compact_words(const Compacting *c, const uint16_t *from) {
    uint32_t count = 1;
    for (int64_t k = 0; k < c->n; k += PAIR_STEP) {
        const int64_t there = least(PAIR_STEP, c->n - k);
        const __m512i row = _mm512_maskz_loadu_epi16(there < PAIR_STEP ? (1u << there) - 1 : ~0u, from + k);
        __mmask64 unlisted;
        codes_of(_mm512_srli_epi16(row, 8), (const uint8_t *)c->beside, &unlisted);
        const uint64_t of_weights = 0x5555555555555555u >> (LINE - 2 * there); /* between them are zeros */
        count += (uint32_t)__builtin_popcountll(unlisted & of_weights);
    }
    return count;
}

/* The `part`-th of `parts` shares of the rows. */
static void compact_make(const Compacting *c, int64_t part, int64_t parts) {
    const int64_t share = (c->rows + parts - 1) / parts, last = least((part + 1) * share, c->rows);
    for (int64_t r = part * share; r < last; r++) {
        const uint16_t *row = c->weight + r * c->n;
        if (c->out) compact_row(c, row, c->out + compact_at(r, c->n), (uint32_t *)compact_list(c->beside, c->rows, r));
        else c->counts[r] = compact_words(c, row);
    }
}

/* ---- Reading it ---- */

/* What is listed of a row, from some place on: of which line the next one is, and where. */
typedef struct {
    const uint32_t *next;
    uint32_t line;
} Listed;

INLINE Listed listed(const uint32_t *next) { return (Listed){next, *next >> 8 >> 6}; }

INLINE Listed listed_from(const Block *block, int64_t row, int64_t from) {
    const uint32_t *next = compact_list((const uint32_t *)block->scale, block->rows, row);
    while (*next >> 8 < from) next++;
    return listed(next);
}

/* Puts in what is listed of this line. */
PAIRS static __m512i __attribute__((noinline)) put_listed(__m512i upper, Listed *of) {
    uint8_t bytes[LINE];
    _mm512_storeu_si512(bytes, upper);
    const uint32_t line = of->line;
    while (of->line == line) {
        bytes[compact_place(*of->next >> 8 & (LINE - 1))] = (uint8_t)*of->next;
        *of = listed(of->next + 1);
    }
    return _mm512_loadu_si512(bytes);
}

PAIRS INLINE __m512i compact_table(const Block *block) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)block->scale)); }

/* The 64 weights of half a block, in two vectors. */
PAIRS INLINE void compact_line(const uint8_t *at, int half, uint32_t line, __m512i table, Listed *of, __m512i weights[2]) {
    const __m512i codes = _mm512_loadu_si512(at + 2 * LINE), lower = _mm512_loadu_si512(at + half * LINE);
    __m512i upper = _mm512_shuffle_epi8(table, _mm512_and_si512(half ? _mm512_srli_epi16(codes, 4) : codes, _mm512_set1_epi8(15)));
    if (__builtin_expect(of->line == line, 0)) upper = put_listed(upper, of);
    weights[0] = _mm512_unpacklo_epi8(lower, upper), weights[1] = _mm512_unpackhi_epi8(lower, upper);
}

/* As `pair_tile`. Columns have zeros behind a row's end, up to the end of its last block. */
PAIRS INLINE void compact_tile(const Block *block, int64_t n, const uint16_t *columns, int64_t width, int count, float *const *y, int R, int C,
                               const Spot spot) {
    const int64_t bytes = compact_bytes(n);
    const uint8_t *w = (const uint8_t *)block->weight + compact_at(spot.row, n);
    const uint16_t *x = columns + spot.column * width;
    const __m512i table = compact_table(block);
    __m512 sum[ROWS][COLUMNS];
    Listed of[ROWS];
    EACH_SUM sum[r][c] = spot.from ? (__m512)spot.kept[r][c] : _mm512_setzero_ps();
    for (int r = 0; r < R; r++) of[r] = listed_from(block, spot.row + r, spot.from);
    for (int64_t k = spot.from; k < spot.to; k += COMPACT_BLOCK) {
        const int64_t at = k / COMPACT_BLOCK * COMPACT_BYTES;
        fetch((const char *)w, bytes, spot.ahead, at, COMPACT_BYTES, R, C);
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
            __m512i v[ROWS][2];
            _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)
                compact_line(w + r / 2 * 2 * bytes + r % 2 * COMPACT_BYTES + 2 * at, half, (uint32_t)(k / LINE + half), table, &of[r], v[r]);
            _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) _Pragma("GCC unroll 8") for (int c = 0; c < C; c++) {
                const __m512bh column = (__m512bh)_mm512_loadu_si512(x + c * width + k + half * LINE + i * PAIR_STEP);
                _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)v[r][i], column);
            }
        }
    }
    if (spot.to < n) EACH_SUM spot.kept[r][c] = (Floats)sum[r][c];
    else EACH_SUM if (spot.column + c < count) y[spot.column + c][block->out + spot.row + r] = _mm512_reduce_add_ps(sum[r][c]);
}

#define COMPACT_TILE(...) compact_tile(block, n, columns, width, count, y, __VA_ARGS__)

PAIRS static void product_compact(const Block *block, int64_t first, int64_t last, int64_t n, const void *columns, int64_t width, int count,
                                  float *const *y) {
    WALK(COMPACT_TILE, compact_bytes(n), 2, 2, 8, 4, 4, 2)
}

/* Numbers `from`, a multiple of COMPACT_BLOCK, to `to` of `rows` rows from `first` on, to out [rows, to - from]. */
PAIRS static void compact_rows(const Block *block, int64_t first, int64_t rows, int64_t n, int64_t from, int64_t to, uint16_t *out) {
    const __m512i table = compact_table(block);
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *w = (const uint8_t *)block->weight + compact_at(first + r, n);
        Listed of = listed_from(block, first + r, from);
        uint16_t *const row = out + r * (to - from) - from;
        for (int64_t k = from; k < to; k += LINE) {
            const uint8_t *at = w + k / COMPACT_BLOCK * 2 * COMPACT_BYTES;
            __m512i v[2];
            if (k / LINE % 2) compact_line(at, 1, (uint32_t)(k / LINE), table, &of, v);
            else compact_line(at, 0, (uint32_t)(k / LINE), table, &of, v);
            if (k + LINE <= to) {
                _mm512_storeu_si512(row + k, v[0]);
                _mm512_storeu_si512(row + k + PAIR_STEP, v[1]);
            } else memcpy(row + k, v, (size_t)(to - k) * sizeof *out);
        }
    }
}

#endif
#endif
