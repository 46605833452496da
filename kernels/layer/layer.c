/* The small operators of a transformer layer. Arguments and results as in kernels/layer/plain.py;
   `kind`: dtype of all numbers, BF16 or F32. */
#include "row.h"

/* One row of add_norm. With a constant kind, the loops become vectors. */
INLINE void norm_row(
    const int kind, int64_t n, void *x, const void *y, const void *weight, double eps, void *out
) {
    float squares = 0.0f;
    if (y) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            store_number(x, kind, i, number_at(x, kind, i) + number_at(y, kind, i));
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++)
        squares += number_at(x, kind, i) * number_at(x, kind, i);
    const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        store_number(
            out, kind, i, rounded(kind, number_at(x, kind, i) * scale) * number_at(weight, kind, i)
        );
}

/* See row.h. */
void minikv_norm_row(int64_t n, bf16 *x, const bf16 *y, const bf16 *weight, double eps, bf16 *out) {
    norm_row(BF16, n, x, y, weight, eps, out);
}

/* add_norm: t rows x [t, n], `pitch` apart; y [t, n] is added to x in place if it is not NULL; then
   RMSNorm of x, times weight [n], into out [t, n]. */
void minikv_add_norm(
    int kind, int64_t t, int64_t n, int64_t pitch, void *x, const void *y, const void *weight,
    double eps, void *out
) {
    const int64_t size = item_size(kind);
#pragma omp parallel for schedule(static) if (t * n > 100000)
    for (int64_t r = 0; r < t; r++) {
        char *row = (char *)x + r * pitch * size, *into = (char *)out + r * n * size;
        const char *more = y ? (const char *)y + r * n * size : NULL;
        if (kind == BF16)
            norm_row(BF16, n, row, more, weight, eps, into);
        else
            norm_row(F32, n, row, more, weight, eps, into);
    }
}

/* Rotate one head by cos and sin [D]. */
INLINE void rotate_head(
    const int kind, int64_t D, const void *x, const void *cos, const void *sin, void *out
) {
    const int64_t half = D / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        const float a = number_at(x, kind, i), b = number_at(x, kind, half + i);
        const float one = a * number_at(cos, kind, i), two = b * number_at(cos, kind, half + i);
        store_number(out, kind, i, multiply_add(b, number_at(sin, kind, i), one));
        store_number(out, kind, half + i, multiply_add(a, number_at(sin, kind, half + i), two));
    }
}

/* See row.h. */
void minikv_rotate_row(
    int kind, int64_t heads, int64_t D, const void *x, const void *cos, const void *sin, void *out
) {
    const int64_t size = D * item_size(kind);
    for (int64_t h = 0; h < heads; h++) {
        const char *from = (const char *)x + h * size;
        if (kind == BF16)
            rotate_head(BF16, D, from, cos, sin, (char *)out + h * size);
        else
            rotate_head(F32, D, from, cos, sin, (char *)out + h * size);
    }
}

/* rotate: rotary embedding of x [t, heads, D], whose tokens are `pitch` numbers apart, by cos and
   sin [t, D], into out [t, heads, D]. */
void minikv_rotate(
    int kind, int64_t t, int64_t heads, int64_t D, int64_t pitch, const void *x, const void *cos,
    const void *sin, void *out
) {
    const int64_t size = item_size(kind);
#pragma omp parallel for schedule(static) if (t * heads * D > 100000)
    for (int64_t r = 0; r < t; r++)
        minikv_rotate_row(
            kind, heads, D, (const char *)x + r * pitch * size, (const char *)cos + r * D * size,
            (const char *)sin + r * D * size, (char *)out + r * heads * D * size
        );
}

/* x * sigmoid(x). */
static inline float silu(float x) {
    float e = exp_negative(-fabsf(x));
    return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* One row of silu_mul: gate and up [n]. */
INLINE void silu_row(const int kind, int64_t n, void *gate, const void *up) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        store_number(
            gate, kind, i, rounded(kind, silu(number_at(gate, kind, i))) * number_at(up, kind, i)
        );
}

/* See row.h. */
void minikv_silu_row(int64_t n, bf16 *gate, const bf16 *up) { silu_row(BF16, n, gate, up); }

/* silu_mul: both [t, 2 n] is the gate and then up, its rows `pitch` apart. silu(gate) * up
   overwrites the gate. */
void minikv_silu_mul(int kind, int64_t t, int64_t n, int64_t pitch, void *both) {
#pragma omp parallel for schedule(static) if (t * n > 50000)
    for (int64_t r = 0; r < t; r++) {
        char *gate = (char *)both + r * pitch * item_size(kind);
        if (kind == BF16)
            silu_row(BF16, n, gate, gate + n * item_size(kind));
        else
            silu_row(F32, n, gate, gate + n * item_size(kind));
    }
}
