/* The small operators of a transformer layer. Arguments and results as in kernels/layer/plain.py;
   `kind`: dtype of all numbers, BF16 or F32. */
#include "row.h"

/* See row.h. */
void minikv_norm_row(int64_t n, bf16 *x, const bf16 *y, const bf16 *weight, double eps, bf16 *out) {
    float squares = 0.0f;
    if (y) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) x[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += from_bf16(x[i]) * from_bf16(x[i]);
    const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        out[i] = to_bf16(from_bf16(to_bf16(from_bf16(x[i]) * scale)) * from_bf16(weight[i]));
}

/* add_norm: t rows x [t, n], `pitch` apart; y [t, n] is added to x in place if it is not NULL; then
   RMSNorm of x, times weight [n], into out [t, n]. */
void minikv_add_norm(
    int kind, int64_t t, int64_t n, int64_t pitch, void *x, const void *y, const void *weight,
    double eps, void *out
) {
#pragma omp parallel for schedule(static) if (t * n > 100000)
    for (int64_t r = 0; r < t; r++) {
        if (kind == BF16) {
            minikv_norm_row(
                n, (bf16 *)x + r * pitch, y ? (const bf16 *)y + r * n : NULL, weight, eps,
                (bf16 *)out + r * n
            );
        } else {
            float *row = (float *)x + r * pitch, *into = (float *)out + r * n;
            const float *more = y ? (const float *)y + r * n : NULL, *w = weight;
            float squares = 0.0f;
            if (more) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++) row[i] += more[i];
            }
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n; i++) squares += row[i] * row[i];
            const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
            for (int64_t i = 0; i < n; i++) into[i] = row[i] * scale * w[i];
        }
    }
}

/* See row.h. */
void minikv_rotate_row(
    int kind, int64_t heads, int64_t D, const void *x, const void *cos, const void *sin, void *out
) {
    const int64_t half = D / 2;
    for (int64_t h = 0; h < heads; h++) {
        if (kind == BF16) {
            const bf16 *row = (const bf16 *)x + h * D, *c = cos, *s = sin;
            bf16 *into = (bf16 *)out + h * D;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float a = from_bf16(row[i]), b = from_bf16(row[half + i]);
                into[i] = to_bf16(multiply_add(b, from_bf16(s[i]), a * from_bf16(c[i])));
                into[half + i] =
                    to_bf16(multiply_add(a, from_bf16(s[half + i]), b * from_bf16(c[half + i])));
            }
        } else {
            const float *row = (const float *)x + h * D, *c = cos, *s = sin;
            float *into = (float *)out + h * D;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float a = row[i], b = row[half + i];
                into[i] = multiply_add(b, s[i], a * c[i]);
                into[half + i] = multiply_add(a, s[half + i], b * c[half + i]);
            }
        }
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

/* See row.h. */
void minikv_silu_row(int64_t n, bf16 *gate, const bf16 *up) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        gate[i] = to_bf16(from_bf16(to_bf16(silu(from_bf16(gate[i])))) * from_bf16(up[i]));
}

/* silu_mul: both [t, 2 n] is the gate and then up, its rows `pitch` apart. silu(gate) * up
   overwrites the gate. */
void minikv_silu_mul(int kind, int64_t t, int64_t n, int64_t pitch, void *both) {
#pragma omp parallel for schedule(static) if (t * n > 50000)
    for (int64_t r = 0; r < t; r++) {
        if (kind == BF16) {
            minikv_silu_row(n, (bf16 *)both + r * pitch, (const bf16 *)both + r * pitch + n);
        } else {
            float *gate = (float *)both + r * pitch;
            const float *up = gate + n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) gate[i] = silu(gate[i]) * up[i];
        }
    }
}
