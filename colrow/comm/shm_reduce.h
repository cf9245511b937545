/* Sum and maximum of one array per rank, in rank order, so that every rank computes the same bits from the same inputs.
 *
 * float16 and bfloat16 are added in float32 and rounded once at the end (to nearest, ties to even, as torch rounds). Written as plain loops
 * over small blocks that compilers vectorise; on x86-64 each function exists for AVX-512, AVX2 and the baseline, chosen when the library is
 * loaded. NEON is the baseline of aarch64. No multiplication takes part, so every version gives the same bits.
 */
#ifndef COLROW_SHM_REDUCE_H
#define COLROW_SHM_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "shm.h"

#ifdef __clang__
#define CR_CAN_CLONE (__clang_major__ >= 17)
#else
#define CR_CAN_CLONE (__GNUC__ >= 12)
#endif
#if defined(__x86_64__) && defined(__GLIBC__) && CR_CAN_CLONE && !defined(__SANITIZE_THREAD__)
#define SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SIMD
#endif
#define INLINE static inline __attribute__((always_inline))

/* ---- Conversions ---- */

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float from_bf16(uint16_t value) { return float_of((uint32_t)value << 16); }

INLINE uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded); /* NaN: rounding could carry into infinity */
}

/* Exact: the half's exponent and mantissa are moved into a float's place, and a product with 2^112 puts the exponent right, subnormals
 * included. Infinity and NaN keep their mantissa under the largest exponent. */
INLINE float from_f16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, body = (uint32_t)(value & 0x7fff) << 13;
    uint32_t finite = bits_of(float_of(body) * 0x1p112f);
    return float_of(sign | ((value & 0x7c00) == 0x7c00 ? body | 0x7f800000 : finite));
}

/* Normal results: rebias and round in integers. Results below 2^-14: adding 0.5 lets the float adder round at the place of the half's last
 * bit, 2^-24. From 65520 on: infinity. */
INLINE uint16_t to_f16(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, body = bits & 0x7fffffff;
    uint32_t normal = (body - (112u << 23) + 0xfff + ((body >> 13) & 1)) >> 13;
    uint32_t small = bits_of(float_of(body) + 0.5f) - bits_of(0.5f);
    uint32_t result = body < (113u << 23) ? small : normal;
    result = body >= 0x477ff000 ? 0x7c00 : result;
    return (uint16_t)(sign | (body > 0x7f800000 ? 0x7e00 : result));
}

#define AS_IS(v) (v)
#define ADD(a, b) ((a) + (b))
#define MAX(a, b) ((b) > (a) || (b) != (b) ? (b) : (a)) /* NaN wins, as in torch.maximum */

/* ---- One function per dtype and operation: out[i] = in[0][i] op in[1][i] op ...; `out` may be one of the inputs, exactly ---- */

#define BLOCK 1024

#define REDUCE(NAME, T, ACC, LOAD, STORE, OP)                                                             \
    SIMD static void NAME(void *to, const void *const *from, int n, size_t count) {                       \
        ACC acc[BLOCK];                                                                                   \
        for (size_t start = 0; start < count; start += BLOCK) {                                           \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                \
            const T *a = (const T *)from[0] + start, *b = (const T *)from[n > 1] + start;                 \
            T *out = (T *)to + start;                                                                     \
            if (n == 1) for (size_t i = 0; i < length; i++) acc[i] = LOAD(a[i]);                          \
            else for (size_t i = 0; i < length; i++) acc[i] = OP((ACC)LOAD(a[i]), (ACC)LOAD(b[i]));       \
            for (int r = 2; r < n; r++) {                                                                 \
                const T *c = (const T *)from[r] + start;                                                  \
                for (size_t i = 0; i < length; i++) acc[i] = OP(acc[i], (ACC)LOAD(c[i]));                 \
            }                                                                                             \
            for (size_t i = 0; i < length; i++) out[i] = STORE(acc[i]);                                   \
        }                                                                                                 \
    }

REDUCE(sum_f32, float, float, AS_IS, AS_IS, ADD)
REDUCE(max_f32, float, float, AS_IS, AS_IS, MAX)
REDUCE(sum_bf16, uint16_t, float, from_bf16, to_bf16, ADD)
REDUCE(max_bf16, uint16_t, float, from_bf16, to_bf16, MAX)
REDUCE(sum_f16, uint16_t, float, from_f16, to_f16, ADD)
REDUCE(max_f16, uint16_t, float, from_f16, to_f16, MAX)
REDUCE(sum_f64, double, double, AS_IS, AS_IS, ADD)
REDUCE(max_f64, double, double, AS_IS, AS_IS, MAX)
REDUCE(sum_i32, uint32_t, uint32_t, AS_IS, AS_IS, ADD) /* unsigned: overflow wraps instead of being undefined */
REDUCE(max_i32, int32_t, int32_t, AS_IS, AS_IS, MAX)
REDUCE(sum_i64, uint64_t, uint64_t, AS_IS, AS_IS, ADD)
REDUCE(max_i64, int64_t, int64_t, AS_IS, AS_IS, MAX)
REDUCE(sum_u8, uint8_t, uint8_t, AS_IS, (uint8_t), ADD)
REDUCE(max_u8, uint8_t, uint8_t, AS_IS, AS_IS, MAX)

typedef void Reduce(void *to, const void *const *from, int n, size_t count);

static Reduce *const reduce_of[CR_DTYPES][2] = {{sum_f32, max_f32}, {sum_bf16, max_bf16}, {sum_f16, max_f16}, {sum_f64, max_f64},
                                                {sum_i32, max_i32}, {sum_i64, max_i64}, {sum_u8, max_u8}};
static const size_t size_of[CR_DTYPES] = {4, 2, 2, 8, 4, 8, 1};

#endif
