/* Attention of many queries over rows in bfloat16 (or, for prefill_float32.c, which includes this
   with FLOAT32 defined, in float32) with products of floats, for any processor with float vectors.
   Keys and values are converted to float once for a block of queries. */
#include "lanes.h"

#ifdef FLOAT32
#define NAME minikv_rows_attention_float32
typedef float stored;
INLINE float widen(stored x) { return x; }
INLINE stored narrow(float x) { return x; }
#else
#define NAME minikv_rows_attention_float
typedef bf16 stored;
INLINE float widen(stored x) { return from_bf16(x); }
INLINE stored narrow(float x) { return to_bf16(x); }
#endif

#define WIDE 3
#if VEC == 16 || defined(__aarch64__)
enum { TILE = 8, PAIR = 1, STEP = 1, STRIPS = 4 };
#else
enum { TILE = 4, PAIR = 1, STEP = 1, STRIPS = 4 };
#endif

typedef float item;

#define VALUE_TILE(r, s, d) ((r)->v + (d))
#define VALUE_NEXT(s) ((s)->size)

INLINE int64_t block_keys(int64_t size) { return size <= 64 ? 128 : 64; }

#include "prefill.h"
#include "prefill_vectors.h"

INLINE vec add_product(vec sum, const item *a, item b) { return sum + load(a) * b; }

static void load_queries(const Shape *s, const stored *const *from, int wide, item *to) {
    for (int i = 0; i < LANES; i++)
        for (int64_t d = 0; d < s->size; d++)
            to[d * wide * LANES + i] = from[i] ? widen(from[i][d]) : 0.0f;
}

INLINE void load_key(const Shape *s, const stored *from, item *to) {
    for (int64_t d = 0; d < s->size; d++) to[d] = from ? widen(from[d]) : 0.0f;
}

static void load_values(const Shape *s, const stored *v, int64_t count, item *to) {
    int64_t used = (count + TILE - 1) / TILE * TILE;
    for (int64_t i = 0; i < used; i++)
        load_key(s, i < count ? v + i * s->v_row : NULL, to + i * s->size);
}

INLINE void store_probs(const vec *p, item *to, vec *sum) {
    store(to, *p);
    *sum += *p;
}

static void write_rows(
    const Shape *s, const float *x, int wide, vec share, int count, stored *const *to
) {
    for (int i = 0; i < count; i++) {
        float row[256]; /* the largest head */
        for (int64_t d = 0; d < s->size; d++) row[d] = x[d * wide * LANES + i] * share[i];
        for (int64_t d = 0; d < s->size; d++) to[i][d] = narrow(row[d]);
    }
}

/* See `rows_attention` in prefill.h. */
int NAME(
    const stored *q, const stored *k, const stored *v, stored *out, float *lse, const Shape *s
) {
    return rows_attention(q, k, v, out, lse, s);
}
