/* Attention of many queries over rows in float32. */
#include "lanes.h"

typedef float stored;

INLINE float widen(stored x) { return x; }

INLINE stored narrow(float x) { return x; }

#include "prefill_float.h"

/* See `rows_attention` in prefill.h. */
int minikv_rows_attention_float32(
    const float *q, const float *k, const float *v, float *out, float *lse, const Shape *s
) {
    return rows_attention(q, k, v, out, lse, s);
}
