/* The attention that the queries of a prompt give each row: sums, maxima, or each probability. Sums
   and maxima need no T x N probabilities in memory. Also quadratic forms, with the rows of a matrix
   in place of the queries. Specification: kernels/mass/plain.py.

   The lanes of a vector are keys, so that sums over queries are sums of vectors; numbers of queries
   are broadcast. A block of LANES * WIDE keys is converted to float and transposed once for many
   queries. The log-sum-exp of every query is an input, so that each probability is final; a FORM
   has none. */
#include "lanes.h"
#include "span.h"
#include "threads.h"

/* TILE queries are computed together: their sums, a row of keys and one number of a query fill the
   registers. */
#if VEC == 16 || defined(__aarch64__)
enum { TILE = 8 };
#else
enum { TILE = 4 };
#endif
enum { WIDE = 3, BLOCK = LANES * WIDE };

/* What is computed from the probabilities of a key: their sum, the largest, or all of them. FORM:
   of the products with the rows of a symmetric matrix, their sum, each times the key's number. */
enum { SUM, PEAK, EACH, FORM };

#define QUERY_BYTES (1 << 18) /* of the queries kept as floats at a time: they fit the cache */
#define LOG2E 1.44269504088896341
#define LOWEST -3e38f /* an exponent of 2 that gives 0 */

/* heads, group, rows, keys, size: H, G, T, N, D. window: a query at position p sees keys after p -
   window; 0: no limit. kind: dtype of keys; q_kind: of queries. made: SUM, PEAK, EACH or FORM. The
   rest are strides in numbers; a stride of 0 over H: the heads share the tensor. If there is an
   index [H, N], key j of head h is row index[h][j] of k. */
typedef struct {
    int64_t heads, group, rows, keys, size, window, kind, q_kind, made;
    int64_t q_head, q_group, q_row, q_pos_row, k_head, k_row, index_head, pos_head;
    int64_t mass_head, mass_group, squares_head, each_head, each_group, each_row;
} Shape;

/* Inputs and results. Unwanted results are NULL. lse [H, G, T]. */
typedef struct {
    const void *q, *k;
    const int64_t *q_pos, *k_pos, *index;
    const float *lse;
    float *mass;    /* [H, G, N]: sums and forms are added, peaks are written */
    float *squares; /* [H, N]: the squares of means over G, summed, are added */
    float *each;    /* [H, G, T, N]: all are written */
} Tensors;

/* Memory of one thread. */
typedef struct {
    float *q;        /* [G][most][D], queries t .. t + count - 1 of one KV head */
    float *k;        /* [D][BLOCK], keys of one block */
    float *sums;     /* [G][BLOCK] */
    float *together; /* [TILE][BLOCK], summed over G */
    float *squares;  /* [BLOCK] */
    int32_t *pos;    /* [BLOCK], -1 where there is no key */
    int64_t most, t, count;
    int32_t low, high; /* of the positions of the block's keys */
    int whole;         /* each lane is a key */
} Workspace;

/* Convert `from` [size] of dtype `kind` to floats, written `step` numbers apart. */
INLINE void widen(const void *from, int64_t kind, int64_t size, float *to, int64_t step) {
    if (kind == BF16)
        for (int64_t d = 0; d < size; d++) to[d * step] = from_bf16(((const bf16 *)from)[d]);
    else
        for (int64_t d = 0; d < size; d++) to[d * step] = ((const float *)from)[d];
}

/* Row `at` of numbers of dtype `kind`. */
INLINE const void *row_at(const void *all, int64_t kind, int64_t at) {
    return (const char *)all + at * item_size((int)kind);
}

/* Load the queries of head h from t on, as many as fit. */
static void load_queries(const Shape *s, const Tensors *x, Workspace *r, int64_t h, int64_t t) {
    r->t = t;
    r->count = s->rows - t < r->most ? s->rows - t : r->most;
    for (int64_t g = 0; g < s->group; g++)
        for (int64_t i = 0; i < r->count; i++) {
            int64_t at = h * s->q_head + g * s->q_group + (t + i) * s->q_row;
            float *to = r->q + (g * r->most + i) * s->size;
            widen(row_at(x->q, s->q_kind, at), s->q_kind, s->size, to, 1);
        }
}

/* Load the block of keys of head h that begins at key `begin`. Where there is no key, zeros: the
   memory there may hold NaN. */
static void load_keys(const Shape *s, const Tensors *x, Workspace *r, int64_t h, int64_t begin) {
    r->low = INT32_MAX;
    r->high = -1;
    r->whole = 1;
    for (int64_t j = 0; j < BLOCK; j++) {
        int64_t key = begin + j;
        int32_t pos = key < s->keys ? to_int32(x->k_pos[h * s->pos_head + key]) : -1;
        r->pos[j] = pos < 0 ? -1 : pos;
        if (pos < 0) {
            r->whole = 0;
            for (int64_t d = 0; d < s->size; d++) r->k[d * BLOCK + j] = 0.0f;
            continue;
        }
        r->low = pos < r->low ? pos : r->low;
        r->high = pos > r->high ? pos : r->high;
        int64_t at = x->index ? x->index[h * s->index_head + key] * s->k_row
                              : h * s->k_head + key * s->k_row;
        widen(row_at(x->k, s->kind, at), s->kind, s->size, r->k + j, BLOCK);
    }
}

