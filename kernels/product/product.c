/* The product of one row of activations and a matrix: its time is that of reading the matrix. See
   kernels/product/plain.py. */
#include "row.h"

/* AHEAD: how many bytes ahead of the read position to prefetch; rows follow each other, and the
   processor's own prefetching stops at the end of a page. NEAR: the cache to prefetch into, 3 for
   L1, 2 for L2. A Xeon with AMX was measured to be faster with the first pair of values
   (docs/measurements/cpu.md); others were measured with the second. */
#ifdef __AMX_TILE__
enum { AHEAD = 8192, NEAR = 2 };
#else
enum { AHEAD = 4096, NEAR = 3 };
#endif

/* x [n] times one row of a matrix, summed in float32. A 32-bit word holds two bfloat16. The upper
   one becomes a float by clearing the lower half, the lower one by a shift, so the two need not be
   separated by a shuffle. */
static inline bf16 dot(int64_t n, const bf16 *x, const bf16 *row) {
    const int64_t whole = n / (2 * VEC) * (2 * VEC);
    vec low = {0}, high = {0};
    for (int64_t b = 0; b < whole; b += 2 * VEC) {
        uvec a, c;
        __builtin_prefetch((const char *)(row + b) + AHEAD, 0, NEAR);
        memcpy(&a, x + b, sizeof a);
        memcpy(&c, row + b, sizeof c);
        low += (vec)(a << 16) * (vec)(c << 16);
        high += (vec)(a & 0xffff0000u) * (vec)(c & 0xffff0000u);
    }
    float sum = sum_vec(low + high);
    for (int64_t i = whole; i < n; i++) sum += from_bf16(x[i]) * from_bf16(row[i]);
    return to_bf16(sum);
}

/* row_product: out [rows] = w [rows, n] x [n], all bfloat16, summed in float32. One row at a time:
   prefetching works best with few streams. */
void minikv_row_product(int64_t n, int64_t rows, const bf16 *x, const bf16 *w, bf16 *out) {
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t o = 0; o < rows; o++) out[o] = dot(n, x, w + o * n);
}

/* See row.h. */
void minikv_plain_rows(
    int64_t n, const bf16 *x, const bf16 *w, int64_t first, int64_t end, bf16 *out
) {
    for (int64_t o = first; o < end; o++) out[o] = dot(n, x, w + o * n);
}

/* The number of threads that share a product. */
int minikv_threads(void) { return (int)most_threads(); }
