/* Products of many rows of activations with tiles of bfloat16 (AMX). A tile of activations has 16
   rows and 32 columns. A tile of weights has 16 pairs of columns for each of 16 rows of weights.

   A panel is up to SPAN rows and one part of the columns of the weights, converted to bfloat16, in
   the order in which it is multiplied. A task multiplies up to ROWS rows of activations by the
   panels of all parts. The panel, the activations and the sums stay in the L2 cache, into which the
   next operands are prefetched meanwhile. 32 rows of activations stay in the L1 cache. If there are
   many rows of activations, the threads first convert a block of weights together; otherwise each
   task converts its own. int8 weights are whole numbers, which bfloat16 represents exactly. Weights
   of four bits are rounded to bfloat16, as `Int4.columns` of models/linear.py rounds them.
   Activations are not rounded. */
#include "row.h"
#include "tiles.h"

#include <stdlib.h>

/* The arguments of a product: x [t, n], whose rows are `pitch` numbers apart, and the weights
   [m.outs, m.n]. A row has `parts` parts of `steps` tiles; the last may have fewer. A panel has
   `span` rows of weights, a multiple of 32. `rows` rows of activations are multiplied together, of
   the `most` that are copied at a time. */
typedef struct {
    Matrix m;
    int64_t t, pitch;
    const bf16 *x;
    bf16 *out; /* [t, outs] */
    int64_t parts, steps, span, rows, most;
} Product;

#if TILES

/* STEP: columns of a tile of activations. LONGEST: tiles along the columns of a part. SPAN: the
   most rows of a panel. ROWS: rows of activations that are multiplied together; up to ALONE, if
   there are no more. MOST: rows of activations that are copied at a time; half as many, if they
   have more than WIDE columns. BLOCK_BYTES: of weights that four threads convert together. */
enum { STEP = 32, LONGEST = 8, SPAN = 256, ROWS = 256, ALONE = 384, MOST = 2048, WIDE = 8192 };
enum { BLOCK_BYTES = 8 << 20 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; } /* rounded up */

/* How many tiles part number `part` has along the columns. */
INLINE int64_t steps_of(const Product *p, int64_t part) {
    return least(p->steps, over(p->m.n, STEP) - part * p->steps);
}

/* Numbers of the tiles of `tiles` times 16 rows in one part. */
INLINE int64_t size_of(const Product *p, int64_t tiles) { return tiles * p->steps * NUMBERS; }

/* How many tiles of 16 rows of weights the panel from row `from` on has. */
INLINE int64_t outs_of(const Product *p, int64_t from) {
    return over(least(p->m.outs - from, p->span), 16);
}

/* A mask of the STEP columns from `at` on: which of them exist. */
INLINE __mmask32 columns_from(const Product *p, int64_t at) {
    int64_t left = p->m.n - at;
    return left < STEP ? (1u << left) - 1 : ~0u;
}

/* Copy 16 rows of activations from row `first` on to tile `number` of `tiles` in each part: to
   [parts][tiles][steps][16][32]. Rows and columns that do not exist become zeros. */
static void load_rows(const Product *p, int64_t first, int64_t number, int64_t tiles, bf16 *to) {
    int64_t held = least(p->t - first, 16);
    for (int64_t step = 0; step < over(p->m.n, STEP); step++) {
        int64_t part = step / p->steps, at = step * STEP;
        bf16 *tile = to + size_of(p, part * tiles + number) + step % p->steps * NUMBERS;
        __mmask32 mask = columns_from(p, at);
        const bf16 *from = p->x + first * p->pitch + at;
        for (int64_t i = 0; i < 16; i++)
            _mm512_store_si512(
                tile + i * STEP, _mm512_maskz_loadu_epi16(i < held ? mask : 0, from + i * p->pitch)
            );
    }
}

/* Convert 32 int8 numbers to bfloat16. */
INLINE __m512i whole_numbers(__m256i codes) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Make one tile of the panel from int8 weights: columns `at` .. at + 31 of 16 rows from row `from`
   on. */
