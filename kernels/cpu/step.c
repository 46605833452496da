/* What happens to one token between the products: attention over segments, newcomers, and the small
   operators. What each function computes is said by its twin in kernels/reference.py. */
#include "numbers.h"

#include <stdlib.h>

typedef uint16_t half_bits __attribute__((vector_size(2 * VEC)));
typedef int8_t codes __attribute__((vector_size(VEC)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t i4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i4){__VA_ARGS__})
#endif

enum { CODES = 3, WIDEST = 256 / VEC /* vectors of a row: heads of 256 */ };

static inline vec load(const void *row, int kind, int i) {
    if (kind == BF16) {
        half_bits x;
        memcpy(&x, (const char *)row + sizeof x * i, sizeof x);
        return (vec)(__builtin_convertvector(x, words) << 16);
    }
    if (kind == CODES) {
        codes x;
        memcpy(&x, (const char *)row + sizeof x * i, sizeof x);
        return __builtin_convertvector(x, vec);
    }
    vec x;
    memcpy(&x, (const char *)row + sizeof x * i, sizeof x);
    return x;
}

static inline long item(int kind) { return kind == CODES ? 1 : kind == BF16 ? 2 : 4; }

static inline void store(void *row, int kind, long i, float x) {
    if (kind == BF16)
        ((bf16 *)row)[i] = to_bf16(x);
    else
        ((float *)row)[i] = x;
}

static inline float number(const void *row, int kind, long i) {
    if (kind == CODES)
        return ((const int8_t *)row)[i];
    return kind == BF16 ? from_bf16(((const bf16 *)row)[i]) : ((const float *)row)[i];
}

/* The rows of a head and what is known of each; stored: what k and v are. */
typedef struct {
    int D, stored;
    long n;
    const char *k, *v;
    const int32_t *pos; /* NULL: all are seen */
    int64_t oldest;
    const float *k_scale, *v_scale;
} rows_t;

enum { FOUR = 4 /* rows, queries and vectors that are worked on together: they stay in registers */ };

static inline float shown(const rows_t *r, long j, float x) {
    if (r->stored == CODES)
        x *= r->k_scale[j];
    return r->pos && r->pos[j] < r->oldest ? -INFINITY : x;
}

/* Sums of four vectors, as one. */
static inline v4 sums(vec a, vec b, vec c, vec d) {
    const v4 part[FOUR] = {by_fours(a), by_fours(b), by_fours(c), by_fours(d)};
    v4 low = SHUFFLE(part[0], part[1], 0, 4, 1, 5) + SHUFFLE(part[0], part[1], 2, 6, 3, 7);
    v4 high = SHUFFLE(part[2], part[3], 0, 4, 1, 5) + SHUFFLE(part[2], part[3], 2, 6, 3, 7);
    return SHUFFLE(low, high, 0, 1, 4, 5) + SHUFFLE(low, high, 2, 3, 6, 7);
}

/* The logits of B queries, n of them each, `pitch` apart. W: whole vectors of a row. */
static inline __attribute__((always_inline)) void scores(
    const int B, const int W, const int kind, const int stored, const rows_t *r, const char *q,
    float *into, long pitch) {
    const int D = r->D;
    const long wide = (long)D * item(stored), each = (long)D * item(kind);
    const float scale = 1.0f / sqrtf((float)D);
    vec query[FOUR][WIDEST];
    for (int b = 0; b < B; b++)
        for (int i = 0; i < W; i++)
            query[b][i] = load(q + b * each, kind, i) * scale;
    long j = 0;
    for (; j + FOUR <= r->n; j += FOUR) {
        const char *k = r->k + j * wide;
        vec sum[FOUR][FOUR] = {0};
#pragma GCC unroll 1
        for (int i = 0; i < W; i++)
            for (int c = 0; c < FOUR; c++) {
                vec key = load(k + c * wide, stored, i);
                for (int b = 0; b < B; b++)
                    sum[b][c] += key * query[b][i];
            }
        for (int b = 0; b < B; b++) {
            v4 x = sums(sum[b][0], sum[b][1], sum[b][2], sum[b][3]);
            for (int c = 0; c < FOUR; c++) {
                float y = x[c];
                for (int d = VEC * W; d < D; d++)
                    y += number(q + b * each, kind, d) * scale * number(k + c * wide, stored, d);
                into[b * pitch + j + c] = shown(r, j + c, y);
            }
        }
    }
    for (; j < r->n; j++)
        for (int b = 0; b < B; b++) {
            const char *k = r->k + j * wide;
            vec sum = {0};
            for (int i = 0; i < W; i++)
                sum += query[b][i] * load(k, stored, i);
            float x = total(sum);
            for (int d = VEC * W; d < D; d++)
                x += number(q + b * each, kind, d) * scale * number(k, stored, d);
            into[b * pitch + j] = shown(r, j, x);
        }
}

