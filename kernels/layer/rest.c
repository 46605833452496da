/* The part of a layer after attention in a decode step, up to the queries, keys and values of the
   next layer: products, norms and the activation function of one row, all in bfloat16, in one call.
   The numbers are those of the separate calls in integer.c, product.c and layer.c. Threads wait for
   each other three times, after each of the first three products. Each thread computes the norms,
   which are small, for itself. */
#include "row.h"

#include <stdlib.h>

/* THREADS_FROM: with more weights than this, threads are faster. EARLY: how many bytes of its part
   of the next matrix a thread prefetches before it waits for the others. */
enum { THREADS_FROM = 1 << 18, EARLY = 32768 };

/* This thread's share of `rows` rows, first to end - 1: whole groups of `step` rows, divided as
   evenly as possible. */
typedef struct {
    int64_t first, end;
} Share;
static Share share_of(int64_t rows, int64_t step) {
    const int64_t groups = (rows + step - 1) / step, threads = threads_here(), me = this_thread();
    const int64_t end = groups * (me + 1) / threads * step;
    return (Share){groups * me / threads * step, end < rows ? end : rows};
}

/* Prefetch the first bytes of these rows of a matrix. */
static void fetch(const Matrix *m, Share rows) {
    const int64_t row = m->form == PLAIN ? 2 * m->n : m->form == EIGHT ? m->n : m->n / 2;
    const int64_t all = (rows.end - rows.first) * row, bytes = all < EARLY ? all : EARLY;
    const char *at = (const char *)m->weights + rows.first * row;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* Quantize x for a packed matrix; nothing to do for a plain one. */
static void prepare(const Matrix *m, const bf16 *x, Rounded rounded) {
    if (m->form != PLAIN) minikv_round_blocks(x, m->n, 0, (m->n + BLOCK - 1) / BLOCK, rounded);
}

/* out = m x + bias, for these rows of m. */
static void multiply(const Matrix *m, const bf16 *x, Rounded rounded, Share rows, bf16 *out) {
    if (m->form == PLAIN)
        minikv_plain_rows(m->n, x, m->weights, rows.first, rows.end, out);
    else
        minikv_packed_rows(m, rounded, rows.first, rows.end, out);
    for (int64_t i = rows.first; m->bias && i < rows.end; i++)
        out[i] = to_bf16(from_bf16(out[i]) + from_bf16(m->bias[i]));
}

/* Overwrite the gate with silu(gate) * up, and quantize it if the matrix m is packed, for these
   columns, whole blocks. both [2 * n]: the gate, then up. */
static void activate(const Matrix *m, bf16 *both, Rounded rounded, Share columns) {
    minikv_silu_row(columns.end - columns.first, both + columns.first, both + m->n + columns.first);
    if (m->form != PLAIN)
        minikv_round_blocks(both, m->n, columns.first / BLOCK, columns.end / BLOCK, rounded);
}

/* The unit in which rows of gate and up are divided: whole blocks and whole tiles. */
static int64_t unit(const Matrix *gate_up) {
    const int64_t step = minikv_rows_together(gate_up);
    return step > BLOCK ? step : BLOCK;
}

/* A quantized row of n numbers takes rounded_bytes(n) of memory; rounded_in lays it out there. */
static int64_t rounded_bytes(int64_t n) { return (n + BLOCK - 1) / BLOCK * (12 + BLOCK); }
static Rounded rounded_in(char *memory, int64_t n) {
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    float *scale = (float *)memory;
    return (Rounded){
        (int8_t *)(scale + 3 * blocks), scale, scale + blocks, (int32_t *)(scale + 2 * blocks)
    };
}

/* Private bytes of each thread, in separate cache lines: a row, its norm, and a quantized row. And
   bytes that the threads share: an output, gate and up, a quantized row. */
static int64_t own_bytes(const Matrix *m, int64_t hidden) {
    const int64_t widest = m[0].n > hidden ? m[0].n : hidden;
    return (rounded_bytes(widest) + 4 * hidden + 191) / 64 * 64;
}
static int64_t shared_bytes(const Matrix *m, int64_t hidden) {
    return rounded_bytes(m[2].n) + 2 * hidden + 4 * m[2].n;
}

/* See row.h. */
int64_t minikv_rest_threads(const Matrix *m, int64_t more) {
    int64_t numbers = more;
    for (int i = 0; i < 4; i++) numbers += m[i].n * m[i].outs;
    return numbers > THREADS_FROM ? most_threads() : 1;
}
int64_t minikv_rest_bytes(const Matrix *m, int64_t hidden, int64_t threads) {
    return threads * own_bytes(m, hidden) + shared_bytes(m, hidden);
}

/* See row.h. */
void minikv_rest_begin(const Matrix *m, int64_t hidden, const bf16 *x, char *memory) {
    memcpy(memory + this_thread() * own_bytes(m, hidden), x, (size_t)hidden * sizeof *x);
}
void minikv_rest_end(const Matrix *m, int64_t hidden, bf16 *x, const char *memory) {
    memcpy(x, memory + this_thread() * own_bytes(m, hidden), (size_t)hidden * sizeof *x);
}

/* See row.h. */
void minikv_rest_fetch(const Matrix *m) { fetch(m, share_of(m->outs, minikv_rows_together(m))); }

/* See row.h. */
void minikv_rest_share(
    const Matrix *m, int64_t hidden, const bf16 *mixed, const bf16 *mlp_norm, const bf16 *next_norm,
    double eps, char *memory, bf16 *result
) {
    const Matrix *out = m, *gate_up = m + 1, *down = m + 2, *next = m + 3;
    const int64_t mlp = down->n, widest = out->n > hidden ? out->n : hidden;
    char *mine = memory + this_thread() * own_bytes(m, hidden);
    char *shared = memory + threads_here() * own_bytes(m, hidden);
    bf16 *row = (bf16 *)mine, *normed = row + hidden;
    const Rounded rounded = rounded_in(mine + 4 * hidden, widest), middle = rounded_in(shared, mlp);
    bf16 *y = (bf16 *)(shared + rounded_bytes(mlp)), *both = y + hidden;
    const Share first = share_of(out->outs, minikv_rows_together(out));
    const Share gates = share_of(mlp, unit(gate_up));
    const Share ups = {gates.first + mlp, gates.end + mlp};
    const Share third = share_of(down->outs, minikv_rows_together(down));
    const Share last = share_of(next->outs, next->outs ? minikv_rows_together(next) : 1);
    prepare(out, mixed, rounded);
    multiply(out, mixed, rounded, first, y);
    fetch(gate_up, gates);
#pragma omp barrier
    minikv_norm_row(hidden, row, y, mlp_norm, eps, normed);
    prepare(gate_up, normed, rounded);
    multiply(gate_up, normed, rounded, gates, both);
    multiply(gate_up, normed, rounded, ups, both);
    activate(down, both, middle, gates);
    fetch(down, third);
#pragma omp barrier
    multiply(down, both, middle, third, y);
    fetch(next, last);
#pragma omp barrier
    minikv_norm_row(hidden, row, y, next_norm, eps, normed);
    if (next->outs) {
        prepare(next, normed, rounded);
        multiply(next, normed, rounded, last, result);
    } else if (this_thread() == 0) {
        memcpy(result, normed, (size_t)hidden * sizeof *normed);
    }
}

/* rest: x += m[0] mixed; x += m[2] (silu(gate) * up) with gate and up = m[1] norm(x); result = m[3]
   norm(x), or norm(x) itself if m[3] has no rows. m: the matrices of the attention output, of gate
   and up, of down, and of the next layer's queries, keys and values. mixed [m[0].n]: the output of
   attention. x [hidden]: the input of the layer, which becomes the input of the next one. mlp_norm
   and next_norm [hidden]. Returns 0, or 1 if there is no memory; then nothing was written. */
int minikv_rest(
    const Matrix *m, int64_t hidden, const bf16 *mixed, bf16 *x, const bf16 *mlp_norm,
    const bf16 *next_norm, double eps, bf16 *result
) {
    const int64_t threads = minikv_rest_threads(m, 0);
    char *memory = malloc((size_t)minikv_rest_bytes(m, hidden, threads));
    if (!memory) return 1;
#pragma omp parallel num_threads(threads)
    {
        minikv_rest_fetch(m);
        minikv_rest_begin(m, hidden, x, memory);
        minikv_rest_share(m, hidden, mixed, mlp_norm, next_norm, eps, memory, result);
        if (this_thread() == 0) minikv_rest_end(m, hidden, x, memory);
    }
    free(memory);
    return 0;
}

/* Whether minikv_rest supports these four matrices. The last one may have no rows. */
int minikv_rest_takes(const Matrix *m) {
    for (int i = 0; i < 4; i++)
        if (m[i].outs && !minikv_rows_together(m + i)) return 0;
    return m[2].n % unit(m + 1) == 0;
}
