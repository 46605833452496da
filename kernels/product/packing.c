/* Pack weights to eight and four bits, and unpack four bits. The results are bit for bit those of
   `pack_int8`, `pack_int4` and `Int4.columns` in models/linear.py. */
#include "numbers.h"

/* The largest group of columns with a scale, and the rows of a tile of four bits. */
enum { GROUP = 128, TILE = 64 };

#define TINY 1.17549435e-38f /* the smallest normal number: no scale is 0 */

/* The nearest whole number within low .. high, ties to even. */
static inline float step_of(float x, float low, float high) {
    float y = rintf(x);
    return y < low ? low : y > high ? high : y;
}

/* pack_int8: w bfloat16 [rows, n] -> codes [rows, n], scale bfloat16 [rows]. A row's scale is its
   largest magnitude / 127. */
void minikv_pack_int8(int64_t rows, int64_t n, const bf16 *w, int8_t *codes, bf16 *scale) {
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t o = 0; o < rows; o++) {
        const bf16 *row = w + o * n;
        /* Of numbers without their signs, the largest has the largest bits, and NaN larger ones. */
        uint16_t bits = 0;
#pragma omp simd reduction(max : bits)
        for (int64_t i = 0; i < n; i++) {
            uint16_t x = row[i] & 0x7fff;
            bits = x > bits ? x : bits;
        }
        float step = from_bf16(bits) / 127.0f;
        scale[o] = to_bf16(step < TINY ? TINY : step);
        step = from_bf16(scale[o]);
        int8_t *out = codes + o * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            out[i] = (int8_t)step_of(from_bf16(row[i]) / step, -127.0f, 127.0f);
    }
}

/* Quantize a group w [size] to codes 0 .. 15. pair gets its scale and its middle, the value of code
   8. */
static inline void pack_group(const bf16 *w, int64_t size, uint8_t *codes, bf16 *pair) {
    float least = INFINITY, most = -INFINITY;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (int64_t i = 0; i < size; i++) {
        float x = from_bf16(w[i]);
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    float step = (most - least) / 15.0f;
    pair[0] = to_bf16(step < TINY ? TINY : step);
    step = from_bf16(pair[0]);
    pair[1] = to_bf16(least + 8.0f * step);
    const float middle = from_bf16(pair[1]);
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        codes[i] =
            (uint8_t)(int32_t)step_of(rintf((from_bf16(w[i]) - middle) / step) + 8.0f, 0.0f, 15.0f);
}

/* pack_int4: w bfloat16 [rows, n] -> packed [padded, n / 2], scales bfloat16 [n / group, stride,
   2]: the scale and the middle of each group. `padded` is rows, rounded up to a multiple of TILE. A
   tile of 2 * half rows has `half` bytes for each column: byte i has row i in its lower four bits
   and row half + i in the upper ones. Rows beyond the last are 0. */
void minikv_pack_int4(
    int64_t rows, int64_t n, int64_t group, int64_t half, int64_t stride, const bf16 *w,
    uint8_t *packed, bf16 *scales
) {
    const int64_t tiles = (rows + TILE - 1) / TILE * TILE / (2 * half);
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t tile = 0; tile < tiles; tile++) {
        uint8_t codes[TILE][GROUP], both[TILE / 2][GROUP];
        const int64_t first = tile * 2 * half;
        for (int64_t at = 0; at < n; at += group) {
            for (int64_t i = 0; i < 2 * half; i++) {
                const bf16 *row = w + (first + i) * n + at;
                if (first + i < rows) {
                    /* The row's next group, which is far from this one of the next row. */
                    for (int64_t c = group; c < 2 * group; c += 32) __builtin_prefetch(row + c);
                    pack_group(
                        row, group, codes[i], scales + (at / group * stride + first + i) * 2
                    );
                } else
                    memset(codes[i], 0, GROUP);
            }
            for (int64_t i = 0; i < half; i++)
                for (int64_t c = 0; c < group; c++)
                    both[i][c] = codes[i][c] | (uint8_t)(codes[half + i][c] << 4);
            uint8_t *out = packed + first * (n / 2) + at * half;
            for (int64_t c = 0; c < group; c++)
                for (int64_t i = 0; i < half; i++) out[c * half + i] = both[i][c];
        }
    }
}

/* unpack_int4: packed [rows, n / 2], whole tiles of `pack_int4`, and scales bfloat16 [n / group,
   stride, 2], which begin with the first of these rows -> out bfloat16 [n, rows]. */
void minikv_unpack_int4(
    int64_t rows, int64_t n, int64_t group, int64_t half, int64_t stride, const uint8_t *packed,
    const bf16 *scales, bf16 *out
) {
    const int64_t groups = n / group, tiles = rows / (2 * half);
#pragma omp parallel for collapse(2) schedule(static) if (rows * n > 65536)
    for (int64_t g = 0; g < groups; g++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = tile * 2 * half;
            const bf16 *pairs = scales + (g * stride + first) * 2;
            float scale[TILE], middle[TILE];
            for (int64_t i = 0; i < 2 * half; i++) {
                scale[i] = from_bf16(pairs[2 * i]);
                middle[i] = from_bf16(pairs[2 * i + 1]);
            }
            for (int64_t c = g * group; c < (g + 1) * group; c++) {
                const uint8_t *bytes = packed + first * (n / 2) + c * half;
                bf16 *low = out + c * rows + first, *high = low + half;
#pragma omp simd
                for (int64_t i = 0; i < half; i++)
                    low[i] = to_bf16(middle[i] + (float)((bytes[i] & 15) - 8) * scale[i]);
#pragma omp simd
                for (int64_t i = 0; i < half; i++)
                    high[i] =
                        to_bf16(middle[half + i] + (float)((bytes[i] >> 4) - 8) * scale[half + i]);
            }
        }
}