/* out[b] = share[b] * sum over rows of p[b] times their values; p [B, n]. */
static inline __attribute__((always_inline)) void mix(
    const int B, const int W, const int kind, const int stored, const rows_t *r, const float *p,
    const float *share, char *out) {
    const int D = r->D;
    const long wide = (long)D * item(stored);
    for (int from = 0; from < W; from += FOUR) {
        vec mixed[FOUR][FOUR] = {0};
        const int many = W - from < FOUR ? W - from : FOUR;
        for (long j = 0; j < r->n; j++) {
            const float by = stored == CODES ? r->v_scale[j] : 1.0f;
            vec value[FOUR];
            for (int i = 0; i < many; i++)
                value[i] = load(r->v + j * wide, stored, from + i);
            for (int b = 0; b < B; b++)
                for (int i = 0; i < many; i++)
                    mixed[b][i] += value[i] * (p[b * r->n + j] * by);
        }
        for (int b = 0; b < B; b++)
#pragma GCC unroll 1
            for (int i = 0; i < VEC * many; i++)
                store(out, kind, (long)b * D + VEC * from + i, ((float *)mixed[b])[i] * share[b]);
    }
    for (int d = VEC * W; d < D; d++)
        for (int b = 0; b < B; b++) {
            float sum = 0.0f;
            for (long j = 0; j < r->n; j++)
                sum += p[b * r->n + j] * number(r->v + j * wide, stored, d) *
                       (stored == CODES ? r->v_scale[j] : 1.0f);
            store(out, kind, (long)b * D + d, sum * share[b]);
        }
}

/* e = exp(x - the largest x), of n; one over their sum. NaN among x makes the sum NaN, and that the
   answer. */
static __attribute__((noinline)) float soften(const float *x, float *e, long n, float *lse) {
    float most = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < n; j++)
        most = x[j] > most ? x[j] : most;
    const float top = most == -INFINITY ? 0.0f : most;
#pragma omp simd reduction(+ : total)
    for (long j = 0; j < n; j++) {
        float y = exp_negative(x[j] - top);
        total += y;
        e[j] = y;
    }
    *lse = total == 0.0f ? -INFINITY : top + logf(total);
    return total == 0.0f ? 0.0f : 1.0f / total;
}

/* B <= FOUR queries over the rows of their head; p [B, n] is room. */
static inline __attribute__((always_inline)) void few_queries(
    const int B, const int W, const int kind, const int stored, const rows_t *r, const char *q,
    float *logits, long pitch, float *lse, char *out, float *p) {
    float share[FOUR];
    if (!logits)
        pitch = r->n;
    float *found = logits ? logits : p;
    scores(B, W, kind, stored, r, q, found, pitch);
    for (int b = 0; b < B; b++)
        share[b] = soften(found + b * pitch, p + b * r->n, r->n, lse + b);
    mix(B, W, kind, stored, r, p, share, out);
}

/* With all sizes known, loops unroll and sums stay in registers. */
#define OF(B, W, KIND, STORED)                                                         \
    if (queries == B && r->D == VEC * W && kind == KIND && r->stored == STORED) {       \
        few_queries(B, W, KIND, STORED, r, q, logits, pitch, lse, out, p);             \
        return;                                                                        \
    }
#define EACH(W, STORED) OF(1, W, BF16, STORED) OF(3, W, BF16, STORED) OF(4, W, BF16, STORED)