/* Add the products of TILE queries of head g, from query i on, with the block's keys, of the
   numbers from `first` to `end` of each. If fewer queries are left, the last one fills the rest. */
INLINE void add_products(
    const Shape *s, const Workspace *r, int64_t g, int64_t i, int64_t first, int64_t end,
    vec x[TILE][WIDE]
) {
    const float *q[TILE];
    UNROLL
    for (int j = 0; j < TILE; j++) {
        int64_t at = i + j < r->count ? i + j : r->count - 1;
        q[j] = r->q + (g * r->most + at) * s->size;
    }
    for (int64_t d = first; d < end; d++) {
        const float *k = r->k + d * BLOCK;
        UNROLL
        for (int j = 0; j < TILE; j++) {
            UNROLL
            for (int w = 0; w < WIDE; w++) x[j][w] += load(k + w * LANES) * q[j][d];
        }
    }
}

/* Whether a key at position `at` is inside the window of a query at `pos`. */
INLINE int reaches(const Shape *s, int32_t pos, int32_t at) {
    return !s->window || (int64_t)pos - at < s->window;
}

/* Which keys of vector w a query at `pos` sees. */
INLINE ivec sees(const Shape *s, const Workspace *r, int w, int32_t pos) {
    ivec at = *(const ivec *)(r->pos + w * LANES);
    int32_t before = s->window && pos >= s->window ? pos - (int32_t)s->window : -1;
    return (at <= pos) & (at > before);
}

/* The attention that the loaded queries i .. i + TILE - 1 of head h give the block of keys that
   begins at key `begin`. */
static void tile(
    const Shape *s, const Tensors *x, const Workspace *r, int64_t h, int64_t begin, int64_t i
) {
    const float scale = (float)(LOG2E / sqrt((double)s->size));
    int32_t pos[TILE];
    int count = r->count - i < TILE ? (int)(r->count - i) : TILE;
    for (int j = 0; j < TILE; j++)
        pos[j] = to_int32(x->q_pos[(r->t + i + (j < count ? j : count - 1)) * s->q_pos_row]);
    int none = pos[count - 1] < r->low || !reaches(s, pos[0], r->high);
    if (none && s->made != EACH) return;
    int all = r->whole && pos[0] >= r->high && reaches(s, pos[count - 1], r->low);
    for (int64_t g = 0; g < s->group; g++) {
        const float *lse = x->lse + (h * s->group + g) * s->rows + r->t + i;
        vec p[TILE][WIDE] = {0};
        add_products(s, r, g, i, 0, s->size, p);
        UNROLL
        for (int j = 0; j < TILE; j++) {
            float base = (float)(lse[j < count ? j : count - 1] * LOG2E);
            UNROLL
            for (int w = 0; w < WIDE; w++) {
                p[j][w] = p[j][w] * scale - base;
                if (!all) p[j][w] = where(sees(s, r, w, pos[j]), p[j][w], fill(LOWEST));
            }
        }
        if (s->made == PEAK) {
            UNROLL
            for (int w = 0; w < WIDE; w++) {
                float *sum = r->sums + g * BLOCK + w * LANES;
                vec most = load(sum);
                UNROLL
                for (int j = 0; j < TILE; j++) /* also a repeated last query; NaN stays */
                    most = where(most == most, larger(p[j][w], most), most);
                store(sum, most);
            }
            continue;
        }
        if (s->made == EACH) {
            int64_t left = s->keys - begin;
            for (int j = 0; j < count; j++) {
                float row[BLOCK] __attribute__((aligned(64)));
                for (int w = 0; w < WIDE; w++) store(row + w * LANES, power(p[j][w]));
                float *to = x->each + h * s->each_head + g * s->each_group +
                            (r->t + i + j) * s->each_row + begin;
                memcpy(to, row, 4 * (size_t)(left < BLOCK ? left : BLOCK));
            }
            continue;
        }
        UNROLL
        for (int w = 0; w < WIDE; w++) {
            float *sum = r->sums + g * BLOCK + w * LANES;
            vec most = load(sum);
            UNROLL
            for (int j = 0; j < TILE; j++) {
                vec y = j < count ? power(p[j][w]) : (vec){0};
                float *together = r->together + j * BLOCK + w * LANES;
                store(together, g ? load(together) + y : y);
                most += y;
            }
            store(sum, most);
        }
    }
    if (s->made != SUM) return;
    float share = 1.0f / (float)s->group;
    for (int w = 0; w < WIDE; w++) {
        vec sum = load(r->squares + w * LANES);
        for (int j = 0; j < TILE; j++) {
            vec mean = load(r->together + j * BLOCK + w * LANES) * share;
            sum += mean * mean;
        }
        store(r->squares + w * LANES, sum);
    }
}

