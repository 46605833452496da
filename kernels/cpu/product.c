/* Few rows times a matrix: bound by reading the matrix. */
#include "numbers.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum { BLOCK = 256 /* columns whose activations share a scale */ };

/* x [n], w [rows, n] -> out [rows], all bf16, summed in float. A word holds two numbers: the one in
   its upper half is a float once the lower half is gone, the other once it is moved up; so nothing
   has to be taken apart. A row at a time: what fetches memory ahead follows few streams best. */
void minikv_row_product(int64_t n, int64_t rows, const bf16 *x, const bf16 *w, bf16 *out) {
    const int64_t whole = n / (2 * VEC) * (2 * VEC);
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t o = 0; o < rows; o++) {
        const bf16 *row = w + o * n;
        vec low = {0}, high = {0};
        for (int64_t b = 0; b < whole; b += 2 * VEC) {
            words a, c;
            memcpy(&a, x + b, sizeof a);
            memcpy(&c, row + b, sizeof c);
            low += (vec)(a << 16) * (vec)(c << 16);
            high += (vec)(a & 0xffff0000u) * (vec)(c & 0xffff0000u);
        }
        float sum = total(low + high);
        for (int64_t i = whole; i < n; i++)
            sum += from_bf16(x[i]) * from_bf16(row[i]);
        out[o] = to_bf16(sum);
    }
}

/* A row of activations as 15 bits and a sign, a scale for each block. */
static void fix(const bf16 *x, int64_t n, int16_t *fixed, float *scales) {
    for (int64_t b = 0; b * BLOCK < n; b++) {
        const int64_t end = (b + 1) * BLOCK < n ? (b + 1) * BLOCK : n;
        float most = 0.0f;
        for (int64_t i = b * BLOCK; i < end; i++) {
            float a = fabsf(from_bf16(x[i]));
            most = a > most || a != a ? a : most;
        }
        /* Infinity and NaN have no steps: they come out by the scale. */
        const float scale = most == 0.0f ? 1.0f : most / 32767.0f;
        const float steps = most < INFINITY ? 1.0f / scale : 0.0f;
        scales[b] = most < INFINITY ? scale : NAN;
        for (int64_t i = b * BLOCK; i < end; i++) {
            float y = rintf(from_bf16(x[i]) * steps);
            fixed[i] = (int16_t)(y > 32767.0f ? 32767.0f : y < -32767.0f ? -32767.0f : y);
        }
    }
}

static inline float dot(const int8_t *w, const int16_t *fixed, const float *scales, int64_t n) {
    float sum = 0.0f;
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) { /* 256 products of 2^22 fit 32 bits */
        int32_t whole = 0;
        for (int j = 0; j < BLOCK; j++)
            whole += (int16_t)w[i + j] * fixed[i + j];
        sum += (float)whole * scales[i / BLOCK];
    }
    int32_t rest = 0;
    for (int64_t j = i; j < n; j++)
        rest += (int16_t)w[j] * fixed[j];
    return i < n ? sum + (float)rest * scales[i / BLOCK] : sum;
}

/* The weights are multiplied as the integers they are: x [t, n] bf16, w int8 [rows, n], scale bf16
   [rows] -> out [t, rows] bf16; 1: no memory. */
int minikv_int8_product(
    int64_t t, int64_t n, int64_t rows, const bf16 *x, const int8_t *w, const bf16 *scale, bf16 *out) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    int16_t *fixed = malloc(t * n * sizeof *fixed);
    float *scales = malloc(t * blocks * sizeof *scales);
    if (fixed && scales) {
        for (int64_t r = 0; r < t; r++)
            fix(x + r * n, n, fixed + r * n, scales + r * blocks);
#pragma omp parallel for schedule(static) if (rows * n > 65536)
        for (int64_t o = 0; o < rows; o++)
            for (int64_t r = 0; r < t; r++) {
                float sum = dot(w + o * n, fixed + r * n, scales + r * blocks, n);
                out[r * rows + o] = to_bf16(sum * from_bf16(scale[o]));
            }
    }
    const int failed = !fixed || !scales;
    free(fixed);
    free(scales);
    return failed;
}

/* Threads that a product is shared by. */
int minikv_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
