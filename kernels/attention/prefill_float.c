/* Attention of many queries over rows in bfloat16, by products of floats. */
#include "lanes.h"

typedef bf16 stored;

INLINE float widen(stored x) { return from_bf16(x); }

INLINE stored narrow(float x) { return to_bf16(x); }

#include "prefill_float.h"

/* See `rows_attention` in prefill.h. */
int minikv_rows_attention_float(
    const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *lse, const Shape *s
) {
    return rows_attention(q, k, v, out, lse, s);
}
