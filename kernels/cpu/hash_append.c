/* HashEvict: in a full head, the new row overwrites the row that is least similar to the queries,
   by the Hamming distance of their hash codes. */

/* Products are rounded before they are added, as in torch: sums near 0 have the same sign. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "span.h"

/* Number d of a row of floats of dtype `kind`. */
static inline float float_at(const void *row, int kind, int64_t d) {
    if (kind == F32)
        return ((const float *)row)[d];
    const uint16_t x = ((const uint16_t *)row)[d];
    return kind == BF16 ? from_bf16(x) : from_f16(x);
}

/* The hash code of x [D]: bit b is 1 if x . matrix[:, b] >= 0, matrix [D, B]. With a constant B the
   sums stay in registers. */
static inline __attribute__((always_inline)) uint64_t
sign_bits(const void *x, int kind, int64_t D, const float *matrix, const int B) {
    float sums[64] = {0};
    for (int64_t d = 0; d < D; d++) {
        const float one = float_at(x, kind, d);
#pragma omp simd
        for (int b = 0; b < B; b++)
            sums[b] += one * matrix[d * B + b];
    }
    uint64_t found = 0;
    for (int b = 0; b < B; b++)
        found |= (uint64_t)(sums[b] >= 0.0f) << b;
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

/* score [n] = minus the Hamming distance of each row's code to a probe, summed over P probes. These
   are whole numbers, exact in float. */
static inline __attribute__((always_inline)) void hamming_scores(
    const void *code, const int size, int64_t begin, int n, const uint64_t *probes, int64_t P,
    float *score
) {
    memset(score, 0, n * sizeof(float));
    for (int64_t i = 0; i < P; i++) {
        const uint64_t probe = probes[i];
#pragma omp simd
        for (int j = 0; j < n; j++)
            score[j] -=
                (float)__builtin_popcountll(probe ^ (uint64_t)code_at(code, size, begin + j));
    }
}

/* Where a row of `bytes` bytes is. */
static inline char *row_of(void *rows, int64_t row, int64_t bytes) {
    return (char *)rows + row * bytes;
}

/* HashEvict (arXiv 2412.16187, section 3) before attention, in one layer: evict from each full head
   and write the new rows. Arguments and results as in hash_append in kernels/cpu/hash_append.py;
   kind: dtype of probes, keys and values; code_size: bytes of a code; undo_*: undo_rows. Returns 0,
   or 1 if there is no memory; then nothing was written. */
int minikv_hash_append(
    int kind, int code_size, int64_t H, int64_t P, int64_t D, int64_t B, const void *probe,
    const void *key, const void *value, const float *matrix, const int64_t *start,
    const int64_t *length, const int64_t *cap, int64_t *free_slot, const int64_t *position, void *k,
    void *v, int32_t *pos, void *code, void *undo_k, void *undo_v, int32_t *undo_pos,
    void *undo_code, int64_t width, int64_t sinks, int64_t recent, int64_t pinned
) {
    const int64_t row_size = D * item_size(kind), newest = *position - 1;
    uint64_t *probes = scratch(P, sizeof(uint64_t));
    float *score = scratch(width, sizeof(float));
    const int good = probes && score;
    for (int64_t h = 0; good && h < H; h++) {
        if (free_slot[h] >= 0 || length[h] < cap[h])
            continue;
        const int n = (int)length[h];
        const int32_t *at = pos + start[h];
        for (int64_t i = 0; i < P; i++)
            probes[i] =
                code_of((const char *)probe + (h * P + i) * row_size, kind, D, matrix, (int)B);
        if (code_size == 2)
            hamming_scores(code, 2, start[h], n, probes, P, score);
        else if (code_size == 4)
            hamming_scores(code, 4, start[h], n, probes, P, score);
        else
            hamming_scores(code, 8, start[h], n, probes, P, score);
        int found = lowest(score, at, n, evictable_span(newest, sinks, recent, pinned));
        if (found < 0)
            found = lowest(score, at, n, fallback_span(newest, pinned));
        const int64_t row = start[h] + (found < 0 ? 0 : found);
        memcpy(row_of(undo_k, h, row_size), row_of(k, row, row_size), row_size);
        memcpy(row_of(undo_v, h, row_size), row_of(v, row, row_size), row_size);
        memcpy(row_of(undo_code, h, code_size), row_of(code, row, code_size), code_size);
        undo_pos[h] = pos[row];
        free_slot[h] = row;
    }
    for (int64_t h = 0; good && h < H; h++) {
        const int64_t row = free_slot[h] >= 0 ? free_slot[h] : start[h] + length[h];
        const char *new_key = (const char *)key + h * row_size;
        const uint64_t new_code = code_of(new_key, kind, D, matrix, (int)B);
        memcpy(row_of(k, row, row_size), new_key, row_size);
        memcpy(row_of(v, row, row_size), (const char *)value + h * row_size, row_size);
        pos[row] = (int32_t)*position;
        if (code_size == 2)
            ((int16_t *)code)[row] = (int16_t)new_code;
        else if (code_size == 4)
            ((int32_t *)code)[row] = (int32_t)new_code;
        else
            ((int64_t *)code)[row] = (int64_t)new_code;
    }
    free(score);
    free(probes);
    return !good;
}
