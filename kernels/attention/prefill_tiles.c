/* Attention of many queries over rows with products of bfloat16 tiles (AMX). A tile of keys [16, 32
   numbers] times a tile of queries, pairs along D [16, LANES], makes logits [16 keys, LANES]. A
   tile of values [16 numbers, 32 keys] times probabilities makes outputs. Two tiles of one factor
   are multiplied by two of the other at a time. */
#include "tiles.h"

#if TILES

#define WIDE 2
enum { TILE = 32, STEP = 32, STRIPS = 16 };

INLINE int64_t block_keys(int64_t size) { return size <= 128 ? 256 : 128; }

#include "prefill_pairs.h"

INLINE void begin_thread(void) { shape_tiles(0, 0); }

INLINE void end_thread(void) { _tile_release(); }

/* To [keys / 16][D / 32][16][32]. */
static void load_keys(const Shape *s, const bf16 *k, int64_t count, item *to) {
    int64_t used = (count + TILE - 1) / TILE * TILE, steps = padded(s->size) / STEP;
    bf16 *tiles = (bf16 *)to;
    for (int64_t i = 0; i < used; i++)
        for (int64_t step = 0; step < steps; step++) {
            int64_t left = s->size - step * STEP;
            __mmask32 mask = i >= count ? 0 : left < STEP ? (1u << left) - 1 : ~0u;
            __m512i x = _mm512_maskz_loadu_epi16(mask, k + i * s->k_row + step * STEP);
            _mm512_store_si512(tiles + ((i / 16) * steps + step) * NUMBERS + i % 16 * STEP, x);
        }
}

/* To [keys / 32][D / 16][16][32], keys along a row. */
static void load_values(const Shape *s, const bf16 *v, int64_t count, item *to) {
    int64_t used = (count + TILE - 1) / TILE * TILE;
    bf16 *tile = (bf16 *)to;
    for (int64_t key = 0; key < used; key += TILE)
        for (int64_t d = 0; d < s->size; d += 16, tile += NUMBERS) {
            __m512i x[16];
            for (int i = 0; i < 16; i++) x[i] = load_pair(s, v, key + 2 * i, count, d);
            transpose(x);
            for (int i = 0; i < 16; i++) _mm512_store_si512(tile + i * STEP, x[i]);
        }
}

/* Registers 0 .. 3 += the sum over `steps` of tiles of a times tiles of b [step][16][wide][LANES].
   Register 2 * i + w is for row i of tiles of a and vector w of b. In a, the next step is a_next
   numbers ahead, and the second row of tiles a_row numbers. two: whether there is a second row. */
INLINE void add_tiles(
    const int wide, const int two, int64_t steps, const bf16 *a, int64_t a_row, int64_t a_next,
    const item *b
) {
    for (int64_t step = 0; step < steps; step++, a += a_next, b += 16 * wide * LANES) {
        LOAD_TILE(4, a, ROW);
        LOAD_TILE(6, b, wide * ROW);
        _tile_dpbf16ps(0, 4, 6);
        if (wide == 2) {
            LOAD_TILE(7, b + LANES, wide * ROW);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two) {
            LOAD_TILE(5, a + a_row, ROW);
            _tile_dpbf16ps(2, 5, 6);
            if (wide == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

INLINE void find_logits(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t key,
    vec x[TILE][WIDE]
) {
    int64_t steps = padded(s->size) / STEP, next = steps * NUMBERS;
    const bf16 *k = (const bf16 *)r->k + (key - r->begin) / 16 * next;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    add_tiles(wide, 1, steps, k, next, NUMBERS, strip->q);
    _tile_stored(0, &x[0][0], WIDE * ROW);
    _tile_stored(2, &x[16][0], WIDE * ROW);
    if (wide == 2) {
        _tile_stored(1, &x[0][1], WIDE * ROW);
        _tile_stored(3, &x[16][1], WIDE * ROW);
    }
}

/* `add_values` for the 16 numbers of each value in one tile, or the 32 of two; their outputs begin
   at `sum`. */
INLINE void add_some_values(
    const int wide, const int two, int64_t steps, const bf16 *v, int64_t next, const item *p,
    float *sum
) {
    float *below = sum + 16 * wide * LANES;
    LOAD_TILE(0, sum, wide * ROW);
    if (wide == 2) LOAD_TILE(1, sum + LANES, wide * ROW);
    if (two) LOAD_TILE(2, below, wide * ROW);
    if (two && wide == 2) LOAD_TILE(3, below + LANES, wide * ROW);
    add_tiles(wide, two, steps, v, NUMBERS, next, p);
    _tile_stored(0, sum, wide * ROW);
    if (wide == 2) _tile_stored(1, sum + LANES, wide * ROW);
    if (two) _tile_stored(2, below, wide * ROW);
    if (two && wide == 2) _tile_stored(3, below + LANES, wide * ROW);
}

INLINE void add_values(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t count
) {
    int64_t next = s->size / 16 * NUMBERS, d = 0;
    const bf16 *v = (const bf16 *)r->v;
    for (; d + 32 <= s->size; d += 32)
        add_some_values(
            wide, 1, count / TILE, v + d / 16 * NUMBERS, next, r->p,
            strip->out_sum + d * wide * LANES
        );
    if (d < s->size)
        add_some_values(
            wide, 0, count / TILE, v + d / 16 * NUMBERS, next, r->p,
            strip->out_sum + d * wide * LANES
        );
}

#endif

/* Whether the processor has tiles and this process may use them. */
int minikv_rows_attention_tiles_available(void) { return granted(); }

/* See `rows_attention` in prefill.h; returns 1 where there are no tiles. */
int minikv_rows_attention_tiles(
    const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *lse, const int64_t *shape
) {
#if TILES
    return rows_attention(q, k, v, out, lse, (const Shape *)shape);
#else
    (void)q, (void)k, (void)v, (void)out, (void)lse, (void)shape;
    return 1;
#endif
}
