/* Products of many rows of activations with tiles of bfloat16 (AMX). A tile of activations has 16
   rows and 32 columns. A tile of weights has 16 pairs of columns for each of 16 rows of weights.

   A panel is SPAN rows and PART columns of the weights, converted to bfloat16, in the order in
   which it is multiplied. 32 of its rows stay in the L1 cache while they are multiplied by CHUNK
   rows of activations. These stay in the L2 cache, into which the next ones are prefetched
   meanwhile. int8 weights are whole numbers, which bfloat16 represents exactly. Weights of four
   bits are rounded to bfloat16, as `unpack_int4` of packing.c rounds them. Activations are not
   rounded. */
#include "row.h"
#include "tiles.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* The arguments of a product: x [t, n], whose rows are `pitch` numbers apart, and the weights
   [m.outs, m.n]. */
typedef struct {
    Matrix m;
    int64_t t, pitch;
    const bf16 *x;
    bf16 *out; /* [t, outs] */
} Product;

#if TILES

/* MOST: the most rows of activations that are read before the panels are made again. STEP: columns
   of a tile of activations. STEPS: tiles along the columns of a part. */
enum { SPAN = 128, PART = 256, CHUNK = 256, MOST = 1024, STEP = 32, STEPS = PART / STEP };

/* How many parts of PART columns a row has, how many steps of STEP columns a part has, and how many
   tiles `rows` rows have. */
INLINE int64_t parts_of(const Product *p) { return (p->m.n + PART - 1) / PART; }
INLINE int64_t steps_of(const Product *p, int64_t part) {
    int64_t left = p->m.n - part * PART;
    return ((left < PART ? left : PART) + STEP - 1) / STEP;
}
INLINE int64_t tiles_of(int64_t rows) { return (rows + 15) / 16; }

/* How many tiles of 16 rows of weights the panel from row `from` on has. */
INLINE int64_t outs_of(const Product *p, int64_t from) {
    int64_t left = p->m.outs - from;
    return tiles_of(left < SPAN ? left : SPAN);
}

/* A mask of the STEP columns from `at` on: which of them exist. */
INLINE __mmask32 columns_from(const Product *p, int64_t at) {
    int64_t left = p->m.n - at;
    return left < STEP ? (1u << left) - 1 : ~0u;
}

/* Copy 16 rows of activations from row `first` on to `to` [parts][tiles][STEPS][16][32]. Rows and
   columns that do not exist become zeros. */