static void some_queries(
    int queries, int kind, const rows_t *r, const char *q, float *logits, long pitch, float *lse,
    char *out, float *p) {
    EACH(64 / VEC, BF16)
    EACH(128 / VEC, BF16)
    EACH(64 / VEC, CODES)
    EACH(128 / VEC, CODES)
    few_queries(queries, r->D / VEC, kind, r->stored, r, q, logits, pitch, lse, out, p);
}

/* 0, or 1 if there is no memory. kind: of q and out; stored: of k and v (CODES: int8). */
int minikv_ragged_attention(
    int kind, int stored, int H, int G, int D, const void *q, const void *k, const void *v,
    const int64_t *start, const int64_t *length, const int32_t *pos, const int64_t *oldest,
    const float *k_scale, const float *v_scale, float *logits, int64_t pitch, float *lse, void *out) {
    const long wide = (long)D * item(stored);
    const long each = (long)D * item(kind);
    long most = 0, all = 0;
    for (int h = 0; h < H; h++) {
        most = length[h] > most ? length[h] : most;
        all += length[h];
    }
    float *room = malloc(sizeof(float) * FOUR * H * (most ? most : 1));
    if (!room)
        return 1;
#pragma omp parallel for schedule(dynamic) if (all * G * D > 200000)
    for (int h = 0; h < H; h++) {
        float *p = room + FOUR * h * most;
        const int64_t at = start[h];
        const rows_t rows = {
            D, stored, length[h], (const char *)k + at * wide, (const char *)v + at * wide,
            pos ? pos + at : NULL, pos ? *oldest : 0, k_scale ? k_scale + at : NULL,
            v_scale ? v_scale + at : NULL,
        };
        for (int g = 0, queries; g < G; g += queries) {
            queries = G - g < FOUR ? G - g == 3 ? 3 : 1 : FOUR;
            const long first = (long)h * G + g;
            some_queries(queries, kind, &rows, (const char *)q + first * each,
                         logits ? logits + first * pitch : NULL, pitch, lse + first,
                         (char *)out + first * each, p);
        }
    }
    free(room);
    return 0;
}

/* A row of numbers as int8 codes; its scale. */
static float encode(const void *row, int kind, int D, int8_t *codes) {
    float most = 0.0f;
    for (int d = 0; d < D; d++) {
        float x = fabsf(number(row, kind, d));
        most = x > most || x != x ? x : most;
    }
    float scale = most == 0.0f ? 1.0f : most / 127.0f;
    for (int d = 0; d < D; d++) {
        float x = rintf(number(row, kind, d) / scale);
        codes[d] = (int8_t)(x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x);
    }
    return scale;
}

/* blank: `blanks` columns of `sizes` bytes a number. */
void minikv_append(
    int kind, int coded, int H, int D, const void *key, int64_t key_pitch, const void *value,
    int64_t value_pitch, const int64_t *slot, const int64_t *position, void *k, void *v, int32_t *pos,
    float *k_scale, float *v_scale, int blanks, void *const *blank, const int32_t *sizes) {
    const long item = kind == BF16 ? 2 : 4;
    for (int h = 0; h < H; h++) {
        const int64_t at = slot[h];
        const char *one = (const char *)key + h * key_pitch * item;
        const char *two = (const char *)value + h * value_pitch * item;
        if (coded) {
            k_scale[at] = encode(one, kind, D, (int8_t *)k + at * D);
            v_scale[at] = encode(two, kind, D, (int8_t *)v + at * D);
        } else {
            memcpy((char *)k + at * D * item, one, D * item);
            memcpy((char *)v + at * D * item, two, D * item);
        }
        pos[at] = (int32_t)*position;
        for (int i = 0; i < blanks; i++)
            memset((char *)blank[i] + at * sizes[i], 0, sizes[i]);
    }
}

void minikv_advance(
    int64_t heads, int before, uint8_t *go, const int64_t *start, int64_t *length,
    const int64_t *cap, const int64_t *hole, int64_t *position, int64_t *count, int64_t *slot,
    uint8_t *taken) {
    const int final = *go;
    *position += final;
    *go = 0;
    for (int64_t i = 0; i < heads; i++) {
        if (final) {
            length[i] = count[i];
            taken[i] = 0;
        }
        int still = hole[i] >= 0;
        slot[i] = still ? hole[i] : start[i] + length[i];
        if (before && !still && length[i] >= cap[i]) {
            taken[i] = 1;
            still = 1;
        }
        count[i] = length[i] + !still;
    }
}

