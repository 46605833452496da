/* Attention of many queries over rows, in blocks that fit the processor's caches (FlashAttention-2,
   arXiv 2307.08691, section 3.1).

   The lanes of a vector are queries: logits are [keys, queries], and outputs [D, queries] until
   they are written. So numbers of keys and values are broadcast, and sums over keys are sums of
   vectors. The G query heads of a KV head share its keys: row t * G + g of a block is query t of
   head g.

   The exponents of a query are relative to its `shift`, which need not be the maximum of its
   logits. It is the largest logit of the first keys, and is raised only when the sum of a block
   exceeds SUM_LIMIT. Up to there floats keep their relative precision, so most blocks need no
   maximum.

   A file that includes this implements the products. It defines

     stored   the type of queries, keys, values and outputs in memory
     PAIR     how many numbers an `item` has, whose products are added at once: numbers along D for
              queries and keys, along keys for probabilities and values
     item     the type of PAIR numbers
     TILE     keys whose logits are computed at once
     STEP     numbers of a key that are multiplied at once: rows end with zeros up to a multiple
     WIDE     vectors of queries in a strip; 2 or 3
     STRIPS   the most strips of a block
     block_keys(size)  keys of a block: with their values they fit the cache

   and the functions that are declared below; prefill_vectors.h has some of them. */
#include "threads.h"

#include <stdlib.h>

/* Queries of a strip. */
enum { STRIP = LANES * WIDE };

/* heads, group, rows, keys, size: H, G, T, N, D. first: how many rows query 0 sees. The rest are
   strides in numbers. */
typedef struct {
    int64_t heads, group, rows, keys, size, first;
    int64_t q_head, q_group, q_row, k_head, k_row, v_head, v_row, out_head, out_group, out_row;
} Shape;

/* How the work is divided: `blocks` blocks of `strips` strips for each KV head, over `threads`
   threads, each with `each` bytes of memory. */
typedef struct {
    int64_t strips, blocks, threads, each;
} Division;

/* LANES * wide queries, and their sums over the keys so far. */
typedef struct {
    int wide;
    item *q;            /* [D / PAIR][lanes] */
    float *out_sum;     /* [D][lanes], outputs before they are divided */
    float *shift;       /* [lanes], in units of log2, as all exponents here */
    float *sum;         /* [lanes], of probabilities before they are rounded */
    float *rounded_sum; /* [lanes], of rounded probabilities */
    int32_t *limit;     /* [lanes], how many rows a query sees; does not decrease */
} Strip;

/* Memory of one thread. */
typedef struct {
    Strip strips[STRIPS];
    item *k;       /* one block of keys, in the layout of the including file */
    item *v;       /* their values, likewise */
    item *p;       /* [keys / PAIR][lanes], probabilities */
    int64_t begin; /* the first key of the block */
} Workspace;

/* Prepare a thread, and undo that. */
INLINE void begin_thread(void);
INLINE void end_thread(void);

/* Write the queries of the LANES rows `from` [D] to `to` [items_of(s)][wide][LANES], from there on;
   NULL: zeros. */
static void load_queries(const Shape *s, const stored *const *from, int wide, item *to);

/* Write `count` keys, from k [count, D] on, to `to`, with zeros up to a multiple of TILE. */
static void load_keys(const Shape *s, const stored *k, int64_t count, item *to);

/* The same for their values. */
static void load_values(const Shape *s, const stored *v, int64_t count, item *to);

/* The products of queries and the keys key .. key + TILE - 1, before they are scaled. */
INLINE void find_logits(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t key,
    vec x[TILE][WIDE]
);

/* strip->out_sum += the values of the first `count` keys, a multiple of TILE, times r->p. */
INLINE void add_values(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t count
);

/* Write the probabilities of PAIR keys, each [LANES], to `to`, and add the rounded ones to `sum`.
 */
INLINE void store_probs(const vec *p, item *to, vec *sum);

/* Write the outputs of `count` queries x [D][wide][LANES] times `share` to rows `to`. */
static void write_rows(
    const Shape *s, const float *x, int wide, vec share, int count, stored *const *to
);

#define SUM_LIMIT 1073741824.0f /* 2^30 */
#define LOWEST -3e38f

