/* Attention of one query per head over the head's own segment of rows: arguments and results as in
   ragged_attention of kernels/decode/plain.py. */
#include "cache.h"
#include "tiles.h"

#include <stdlib.h>

typedef uint16_t half_vec __attribute__((vector_size(2 * VEC)));
typedef int8_t int8_vec __attribute__((vector_size(VEC)));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t i4 __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i4){__VA_ARGS__})
#endif

/* MAX_VECS: vectors of the longest row (D = 256). FOUR: how many rows, queries and vectors are
   computed together, in registers. AHEAD: how many bytes ahead of the read position to prefetch;
   the processor's own prefetching stops at the end of a page. */
enum { MAX_VECS = 256 / VEC, FOUR = 4, AHEAD = 4096 };

/* Prefetch `size` bytes of rows that are read later. */
static inline void fetch(const char *rows, long size) {
    for (long at = 0; at < size; at += 64) __builtin_prefetch(rows + at);
}

/* Vector i of a row of dtype `kind`. In a row of bfloat16, the first 2 * pairs vectors are read in
   pairs: of 2 * VEC numbers, one vector has those with even indices and the other those with odd
   indices. The upper half of a 32-bit word becomes a float by clearing the lower half, the lower
   half by a shift. */
static inline vec load_vec(const void *row, int kind, int i, int pairs) {
    if (kind == BF16 && i < 2 * pairs) {
        uvec x;
        memcpy(&x, (const char *)row + sizeof x * (i / 2), sizeof x);
        return (vec)(i % 2 ? x & 0xffff0000u : x << 16);
    }
    if (kind == BF16) {
        half_vec x;
        memcpy(&x, (const char *)row + sizeof x * i, sizeof x);
        return (vec)(__builtin_convertvector(x, uvec) << 16);
    }
    if (kind == INT8) {
        int8_vec x;
        memcpy(&x, (const char *)row + sizeof x * i, sizeof x);
#if VEC == 16 /* compilers convert bytes one by one, in four times the time */
        return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#elif VEC == 8 && defined(__AVX2__)
        return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x)));
#else
        return __builtin_convertvector(x, vec);
#endif
    }
    vec x;
    memcpy(&x, (const char *)row + sizeof x * i, sizeof x);
    return x;
}

/* In how many pairs `load_vec` reads W vectors of keys and values. Queries have the same dtype; if
   keys and values are int8, there are no pairs. */
static inline int pairs_of(int stored, int W) { return stored == BF16 ? W / 2 : 0; }

/* The index in the row of number i in the vectors of `load_vec`. */
static inline int place_of(int i, int pairs) {
    const int pair = i / (2 * VEC), lane = i % (2 * VEC);
    return pair < pairs ? 2 * VEC * pair + 2 * (lane % VEC) + lane / VEC : i;
}

/* The n rows of a head: keys and values [n, D] of dtype `stored`, their positions [n], and, for
   int8, their scales [n]. Rows with positions before `oldest` are not seen. */
typedef struct {
    int D, stored;
    long n;
    const char *k, *v;
    const int32_t *pos; /* NULL: every row is seen */
    int64_t oldest;
    const float *k_scale, *v_scale;
} Segment;

/* The logit of row j, from the product x of query and key; -inf if the row is not seen. */
static inline float finish_logit(const Segment *r, long j, float x) {
    if (r->stored == INT8) x *= r->k_scale[j];
    return r->pos && r->pos[j] < r->oldest ? -INFINITY : x;
}

/* One vector with the sum of a, of b, of c and of d. */
static inline v4 sum_four(vec a, vec b, vec c, vec d) {
    const v4 part[FOUR] = {by_fours(a), by_fours(b), by_fours(c), by_fours(d)};
    v4 low = SHUFFLE(part[0], part[1], 0, 4, 1, 5) + SHUFFLE(part[0], part[1], 2, 6, 3, 7);
    v4 high = SHUFFLE(part[2], part[3], 0, 4, 1, 5) + SHUFFLE(part[2], part[3], 2, 6, 3, 7);
    return SHUFFLE(low, high, 0, 1, 4, 5) + SHUFFLE(low, high, 2, 3, 6, 7);
}

/* The scaled logits of B queries q [B, D] over the rows, into out [B, n], whose rows are `pitch`
   apart. W: whole vectors of a row; kind: dtype of q. */
