/* Sixteen numbers at a time, in the compiler's own vectors: one instruction each with AVX-512, two with AVX2, four with NEON or SSE.
 *
 * Lanes are added in one fixed order, so a sum does not depend on how wide the machine's registers are. On x86-64 each function marked SIMD
 * exists for AVX-512, AVX2 and the baseline, chosen when the library is loaded.
 */
#ifndef COLROW_VECTOR_H
#define COLROW_VECTOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __clang__
#define CAN_CLONE (__clang_major__ >= 17)
#else
#define CAN_CLONE (__GNUC__ >= 12)
#endif
#if defined(__x86_64__) && defined(__GLIBC__) && CAN_CLONE && !defined(__SANITIZE_THREAD__)
#define CLONES 1
#else
#define CLONES 0
#endif
#ifndef HIGHEST /* level of processors that code is made for: 2 any, 3 AVX2, 4 AVX-512, 5 with products of bfloat16; lower in tests */
#define HIGHEST 5
#endif
#if CLONES && HIGHEST >= 4
#define SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif CLONES && HIGHEST == 3
#define SIMD __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define SIMD
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(64)));

enum { F32, BF16, F16, INT8, COMPACT }; /* how weights and caches are stored; caches and sums: one of the first three */
enum { GROUP = 64 };      /* int8 weights that share a scale */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE Floats load_f32(const float *at) {
    Floats v;
    memcpy(&v, at, sizeof v);
    return v;
}

INLINE Floats load_bf16(const uint16_t *at) {
    Halves h;
    memcpy(&h, at, sizeof h);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}

/* The exponent is moved by a multiplication, which is right for numbers below the smallest normal one too, not for infinities. */
INLINE Floats load_f16(const uint16_t *at) {
    Halves h;
    memcpy(&h, at, sizeof h);
    const Words w = __builtin_convertvector(h, Words);
    return (Floats)((w & 0x7fff) << 13 | (w & 0x8000) << 16) * 0x1p112f;
}

INLINE void store_f32(float *at, Floats v) { memcpy(at, &v, sizeof v); }

/* Halves added to halves: the same tree everywhere. */
INLINE float total(Floats v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

/* What `total` gives of each of sixteen, to the bit: halves of two vectors are added side by side, until a lane is left of each. */
#if defined(__clang__) || __GNUC__ >= 12
#define HALVED(TO, FROM, COUNT, LOW, HIGH) \
    for (int i = 0; i < COUNT; i++) TO[i] = __builtin_shufflevector(FROM[i], FROM[i + COUNT], LOW) + __builtin_shufflevector(FROM[i], FROM[i + COUNT], HIGH);
#define LIST(...) __VA_ARGS__
INLINE Floats totals(const Floats v[LANES]) {
    Floats a[8], b[4], c[2], d[1];
    HALVED(a, v, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    HALVED(b, a, 4, LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27), LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
    HALVED(c, b, 2, LIST(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29), LIST(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
    HALVED(d, c, 1, LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
    return __builtin_shufflevector(d[0], d[0], 0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
}
#undef HALVED
#undef LIST

/* Thirty-two bfloat16 as they lie in memory: those at even places and those at odd ones, which takes less than to spread them. */
INLINE void load_pairs(const uint16_t *at, Floats *even, Floats *odd) {
    Words both;
    memcpy(&both, at, sizeof both);
    *even = (Floats)(both << 16), *odd = (Floats)(both & 0xffff0000u);
}

/* Thirty-two numbers parted like that, and joined again. */
INLINE void part(const float *at, Floats *even, Floats *odd) {
    const Floats a = load_f32(at), b = load_f32(at + LANES);
    *even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

INLINE void join(float *at, Floats even, Floats odd) {
    store_f32(at, __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    store_f32(at + LANES, __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}
#define PARTS 1
#else
#define PARTS 0
INLINE Floats totals(const Floats v[LANES]) {
    Floats sums;
    for (int i = 0; i < LANES; i++) sums[i] = total(v[i]);
    return sums;
}
#endif

INLINE float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE uint16_t to_bf16(float value) { /* to nearest, ties to even, as torch rounds */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE float from_f16(uint16_t value) {
    const uint32_t bits = (uint32_t)(value & 0x7fff) << 13 | (uint32_t)(value & 0x8000) << 16;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    return (value & 0x7c00) == 0x7c00 ? (value & 0x3ff ? NAN : value & 0x8000 ? -INFINITY : INFINITY) : f;
}

INLINE uint16_t to_f16(float value) { /* to nearest, ties to even */
    uint32_t bits, sign;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (bits > 0x7f800000) return 0x7e00;
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* below the smallest normal number: the addition rounds */
        float f;
        memcpy(&f, &bits, 4);
        f += 0.5f;
        memcpy(&bits, &f, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

/* Numbers of a cache or of a sum. */
INLINE float get(const void *from, int dtype, int64_t at) {
    return dtype == F32 ? ((const float *)from)[at] : (dtype == BF16 ? from_bf16 : from_f16)(((const uint16_t *)from)[at]);
}

INLINE void put(void *to, int dtype, int64_t at, const float *from, int64_t n) {
    if (dtype == F32) memcpy((float *)to + at, from, (size_t)n * sizeof *from);
    else if (dtype == BF16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[at + i] = to_bf16(from[i]);
    else
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[at + i] = to_f16(from[i]);
}

INLINE Floats load(const void *from, int dtype, int64_t at) {
    return dtype == F32 ? load_f32((const float *)from + at) : (dtype == BF16 ? load_bf16 : load_f16)((const uint16_t *)from + at);
}

/* e^x to 2 units in the last place, in plain arithmetic that vectorises. x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial for e^r. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1;
    p = p * r + 1;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

#endif