/* The length of a row of `size` numbers with the zeros at its end. */
INLINE int64_t padded(int64_t size) { return (size + STEP - 1) / STEP * STEP; }

/* Items of a row of queries. */
INLINE int64_t items_of(const Shape *s) { return padded(s->size) / PAIR; }

/* The division for this shape and number of threads. */
static Division divide(const Shape *s) {
    Division c;
    c.threads = most_threads();
    int64_t all = (s->rows * s->group + STRIP - 1) / STRIP;
    c.strips = STRIPS;
    while (c.strips > 1 && s->heads * (all / c.strips) < 4 * c.threads) c.strips /= 2;
    c.blocks = (all + c.strips - 1) / c.strips;
    if (c.threads > s->heads * c.blocks) c.threads = s->heads * c.blocks;
    /* Queries, keys, values, probabilities, outputs, and four numbers per query. Each is a multiple
       of the bytes of a vector. */
    int64_t keys = block_keys(s->size), rows = STRIPS * STRIP, number = sizeof(item) / PAIR;
    c.each = number * ((rows + 2 * keys) * padded(s->size) + keys * STRIP) + 4 * rows * s->size +
             4 * 4 * rows;
    c.each = (c.each + 63) / 64 * 64;
    return c;
}

/* The next `bytes` bytes of the memory that begins at *at. */
static void *carve(char **at, int64_t bytes) {
    void *begin = *at;
    *at += bytes;
    return begin;
}

/* A workspace in the memory at `at`, for heads of `size` numbers. */
static Workspace init_workspace(char *at, int64_t size) {
    int64_t keys = block_keys(size), number = sizeof(item) / PAIR;
    Workspace r;
    for (int i = 0; i < STRIPS; i++) {
        Strip *x = &r.strips[i];
        x->q = carve(&at, number * STRIP * padded(size));
        x->out_sum = carve(&at, 4 * STRIP * size);
        x->shift = carve(&at, 4 * STRIP);
        x->sum = carve(&at, 4 * STRIP);
        x->rounded_sum = carve(&at, 4 * STRIP);
        x->limit = carve(&at, 4 * STRIP);
    }
    r.k = carve(&at, number * keys * padded(size));
    r.v = carve(&at, number * keys * padded(size));
    r.p = carve(&at, number * keys * STRIP);
    r.begin = 0;
    return r;
}

/* Load the strip of one KV head that begins at row `begin`; rows beyond the last are zeros. */
static void load_strip(const Shape *s, const stored *q, int64_t begin, Strip *x) {
    int64_t all = s->rows * s->group;
    x->wide = all - begin < STRIP ? (int)((all - begin + LANES - 1) / LANES) : WIDE;
    for (int w = 0; w < x->wide; w++) {
        const stored *from[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t row = begin + w * LANES + i, held = row < all ? row : all - 1;
            int64_t t = held / s->group, g = held % s->group, seen = s->first + t;
            from[i] = row < all ? q + t * s->q_row + g * s->q_group : NULL;
            x->limit[w * LANES + i] = (int32_t)(seen < s->keys ? seen : s->keys);
        }
        load_queries(s, from, x->wide, x->q + w * LANES);
    }
}

/* Which queries of vector w see a key. */
INLINE ivec sees(const Strip *strip, int w, int64_t key) {
    return *(const ivec *)(strip->limit + w * LANES) > (int32_t)key;
}

/* Raise `most` to the largest scaled logit of each query, among keys begin .. end - 1 that it
   sees. */
INLINE void raise_max(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t begin,
    int64_t end, float scale, vec most[WIDE]
) {
    for (int64_t key = begin; key < end; key += TILE) {
        vec x[TILE][WIDE];
        find_logits(wide, s, r, strip, key, x);
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++) {
                vec logit = larger(x[i][w] * scale, most[w]);
                most[w] = where(sees(strip, w, key + i), logit, most[w]);
            }
        }
    }
}

/* The probabilities of keys begin .. end - 1 relative to the shift, rounded, into r->p; their sums
   before (`sum`) and after rounding (`rounded_sum`). */
