/* The common part of prefill.c and prefill_tiles.c: an item is a pair of bfloat16. Probabilities
   are rounded to bfloat16, and the output is divided by the sum of the rounded ones; the
   log-sum-exp is that of the sum before rounding. Include this instead of prefill.h. */
#include "pairs.h"

enum { PAIR = 2 };

typedef bf16 stored;
typedef uint32_t item;

#include "prefill.h"

static void load_queries(const Shape *s, const bf16 *const *from, int wide, item *to) {
    int64_t pairs = s->size / 2, items = items_of(s);
    for (int64_t at = 0; at < items; at += LANES) {
        int64_t here = items - at < LANES ? items - at : LANES;
        int64_t held = pairs - at < LANES ? pairs - at : LANES;
        __mmask16 mask = (__mmask16)((1u << held) - 1);
        __m512i y[LANES];
        for (int i = 0; i < LANES; i++)
            y[i] =
                from[i] ? _mm512_maskz_loadu_epi32(mask, from[i] + 2 * at) : _mm512_setzero_si512();
        transpose(y);
        for (int64_t i = 0; i < here; i++) _mm512_store_si512(to + (at + i) * wide * LANES, y[i]);
    }
}

/* Numbers d .. d + 15 of the values of `key` and key + 1, as pairs; zeros from key `count` on. */
INLINE __m512i load_pair(const Shape *s, const bf16 *v, int64_t key, int64_t count, int64_t d) {
    const bf16 *from = v + key * s->v_row + d;
    __m256i even = _mm256_setzero_si256(), odd = even;
    if (key < count) even = _mm256_loadu_si256((const void *)from);
    if (key + 1 < count) odd = _mm256_loadu_si256((const void *)(from + s->v_row));
    return interleave(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1));
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
        for (int i = 0; i < LANES; i++) y[i] = (__m512i)(load(x + (d + i) * wide * LANES) * share);
        transpose(y);
        for (int i = 0; i < count; i++)
            _mm256_storeu_si256((void *)(to[i] + d), (__m256i)_mm512_cvtneps_pbh((__m512)y[i]));
    }
}
