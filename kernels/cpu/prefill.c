/* Attention of many queries over rows, in blocks that stay in the caches (FlashAttention-2, arXiv
   2307.08691, section 3.1), by the bfloat16 dot products of AVX-512.

   Queries lie along the lanes of a vector: logits are [keys, queries], and outputs [D, queries]
   until they are written. So keys are broadcast from where they are in memory, sums over keys are
   sums of vectors, and only values are repacked. The G heads of a KV head share its keys: row t * G
   + g of a block is query t of head g.

   The exponents of a query are relative to its `shift`, which need not be the maximum of its
   logits: it is the largest of the first eight, and changes only when the sum of a block exceeds
   SUM_LIMIT. Floats keep their relative precision up to there, and of most logits no maximum is
   needed.

   Probabilities are rounded to bfloat16, and the output is divided by the sum of the rounded ones.
   The log-sum-exp is that of the sum before rounding. */
#include "numbers.h"

#include <stdlib.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AVAILABLE 1
#include <immintrin.h>
#else
#define AVAILABLE 0
#endif

#ifdef _OPENMP
#include <omp.h>
#endif

/* LANES: queries of a vector. WIDE: vectors of a strip. STRIP: queries of a strip. TILE: keys, or
   numbers of a value, that are summed at once. STRIPS: the most strips of a block. */
enum { LANES = 16, WIDE = 3, STRIP = LANES * WIDE, TILE = 8, STRIPS = 4 };

/* Sizes H, G, T, N, D; how many rows query 0 sees; and strides in numbers. */
typedef struct {
    int64_t heads, group, rows, keys, size, first;
    int64_t q_head, q_group, q_row, k_head, k_row, v_head, v_row, out_head, out_group, out_row;
} Shape;

/* How the work is divided: `blocks` blocks of `strips` strips for each KV head; `each`: bytes of
   memory of a thread. */
typedef struct {
    int64_t strips, blocks, threads, each;
} Division;

/* Whether the processor that this is compiled for has the instructions. */
int minikv_rows_attention_available(void) { return AVAILABLE; }

#if AVAILABLE

/* How many keys a block has: with their values they stay in the first cache. */
static int64_t block_keys(int64_t size) { return size <= 64 ? 128 : 64; }

/* The division for this shape and number of threads. */
static Division divide(const Shape *s) {
    Division c;
#ifdef _OPENMP
    c.threads = omp_get_max_threads();
#else
    c.threads = 1;
#endif
    int64_t all = (s->rows * s->group + STRIP - 1) / STRIP;
    c.strips = STRIPS;
    while (c.strips > 1 && s->heads * (all / c.strips) < 4 * c.threads)
        c.strips /= 2;
    c.blocks = (all + c.strips - 1) / c.strips;
    if (c.threads > s->heads * c.blocks)
        c.threads = s->heads * c.blocks;
    /* Queries, values, probabilities, the last keys, outputs, and four numbers per query. Each is a
       multiple of 64 bytes. */
    int64_t keys = block_keys(s->size), rows = STRIPS * STRIP;
    c.each = 2 * rows * s->size + 2 * keys * s->size + 2 * keys * STRIP + 2 * TILE * s->size +
             4 * rows * s->size + 4 * 4 * rows;
    return c;
}

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define SUM_LIMIT 1073741824.0f /* 2^30 */
#define LOWEST -3e38f

/* Two vectors of 16 bfloat16, as 16 pairs. */
INLINE __m512i interleave(__m512i pairs) {
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0
    );
    return _mm512_permutexvar_epi16(order, pairs);
}

/* Two bfloat16 at x, in all lanes. */
INLINE __m512i pair(const void *x) {
    int32_t pairs;
    memcpy(&pairs, x, 4);
    return _mm512_set1_epi32(pairs);
}

/* sum[i][w] += the sum over `steps` of pair a[step][w] times the pair of b at i * row + step *
   next, counted in bfloat16. */