static void load_rows(const Product *p, int64_t first, int64_t tiles, bf16 *to) {
    int64_t left = p->t - first, held = left < 16 ? left : 16;
    for (int64_t at = 0; at < p->m.n; at += STEP) {
        bf16 *tile = to + (at / PART * tiles * STEPS + at % PART / STEP) * NUMBERS;
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
    for (int i = 0; i < 16; i++)
        _mm512_store_si512(to + i * 16, x[i]);
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

/* Make the panel of a part from row `from` on: [SPAN / 32][STEPS][2][16][16]. */
static void load_panel(const Product *p, int64_t from, int64_t part, uint32_t *panel) {
    for (int64_t o = 0; o < SPAN && from + o < p->m.outs; o += 16)
        for (int64_t step = 0; step < steps_of(p, part); step++) {
            uint32_t *to = panel + ((o / 32 * STEPS + step) * 2 + o / 16 % 2) * 256;
            int64_t at = part * PART + step * STEP;
            if (p->m.form == FOUR)
                load_four(p, from + o, at, to);
            else
                load_eight(p, from + o, at, to);
        }
}

/* Add the product of the activations x [tiles][STEPS][16][32] and the panel to sums [tiles][SPAN /
   16][16][16]; with `first`, overwrite sums instead. outs: tiles of 16 rows of weights. next: the
   activations to prefetch, which are multiplied after x. */
static void multiply(
    int64_t tiles, int64_t outs, int64_t steps, int first, const bf16 *x, const uint32_t *panel,
    float *sums, const bf16 *next
) {
    const char *ahead = (const char *)next;
    /* Each step prefetches so many lines; together, the steps prefetch all of `next`. */
    const int lines = (int)((64 + outs - 1) / outs);
    for (int64_t o = 0; o < outs; o += 2)
        for (int64_t r = 0; r < tiles; r += 2) {
            const int two = r + 1 < tiles; /* else the first tile is computed twice */
            const bf16 *a = x + r * STEPS * NUMBERS, *below = a + two * STEPS * NUMBERS;
            const uint32_t *b = panel + o * STEPS * 256;
            float *sum = sums + (r * (SPAN / 16) + o) * 256, *under = sum + two * (SPAN * 16);
            if (first) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            } else {
                LOAD_TILE(0, sum, ROW);
                LOAD_TILE(1, sum + 256, ROW);
                LOAD_TILE(2, under, ROW);
                LOAD_TILE(3, under + 256, ROW);
            }
            for (int64_t step = 0; step < steps; step++) {
                for (int i = 0; i < lines; i++, ahead += 64)
                    __builtin_prefetch(ahead, 0, 2);
                LOAD_TILE(4, a + step * NUMBERS, ROW);
                LOAD_TILE(6, b + step * 512, ROW);
                LOAD_TILE(5, below + step * NUMBERS, ROW);
                LOAD_TILE(7, b + step * 512 + 256, ROW);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(2, under, ROW);
            _tile_stored(3, under + 256, ROW);
            _tile_stored(0, sum, ROW);
            _tile_stored(1, sum + 256, ROW);
        }
}

/* Write the outputs of `rows` rows of activations from row `first` on, for the panel's rows of
   weights from row `from` on: the sums, times the scales of int8 weights. */
static void write_out(
    const Product *p, int64_t first, int64_t rows, int64_t from, const float *sums
) {
    int64_t left = p->m.outs - from, outs = outs_of(p, from);
    __mmask16 mask[SPAN / 16];
    vec scale[SPAN / 16];
    for (int64_t o = 0; o < outs; o++, left -= 16) {
        mask[o] = left < 16 ? (__mmask16)((1u << left) - 1) : 0xffff;
        scale[o] = fill(1.0f);
        if (p->m.form == EIGHT) {
            const bf16 *at = (const bf16 *)p->m.scales + from + o * 16;
            __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask[o], at));
            scale[o] = (vec)_mm512_slli_epi32(wide, 16);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *sum = sums + r / 16 * (SPAN * 16) + r % 16 * 16;
        bf16 *to = p->out + (first + r) * p->m.outs + from;
        for (int64_t o = 0; o < outs; o++) {
            vec made = load(sum + o * 256) * scale[o];
            _mm256_mask_storeu_epi16(
                to + o * 16, mask[o], (__m256i)_mm512_cvtneps_pbh((__m512)made)
            );
        }
    }
}

/* Compute the sums of SPAN rows of weights from row `from` on, over all parts, for `rows` rows of
   activations. Their tiles begin at x; those of the next part come `part_next` numbers later. */
static void sum_span(
    const Product *p, int64_t from, int64_t rows, const bf16 *x, int64_t part_next, uint32_t *panel,
    float *sums
) {
    int64_t outs = outs_of(p, from);
    for (int64_t part = 0; part < parts_of(p); part++) {
        const bf16 *here = x + part * part_next;
        const bf16 *after = part + 1 < parts_of(p) ? here + part_next : x;
        load_panel(p, from, part, panel);
        for (int64_t r = 0; r < rows; r += CHUNK) {
            int64_t tiles = tiles_of(rows - r < CHUNK ? rows - r : CHUNK);
            const bf16 *chunk = here + r * STEPS * STEP;
            multiply(
                tiles, outs, steps_of(p, part), part == 0, chunk, panel, sums + r * SPAN,
                r + CHUNK < rows ? chunk + CHUNK * STEPS * STEP : after
            );
        }
    }
}

/* For how many of `rows` rows of activations one thread makes a panel: up to MOST, but fewer if
   there would be less than three panels per thread. At least CHUNK. */
static int64_t rows_together(const Product *p, int64_t rows) {
    int64_t threads = 1, spans = (p->m.outs + SPAN - 1) / SPAN, together = MOST;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    while (together > CHUNK && spans * ((rows + together - 1) / together) < 3 * threads)
        together /= 2;
    return together;
}

/* Compute the whole product. Returns 0, or 2 if memory runs out. */
static int product(const Product *p) {
    int64_t most = p->t < MOST ? p->t : MOST, spans = (p->m.outs + SPAN - 1) / SPAN;
    int64_t together = rows_together(p, most);
    bf16 *x = aligned_alloc(64, (size_t)(parts_of(p) * tiles_of(most) * STEPS * NUMBERS * 2));
    int failed = !x;
#pragma omp parallel if (p->t * p->m.n * p->m.outs > 65536)
    {
        uint32_t *panel = aligned_alloc(64, SPAN * PART * 2);
        float *sums = aligned_alloc(64, (size_t)(tiles_of(most) * 16 * SPAN * 4));
        if (!panel || !sums)
#pragma omp atomic write
            failed = 1;
#pragma omp barrier
        shape_tiles();
        for (int64_t begin = 0; begin < p->t && !failed; begin += MOST) {
            int64_t here = p->t - begin < MOST ? p->t - begin : MOST, tiles = tiles_of(here);
            int64_t groups = (here + together - 1) / together;
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tiles; i++)
                load_rows(p, begin + i * 16, tiles, x + i * STEPS * NUMBERS);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < groups * spans; i++) {
                int64_t first = i % groups * together, from = i / groups * SPAN;
                int64_t rows = here - first < together ? here - first : together;
                sum_span(
                    p, from, rows, x + first * STEPS * STEP, tiles * STEPS * NUMBERS, panel, sums
                );
                write_out(p, begin + first, rows, from, sums);
            }
        }
        _tile_release();
        free(panel);
        free(sums);
    }
    free(x);
    return failed ? 2 : 0;
}

#endif

/* x bfloat16 [t, n], whose rows are `pitch` numbers apart, times the transpose of a packed matrix
   [outs, n] -> out bfloat16 [t, outs]. No size is 0. With four bits, n is a multiple of 32. The
   bias is not added. Returns 0; 1 if this was compiled without tiles; 2 if memory runs out. */
int minikv_rows_product(int64_t t, int64_t pitch, const Matrix *m, const bf16 *x, bf16 *out) {
#if TILES
    const Product p = {.m = *m, .t = t, .pitch = pitch, .x = x, .out = out};
    return product(&p);
#else
    (void)t, (void)pitch, (void)m, (void)x, (void)out;
    return 1;
#endif
}
