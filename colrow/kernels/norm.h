/* Root mean square norms (Zhang and Sennrich, arXiv:1910.07467, equation 4) of a prompt's tokens in bfloat16, in one pass over memory, on
 * processors that have instructions for bfloat16. */
#ifndef COLROW_NORM_H
#define COLROW_NORM_H

#include "product.h"

/* out [rows, n] = x [rows, n], rows `stride` apart, / sqrt(mean of squares + eps) * (more + weight). `early`: rounded to bfloat16 before it is
 * multiplied by the weight as well as after. */
typedef struct {
    int64_t rows, n, stride, early;
    const uint16_t *x, *weight;
    uint16_t *out;
    float eps, more;
} Norm;

#if CLONES && HIGHEST >= 5

PAIRS INLINE __m512 widened(__m256i v) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16); }

PAIRS static void norm_row(const Norm *norm, const uint16_t *x, uint16_t *out) {
    enum { SUMS = 4 }; /* so that one addition need not wait for the one before */
    const __m512 more = _mm512_set1_ps(norm->more);
    __m512 sums[SUMS] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t i = 0; i < norm->n; i += SUMS * LANES)
        for (int s = 0; s < SUMS && i + s * LANES < norm->n; s++) {
            const __m512 v = widened(_mm256_maskz_loadu_epi16(lanes(norm->n - i - s * LANES), x + i + s * LANES));
            sums[s] = _mm512_fmadd_ps(v, v, sums[s]);
        }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
    const __m512 scale = _mm512_set1_ps(1 / sqrtf(sum / (float)norm->n + norm->eps));
    for (int64_t i = 0; i < norm->n; i += LANES) {
        const __mmask16 there = lanes(norm->n - i);
        __m512 v = _mm512_mul_ps(widened(_mm256_maskz_loadu_epi16(there, x + i)), scale);
        if (norm->early) v = widened((__m256i)_mm512_cvtneps_pbh(v));
        const __m512 weight = _mm512_add_ps(more, widened(_mm256_maskz_loadu_epi16(there, norm->weight + i)));
        _mm256_mask_storeu_epi16(out + i, there, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(v, weight)));
    }
}

/* The `part`-th of `parts` shares of the rows. */
static void norms(const Norm *norm, int64_t part, int64_t parts) {
    for (int64_t row = norm->rows * part / parts; row < norm->rows * (part + 1) / parts; row++)
        norm_row(norm, norm->x + row * norm->stride, norm->out + row * norm->n);
}

#else
static void norms(const Norm *norm, int64_t part, int64_t parts) { (void)norm, (void)part, (void)parts; }
#endif
#endif