INLINE void add_products(
    const int wide, __m512 sum[TILE][WIDE], int64_t steps, const uint32_t *a, const bf16 *b,
    int64_t row, int64_t next
) {
    for (int64_t step = 0; step < steps; step++) {
        __m512bh x[WIDE];
        UNROLL
        for (int w = 0; w < wide; w++)
            x[w] = (__m512bh)_mm512_load_si512(a + (step * wide + w) * LANES);
        UNROLL
        for (int i = 0; i < TILE; i++) {
            __m512bh y = (__m512bh)pair(b + i * row + step * next);
            UNROLL
            for (int w = 0; w < wide; w++)
                sum[i][w] = _mm512_dpbf16_ps(sum[i][w], x[w], y);
        }
    }
}

/* 2^x with a relative error of 4e-6; 0 below the range of float32 and infinity above it. */
INLINE __m512 power(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.3534167e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.2011464e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4144275e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9300383e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0000026f));
    return _mm512_scalef_ps(p, x);
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

/* LANES * wide queries, and what is known of them so far. */
typedef struct {
    int wide;
    uint32_t *q;        /* [D / 2][lanes], pairs along D */
    float *out_sum;     /* [D][lanes], outputs before they are divided */
    float *shift;       /* [lanes], in units of log2, as all exponents here */
    float *sum;         /* [lanes], of probabilities before they are rounded */
    float *rounded_sum; /* [lanes], of rounded probabilities */
    int32_t *limit;     /* [lanes], how many rows a query sees; not decreasing */
} Strip;

/* Memory of one thread. */
typedef struct {
    Strip strips[STRIPS];
    uint32_t *v; /* [D / 8][keys / 2][8], values as pairs along the keys */
    uint32_t *p; /* [keys / 2][lanes], probabilities as pairs along the keys */
    bf16 *tail;  /* [8][D], the last keys; beyond them anything, which no query sees */
} Workspace;

/* The next `bytes` bytes of the memory that begins at *at. */
static void *carve(char **at, int64_t bytes) {
    void *begin = *at;
    *at += bytes;
    return begin;
}

/* A workspace in `at`, for heads of `size`. */
static Workspace init_workspace(char *at, int64_t size) {
    int64_t keys = block_keys(size);
    Workspace r;
    for (int i = 0; i < STRIPS; i++) {
        Strip *x = &r.strips[i];
        x->q = carve(&at, 2 * STRIP * size);
        x->out_sum = carve(&at, 4 * STRIP * size);
        x->shift = carve(&at, 4 * STRIP);
        x->sum = carve(&at, 4 * STRIP);
        x->rounded_sum = carve(&at, 4 * STRIP);
        x->limit = carve(&at, 4 * STRIP);
    }
    r.v = carve(&at, 2 * keys * size);
    r.p = carve(&at, 2 * keys * STRIP);
    r.tail = carve(&at, 2 * TILE * size);
    return r;
}

/* Load the strip of one KV head that begins at row `begin`; rows beyond the last are zeros. */
static void load_queries(const Shape *s, const bf16 *q, int64_t begin, Strip *x) {
    int64_t all = s->rows * s->group, pairs = s->size / 2;
    x->wide = all - begin < STRIP ? (int)((all - begin + LANES - 1) / LANES) : WIDE;
    for (int w = 0; w < x->wide; w++) {
        const bf16 *from[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t row = begin + w * LANES + i, held = row < all ? row : all - 1;
            int64_t t = held / s->group, g = held % s->group, seen = s->first + t;
            from[i] = row < all ? q + t * s->q_row + g * s->q_group : NULL;
            x->limit[w * LANES + i] = (int32_t)(seen < s->keys ? seen : s->keys);
        }
        for (int64_t at = 0; at < pairs; at += LANES) {
            int64_t here = pairs - at < LANES ? pairs - at : LANES;
            __mmask16 mask = (__mmask16)((1u << here) - 1);
            __m512i y[LANES];
            for (int i = 0; i < LANES; i++)
                y[i] = from[i] ? _mm512_maskz_loadu_epi32(mask, from[i] + 2 * at)
                               : _mm512_setzero_si512();
            transpose(y);
            for (int64_t i = 0; i < here; i++)
                _mm512_store_si512(x->q + ((at + i) * x->wide + w) * LANES, y[i]);
        }
    }
}

