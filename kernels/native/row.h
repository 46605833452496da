/* The common part of a decode step's C files: the type of a matrix, and the operations on one row
   of activations. No function here starts threads. */
#ifndef MINIKV_ROW_H
#define MINIKV_ROW_H

#include "numbers.h"
#include "threads.h"

/* The format of weights: bfloat16 [outs, n]; int8 with a bfloat16 scale for each row; four bits in
   the layout of `pack_int4` in packing.c. */
enum { PLAIN, EIGHT, FOUR };

/* A matrix of weights [outs, n]. Only four bits use `group`, `half` and `stride`, as in integer.c.
   bias [outs] may be NULL. The fields are those of `struct` in kernels/product/cpu.py. */
typedef struct {
    int64_t form, n, outs, group, half, stride;
    const void *weights, *scales;
    const bf16 *bias;
} Matrix;

/* A row of activations, quantized to int8: codes [n], and for each block of BLOCK columns its
   scale, the sum of its codes times the scale, and -8 times the sum of its codes. */
typedef struct {
    int8_t *codes;
    float *scale, *sum;
    int32_t *start;
} Rounded;

/* Columns of a row that share a scale. */
enum { BLOCK = 32 };

/* Quantize the blocks `first` to `end` - 1 of a row x [n]. */
HIDDEN void minikv_round_blocks(const bf16 *x, int64_t n, int64_t first, int64_t end, Rounded out);

/* How many rows of the matrix are computed together. 0: even for one row of activations, such a
   matrix must first be rearranged into panels (integer.c). */
HIDDEN int64_t minikv_rows_together(const Matrix *m);

/* out [outs]: x [n] times the rows `first` to `end` - 1 of the matrix. The numbers are those of
   int8_product, int4_product and row_product. With four bits the rows are whole tiles; only the
   last tile of the matrix may be shorter. */
HIDDEN void minikv_packed_rows(const Matrix *m, Rounded x, int64_t first, int64_t end, bf16 *out);
HIDDEN void minikv_plain_rows(
    int64_t n, const bf16 *x, const bf16 *w, int64_t first, int64_t end, bf16 *out
);

/* One row of add_norm and of silu_mul in layer.c. gate and up [n]; the result overwrites gate. */
HIDDEN void minikv_norm_row(
    int64_t n, bf16 *x, const bf16 *y, const bf16 *weight, double eps, bf16 *out
);
HIDDEN void minikv_silu_row(int64_t n, bf16 *gate, const bf16 *up);

/* rotate of layer.c for one token: x and out [heads, D] of dtype `kind`, cos and sin [D]. */
HIDDEN void minikv_rotate_row(
    int kind, int64_t heads, int64_t D, const void *x, const void *cos, const void *sin, void *out
);

/* A layer after attention, in a team of threads (rest.c). m: its four matrices, as in minikv_rest.
   How many threads are worthwhile for such a layer, if attention multiplies `more` numbers; and the
   bytes of memory that they need. */
HIDDEN int64_t minikv_rest_threads(const Matrix *m, int64_t more);
HIDDEN int64_t minikv_rest_bytes(const Matrix *m, int64_t hidden, int64_t threads);

/* Every thread calls these. begin: copy x [hidden], the input of the layer, to memory. share:
   compute this thread's share of minikv_rest, which changes that copy and writes to `result`. All
   threads must have written `mixed` before. end: copy the input of the next layer back to x. */
HIDDEN void minikv_rest_begin(const Matrix *m, int64_t hidden, const bf16 *x, char *memory);
HIDDEN void minikv_rest_share(
    const Matrix *m, int64_t hidden, const bf16 *mixed, const bf16 *mlp_norm, const bf16 *next_norm,
    double eps, char *memory, bf16 *result
);
HIDDEN void minikv_rest_end(const Matrix *m, int64_t hidden, bf16 *x, const char *memory);

/* Prefetch the weights that this thread reads first in minikv_rest_share. */
HIDDEN void minikv_rest_fetch(const Matrix *m);

#endif