INLINE void find_probs(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t begin,
    int64_t end, float scale, vec sum[WIDE], vec rounded_sum[WIDE]
) {
    item *to = r->p;
    for (int w = 0; w < wide; w++) sum[w] = rounded_sum[w] = (vec){0};
    for (int64_t key = begin; key < end; key += TILE) {
        vec x[TILE][WIDE];
        find_logits(wide, s, r, strip, key, x);
        if (key + TILE > strip->limit[0]) { /* some query does not see all of them */
            UNROLL
            for (int i = 0; i < TILE; i++) {
                UNROLL
                for (int w = 0; w < wide; w++)
                    x[i][w] = where(sees(strip, w, key + i), x[i][w], fill(LOWEST));
            }
        }
        UNROLL
        for (int w = 0; w < wide; w++) {
            vec shift = load(strip->shift + w * LANES);
            UNROLL
            for (int i = 0; i < TILE; i += PAIR) {
                vec p[PAIR], all;
                UNROLL
                for (int j = 0; j < PAIR; j++) {
                    p[j] = power(x[i + j][w] * scale - shift);
                    all = j ? all + p[j] : p[j];
                }
                sum[w] += all;
                store_probs(p, to + (i / PAIR * wide + w) * LANES, &rounded_sum[w]);
            }
        }
        to += TILE / PAIR * wide * LANES;
    }
}

/* Raise the shift to the largest logit of the keys up to `end`, and rescale the sums that were made
   with the old shift. */
INLINE void move_shift(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t begin,
    int64_t end, float scale
) {
    vec most[WIDE], less[WIDE];
    for (int w = 0; w < wide; w++) most[w] = load(strip->shift + w * LANES);
    raise_max(wide, s, r, strip, begin, end, scale, most);
    for (int w = 0; w < wide; w++) {
        float *shift = strip->shift + w * LANES, *sum = strip->sum + w * LANES;
        float *rounded_sum = strip->rounded_sum + w * LANES;
        less[w] = power(load(shift) - most[w]);
        store(shift, most[w]);
        store(sum, load(sum) * less[w]);
        store(rounded_sum, load(rounded_sum) * less[w]);
    }
    for (int64_t d = 0; d < s->size; d++)
        for (int w = 0; w < wide; w++) {
            float *at = strip->out_sum + (d * wide + w) * LANES;
            store(at, load(at) * less[w]);
        }
}

/* Attention of one strip over keys begin .. end - 1 of the block that is loaded. */
INLINE void attend_strip(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t begin,
    int64_t end, float scale
) {
    int64_t most = strip->limit[wide * LANES - 1];
    if (end > most) end = most;
    if (end <= begin) return;
    vec sum[WIDE], rounded_sum[WIDE];
    if (begin == 0) {
        vec first[WIDE];
        for (int w = 0; w < wide; w++) first[w] = fill(LOWEST);
        raise_max(wide, s, r, strip, 0, 1, scale, first);
        for (int w = 0; w < wide; w++) store(strip->shift + w * LANES, first[w]);
        memset(strip->sum, 0, (size_t)(4 * wide * LANES));
        memset(strip->rounded_sum, 0, (size_t)(4 * wide * LANES));
        memset(strip->out_sum, 0, (size_t)(4 * s->size * wide * LANES));
    }
    find_probs(wide, s, r, strip, begin, end, scale, sum, rounded_sum);
    int beyond = 0;
    for (int w = 0; w < wide; w++) /* also if a sum is NaN */
        beyond |= any(~(sum[w] <= fill(SUM_LIMIT)));
    if (__builtin_expect(beyond, 0)) {
        move_shift(wide, s, r, strip, begin, end, scale);
        find_probs(wide, s, r, strip, begin, end, scale, sum, rounded_sum);
    }
    for (int w = 0; w < wide; w++) {
        float *at = strip->sum + w * LANES, *rounded = strip->rounded_sum + w * LANES;
        store(at, load(at) + sum[w]);
        store(rounded, load(rounded) + rounded_sum[w]);
    }
    add_values(wide, s, r, strip, (end - begin + TILE - 1) / TILE * TILE);
}