/* Pack the values of `count` keys, with zeros up to a multiple of 8. */
static void load_values(const Shape *s, const bf16 *v, int64_t count, uint32_t *packed) {
    int64_t steps = block_keys(s->size) / 2;
    int64_t used = (count + TILE - 1) / TILE * TILE / 2;
    for (int64_t step = 0; step < used; step++) {
        int64_t key = 2 * step;
        for (int64_t d = 0; d < s->size; d += LANES) {
            __m256i even = _mm256_setzero_si256(), odd = even;
            if (key < count)
                even = _mm256_loadu_si256((const void *)(v + key * s->v_row + d));
            if (key + 1 < count)
                odd = _mm256_loadu_si256((const void *)(v + (key + 1) * s->v_row + d));
            __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
            pairs = interleave(pairs);
            uint32_t *to = packed + (d * steps + step * TILE);
            _mm256_store_si256((void *)to, _mm512_castsi512_si256(pairs));
            _mm256_store_si256((void *)(to + steps * TILE), _mm512_extracti64x4_epi64(pairs, 1));
        }
    }
}

/* The products of queries and the eight keys from `key` on, before they are scaled. */
INLINE void find_logits(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, const bf16 *k,
    int64_t key, __m512 x[TILE][WIDE]
) {
    int whole = key + TILE <= s->keys;
    UNROLL
    for (int i = 0; i < TILE; i++) {
        UNROLL
        for (int w = 0; w < wide; w++)
            x[i][w] = _mm512_setzero_ps();
    }
    add_products(
        wide, x, s->size / 2, strip->q, whole ? k + key * s->k_row : r->tail,
        whole ? s->k_row : s->size, 2
    );
}

/* Which of the 16 queries of vector w see a key. */
INLINE __mmask16 sees(const Strip *strip, int w, int64_t key) {
    __m512i limit = _mm512_load_si512(strip->limit + w * LANES);
    return _mm512_cmpgt_epi32_mask(limit, _mm512_set1_epi32((int32_t)key));
}

/* Raise `most` to the largest scaled logit of each query, among keys begin .. end - 1 that it
   sees. */
INLINE void raise_max(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, const bf16 *k,
    int64_t begin, int64_t end, float scale, __m512 most[WIDE]
) {
    for (int64_t key = begin; key < end; key += TILE) {
        __m512 x[TILE][WIDE];
        find_logits(wide, s, r, strip, k, key, x);
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++) {
                __m512 logit = _mm512_mul_ps(x[i][w], _mm512_set1_ps(scale));
                most[w] = _mm512_mask_max_ps(most[w], sees(strip, w, key + i), most[w], logit);
            }
        }
    }
}

/* The probabilities of keys begin .. end - 1 relative to the shift, rounded, into r->p; their sums
   before (`sum`) and after rounding (`rounded_sum`). */
INLINE void find_probs(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, const bf16 *k,
    int64_t begin, int64_t end, float scale, __m512 sum[WIDE], __m512 rounded_sum[WIDE]
) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    uint32_t *to = r->p;
    for (int w = 0; w < wide; w++)
        sum[w] = rounded_sum[w] = _mm512_setzero_ps();
    for (int64_t key = begin; key < end; key += TILE) {
        __m512 x[TILE][WIDE];
        find_logits(wide, s, r, strip, k, key, x);
        if (key + TILE > strip->limit[0]) { /* some query does not see all of them */
            UNROLL
            for (int i = 0; i < TILE; i++) {
                UNROLL
                for (int w = 0; w < wide; w++)
                    x[i][w] = _mm512_mask_mov_ps(
                        _mm512_set1_ps(LOWEST), sees(strip, w, key + i), x[i][w]
                    );
            }
        }
        UNROLL
        for (int w = 0; w < wide; w++) {
            __m512 shift = _mm512_load_ps(strip->shift + w * LANES);
            UNROLL
            for (int i = 0; i < TILE; i += 2) {
                __m512 even = power(_mm512_fmsub_ps(x[i][w], _mm512_set1_ps(scale), shift));
                __m512 odd = power(_mm512_fmsub_ps(x[i + 1][w], _mm512_set1_ps(scale), shift));
                sum[w] = _mm512_add_ps(sum[w], _mm512_add_ps(even, odd));
                __m512i pairs = interleave((__m512i)_mm512_cvtne2ps_pbh(odd, even));
                rounded_sum[w] = _mm512_dpbf16_ps(rounded_sum[w], (__m512bh)pairs, ones);
                _mm512_store_si512(to + (i / 2 * wide + w) * LANES, pairs);
            }
        }
        to += TILE / 2 * wide * LANES;
    }
}

