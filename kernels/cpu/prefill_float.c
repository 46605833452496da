/* Attention of many queries over rows by floats: of any processor with vectors of them. Each number
   in bfloat16 is widened once for a block of queries. */
#include "lanes.h"

/* Sums, with a row of queries and one number, fill the registers. */
#if VEC == 16 || defined(__aarch64__)
enum { TILE = 8, PAIR = 1 };
#else
enum { TILE = 4, PAIR = 1 };
#endif

typedef float item;

#define VALUE_TILE(r, s, d) ((r)->v + (d))
#define VALUE_NEXT(s) ((s)->size)

#include "prefill.h"

INLINE vec add_product(vec sum, const item *a, item b) { return sum + load(a) * b; }

static void load_queries(const Shape *s, const bf16 *const *from, int wide, item *to) {
    for (int i = 0; i < LANES; i++)
        for (int64_t d = 0; d < s->size; d++)
            to[d * wide * LANES + i] = from[i] ? from_bf16(from[i][d]) : 0.0f;
}

INLINE void load_key(const Shape *s, const bf16 *from, item *to) {
    for (int64_t d = 0; d < s->size; d++)
        to[d] = from ? from_bf16(from[d]) : 0.0f;
}

static void load_values(const Shape *s, const bf16 *v, int64_t count, item *to) {
    int64_t used = (count + TILE - 1) / TILE * TILE;
    for (int64_t i = 0; i < used; i++)
        load_key(s, i < count ? v + i * s->v_row : NULL, to + i * s->size);
}

INLINE void store_probs(const vec *p, item *to, vec *sum) {
    store(to, *p);
    *sum += *p;
}

static void round_outputs(
    const Shape *s, const float *x, int wide, vec share, int count, bf16 *const *to
) {
    for (int i = 0; i < count; i++) {
        float row[256]; /* the largest head */
        for (int64_t d = 0; d < s->size; d++)
            row[d] = x[d * wide * LANES + i] * share[i];
        for (int64_t d = 0; d < s->size; d++)
            to[i][d] = to_bf16(row[d]);
    }
}

/* See `rows_attention`. */
int minikv_rows_attention_float(
    const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *lse, const Shape *s
) {
    return rows_attention(q, k, v, out, lse, s);
}
