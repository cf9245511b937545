/* Products with int8 weights at one level of processors. product.h includes it once for each, with these macros, which end here:
 *
 * AT(NAME), TARGET    the name at this level; the attribute of its functions
 * OF_PAIRS            sums + the products of a column's pair with the pairs of LANES rows, in whole numbers of 32 bits
 * HALVES              sixteens of a panel's rows that a tile has
 *
 * A panel is PANEL_ROWS rows side by side: of each row a pair of weights, then of each row the next pair, so that it lies in memory as it is
 * read. Columns are whole numbers of 16 bits with a scale for each GROUP (pack_int8): within a group all arithmetic is exact, the same in
 * any order and on any processor. Groups are scaled and added up in float32, from the row's beginning to its end.
 */

/* The panel that begins with `row`, or its half `half`. With few columns a sum is split in SPLIT, so that products need not wait for each
 * other. */
TARGET INLINE void AT(int8_tile)(const Block *block, int64_t row, int half, int64_t n, const int16_t *columns, int64_t width, int column,
                                 int count, float *const *y, int C, int SPLIT, int64_t ahead) {
    const int64_t groups = (n + GROUP - 1) / GROUP;
    const int8_t *w = (const int8_t *)block->weight + row * groups * GROUP + 2 * LANES * half;
    const float *scale = (const float *)block->scale + row * groups + LANES * half;
    const int16_t *x = columns + column * width;
    Floats sum[2][4] = {0};
    for (int64_t g = 0; g < groups; g++, w += PANEL_ROWS * GROUP, scale += PANEL_ROWS) {
        Ints part[2][4][4] = {0};
        for (int first = 0; first < GROUP / 2; first += 4) _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            const int pair = first + i;
            if (ahead) __builtin_prefetch(w + pair * 2 * PANEL_ROWS + ahead);
            _Pragma("GCC unroll 2") for (int r = 0; r < HALVES; r++) _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {
                Ints *to = &part[r][c][i % SPLIT];
                *to = OF_PAIRS(*to, w + (pair * PANEL_ROWS + r * LANES) * 2, x + c * width + g * GROUP + pair * 2);
            }
        }
        _Pragma("GCC unroll 2") for (int r = 0; r < HALVES; r++) _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {
            _Pragma("GCC unroll 4") for (int i = 1; i < SPLIT; i++) part[r][c][0] += part[r][c][i];
            const Floats scales = load_f32(scale + r * LANES) * int8_scales(x + c * width, n)[g];
            sum[r][c] += __builtin_convertvector(part[r][c][0], Floats) * scales;
        }
    }
    for (int r = 0; r < HALVES; r++)
        for (int c = 0; c < C && column + c < count; c++) {
            const int64_t first = row + (half + r) * LANES, rows = block->rows - first < LANES ? block->rows - first : LANES;
            if (rows > 0) memcpy(y[column + c] + block->out + first, &sum[r][c], (size_t)rows * sizeof(float));
        }
}

/* Of the columns that go over a panel one after the other, the first meet memory and fetch what comes next. */
TARGET static void AT(product_int8)(const Block *block, int64_t first, int64_t last, int64_t n, const void *columns, int64_t width, int count,
                                    float *const *y) {
    for (int64_t row = first; row < last; row += PANEL_ROWS)
        for (int c = 0, step = 0; c < count; c += step)
            for (int half = 0; half < 2; half += HALVES) {
#define TILE(C, SPLIT, AHEAD) AT(int8_tile)(block, row, half, n, columns, width, c, count, y, step = C, SPLIT, AHEAD)
                if (count - c > 2 && c == 0) TILE(4, 1, INT8_AHEAD);
                else if (count - c > 2) TILE(4, 1, 0);
                else if (count - c > 1) TILE(2, 2, INT8_AHEAD);
                else TILE(1, 4, INT8_AHEAD);
#undef TILE
            }
}

#undef AT
#undef TARGET
#undef OF_PAIRS
#undef HALVES
