/* Matrix products of one row, whose time is that of reading the matrix. See
   kernels/torch/product.py. */
#include "numbers.h"

#ifdef _OPENMP
#include <omp.h>
#endif

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

/* The number of threads that share a product. */
int minikv_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}
