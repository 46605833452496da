/* Join the attention outputs of disjoint sets of rows by their log-sum-exps: `merge` of
   kernels/attention/plain.py. */
#include "numbers.h"

enum { PARTS = 8, SIZE = 256 }; /* at most */

/* heads, group, rows, size: H, G, T, D. count: the number of parts. kind: dtype of the outputs.
   Then the strides over H, G and T, in numbers: of the joined output, of each part's output, and
   of each part's log-sum-exps. */
typedef struct {
    int64_t heads, group, rows, size, count, kind;
    int64_t joined[3], out[PARTS][3], lse[PARTS][3];
} Shape;

/* Where row (h, g, t) begins. */
static inline int64_t row_of(const int64_t *strides, int64_t h, int64_t g, int64_t t) {
    return h * strides[0] + g * strides[1] + t * strides[2];
}

/* sum += x * weight, of numbers of dtype `kind`. */
static void add_row(float *sum, const void *x, int64_t at, float weight, int64_t n, int64_t kind) {
    if (kind == BF16)
        for (int64_t d = 0; d < n; d++) sum[d] += from_bf16(((const bf16 *)x)[at + d]) * weight;
    else
        for (int64_t d = 0; d < n; d++) sum[d] += ((const float *)x)[at + d] * weight;
}

/* merge: joined [H, G, T, D] = the sum over parts of exp(lse - whole) * out, and whole [H, G, T] =
   the log-sum-exp over the parts. outs[i] [H, G, T, D] is of dtype `kind`, lses[i] [H, G, T] is
   float32. The output of a part whose lse is -inf is not read; if all are -inf, the result is 0. */
void minikv_merge(
    const void *const *outs, const float *const *lses, void *joined, float *whole, const Shape *s
) {
#pragma omp parallel for
    for (int64_t t = 0; t < s->rows; t++)
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t g = 0; g < s->group; g++) {
                float lse[PARTS], most = -INFINITY, total = 0.0f, sum[SIZE] = {0};
                for (int64_t i = 0; i < s->count; i++) {
                    lse[i] = lses[i][row_of(s->lse[i], h, g, t)];
                    most = most != most || lse[i] <= most ? most : lse[i]; /* NaN stays */
                }
                for (int64_t i = 0; i < s->count; i++)
                    total += lse[i] == -INFINITY ? 0.0f : expf(lse[i] - most);
                float all = most == -INFINITY ? most : most + logf(total);
                whole[(h * s->group + g) * s->rows + t] = all;
                for (int64_t i = 0; i < s->count; i++)
                    if (lse[i] != -INFINITY)
                        add_row(
                            sum, outs[i], row_of(s->out[i], h, g, t), expf(lse[i] - all), s->size,
                            s->kind
                        );
                int64_t to = row_of(s->joined, h, g, t);
                for (int64_t d = 0; d < s->size; d++)
                    if (s->kind == BF16)
                        ((bf16 *)joined)[to + d] = to_bf16(sum[d]);
                    else
                        ((float *)joined)[to + d] = sum[d];
            }
}
