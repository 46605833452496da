/* Attention of many queries over rows with the bfloat16 products of AVX-512, which multiply pairs
   of numbers and add both products. */
#include "lanes.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AVAILABLE 1
#else
#define AVAILABLE 0
#endif

/* Whether the processor that this is compiled for has the instructions. */
int minikv_rows_attention_available(void) { return AVAILABLE; }

#if AVAILABLE

#define WIDE 3
enum { TILE = 8, STEP = 2, STRIPS = 4 };

/* [D / TILE][keys / 2][TILE] */
#define VALUE_TILE(r, s, d) ((r)->v + (d) * (block_keys((s)->size) / PAIR))
#define VALUE_NEXT(s) TILE

INLINE int64_t block_keys(int64_t size) { return size <= 64 ? 128 : 64; }

#include "prefill_pairs.h"
#include "prefill_vectors.h"

INLINE vec add_product(vec sum, const item *a, item b) {
    __m512bh x = (__m512bh)_mm512_load_si512(a), y = (__m512bh)_mm512_set1_epi32((int32_t)b);
    return _mm512_dpbf16_ps(sum, x, y);
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
        for (int64_t d = 0; d < s->size; d += LANES) {
            __m512i pairs = load_pair(s, v, 2 * step, count, d);
            uint32_t *at = to + (d * steps + step * TILE);
            _mm256_store_si256((void *)at, _mm512_castsi512_si256(pairs));
            _mm256_store_si256((void *)(at + steps * TILE), _mm512_extracti64x4_epi64(pairs, 1));
        }
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
