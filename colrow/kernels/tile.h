/* Products at one level of processors. product.h includes it once for each, with these macros, which end here:
 *
 * AT(NAME), TARGET        the name at this level; the attribute of its functions
 * SHAPE                   tiles (WALK in product.h), as many rows and columns as registers hold
 * FROM_F16                sixteen weights as Floats
 */

TARGET INLINE Floats AT(weights)(const char *w, int dtype, int64_t at) {
    return dtype == F16 ? FROM_F16((const uint16_t *)w + at) : load(w, dtype, at);
}

/* At the end of a row, with zeros behind it. */
TARGET static Floats __attribute__((noinline)) AT(last_weights)(const char *w, int dtype, int64_t at, int64_t n) {
    float rest[LANES] = {0};
    for (int64_t i = at; i < n && i < at + LANES; i++) rest[i - at] = get(w, dtype, i);
    return load_f32(rest);
}

/* R rows times C columns, which are constants where this is inlined, so sums stay in registers. Columns have zeros up to a multiple of
 * GROUP. */
TARGET INLINE void AT(tile)(const Block *block, int dtype, int64_t n, const float *columns, int64_t width, int count, float *const *y, int R,
                            int C, const Spot spot) {
    const int64_t unit = dtype == F32 ? 4 : 2, bytes = n * unit;
    const char *w = (const char *)block->weight + spot.row * bytes;
    const float *x = columns + spot.column * width;
    Floats sum[ROWS][COLUMNS], v[ROWS];
    EACH_SUM sum[r][c] = spot.from ? spot.kept[r][c] : (Floats){0};
    for (int64_t k = spot.from; k < spot.to; k += GROUP) {
        const int whole = k + GROUP <= n;
        if (whole) fetch(w, bytes, spot.ahead, k * unit, GROUP * unit, R, C);
#define STEP(WEIGHTS)                                                                             \
    for (int64_t at = k; at < k + GROUP; at += LANES) {                                           \
        _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) v[r] = WEIGHTS;                       \
        _Pragma("GCC unroll 8") for (int c = 0; c < C; c++) {                                     \
            const Floats column = load_f32(x + c * width + at);                                   \
            _Pragma("GCC unroll 4") for (int r = 0; r < R; r++) sum[r][c] += v[r] * column;       \
        }                                                                                         \
    }
        if (whole) _Pragma("GCC unroll 4") STEP(AT(weights)(w + r * bytes, dtype, at))
        else STEP(AT(last_weights)(w + r * bytes, dtype, at, n))
#undef STEP
    }
    if (spot.to < n) EACH_SUM spot.kept[r][c] = sum[r][c];
    else EACH_SUM if (spot.column + c < count) y[spot.column + c][block->out + spot.row + r] = total(sum[r][c]);
}

#define PLAIN(NAME, DTYPE, UNIT, ...)                                                                                                      \
    TARGET static void AT(NAME)(const Block *block, int64_t first, int64_t last, int64_t n, const void *columns, int64_t width, int count, \
                                float *const *y) {                                                                                         \
        APPLY(WALK, TILE_##DTYPE, n * UNIT, 4, __VA_ARGS__)                                                                             \
    }
#define APPLY(MACRO, ...) MACRO(__VA_ARGS__)
#define TILE(DTYPE, ...) AT(tile)(block, DTYPE, n, columns, width, count, y, __VA_ARGS__)
#define TILE_F32(...) TILE(F32, __VA_ARGS__)
#define TILE_BF16(...) TILE(BF16, __VA_ARGS__)
#define TILE_F16(...) TILE(F16, __VA_ARGS__)

PLAIN(product_f32, F32, 4, SHAPE)
PLAIN(product_bf16, BF16, 2, SHAPE)
PLAIN(product_f16, F16, 2, SHAPE)

#undef PLAIN
#undef APPLY
#undef TILE
#undef TILE_F32
#undef TILE_BF16
#undef TILE_F16
#undef AT
#undef TARGET
#undef SHAPE
#undef FROM_F16
