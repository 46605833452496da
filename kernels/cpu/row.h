/* What the C files share of a decode step: the operations on one row of activations, and a matrix
   that it is multiplied by. Nothing here starts threads. */
#ifndef MINIKV_ROW_H
#define MINIKV_ROW_H

#include "numbers.h"

/* How weights are kept: bfloat16 [outs, n]; int8 with a bfloat16 scale for each row; four bits as
   `pack_int4` of packing.c makes them. */
enum { PLAIN, EIGHT, FOUR };

/* `group`, `half` and `stride` are those of four bits, as in integer.c. bias [outs] may be NULL.
   The fields are those of kernels/cpu/matrix.py. */
typedef struct {
    int64_t form, n, outs, group, half, stride;
    const void *weights, *scales;
    const bf16 *bias;
} Matrix;

/* A row of activations rounded to eight bits: codes [n], and of each block of columns the scale,
   the sum of what is rounded, and -8 times the sum of the codes. */
typedef struct {
    int8_t *codes;
    float *scale, *sum;
    int32_t *start;
} Rounded;

/* Columns of a row that share a scale. */
enum { BLOCK = 32 };

#define HIDDEN __attribute__((visibility("hidden")))

/* Round the blocks `first` to `end` - 1 of a row x [n]. */
HIDDEN void minikv_round_blocks(const bf16 *x, int64_t n, int64_t first, int64_t end, Rounded out);

/* Rows of the matrix that are computed together; 0: one row of activations is not multiplied by
   such a matrix without making a panel of it (integer.c). */
HIDDEN int64_t minikv_rows_together(const Matrix *m);

/* out [outs]: x [n] times the rows `first` to `end` - 1 of the matrix, as the products of their own
   files make them. Of four bits, whole tiles, but for the last one of the matrix. */
HIDDEN void minikv_packed_rows(const Matrix *m, Rounded x, int64_t first, int64_t end, bf16 *out);
HIDDEN void minikv_plain_rows(
    int64_t n, const bf16 *x, const bf16 *w, int64_t first, int64_t end, bf16 *out
);

/* One row of add_norm and of silu_mul in layer.c. gate and up [n]; the result goes over the gate.
 */
HIDDEN void minikv_norm_row(
    int64_t n, bf16 *x, const bf16 *y, const bf16 *weight, double eps, bf16 *out
);
HIDDEN void minikv_silu_row(int64_t n, bf16 *gate, const bf16 *up);

/* rotate of layer.c for one token: x and out [heads, D] of dtype `kind`, cos and sin [D]. */
HIDDEN void minikv_rotate_row(
    int kind, int64_t heads, int64_t D, const void *x, const void *cos, const void *sin, void *out
);

#endif