/* Add, for each key x of the block, the part of x A x that rows i .. i + TILE - 1 of the loaded
   ones of each symmetric matrix A give. What is left of the diagonal counts twice, and what is
   right of it not at all. */
static void form(const Shape *s, const Workspace *r, int64_t i) {
    const int64_t row = r->t + i;
    const int count = r->count - i < TILE ? (int)(r->count - i) : TILE;
    for (int64_t g = 0; g < s->group; g++) {
        vec x[TILE][WIDE] = {0};
        add_products(s, r, g, i, 0, row, x);
        UNROLL
        for (int j = 0; j < TILE; j++) {
            UNROLL
            for (int w = 0; w < WIDE; w++) x[j][w] += x[j][w];
        }
        add_products(s, r, g, i, row, row + count, x);
        UNROLL
        for (int w = 0; w < WIDE; w++) {
            float *sum = r->sums + g * BLOCK + w * LANES;
            vec all = load(sum);
            for (int j = 0; j < count; j++)
                all += x[j][w] * load(r->k + (row + j) * BLOCK + w * LANES);
            store(sum, all);
        }
    }
}

/* Add the sums of the block of head h that begins at key `begin` to the results, or write its
   maxima there. */
static void put(const Shape *s, const Tensors *x, Workspace *r, int64_t h, int64_t begin) {
    int64_t count = s->keys - begin < BLOCK ? s->keys - begin : BLOCK;
    for (int64_t g = 0; g < s->group; g++) {
        float *to = x->mass + h * s->mass_head + g * s->mass_group + begin;
        float *sums = r->sums + g * BLOCK;
        if (s->made == PEAK) {
            for (int w = 0; w < WIDE; w++) store(sums + w * LANES, power(load(sums + w * LANES)));
            for (int64_t j = 0; j < count; j++)
                to[j] = sums[j] <= to[j] ? to[j] : sums[j]; /* also NaN */
        } else
            for (int64_t j = 0; j < count; j++) to[j] += sums[j];
    }
    if (s->made == SUM)
        for (int64_t j = 0; j < count; j++)
            x->squares[h * s->squares_head + begin + j] += r->squares[j];
}

/* Attention of the loaded queries of head h over the blocks of keys number `thread`, `thread` +
   `threads`, ... Early keys are seen by more queries, so each thread gets early and late blocks. */
static void blocks(
    const Shape *s, const Tensors *x, Workspace *r, int64_t h, int64_t thread, int64_t threads
) {
    for (int64_t begin = thread * BLOCK; begin < s->keys; begin += threads * BLOCK) {
        load_keys(s, x, r, h, begin);
        vec nothing = fill(s->made == PEAK ? LOWEST : 0.0f);
        for (int64_t j = 0; j < s->group * WIDE; j++) store(r->sums + j * LANES, nothing);
        memset(r->squares, 0, 4 * BLOCK);
        for (int64_t i = 0; i < r->count; i += TILE) {
            if (s->made == FORM)
                form(s, r, i);
            else
                tile(s, x, r, h, begin, i);
        }
        if (s->made != EACH) put(s, x, r, h, begin);
    }
}

/* Compute the results that s->made selects into x; see `Shape` and `Tensors`. q [H, G, T, D]
   of dtype `q_kind`, k of `kind`; q_pos [T] does not decrease; no tensor is empty. For PEAK, mass
   must be 0 before the call. FORM reads neither q_pos nor lse, and T is D. Returns 0, or 2 if there
   is no memory. */
int minikv_attention_mass(const Tensors *x, const Shape *s) {
    int64_t threads = most_threads(), most = QUERY_BYTES / (4 * s->group * s->size);
    most = most > s->rows ? s->rows : most > TILE ? most : TILE;
    int64_t count = (s->keys + BLOCK - 1) / BLOCK;
    threads = threads < count ? threads : count;
    int64_t queries = (s->group * most * s->size + LANES - 1) / LANES * LANES;
    int64_t each = queries + (s->size + s->group + TILE + 2) * BLOCK;
    each = (4 * each + 63) / 64 * 64;
    char *memory = aligned_alloc(64, (size_t)(threads * each));
    if (memory == NULL) return 2;
#pragma omp parallel num_threads((int)threads)
    {
        const int64_t thread = this_thread(), all = threads_here();
        Workspace r = {.most = most};
        r.q = (float *)(memory + thread * each);
        r.k = r.q + queries;
        r.sums = r.k + s->size * BLOCK;
        r.together = r.sums + s->group * BLOCK;
        r.squares = r.together + TILE * BLOCK;
        r.pos = (int32_t *)(r.squares + BLOCK);
        for (int64_t h = 0; h < s->heads; h++)
            for (int64_t t = 0; t < s->rows; t += most) {
                load_queries(s, x, &r, h, t);
                blocks(s, x, &r, h, thread, all);
            }
    }
    free(memory);
    return 0;
}
