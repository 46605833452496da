/* The small operators of a transformer layer. Arguments and results as in kernels/torch/layer.py;
   `kind`: dtype of all numbers, BF16 or F32. */
#include "numbers.h"

/* add_norm: t rows x [t, n], `pitch` apart; y [t, n] is added to x in place if it is not NULL; then
   RMSNorm of x, times weight [n], into out [t, n]. */
void minikv_add_norm(
    int kind, int64_t t, int64_t n, int64_t pitch, void *x, const void *y, const void *weight,
    double eps, void *out
) {
#pragma omp parallel for schedule(static) if (t * n > 100000)
    for (int64_t r = 0; r < t; r++) {
        if (kind == BF16) {
            bf16 *row = (bf16 *)x + r * pitch, *into = (bf16 *)out + r * n;
            const bf16 *more = y ? (const bf16 *)y + r * n : NULL, *w = weight;
            float squares = 0.0f;
            if (more) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    row[i] = to_bf16(from_bf16(row[i]) + from_bf16(more[i]));
            }
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n; i++)
                squares += from_bf16(row[i]) * from_bf16(row[i]);
            const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                into[i] = to_bf16(from_bf16(to_bf16(from_bf16(row[i]) * scale)) * from_bf16(w[i]));
        } else {
            float *row = (float *)x + r * pitch, *into = (float *)out + r * n;
            const float *more = y ? (const float *)y + r * n : NULL, *w = weight;
            float squares = 0.0f;
            if (more) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    row[i] += more[i];
            }
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n; i++)
                squares += row[i] * row[i];
            const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                into[i] = row[i] * scale * w[i];
        }
    }
}

/* rotate: x [t, heads, D], its rows `pitch` apart; cos and sin [t, D]; out [t, heads, D]. */
void minikv_rotate(
    int kind, int64_t t, int64_t heads, int64_t D, int64_t pitch, const void *x, const void *cos,
    const void *sin, void *out
) {
    const int64_t half = D / 2;
#pragma omp parallel for schedule(static) if (t * heads * D > 100000)
    for (int64_t r = 0; r < t; r++)
        for (int64_t h = 0; h < heads; h++) {
            if (kind == BF16) {
                const bf16 *row = (const bf16 *)x + r * pitch + h * D;
                const bf16 *c = (const bf16 *)cos + r * D, *s = (const bf16 *)sin + r * D;
                bf16 *into = (bf16 *)out + (r * heads + h) * D;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float a = from_bf16(row[i]), b = from_bf16(row[half + i]);
                    into[i] = to_bf16(multiply_add(b, from_bf16(s[i]), a * from_bf16(c[i])));
                    into[half + i] = to_bf16(
                        multiply_add(a, from_bf16(s[half + i]), b * from_bf16(c[half + i]))
                    );
                }
            } else {
                const float *row = (const float *)x + r * pitch + h * D;
                const float *c = (const float *)cos + r * D, *s = (const float *)sin + r * D;
                float *into = (float *)out + (r * heads + h) * D;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float a = row[i], b = row[half + i];
                    into[i] = multiply_add(b, s[i], a * c[i]);
                    into[half + i] = multiply_add(a, s[half + i], b * c[half + i]);
                }
            }
        }
}

/* x * sigmoid(x). */
static inline float silu(float x) {
    float e = exp_negative(-fabsf(x));
    return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* silu_mul: both [t, 2 n], its rows `pitch` apart, the gate first. The result goes over the gate.
 */
void minikv_silu_mul(int kind, int64_t t, int64_t n, int64_t pitch, void *both) {
#pragma omp parallel for schedule(static) if (t * n > 50000)
    for (int64_t r = 0; r < t; r++) {
        if (kind == BF16) {
            bf16 *gate = (bf16 *)both + r * pitch;
            const bf16 *up = gate + n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                gate[i] = to_bf16(from_bf16(to_bf16(silu(from_bf16(gate[i])))) * from_bf16(up[i]));
        } else {
            float *gate = (float *)both + r * pitch;
            const float *up = gate + n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                gate[i] = silu(gate[i]) * up[i];
        }
    }
}
