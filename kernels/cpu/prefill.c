/* Attention of many queries over rows by the products of bfloat16 of AVX-512: numbers are pairs
   along what is summed. Probabilities are rounded to bfloat16, and the output is divided by the sum
   of the rounded ones; the log-sum-exp is that of the sum before rounding. */
#include "lanes.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AVAILABLE 1
#else
#define AVAILABLE 0
#endif

/* Whether the processor that this is compiled for has the instructions. */
int minikv_rows_attention_available(void) { return AVAILABLE; }

#if AVAILABLE

/* Sums, with a row of queries and one pair, fill the registers. */
enum { TILE = 8, PAIR = 2 };

typedef bf16 stored;
typedef uint32_t item;

/* [D / TILE][keys / 2][TILE] */
#define VALUE_TILE(r, s, d) ((r)->v + (d) * (block_keys((s)->size) / PAIR))
#define VALUE_NEXT(s) TILE

#include "prefill.h"

INLINE vec add_product(vec sum, const item *a, item b) {
    __m512bh x = (__m512bh)_mm512_load_si512(a), y = (__m512bh)_mm512_set1_epi32((int32_t)b);
    return _mm512_dpbf16_ps(sum, x, y);
}

/* Two vectors of 16 bfloat16, as 16 pairs. */
INLINE __m512i interleave(__m512i pairs) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0
    );
    return _mm512_permutexvar_epi16(order, pairs);
}

/* Transpose 16 x 16 numbers of 4 bytes. */
static void transpose(__m512i x[16]) {
    __m512i y[16];
    UNROLL
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

static void load_queries(const Shape *s, const bf16 *const *from, int wide, item *to) {
    int64_t pairs = s->size / 2;
    for (int64_t at = 0; at < pairs; at += LANES) {
        int64_t here = pairs - at < LANES ? pairs - at : LANES;
        __mmask16 mask = (__mmask16)((1u << here) - 1);
        __m512i y[LANES];
        for (int i = 0; i < LANES; i++)
            y[i] =
                from[i] ? _mm512_maskz_loadu_epi32(mask, from[i] + 2 * at) : _mm512_setzero_si512();
        transpose(y);
        for (int64_t i = 0; i < here; i++)
            _mm512_store_si512(to + (at + i) * wide * LANES, y[i]);
    }
}

INLINE void load_key(const Shape *s, const bf16 *from, item *to) {
    if (from)
        memcpy(to, from, (size_t)(2 * s->size));
    else
        memset(to, 0, (size_t)(2 * s->size));
}

static void load_values(const Shape *s, const bf16 *v, int64_t count, item *to) {
    int64_t steps = block_keys(s->size) / 2;
    int64_t used = (count + TILE - 1) / TILE * TILE / 2;
    for (int64_t step = 0; step < used; step++) {
        int64_t key = 2 * step;
        for (int64_t d = 0; d < s->size; d += LANES) {
            __m256i even = _mm256_setzero_si256(), odd = even;
            if (key < count)
                even = _mm256_loadu_si256((const void *)(v + key * s->v_row + d));
            if (key + 1 < count)
                odd = _mm256_loadu_si256((const void *)(v + (key + 1) * s->v_row + d));
            __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
            pairs = interleave(pairs);
            uint32_t *at = to + (d * steps + step * TILE);
            _mm256_store_si256((void *)at, _mm512_castsi512_si256(pairs));
            _mm256_store_si256((void *)(at + steps * TILE), _mm512_extracti64x4_epi64(pairs, 1));
        }
    }
}

INLINE void store_probs(const vec *p, item *to, vec *sum) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512i pairs = interleave((__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
    *sum = _mm512_dpbf16_ps(*sum, (__m512bh)pairs, ones);
    _mm512_store_si512(to, pairs);
}

static void write_rows(
    const Shape *s, const float *x, int wide, vec share, int count, bf16 *const *to
) {
    for (int64_t d = 0; d < s->size; d += LANES) {
        __m512i y[LANES];
        for (int i = 0; i < LANES; i++)
            y[i] = (__m512i)(load(x + (d + i) * wide * LANES) * share);
        transpose(y);
        for (int i = 0; i < count; i++)
            _mm256_storeu_si256((void *)(to[i] + d), (__m256i)_mm512_cvtneps_pbh((__m512)y[i]));
    }
}

#endif

/* See `rows_attention` in prefill.h; returns 1 where the processor lacks the instructions. */
int minikv_rows_attention(
    const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *lse, const int64_t *shape
) {
#if AVAILABLE
    return rows_attention(q, k, v, out, lse, (const Shape *)shape);
#else
    (void)q, (void)k, (void)v, (void)out, (void)lse, (void)shape;
    return 1;
#endif
}