INLINE void load_eight(const Product *p, int64_t from, int64_t at, uint32_t *to) {
    __m512i x[16];
    __mmask32 mask = columns_from(p, at);
    for (int64_t i = 0; i < 16; i++) {
        const int8_t *row = (const int8_t *)p->m.weights + (from + i) * p->m.n + at;
        x[i] = whole_numbers(_mm256_maskz_loadu_epi8(from + i < p->m.outs ? mask : 0, row));
    }
    transpose(x);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 16, x[i]);
}

/* `load_eight` for weights of four bits. The 16 rows of a column are in 16 consecutive bytes. */
INLINE void load_four(const Product *p, int64_t from, int64_t at, uint32_t *to) {
    const Matrix *m = &p->m;
    int64_t tile = from / (2 * m->half), inside = from % (2 * m->half);
    const uint8_t *bytes =
        (const uint8_t *)m->weights + tile * m->half * m->n + at * m->half + inside % m->half;
    const bf16 *pairs = (const bf16 *)m->scales + (at / m->group * m->stride + from) * 2;
    const __m512i words = _mm512_loadu_si512(pairs);
    const __m512 scale = (__m512)_mm512_slli_epi32(words, 16);
    const __m512 middle = (__m512)_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000));
    const __m128i high = _mm_cvtsi32_si128(inside < m->half ? 0 : 4);
    for (int i = 0; i < 16; i++) {
        __m512 value[2];
        for (int j = 0; j < 2; j++) {
            __m128i four = _mm_loadu_si128((const void *)(bytes + (2 * i + j) * m->half));
            four = _mm_and_si128(_mm_srl_epi16(four, high), _mm_set1_epi8(15));
            __m512 code = _mm512_cvtepi32_ps(
                _mm512_sub_epi32(_mm512_cvtepu8_epi32(four), _mm512_set1_epi32(8))
            );
            value[j] = _mm512_fmadd_ps(code, scale, middle);
        }
        _mm512_store_si512(
            to + i * 16, interleave((__m512i)_mm512_cvtne2ps_pbh(value[1], value[0]))
        );
    }
}

/* Prefetch a sixteenth, number `i`, of the int8 weights of a part of 16 rows from row `from` on. */
INLINE void expect_eight(const Product *p, int64_t from, int64_t part, int64_t i) {
    const int8_t *row = (const int8_t *)p->m.weights + (from + i) * p->m.n + part * p->steps * STEP;
    for (int64_t at = 0; at < p->steps * STEP; at += 64) __builtin_prefetch(row + at, 0, 2);
}

/* 32-bit words of a panel. */
INLINE int64_t panel_size(const Product *p) { return p->span * p->steps * STEP / 2; }

/* Make the panel of a part from row `from` on: [span / 32][steps][2][16][16]. */
static void load_panel(const Product *p, int64_t from, int64_t part, uint32_t *panel) {
    for (int64_t o = 0; o < p->span && from + o < p->m.outs; o += 16)
        for (int64_t step = 0; step < steps_of(p, part); step++) {
            uint32_t *to = panel + ((o / 32 * p->steps + step) * 2 + o / 16 % 2) * 256;
            int64_t at = (part * p->steps + step) * STEP;
            if (p->m.form == FOUR)
                load_four(p, from + o, at, to);
            else {
                for (int64_t i = step * 16 / p->steps; i < (step + 1) * 16 / p->steps; i++)
                    expect_eight(p, from + o + 16, part, i);
                load_eight(p, from + o, at, to);
            }
        }
}

/* The scales of the 16 rows of weights from row `from` on; 1 for weights of four bits. */
INLINE vec scales_from(const Product *p, int64_t from) {
    if (p->m.form != EIGHT) return fill(1.0f);
    int64_t left = p->m.outs - from;
    __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
    __m256i held = _mm256_maskz_loadu_epi16(mask, (const bf16 *)p->m.scales + from);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(held), 16);
}

/* Write the outputs of up to 32 rows of activations from row `first` on, for `outs` tiles of rows
   of weights from row `from` on: the sums [outs / 2][2][2][16][16] times the scales. */