/* Make the largest logit up to key `end` the shift, and scale what was summed with the old one. */
INLINE void move_shift(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, const bf16 *k,
    int64_t begin, int64_t end, float scale
) {
    __m512 most[WIDE], less[WIDE];
    for (int w = 0; w < wide; w++)
        most[w] = _mm512_load_ps(strip->shift + w * LANES);
    raise_max(wide, s, r, strip, k, begin, end, scale, most);
    for (int w = 0; w < wide; w++) {
        float *shift = strip->shift + w * LANES, *sum = strip->sum + w * LANES;
        float *rounded_sum = strip->rounded_sum + w * LANES;
        less[w] = power(_mm512_sub_ps(_mm512_load_ps(shift), most[w]));
        _mm512_store_ps(shift, most[w]);
        _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), less[w]));
        _mm512_store_ps(rounded_sum, _mm512_mul_ps(_mm512_load_ps(rounded_sum), less[w]));
    }
    for (int64_t d = 0; d < s->size; d++)
        for (int w = 0; w < wide; w++) {
            float *at = strip->out_sum + (d * wide + w) * LANES;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), less[w]));
        }
}

/* Attention of one strip over keys begin .. end - 1, whose values are in r->v. */
INLINE void attend_strip(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, const bf16 *k,
    int64_t begin, int64_t end, float scale
) {
    int64_t most = strip->limit[wide * LANES - 1], steps = block_keys(s->size) / 2;
    if (end > most)
        end = most;
    if (end <= begin)
        return;
    __m512 sum[WIDE], rounded_sum[WIDE];
    if (begin == 0) {
        __m512 first[WIDE];
        for (int w = 0; w < wide; w++)
            first[w] = _mm512_set1_ps(LOWEST);
        raise_max(wide, s, r, strip, k, 0, 1, scale, first);
        for (int w = 0; w < wide; w++)
            _mm512_store_ps(strip->shift + w * LANES, first[w]);
        memset(strip->sum, 0, (size_t)(4 * wide * LANES));
        memset(strip->rounded_sum, 0, (size_t)(4 * wide * LANES));
        memset(strip->out_sum, 0, (size_t)(4 * s->size * wide * LANES));
    }
    find_probs(wide, s, r, strip, k, begin, end, scale, sum, rounded_sum);
    int beyond = 0;
    for (int w = 0; w < wide; w++) /* also if a sum is NaN */
        beyond |= _mm512_cmp_ps_mask(sum[w], _mm512_set1_ps(SUM_LIMIT), _CMP_NLE_UQ);
    if (__builtin_expect(beyond, 0)) {
        move_shift(wide, s, r, strip, k, begin, end, scale);
        find_probs(wide, s, r, strip, k, begin, end, scale, sum, rounded_sum);
    }
    for (int w = 0; w < wide; w++) {
        float *at = strip->sum + w * LANES, *rounded = strip->rounded_sum + w * LANES;
        _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), sum[w]));
        _mm512_store_ps(rounded, _mm512_add_ps(_mm512_load_ps(rounded), rounded_sum[w]));
    }
    int64_t used = (end - begin + TILE - 1) / TILE * (TILE / 2);
    for (int64_t d = 0; d < s->size; d += TILE) {
        __m512 x[TILE][WIDE];
        float *at = strip->out_sum + d * wide * LANES;
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++)
                x[i][w] = _mm512_load_ps(at + (i * wide + w) * LANES);
        }
        add_products(wide, x, used, r->p, (const bf16 *)(r->v + d * steps), 2, 2 * TILE);
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++)
                _mm512_store_ps(at + (i * wide + w) * LANES, x[i][w]);
        }
    }
}

/* With a constant width, the sums of a tile are registers. */
#define ATTEND_STRIP(WIDTH)                                                                   \
    static __attribute__((noinline)) void attend_strip_##WIDTH(                               \
        const Shape *s, const Workspace *r, const Strip *strip, const bf16 *k, int64_t begin, \
        int64_t end, float scale                                                              \
    ) {                                                                                       \
        attend_strip(WIDTH, s, r, strip, k, begin, end, scale);                               \
    }
ATTEND_STRIP(1)
ATTEND_STRIP(2)
ATTEND_STRIP(3)

