/* What happens to the features of one position between two products: arithmetic element by element, and means along the last dim.
 *
 * Operands are strided views of up to DIMS dims into the arena of a row (a sequence's own memory), into constants, or one number. They work
 * in float32 whatever the model's dtype is.
 */
#ifndef COLROW_ELEMENTWISE_H
#define COLROW_ELEMENTWISE_H

#include "vector.h"

enum { DIMS = 4 };
enum { IN_ARENA, CONSTANT, NUMBER };

typedef struct {
    int64_t kind, at; /* IN_ARENA: offset in floats; CONSTANT: address of floats */
    int64_t stride[DIMS];
    double number;
} Operand;

enum {
    COPY, NEG, EXP, RSQRT, SQRT, RECIPROCAL, SQUARE, SIGMOID, SILU, TANH, RELU, GELU, GELU_TANH, ABS, TRUTH, NOT, UNARY_END, /* out = f(a) */
    ADD, SUB, MUL, DIV, MAXIMUM, MINIMUM, FILL, BINARY_END,           /* out = f(a, b); FILL: c's number where b is not 0, else a */
    MEAN, SUM, MAX, REDUCTION_END,                                    /* out = f(a) along the last dim of `shape` */
    PRODUCT, EXPERTS, ATTEND, TOPK, TAKE, SCATTER, REDUCE
};

INLINE float sigmoid(float x) { return 1 / (1 + exponential(-x)); }
INLINE float tangent(float x) { return 1 - 2 / (1 + exponential(2 * x)); }
INLINE float gelu_tanh(float x) { return 0.5f * x * (1 + tangent(0.79788456f * (x + 0.044715f * x * x * x))); }
INLINE float gelu(float x) { return 0.5f * x * (1 + erff(x * 0.70710678f)); }

/* ---- One piece of a line: at most PIECE elements, side by side ---- */

enum { PIECE = 256 };

#define EACH(OP, VALUE)                               \
    case OP:                                          \
        for (int64_t i = 0; i < n; i++) {             \
            const float x = a[i], y = b[i];           \
            (void)y;                                  \
            out[i] = (VALUE);                         \
        }                                             \
        break;

SIMD static void piece(int op, float *out, const float *a, const float *b, float number, int64_t n) {
    switch (op) {
        EACH(COPY, x)
        EACH(NEG, -x)
        EACH(EXP, exponential(x))
        EACH(RSQRT, 1 / sqrtf(x))
        EACH(SQRT, sqrtf(x))
        EACH(RECIPROCAL, 1 / x)
        EACH(SQUARE, x * x)
        EACH(SIGMOID, sigmoid(x))
        EACH(SILU, x * sigmoid(x))
        EACH(TANH, tangent(x))
        EACH(RELU, x > 0 ? x : x != x ? x : 0)
        EACH(GELU, gelu(x))
        EACH(GELU_TANH, gelu_tanh(x))
        EACH(ABS, fabsf(x))
        EACH(TRUTH, x != 0)
        EACH(NOT, x == 0)
        EACH(ADD, x + y)
        EACH(SUB, x - y)
        EACH(MUL, x * y)
        EACH(DIV, x / y)
        EACH(MAXIMUM, x > y || x != x ? x : y)
        EACH(MINIMUM, x < y || x != x ? x : y)
        EACH(FILL, y != 0 ? number : x)
    }
}

/* The n elements from `from` on, side by side: where they are, or gathered in `room`. */
INLINE const float *gathered(const float *from, int64_t stride, float *room, int64_t n) {
    if (stride == 1) return from;
    for (int64_t i = 0; i < n; i++) room[i] = from[i * stride];
    return room;
}

static void line(int op, float *out, int64_t so, const float *a, int64_t sa, const float *b, int64_t sb, float number, int64_t n) {
    float rooms[3][PIECE];
    for (int64_t at = 0; at < n; at += PIECE) {
        const int64_t count = n - at < PIECE ? n - at : PIECE;
        const float *x = gathered(a + at * sa, sa, rooms[0], count), *y = op < UNARY_END ? x : gathered(b + at * sb, sb, rooms[1], count);
        float *to = so == 1 ? out + at : rooms[2];
        piece(op, to, x, y, number, count);
        if (so != 1)
            for (int64_t i = 0; i < count; i++) out[(at + i) * so] = to[i];
    }
}

static float largest_of(const float *a, int64_t sa, int64_t n) {
    float found = a[0];
    for (int64_t i = 1; i < n; i++) found = a[i * sa] > found || a[i * sa] != a[i * sa] ? a[i * sa] : found;
    return found;
}

SIMD static float sum_of(const float *a, int64_t sa, int64_t n) {
    Floats sum = {0};
    int64_t i = 0;
    if (sa == 1)
        for (; i + LANES <= n; i += LANES) sum += load_f32(a + i);
    float rest = 0;
    for (; i < n; i++) rest += a[i * sa];
    return total(sum) + rest;
}

/* ---- Several dims ---- */

INLINE float *place(const Operand *operand, float *arena) {
    return operand->kind == IN_ARENA ? arena + operand->at : (float *)(intptr_t)operand->at;
}

/* out, a and b have the dims of `shape`; strides of 0 where an operand is broadcast, and where a reduction's result has no such dim. */
static void elementwise(int op, const int64_t *shape, const Operand *out, const Operand *a, const Operand *b, float filler, float *arena) {
    const float number = (float)b->number;
    const float *from_b = b->kind == NUMBER ? &number : place(b, arena), *from_a = place(a, arena);
    float *to = place(out, arena);
    const int64_t n = shape[DIMS - 1], so = out->stride[DIMS - 1], sa = a->stride[DIMS - 1], sb = b->stride[DIMS - 1];
    for (int64_t i = 0; i < shape[0]; i++)
        for (int64_t j = 0; j < shape[1]; j++)
            for (int64_t k = 0; k < shape[2]; k++) {
#define AT(p, o) (p + i * o->stride[0] + j * o->stride[1] + k * o->stride[2])
                if (op < BINARY_END) line(op, AT(to, out), so, AT(from_a, a), sa, AT(from_b, b), sb, filler, n);
                else if (op == MAX) *AT(to, out) = largest_of(AT(from_a, a), sa, n);
                else {
                    const float sum = sum_of(AT(from_a, a), sa, n);
                    *AT(to, out) = op == MEAN ? sum / (float)n : sum;
                }
#undef AT
            }
}

#endif