INLINE void find_logits(
    const int B, const int W, const int kind, const int stored, const Segment *r, const char *q,
    float *out, long pitch
) {
    const int D = r->D, pairs = pairs_of(stored, W);
    const long k_size = (long)D * item_size(stored), q_size = (long)D * item_size(kind);
    const float scale = 1.0f / sqrtf((float)D);
    vec query[FOUR][MAX_VECS];
    for (int b = 0; b < B; b++)
        for (int i = 0; i < W; i++) query[b][i] = load_vec(q + b * q_size, kind, i, pairs) * scale;
    long j = 0;
    for (; j + FOUR <= r->n; j += FOUR) {
        const char *k = r->k + j * k_size;
        fetch(k + AHEAD, FOUR * k_size);
        vec sum[FOUR][FOUR] = {0};
#pragma GCC unroll 1
        for (int i = 0; i < W; i++)
            for (int c = 0; c < FOUR; c++) {
                vec key = load_vec(k + c * k_size, stored, i, pairs);
                for (int b = 0; b < B; b++) sum[b][c] += key * query[b][i];
            }
        for (int b = 0; b < B; b++) {
            v4 x = sum_four(sum[b][0], sum[b][1], sum[b][2], sum[b][3]);
            for (int c = 0; c < FOUR; c++) {
                float y = x[c];
                for (int d = VEC * W; d < D; d++)
                    y += number_at(q + b * q_size, kind, d) * scale *
                         number_at(k + c * k_size, stored, d);
                out[b * pitch + j + c] = finish_logit(r, j + c, y);
            }
        }
    }
    for (; j < r->n; j++)
        for (int b = 0; b < B; b++) {
            const char *k = r->k + j * k_size;
            vec sum = {0};
            for (int i = 0; i < W; i++) sum += query[b][i] * load_vec(k, stored, i, pairs);
            float x = sum_vec(sum);
            for (int d = VEC * W; d < D; d++)
                x += number_at(q + b * q_size, kind, d) * scale * number_at(k, stored, d);
            out[b * pitch + j] = finish_logit(r, j, x);
        }
}

#if TILES
/* TILE: rows of a tile. NUMBERS_WIDE: numbers in a row of a tile of keys. MOST_STEPS: a key has at
   most this many such rows. */
enum { TILE = 16, NUMBERS_WIDE = 32, MOST_STEPS = 4 };

/* Tile 0 = 16 keys, `row` bytes apart, times the queries in tiles 4 to 7. */
INLINE void multiply_tiles(const bf16 *k, long row, int steps) {
    _tile_zero(0);
    LOAD_TILE(1, k, row);
    _tile_dpbf16ps(0, 1, 4);
    if (steps > 1) {
        LOAD_TILE(2, k + NUMBERS_WIDE, row);
        _tile_dpbf16ps(0, 2, 5);
    }
    if (steps > 2) {
        LOAD_TILE(1, k + 2 * NUMBERS_WIDE, row);
        _tile_dpbf16ps(0, 1, 6);
    }
    if (steps > 3) {
        LOAD_TILE(2, k + 3 * NUMBERS_WIDE, row);
        _tile_dpbf16ps(0, 2, 7);
    }
}

/* x[b] = column b of sums. */
INLINE void columns(const float sums[TILE][FOUR], vec x[FOUR]) {
    const __m512i low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(2));
    const vec a = load(sums[0]), b = load(sums[4]), c = load(sums[8]), d = load(sums[12]);
    const vec ab = _mm512_permutex2var_ps(a, low, b), cd = _mm512_permutex2var_ps(c, low, d);
    const vec ef = _mm512_permutex2var_ps(a, high, b), gh = _mm512_permutex2var_ps(c, high, d);
    x[0] = _mm512_shuffle_f32x4(ab, cd, 0x44);
    x[1] = _mm512_shuffle_f32x4(ab, cd, 0xee);
    x[2] = _mm512_shuffle_f32x4(ef, gh, 0x44);
    x[3] = _mm512_shuffle_f32x4(ef, gh, 0xee);
}

