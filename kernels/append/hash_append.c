/* HashEvict: in a full head, the new row overwrites the row that is least similar to the queries,
   by the Hamming distance of their hash codes. */

/* Products are rounded before they are added, as in torch: sums near 0 have the same sign. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "cache.h"
#include "span.h"

/* Number d of a row of floats of dtype `kind`. */
static inline float float_at(const void *row, int kind, int64_t d) {
    if (kind == F32) return ((const float *)row)[d];
    const uint16_t x = ((const uint16_t *)row)[d];
    return kind == BF16 ? from_bf16(x) : from_f16(x);
}

/* The hash code of x [D]: bit b is 1 if x . matrix[:, b] >= 0, matrix [D, B]. With a constant B the
   sums stay in registers. */
INLINE uint64_t sign_bits(const void *x, int kind, int64_t D, const float *matrix, const int B) {
    float sums[64] = {0};
    for (int64_t d = 0; d < D; d++) {
        const float one = float_at(x, kind, d);
#pragma omp simd
        for (int b = 0; b < B; b++) sums[b] += one * matrix[d * B + b];
    }
    uint64_t found = 0;
    for (int b = 0; b < B; b++) found |= (uint64_t)(sums[b] >= 0.0f) << b;
    return found;
}

/* `sign_bits`, with constant B for the usual values. */
static uint64_t code_of(const void *x, int kind, int64_t D, const float *matrix, int B) {
    switch (B) {
    case 8:
        return sign_bits(x, kind, D, matrix, 8);
    case 16:
        return sign_bits(x, kind, D, matrix, 16);
    case 32:
        return sign_bits(x, kind, D, matrix, 32);
    default:
        return sign_bits(x, kind, D, matrix, B);
    }
}

/* The code of a row; a code has `size` bytes. */
static inline int64_t code_at(const void *code, int size, int64_t row) {
    return size == 2   ? ((const int16_t *)code)[row]
           : size == 4 ? ((const int32_t *)code)[row]
                       : ((const int64_t *)code)[row];
}

/* Subtract from score [n] the Hamming distance of each row's code to a probe: whole numbers, exact
   in float. */
INLINE void subtract_distance(
    const void *code, const int size, int64_t begin, int n, uint64_t probe, float *score
) {
#pragma omp simd
    for (int j = 0; j < n; j++)
        score[j] -= (float)__builtin_popcountll(probe ^ (uint64_t)code_at(code, size, begin + j));
}

/* See cache.h. */
void minikv_hash_row(
    const Cache *c, const Hashing *a, const HashLayer *l, int kind, int64_t h, int64_t start,
    int64_t P, const void *probe, const void *key, const void *value, float *score
) {
    const int64_t row_size = c->D * item_size(kind), newest = *c->position - 1;
    const int size = (int)a->code_size, bits = (int)a->bits;
    if (l->free_slot[h] < 0 && l->length[h] >= l->cap[h]) {
        const int n = (int)l->length[h];
        const int32_t *at = c->pos + start;
        memset(score, 0, n * sizeof(float));
        for (int64_t i = 0; i < P; i++) {
            const void *one = (const char *)probe + i * row_size;
            const uint64_t bitmap = code_of(one, kind, c->D, l->matrix, bits);
            if (size == 2)
                subtract_distance(a->code, 2, start, n, bitmap, score);
            else if (size == 4)
                subtract_distance(a->code, 4, start, n, bitmap, score);
            else
                subtract_distance(a->code, 8, start, n, bitmap, score);
        }
        int found = lowest(score, at, n, evictable_span(newest, a->sinks, a->recent, a->pinned));
        if (found < 0) found = lowest(score, at, n, fallback_span(newest, a->pinned));
        l->free_slot[h] = start + (found < 0 ? 0 : found);
    }
    const int64_t row = l->free_slot[h] >= 0 ? l->free_slot[h] : start + l->length[h];
    const uint64_t code = code_of(key, kind, c->D, l->matrix, bits);
    memcpy((char *)c->k + row * row_size, key, row_size);
    memcpy((char *)c->v + row * row_size, value, row_size);
    c->pos[row] = (int32_t)*c->position;
    memcpy((char *)a->code + row * size, &code, size); /* the lower bytes come first */
}

/* HashEvict (arXiv 2412.16187, section 3) before attention, in one layer: evict from each full
   head, which begins at start[h], and write the new rows. Arguments and results as in hash_append
   in kernels/append/cpu.py; kind: dtype of probes [H, P, D], keys and values [H, D]. No head has
   more than `width` rows. Returns 0, or 1 if there is no memory. */
int minikv_hash_append(
    const Cache *c, const Hashing *a, const HashLayer *l, int kind, int64_t H, int64_t P,
    const void *probe, const void *key, const void *value, const int64_t *start, int64_t width
) {
    const int64_t row_size = c->D * item_size(kind);
    float *score = scratch(width, sizeof(float));
    for (int64_t h = 0; score && h < H; h++)
        minikv_hash_row(
            c, a, l, kind, h, start[h], P, (const char *)probe + h * P * row_size,
            (const char *)key + h * row_size, (const char *)value + h * row_size, score
        );
    free(score);
    return !score;
}
