/* Matrix products of few rows, whose time is that of reading the matrix. See
   kernels/torch/product.py. */
#include "numbers.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* Columns whose activations share a scale. */
enum { BLOCK = 256 };

/* row_product: x [n], w [rows, n] -> out [rows], all bfloat16, summed in float32. A 32-bit word
   holds two numbers: the upper one is a float once the lower half is 0, the lower one once it is
   shifted up. So no instruction separates them. One row at a time, as prefetching follows few
   streams best. */
void minikv_row_product(int64_t n, int64_t rows, const bf16 *x, const bf16 *w, bf16 *out) {
    const int64_t whole = n / (2 * VEC) * (2 * VEC);
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t o = 0; o < rows; o++) {
        const bf16 *row = w + o * n;
        vec low = {0}, high = {0};
        for (int64_t b = 0; b < whole; b += 2 * VEC) {
            uvec a, c;
            memcpy(&a, x + b, sizeof a);
            memcpy(&c, row + b, sizeof c);
            low += (vec)(a << 16) * (vec)(c << 16);
            high += (vec)(a & 0xffff0000u) * (vec)(c & 0xffff0000u);
        }
        float sum = sum_vec(low + high);
        for (int64_t i = whole; i < n; i++)
            sum += from_bf16(x[i]) * from_bf16(row[i]);
        out[o] = to_bf16(sum);
    }
}

/* Quantize a row of n activations to 16 bits, with a scale for each block. */
static void quantize_row(const bf16 *x, int64_t n, int16_t *quantized, float *scales) {
    for (int64_t b = 0; b * BLOCK < n; b++) {
        const int64_t end = (b + 1) * BLOCK < n ? (b + 1) * BLOCK : n;
        float most = 0.0f;
        for (int64_t i = b * BLOCK; i < end; i++) {
            float a = fabsf(from_bf16(x[i]));
            most = a > most || a != a ? a : most;
        }
        /* A block with infinity or NaN becomes NaN by its scale. */
        const float scale = most == 0.0f ? 1.0f : most / 32767.0f;
        const float steps = most < INFINITY ? 1.0f / scale : 0.0f;
        scales[b] = most < INFINITY ? scale : NAN;
        for (int64_t i = b * BLOCK; i < end; i++) {
            float y = rintf(from_bf16(x[i]) * steps);
            quantized[i] = (int16_t)(y > 32767.0f ? 32767.0f : y < -32767.0f ? -32767.0f : y);
        }
    }
}

/* The product of int8 weights and quantized activations, both [n]. */
static inline float dot_int8(
    const int8_t *w, const int16_t *quantized, const float *scales, int64_t n
) {
    float sum = 0.0f;
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) { /* a sum of 256 products below 2^22 fits 32 bits */
        int32_t whole = 0;
        for (int j = 0; j < BLOCK; j++)
            whole += (int16_t)w[i + j] * quantized[i + j];
        sum += (float)whole * scales[i / BLOCK];
    }
    int32_t rest = 0;
    for (int64_t j = i; j < n; j++)
        rest += (int16_t)w[j] * quantized[j];
    return i < n ? sum + (float)rest * scales[i / BLOCK] : sum;
}

/* int8_product: x [t, n] bfloat16, w int8 [rows, n], scale bfloat16 [rows] -> out [t, rows]
   bfloat16. Products are of integers. Returns 0, or 1 if there is no memory. */
int minikv_int8_product(
    int64_t t, int64_t n, int64_t rows, const bf16 *x, const int8_t *w, const bf16 *scale, bf16 *out
) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    int16_t *quantized = malloc(t * n * sizeof *quantized);
    float *scales = malloc(t * blocks * sizeof *scales);
    if (quantized && scales) {
        for (int64_t r = 0; r < t; r++)
            quantize_row(x + r * n, n, quantized + r * n, scales + r * blocks);
#pragma omp parallel for schedule(static) if (rows * n > 65536)
        for (int64_t o = 0; o < rows; o++)
            for (int64_t r = 0; r < t; r++) {
                float sum = dot_int8(w + o * n, quantized + r * n, scales + r * blocks, n);
                out[r * rows + o] = to_bf16(sum * from_bf16(scale[o]));
            }
    }
    const int failed = !quantized || !scales;
    free(quantized);
    free(scales);
    return failed;
}

/* The number of threads that share a product. */
int minikv_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