/* Divide the outputs of a strip, and write them and the log-sum-exps. */
static void write_out(const Shape *s, int64_t begin, const Strip *strip, bf16 *out, float *lse) {
    for (int w = 0; w < strip->wide; w++) {
        int64_t row = begin + w * LANES, left = s->rows * s->group - row;
        int count = (int)(left < LANES ? left : LANES);
        const float *sum = strip->sum + w * LANES, *shift = strip->shift + w * LANES;
        __m512 rounded_sum = _mm512_load_ps(strip->rounded_sum + w * LANES);
        __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), rounded_sum);
        bf16 *to[LANES];
        for (int i = 0; i < count; i++) {
            int64_t t = (row + i) / s->group, g = (row + i) % s->group;
            to[i] = out + g * s->out_group + t * s->out_row;
            lse[g * s->rows + t] = shift[i] * 0.69314718055994531f + logf(sum[i]);
        }
        for (int64_t d = 0; d < s->size; d += LANES) {
            __m512i x[LANES];
            for (int i = 0; i < LANES; i++) {
                const float *at = strip->out_sum + ((d + i) * strip->wide + w) * LANES;
                x[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(at), share);
            }
            transpose(x);
            for (int i = 0; i < count; i++) {
                __m256i row16 = (__m256i)_mm512_cvtneps_pbh((__m512)x[i]);
                _mm256_storeu_si256((void *)(to[i] + d), row16);
            }
        }
    }
}

/* Attention of the block of queries that begins at row `begin`, over the rows of one KV head. */
static void block(
    const Shape *s, Workspace *r, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out,
    float *lse, int64_t begin, int64_t strips
) {
    int64_t all = s->rows * s->group, size = s->size, keys = block_keys(size), most = 0;
    int count = 0;
    for (; count < strips && begin + count * STRIP < all; count++) {
        Strip *strip = &r->strips[count];
        load_queries(s, q, begin + count * STRIP, strip);
        most = strip->limit[strip->wide * LANES - 1];
    }
    int64_t rest = s->keys % TILE, last = s->keys - rest;
    for (int64_t i = 0; i < rest; i++)
        memcpy(r->tail + i * size, k + (last + i) * s->k_row, (size_t)(2 * size));
    float scale = (float)(1.44269504088896341 / sqrt((double)size));
    for (int64_t at = 0; at < most; at += keys) {
        int64_t end = at + keys < most ? at + keys : most;
        load_values(s, v + at * s->v_row, end - at, r->v);
        for (int i = 0; i < count; i++) {
            const Strip *strip = &r->strips[i];
            if (strip->wide == 3)
                attend_strip_3(s, r, strip, k, at, end, scale);
            else if (strip->wide == 2)
                attend_strip_2(s, r, strip, k, at, end, scale);
            else
                attend_strip_1(s, r, strip, k, at, end, scale);
        }
    }
    for (int i = 0; i < count; i++)
        write_out(s, begin + i * STRIP, &r->strips[i], out, lse);
}

#endif

/* q [H, G, T, D], k and v [H, N, D], out [H, G, T, D] in bfloat16, lse [H, G, T] in float32, none
   empty; D is a multiple of 16. Query i sees the first min(N, first + i) rows, first at least 1.
   Returns 0, or what is missing: 1 the instructions, 2 memory. */
int minikv_rows_attention(
    const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *lse, const Shape *s
) {
#if AVAILABLE
    Division c = divide(s);
    char *memory = aligned_alloc(64, (size_t)(c.threads * c.each));
    if (memory == NULL)
        return 2;
#pragma omp parallel num_threads((int)c.threads)
    {
        int64_t thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        Workspace r = init_workspace(memory + thread * c.each, s->size);
        /* The last queries see most rows, so they go first. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < s->heads * c.blocks; i++) {
            int64_t h = i % s->heads, begin = (c.blocks - 1 - i / s->heads) * c.strips * STRIP;
            block(
                s, &r, q + h * s->q_head, k + h * s->k_head, v + h * s->v_head,
                out + h * s->out_head, lse + h * s->group * s->rows, begin, c.strips
            );
        }
    }
    free(memory);
    return 0;
#else
    (void)q, (void)k, (void)v, (void)out, (void)lse, (void)s;
    return 1;
#endif
}