/* RMSNorm of t rows x of n numbers into `out`, after y was added to them in place (NULL: nothing). */
void minikv_add_norm(
    int kind, int64_t t, int64_t n, int64_t pitch, void *x, const void *y, const void *weight,
    double eps, void *out) {
#pragma omp parallel for schedule(static) if (t * n > 100000)
    for (int64_t r = 0; r < t; r++) {
        if (kind == BF16) {
            bf16 *row = (bf16 *)x + r * pitch, *into = (bf16 *)out + r * n;
            const bf16 *more = y ? (const bf16 *)y + r * n : NULL, *w = weight;
            float squares = 0.0f;
            if (more) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    row[i] = to_bf16(from_bf16(row[i]) + from_bf16(more[i]));
            }
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n; i++)
                squares += from_bf16(row[i]) * from_bf16(row[i]);
            const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                into[i] = to_bf16(from_bf16(to_bf16(from_bf16(row[i]) * scale)) * from_bf16(w[i]));
        } else {
            float *row = (float *)x + r * pitch, *into = (float *)out + r * n;
            const float *more = y ? (const float *)y + r * n : NULL, *w = weight;
            float squares = 0.0f;
            if (more) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    row[i] += more[i];
            }
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n; i++)
                squares += row[i] * row[i];
            const float scale = (float)(1.0 / sqrt(squares / (double)n + eps));
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                into[i] = row[i] * scale * w[i];
        }
    }
}

/* Rotate t rows of `heads` heads; x [t] rows `pitch` apart, cos and sin [t, D], out contiguous. */
void minikv_rotate(
    int kind, int64_t t, int64_t heads, int64_t D, int64_t pitch, const void *x, const void *cos,
    const void *sin, void *out) {
    const int64_t half = D / 2;
#pragma omp parallel for schedule(static) if (t * heads * D > 100000)
    for (int64_t r = 0; r < t; r++)
        for (int64_t h = 0; h < heads; h++) {
            if (kind == BF16) {
                const bf16 *row = (const bf16 *)x + r * pitch + h * D;
                const bf16 *c = (const bf16 *)cos + r * D, *s = (const bf16 *)sin + r * D;
                bf16 *into = (bf16 *)out + (r * heads + h) * D;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float a = from_bf16(row[i]), b = from_bf16(row[half + i]);
                    into[i] = to_bf16(mad(b, from_bf16(s[i]), a * from_bf16(c[i])));
                    into[half + i] =
                        to_bf16(mad(a, from_bf16(s[half + i]), b * from_bf16(c[half + i])));
                }
            } else {
                const float *row = (const float *)x + r * pitch + h * D;
                const float *c = (const float *)cos + r * D, *s = (const float *)sin + r * D;
                float *into = (float *)out + (r * heads + h) * D;
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float a = row[i], b = row[half + i];
                    into[i] = mad(b, s[i], a * c[i]);
                    into[half + i] = mad(a, s[half + i], b * c[half + i]);
                }
            }
        }
}

static inline float silu(float x) {
    float e = exp_negative(-fabsf(x));
    return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* silu(gate) * up of t rows [2 n], `pitch` apart, into gate's place. */
void minikv_silu_mul(int kind, int64_t t, int64_t n, int64_t pitch, void *both) {
#pragma omp parallel for schedule(static) if (t * n > 50000)
    for (int64_t r = 0; r < t; r++) {
        if (kind == BF16) {
            bf16 *gate = (bf16 *)both + r * pitch;
            const bf16 *up = gate + n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                gate[i] = to_bf16(from_bf16(to_bf16(silu(from_bf16(gate[i])))) * from_bf16(up[i]));
        } else {
            float *gate = (float *)both + r * pitch;
            const float *up = gate + n;
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                gate[i] = silu(gate[i]) * up[i];
        }
    }
}
