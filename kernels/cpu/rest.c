/* What follows attention in a layer of a decode step, up to the queries, keys and values of the
   next one: products, norms and the activation function of one row, all in bfloat16. Each makes
   the numbers of the call of its own, in integer.c, product.c and layer.c; here nobody goes back to
   Python between them, and threads do not fall asleep. */
#include "row.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* THREADS_FROM: weights from which on threads are faster. EARLY: bytes that a thread asks for of
   its part of a matrix while it waits for the others. */
enum { THREADS_FROM = 1 << 18, EARLY = 32768 };

/* Ask for the first bytes of this thread's part of a matrix. */
static void fetch(const Matrix *m) {
#ifdef _OPENMP
    const int64_t bytes = m->form == PLAIN ? 2 * m->n : m->form == EIGHT ? m->n : m->n / 2;
    const int64_t step = minikv_rows_together(m), groups = (m->outs + step - 1) / step;
    const int64_t threads = omp_get_num_threads(), each = groups / threads, more = groups % threads;
    const int64_t me = omp_get_thread_num(), first = each * me + (me < more ? me : more);
    const int64_t rows = m->outs - first * step, most = rows * bytes < EARLY ? rows * bytes : EARLY;
    const char *at = (const char *)m->weights + first * step * bytes;
    for (int64_t i = 0; i < most; i += 64)
        __builtin_prefetch(at + i, 0, 2);
#else
    (void)m;
#endif
}

/* x ready for a matrix: rounded if it is packed. By one thread. */
static void prepare(const Matrix *m, const bf16 *x, Rounded rounded) {
    if (m->form != PLAIN)
        minikv_round_blocks(x, m->n, 0, (m->n + BLOCK - 1) / BLOCK, rounded);
}

/* out = m x + bias, for which the matrix after it is asked for early. Every thread calls it; all
   have the result when it returns. */
static void multiply(
    const Matrix *m, const bf16 *x, Rounded rounded, bf16 *out, const Matrix *after
) {
    const int64_t step = minikv_rows_together(m);
#pragma omp for schedule(static) nowait
    for (int64_t first = 0; first < m->outs; first += step) {
        const int64_t end = first + step < m->outs ? first + step : m->outs;
        if (m->form == PLAIN)
            minikv_plain_rows(m->n, x, m->weights, first, end, out);
        else
            minikv_packed_rows(m, rounded, first, end, out);
        for (int64_t i = first; m->bias && i < end; i++)
            out[i] = to_bf16(from_bf16(out[i]) + from_bf16(m->bias[i]));
    }
    if (after)
        fetch(after);
#pragma omp barrier
}

/* silu(gate) * up of both [2 * n], the gate first, over the gate, and ready for the matrix m. Every
   thread calls it, as `multiply`. */
static void activate(const Matrix *m, bf16 *both, Rounded rounded) {
    const int64_t n = m->n;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < (n + BLOCK - 1) / BLOCK; b++) {
        const int64_t at = b * BLOCK;
        minikv_silu_row(n - at < BLOCK ? n - at : BLOCK, both + at, both + n + at);
        if (m->form != PLAIN)
            minikv_round_blocks(both, n, b, b + 1, rounded);
    }
}

/* rest: m: the matrices behind attention, of gate and up, down, and of the next layer's queries,
   keys and values; the last one without rows if there is no next layer. mixed: what attention
   returned, m[0].n numbers. x [hidden] becomes what enters the next layer; result: m[3] times its
   norm, or the norm itself. Returns 0, or 1 if there is no memory; then nothing was written. */
int minikv_rest(
    const Matrix *m, int64_t hidden, const bf16 *mixed, bf16 *x, const bf16 *mlp_norm,
    const bf16 *next_norm, double eps, bf16 *result
) {
    const Matrix *out = m, *gate_up = m + 1, *down = m + 2, *next = m + 3;
    int64_t longest = hidden, weights = 0;
    for (int i = 0; i < 4; i++) {
        longest = m[i].n > longest ? m[i].n : longest;
        weights += m[i].n * m[i].outs;
    }
    const int64_t blocks = (longest + BLOCK - 1) / BLOCK;
    const int64_t numbers = 2 * hidden + gate_up->outs;
    char *memory = malloc((size_t)(blocks * (12 + BLOCK) + numbers * 2));
    if (!memory)
        return 1;
    float *scale = (float *)memory;
    const Rounded rounded = {
        (int8_t *)(scale + 3 * blocks), scale, scale + blocks, (int32_t *)(scale + 2 * blocks)
    };
    bf16 *y = (bf16 *)(rounded.codes + blocks * BLOCK), *normed = y + hidden;
    bf16 *both = normed + hidden;
#pragma omp parallel if (weights > THREADS_FROM)
    {
        fetch(out);
#pragma omp single
        prepare(out, mixed, rounded);
        multiply(out, mixed, rounded, y, gate_up);
#pragma omp single
        {
            minikv_norm_row(hidden, x, y, mlp_norm, eps, normed);
            prepare(gate_up, normed, rounded);
        }
        multiply(gate_up, normed, rounded, both, down);
        activate(down, both, rounded);
        multiply(down, both, rounded, y, next);
#pragma omp single
        {
            minikv_norm_row(hidden, x, y, next_norm, eps, next->outs ? normed : result);
            if (next->outs)
                prepare(next, normed, rounded);
        }
        if (next->outs)
            multiply(next, normed, rounded, result, NULL);
    }
    free(memory);
    return 0;
}

/* Whether `rest` takes such a matrix. */
int minikv_rest_takes(const Matrix *m) { return m->form == PLAIN || minikv_rows_together(m) > 0; }