static void write_out(
    const Product *p, int64_t first, int64_t rows, int64_t from, int64_t outs, const float *sums
) {
    for (int64_t o = 0; o < outs; o += 2, from += 32, sums += 1024) {
        int64_t left = p->m.outs - from;
        __mmask32 mask = left < 32 ? (1u << left) - 1 : ~0u;
        const vec low = scales_from(p, from), high = scales_from(p, from + 16);
        bf16 *to = p->out + first * p->m.outs + from;
        for (int64_t r = 0; r < rows; r++, to += p->m.outs) {
            const float *sum = sums + r / 16 * 512 + r % 16 * 16;
            __m512 one = (__m512)(load(sum) * low), two = (__m512)(load(sum + 256) * high);
            _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(two, one));
        }
    }
}

/* Multiply `rows` rows of activations from row `first` on by `span` rows of weights from row `from`
   on, in one part: its tiles x [rows / 16][steps][16][32] and its panel. The sums [rows / 32][span
   / 32][2][2][16][16] go from part to part; those of the last are written to out. Meanwhile, what
   is multiplied next is prefetched; next_panel may be NULL. */
static void multiply(
    const Product *p, int64_t first, int64_t rows, int64_t from, int64_t part, const bf16 *x,
    const uint32_t *panel, const bf16 *next_x, const uint32_t *next_panel, float *sums
) {
    int64_t tiles = over(rows, 16), outs = outs_of(p, from), steps = steps_of(p, part);
    const char *row_ahead = (const char *)next_x, *panel_ahead = (const char *)next_panel;
    /* Lines that each step prefetches, so that the steps of a whole part prefetch all. */
    const int row_lines = (int)over(64, outs), panel_lines = next_panel ? (int)over(64, tiles) : 0;
    for (int64_t r = 0; r < tiles; r += 2) {
        const bf16 *a = x + size_of(p, r);
        const bf16 *below = r + 1 < tiles ? a + size_of(p, 1) : a; /* else computed twice */
        float *all = sums + r * p->span * 16, *sum = all;
        for (int64_t o = 0; o < outs; o += 2, sum += 1024) {
            const uint32_t *b = panel + o * p->steps * 256;
            if (part == 0) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            } else {
                LOAD_TILE(0, sum, ROW);
                LOAD_TILE(1, sum + 256, ROW);
                LOAD_TILE(2, sum + 512, ROW);
                LOAD_TILE(3, sum + 768, ROW);
            }
            for (int64_t step = 0; step < steps; step++) {
                for (int i = 0; i < row_lines; i++, row_ahead += 64)
                    __builtin_prefetch(row_ahead, 0, 2);
                for (int i = 0; i < panel_lines; i++, panel_ahead += 64)
                    __builtin_prefetch(panel_ahead, 0, 2);
                LOAD_TILE(4, a + step * NUMBERS, ROW);
                LOAD_TILE(6, b + step * 512, ROW);
                LOAD_TILE(5, below + step * NUMBERS, ROW);
                LOAD_TILE(7, b + step * 512 + 256, ROW);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, sum, ROW);
            _tile_stored(1, sum + 256, ROW);
            _tile_stored(2, sum + 512, ROW);
            _tile_stored(3, sum + 768, ROW);
        }
        if (part + 1 == p->parts)
            write_out(p, first + r * 16, least(rows - r * 16, 32), from, outs, all);
    }
}

/* Multiply `rows` rows of activations from row `first` on by `span` rows of weights from row `from`
   on. x: their tiles in the first part; those of the next part come `apart` numbers later. panels:
   one for each part; NULL: this makes one after the other in `own`. */
static void multiply_all(
    const Product *p, int64_t first, int64_t rows, int64_t from, const bf16 *x, int64_t apart,
    const uint32_t *panels, uint32_t *own, float *sums
) {
    for (int64_t part = 0; part < p->parts; part++) {
        const uint32_t *panel = panels ? panels + part * panel_size(p) : own;
        const uint32_t *next = panels ? panel + panel_size(p) : NULL;
        if (!panels) load_panel(p, from, part, own);
        multiply(
            p, first, rows, from, part, x + part * apart, panel, x + (part + 1) % p->parts * apart,
            next, sums
        );
    }
}

