/* What attention by products of bfloat16 has in common: pairs of them are items. Probabilities are
   rounded to bfloat16, and the output is divided by the sum of the rounded ones; the log-sum-exp is
   that of the sum before rounding. Included in place of prefill.h. */
enum { PAIR = 2 };

typedef bf16 stored;
typedef uint32_t item;

#include "prefill.h"

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
        for (int64_t i = 0; i < here; i++)
            _mm512_store_si512(to + (at + i) * wide * LANES, y[i]);
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