/* With a constant width, the sums of a tile stay in registers. */
#define ATTEND_STRIP(WIDTH)                                                                 \
    static __attribute__((noinline)) void attend_strip_##WIDTH(                             \
        const Shape *s, const Workspace *r, const Strip *strip, int64_t begin, int64_t end, \
        float scale                                                                         \
    ) {                                                                                     \
        attend_strip(WIDTH, s, r, strip, begin, end, scale);                                \
    }
ATTEND_STRIP(1)
ATTEND_STRIP(2)
#if WIDE == 3
ATTEND_STRIP(3)
#endif

/* Divide the outputs of a strip, and write them and the log-sum-exps. */
static void write_out(const Shape *s, int64_t begin, const Strip *strip, stored *out, float *lse) {
    for (int w = 0; w < strip->wide; w++) {
        int64_t row = begin + w * LANES, left = s->rows * s->group - row;
        int count = (int)(left < LANES ? left : LANES);
        const float *sum = strip->sum + w * LANES, *shift = strip->shift + w * LANES;
        vec share = 1.0f / load(strip->rounded_sum + w * LANES);
        stored *to[LANES];
        for (int i = 0; i < count; i++) {
            int64_t t = (row + i) / s->group, g = (row + i) % s->group;
            to[i] = out + g * s->out_group + t * s->out_row;
            lse[g * s->rows + t] = shift[i] * 0.69314718055994531f + logf(sum[i]);
        }
        write_rows(s, strip->out_sum + w * LANES, strip->wide, share, count, to);
    }
}

/* Attention of the block of queries that begins at row `begin`, over the rows of one KV head. */
static void block(
    const Shape *s, Workspace *r, const stored *q, const stored *k, const stored *v, stored *out,
    float *lse, int64_t begin, int64_t strips
) {
    int64_t all = s->rows * s->group, keys = block_keys(s->size), most = 0;
    int count = 0;
    for (; count < strips && begin + count * STRIP < all; count++) {
        Strip *strip = &r->strips[count];
        load_strip(s, q, begin + count * STRIP, strip);
        most = strip->limit[strip->wide * LANES - 1];
    }
    float scale = (float)(1.44269504088896341 / sqrt((double)s->size));
    for (int64_t at = 0; at < most; at += keys) {
        int64_t end = at + keys < most ? at + keys : most;
        r->begin = at;
        load_keys(s, k + at * s->k_row, end - at, r->k);
        load_values(s, v + at * s->v_row, end - at, r->v);
        for (int i = 0; i < count; i++) {
            const Strip *strip = &r->strips[i];
            if (strip->wide == 1)
                attend_strip_1(s, r, strip, at, end, scale);
            else if (strip->wide == 2)
                attend_strip_2(s, r, strip, at, end, scale);
#if WIDE == 3
            else
                attend_strip_3(s, r, strip, at, end, scale);
#endif
        }
    }
    for (int i = 0; i < count; i++) write_out(s, begin + i * STRIP, &r->strips[i], out, lse);
}

/* rows_attention: out = softmax(q k^T / sqrt(D)) v, and lse, the log-sum-exps of the scaled logits.
   q and out [H, G, T, D], k and v [H, N, D] of type `stored`, lse float32 [H, G, T]; none is empty;
   D is a multiple of 16. Query i sees the first min(N, first + i) rows; first is at least 1.
   Returns 0, or 2 if there is no memory. */
static int rows_attention(
    const stored *q, const stored *k, const stored *v, stored *out, float *lse, const Shape *s
) {
    Division c = divide(s);
    char *memory = aligned_alloc(64, (size_t)(c.threads * c.each));
    if (memory == NULL) return 2;
#pragma omp parallel num_threads((int)c.threads)
    {
        Workspace r = init_workspace(memory + this_thread() * c.each, s->size);
        begin_thread();
        /* The last queries see most rows, so they go first. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < s->heads * c.blocks; i++) {
            int64_t h = i % s->heads, begin = (c.blocks - 1 - i / s->heads) * c.strips * STRIP;
            block(
                s, &r, q + h * s->q_head, k + h * s->k_head, v + h * s->v_head,
                out + h * s->out_head, lse + h * s->group * s->rows, begin, c.strips
            );
        }
        end_thread();
    }
    free(memory);
    return 0;
}