/* `find_logits` with tiles, for bfloat16 and rows of `steps` * NUMBERS_WIDE numbers. */
INLINE void find_tile_logits(
    const int B, const int steps, const Segment *r, const bf16 *q, float *out, long pitch
) {
    const long D = steps * NUMBERS_WIDE;
    const float scale = 1.0f / sqrtf((float)D);
    uint32_t query[MOST_STEPS][TILE][FOUR] = {0}; /* pairs of numbers, one column a query */
    for (int b = 0; b < B; b++)
        for (int i = 0; i < D / 2; i++) memcpy(&query[i / TILE][i % TILE][b], q + b * D + 2 * i, 4);
    shape_tiles(0xf1, 4 * FOUR);
    LOAD_TILE(4, query[0], 4 * FOUR);
    LOAD_TILE(5, query[1], 4 * FOUR);
    LOAD_TILE(6, query[2], 4 * FOUR);
    LOAD_TILE(7, query[3], 4 * FOUR);
    for (long j = 0; j < r->n; j += TILE) {
        const bf16 *k = (const bf16 *)r->k + j * D;
        bf16 last[TILE * NUMBERS_WIDE * MOST_STEPS];
        float sums[TILE][FOUR] __attribute__((aligned(64)));
        const long rows = r->n - j < TILE ? r->n - j : TILE;
        if (rows < TILE) { /* rows after the last one are not the head's */
            memset(last, 0, sizeof last);
            k = memcpy(last, k, rows * D * sizeof *k);
        } else
            fetch((const char *)k + AHEAD, TILE * D * sizeof *k);
        multiply_tiles(k, D * sizeof *k, steps);
        _tile_stored(0, sums, 4 * FOUR);
        __asm__ volatile("" ::: "memory");
        vec x[FOUR];
        columns(sums, x);
        const __mmask16 mask = (__mmask16)((1u << rows) - 1);
        for (int b = 0; b < B; b++) _mm512_mask_storeu_ps(out + b * pitch + j, mask, x[b] * scale);
        for (long i = 0; r->pos && i < rows; i++)
            if (r->pos[j + i] < r->oldest)
                for (int b = 0; b < B; b++) out[b * pitch + j + i] = -INFINITY;
    }
    _tile_release();
}
#endif

/* out[b] = norm[b] * the sum over rows of p[b] times their values; p [B, n], out [B, D]. */
INLINE void weighted_sum(
    const int B, const int W, const int kind, const int stored, const Segment *r, const float *p,
    const float *norm, char *out
) {
    const int D = r->D, pairs = pairs_of(stored, W);
    const long v_size = (long)D * item_size(stored);
    for (int from = 0; from < W; from += FOUR) {
        vec sum[FOUR][FOUR] = {0};
        const int many = W - from < FOUR ? W - from : FOUR;
        for (long j = 0; j < r->n; j++) {
            const float scale = stored == INT8 ? r->v_scale[j] : 1.0f;
            if (from == 0) fetch(r->v + j * v_size + AHEAD, v_size);
            vec value[FOUR];
            for (int i = 0; i < many; i++)
                value[i] = load_vec(r->v + j * v_size, stored, from + i, pairs);
            for (int b = 0; b < B; b++)
                for (int i = 0; i < many; i++) sum[b][i] += value[i] * (p[b * r->n + j] * scale);
        }
        for (int b = 0; b < B; b++)
#pragma GCC unroll 1
            for (int i = 0; i < VEC * many; i++)
                store_number(
                    out, kind, (long)b * D + place_of(VEC * from + i, pairs),
                    ((float *)sum[b])[i] * norm[b]
                );
    }
    for (int d = VEC * W; d < D; d++)
        for (int b = 0; b < B; b++) {
            float sum = 0.0f;
            for (long j = 0; j < r->n; j++)
                sum += p[b * r->n + j] * number_at(r->v + j * v_size, stored, d) *
                       (stored == INT8 ? r->v_scale[j] : 1.0f);
            store_number(out, kind, (long)b * D + d, sum * norm[b]);
        }
}

/* e [n] = exp(x - the largest x), and lse = log of the sum of exp(x). Returns 1 / the sum of e, 0
   if every x is -inf. A NaN in x makes the result and so the output NaN. */
static __attribute__((noinline)) float softmax(const float *x, float *e, long n, float *lse) {
    float most = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < n; j++) most = x[j] > most ? x[j] : most;
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

/* Attention of B <= FOUR queries q [B, D] over the rows of their head, into out [B, D], lse [B]
   and, if not NULL, logits [B, n] with rows `pitch` apart. tiles: use them, if they fit. p [B, n]
   is work space. */
INLINE void attend(
    const int B, const int W, const int kind, const int stored, int tiles, const Segment *r,
    const char *q, float *logits, long pitch, float *lse, char *out, float *p
) {
    float norm[FOUR];
    if (!logits) pitch = r->n;
    float *x = logits ? logits : p;
#if TILES
    const int steps = r->D / NUMBERS_WIDE;
    tiles = tiles && kind == BF16 && stored == BF16 && r->D == steps * NUMBERS_WIDE;
    if (tiles && steps <= MOST_STEPS)
        find_tile_logits(B, steps, r, (const bf16 *)q, x, pitch);
    else
#else
    (void)tiles;
#endif
        find_logits(B, W, kind, stored, r, q, x, pitch);
    for (int b = 0; b < B; b++) norm[b] = softmax(x + b * pitch, p + b * r->n, r->n, lse + b);
    weighted_sum(B, W, kind, stored, r, p, norm, out);
}