/* How many spans of weights, each of `size` words, the threads convert together: 0, if each task
   converts its own. */
static int64_t spans_together(int64_t spans, int64_t groups, int64_t size) {
    int64_t threads = most_threads(), bytes = over(threads, 4) * BLOCK_BYTES;
    int64_t block = least(spans, bytes > size * 4 ? bytes / (size * 4) : 1);
    block = over(spans, over(spans, block)); /* blocks of one size */
    return groups > 1 && groups * block >= threads ? block : 0;
}

/* Compute the whole product. Returns 0, or 2 if memory runs out. */
static int product(const Product *p) {
    int64_t groups = over(p->most, p->rows), spans = over(p->m.outs, p->span);
    int64_t size = p->parts * panel_size(p), block = spans_together(spans, groups, size);
    const int shared = block > 0;
    block = shared ? block : spans;
    bf16 *x = aligned_alloc(64, (size_t)(size_of(p, p->parts * over(p->most, 16)) * 2));
    uint32_t *weights = shared ? aligned_alloc(64, (size_t)(block * size * 4)) : NULL;
    int failed = !x || (shared && !weights);
#pragma omp parallel if (p->t * p->m.n * p->m.outs > 65536)
    {
        uint32_t *own = shared ? NULL : aligned_alloc(64, (size_t)panel_size(p) * 4);
        float *sums = aligned_alloc(64, (size_t)(over(p->rows, 32) * 32 * p->span * 4));
        if ((!shared && !own) || !sums)
#pragma omp atomic write
            failed = 1;
#pragma omp barrier
        shape_tiles(0, 0);
        for (int64_t begin = 0; begin < p->t && !failed; begin += p->most) {
            int64_t here = least(p->t - begin, p->most), tiles = over(here, 16);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tiles; i++) load_rows(p, begin + i * 16, i, tiles, x);
            for (int64_t low = 0; low < spans; low += block) {
                int64_t some = least(spans - low, block), tasks = over(here, p->rows) * some;
                if (shared) {
#pragma omp for schedule(static)
                    for (int64_t i = 0; i < some * p->parts; i++)
                        load_panel(
                            p, (low + i / p->parts) * p->span, i % p->parts,
                            weights + i * panel_size(p)
                        );
                }
                /* A thread takes neighbouring tasks, whose activations stay in its cache. */
#pragma omp for schedule(static)
                for (int64_t i = 0; i < tasks; i++) {
                    int64_t first = i / some * p->rows;
                    multiply_all(
                        p, begin + first, least(here - first, p->rows), (low + i % some) * p->span,
                        x + size_of(p, first / 16), size_of(p, tiles),
                        shared ? weights + i % some * size : NULL, own, sums
                    );
                }
            }
        }
        _tile_release();
        free(own);
        free(sums);
    }
    free(x);
    free(weights);
    return failed ? 2 : 0;
}

#endif

/* x bfloat16 [t, n], whose rows are `pitch` numbers apart, times the transpose of a packed matrix
   [outs, n] -> out bfloat16 [t, outs]. No size is 0. With four bits, n is a multiple of 32. The
   bias is not added. Returns 0; 1 if this was compiled without tiles; 2 if memory runs out. */
int minikv_rows_product(int64_t t, int64_t pitch, const Matrix *m, const bf16 *x, bf16 *out) {
#if TILES
    int64_t steps = over(m->n, STEP), parts = over(steps, LONGEST), span = SPAN;
    /* The copies, and the groups of rows in them, have equal sizes, as far as tiles of 16 rows
    allow. */
    int64_t most = over(over(t, over(t, m->n > WIDE ? MOST / 2 : MOST)), 16) * 16;
    int64_t groups = most <= ALONE ? 1 : over(most, ROWS), rows = over(over(most, groups), 16) * 16;
    while (span > 64 && groups * over(m->outs, span) < 3 * most_threads()) span /= 2;
    const Product p = {*m, t, pitch, x, out, parts, over(steps, parts), span, rows, most};
    return product(&p);
#else
    (void)t, (void)pitch, (void)m, (void)x, (void)out;
    return 1;
#endif
}
