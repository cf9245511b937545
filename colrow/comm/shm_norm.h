/* What follows an all-reduce on the decode path, row by row while the sum is in the cache: residual addition and RMSNorm.
 *
 *     residual = residual + sum;  out = weight · (residual / sqrt(mean(residual²) + eps))
 *
 * Rounds where the separate modules of a Llama block round: the new residual, the normalised value, and its product with the weight, each
 * to the tensors' dtype; the norm itself in float32. The sum of squares has 16 partial sums in a fixed order, so that every machine and
 * every rank computes the same bits.
 */
#ifndef COLROW_SHM_NORM_H
#define COLROW_SHM_NORM_H

#include <math.h>

#include "shm_reduce.h"

#define LANES 16

#define NORM(NAME, T, LOAD, STORE)                                                                       \
    SIMD static void NAME(void *values, void *rest, const void *weights, size_t width, float eps) {      \
        T *restrict out = values, *restrict residual = rest;                                             \
        const T *restrict weight = weights;                                                              \
        float block[BLOCK], squares[LANES] = {0}, total = 0;                                             \
        for (size_t start = 0; start < width; start += BLOCK) {                                          \
            const size_t length = width - start < BLOCK ? width - start : BLOCK, even = length / LANES * LANES; \
            for (size_t i = 0; i < length; i++) {                                                        \
                residual[start + i] = STORE(LOAD(residual[start + i]) + LOAD(out[start + i]));           \
                block[i] = LOAD(residual[start + i]);                                                    \
            }                                                                                            \
            for (size_t i = 0; i < even; i += LANES)                                                     \
                for (size_t k = 0; k < LANES; k++) squares[k] += block[i + k] * block[i + k];            \
            for (size_t i = even; i < length; i++) squares[i - even] += block[i] * block[i];             \
        }                                                                                                \
        for (size_t k = 0; k < LANES; k++) total += squares[k];                                          \
        const float scale = 1.0f / sqrtf(total / (float)width + eps);                                    \
        for (size_t i = 0; i < width; i++) out[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(residual[i]) * scale))); \
    }

NORM(norm_f32, float, AS_IS, AS_IS)
NORM(norm_bf16, uint16_t, from_bf16, to_bf16)
NORM(norm_f16, uint16_t, from_f16, to_f16)

typedef void Norm(void *values, void *residual, const void *weight, size_t width, float eps);

static Norm *const norm_of[CR_DTYPES] = {norm_f32, norm_bf16, norm_f16}; /* the others are none */

#endif