/* With all sizes constant, loops are unrolled and sums stay in registers. */
#define IF_SIZES(B, W, KIND, STORED)                                              \
    if (queries == B && r->D == VEC * W && kind == KIND && r->stored == STORED) { \
        attend(B, W, KIND, STORED, tiles, r, q, logits, pitch, lse, out, p);      \
        return;                                                                   \
    }
#define IF_QUERIES(W, STORED) \
    IF_SIZES(1, W, BF16, STORED) IF_SIZES(3, W, BF16, STORED) IF_SIZES(4, W, BF16, STORED)

/* `attend` with constant sizes for the usual ones: heads of 64 and 128, bfloat16. */
static void attend_queries(
    int queries, int kind, int tiles, const Segment *r, const char *q, float *logits, long pitch,
    float *lse, char *out, float *p
) {
    IF_QUERIES(64 / VEC, BF16)
    IF_QUERIES(128 / VEC, BF16)
    IF_QUERIES(64 / VEC, INT8)
    IF_QUERIES(128 / VEC, INT8)
    attend(queries, r->D / VEC, kind, r->stored, tiles, r, q, logits, pitch, lse, out, p);
}

/* See cache.h. */
int64_t minikv_attend_bytes(int64_t n) { return (int64_t)sizeof(float) * FOUR * (n ? n : 1); }

/* See cache.h. */
void minikv_attend_head(
    const Cache *c, int kind, int stored, int tiles, int G, int64_t at, int64_t n,
    const int64_t *oldest, const void *q, float *logits, int64_t pitch, float *lse, void *out,
    void *memory
) {
    const long row_size = (long)c->D * item_size(stored), q_size = (long)c->D * item_size(kind);
    const Segment rows = {
        (int)c->D,
        stored,
        n,
        (const char *)c->k + at * row_size,
        (const char *)c->v + at * row_size,
        oldest ? c->pos + at : NULL,
        oldest ? *oldest : 0,
        c->k_scale ? c->k_scale + at : NULL,
        c->v_scale ? c->v_scale + at : NULL,
    };
    for (int g = 0, queries; g < G; g += queries) {
        queries = G - g < FOUR ? G - g == 3 ? 3 : 1 : FOUR;
        attend_queries(
            queries, kind, tiles, &rows, (const char *)q + g * q_size,
            logits ? logits + g * pitch : NULL, pitch, lse + g, (char *)out + g * q_size, memory
        );
    }
}

/* ragged_attention: out = softmax(q k^T / sqrt(D)) v for the rows of each head. q and out [H, G, D]
   of dtype `kind`; k and v [R, D] of dtype `stored`; head h owns rows start[h] .. start[h] +
   length[h] - 1; lse [H, G] gets the log-sum-exps, logits [H, G, pitch] the logits if it is not
   NULL. pos [R] and oldest are both NULL or neither; so are the scales [R]. tiles: as in
   minikv_attend_head. Returns 0, or 1 if there is no memory. */
int minikv_ragged_attention(
    int kind, int stored, int tiles, int H, int G, int D, const void *q, void *k, void *v,
    const int64_t *start, const int64_t *length, int32_t *pos, const int64_t *oldest,
    float *k_scale, float *v_scale, float *logits, int64_t pitch, float *lse, void *out
) {
    const Cache cache = {D, 0, k, v, pos, k_scale, v_scale, NULL, NULL, NULL};
    const long q_size = (long)D * item_size(kind);
    int64_t most = 0, all = 0;
    for (int h = 0; h < H; h++) {
        most = length[h] > most ? length[h] : most;
        all += length[h];
    }
    const int64_t each = minikv_attend_bytes(most);
    char *memory = malloc(H * each + 1);
    if (!memory) return 1;
#pragma omp parallel for schedule(dynamic) if (all * G * D > 200000)
    for (int h = 0; h < H; h++) {
        const long first = (long)h * G;
        minikv_attend_head(
            &cache, kind, stored, tiles, G, start[h], length[h], oldest,
            (const char *)q + first * q_size, logits ? logits + first * pitch : NULL, pitch,
            lse + first, (char *)out + first * q_size, memory + h * each
        );
    }
    free(memory);
    return 0;
}
