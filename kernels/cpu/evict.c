/* Statistics and victims at the end of a step, and HashEvict's newcomer. What each function
   computes is said by its twin in kernels/reference.py.

   Rows that may leave are those of an interval of positions; a victim is the row of the lowest
   score in it. Where a policy narrows the choice by an order statistic, a threshold is guessed and
   checked by counting, and found by bisection where the guess fails: nothing is sorted. */

/* Products are rounded before they are added, as the twins' are: a constant stream has spread 0. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "numbers.h"

#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* Weights of a call from which on threads pay: about 50 us of one. Rows that are looked at at once,
   where columns of words or doubles beside them should stay near. */
enum { MANY = 30000, BLOCK = 256 };

typedef struct {
    int64_t L, H, G, C;
    const float *logits, *lse;
    const int64_t *start, *length, *cap;
    const int32_t *pos;
    int64_t newest, sinks, recent, pinned;
} Heads;

/* What every policy's function begins with, and what it makes of it. */
#define HEADS                                                                                      \
    int64_t L, int64_t H, int64_t G, int64_t C, const float *logits, const float *lse,             \
        const int64_t *start, const int64_t *length, const int64_t *cap, const int32_t *pos,       \
        const int64_t *newest, int64_t sinks, int64_t recent, int64_t pinned, const uint8_t *go,   \
        int64_t *hole
#define TOGETHER                                                                                   \
    {L, H, G, C, logits, lse, start, length, cap, pos, *newest, sinks, recent, pinned}

typedef struct {
    int32_t low, high; /* of positions, both included */
} Span;

static inline int32_t narrow(int64_t x) {
    return x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : (int32_t)x;
}

/* Free rows, and those that are free where there are no such rows. */
static inline Span strict(int64_t newest, int64_t sinks, int64_t recent, int64_t pinned) {
    return (Span){narrow(sinks > pinned ? sinks : pinned), narrow(newest - recent)};
}

static inline Span relaxed(int64_t newest, int64_t pinned) {
    return (Span){narrow(pinned), narrow(newest - 1)};
}

static inline int within(Span s, int32_t at) { return (at >= s.low) & (at <= s.high); }

static int count_within(const int32_t *pos, int n, Span s) {
    int found = 0;
#pragma omp simd reduction(+ : found)
    for (int j = 0; j < n; j++)
        found += within(s, pos[j]);
    return found;
}

/* The row of the lowest score in the span, of equal ones the oldest; -1 if there is none. A score
   that is NaN is no row's. */
static int lowest(const float *score, const int32_t *pos, int n, Span s) {
    float least = INFINITY;
#pragma omp simd reduction(min : least)
    for (int j = 0; j < n; j++) {
        float x = within(s, pos[j]) ? score[j] : INFINITY;
        least = x < least ? x : least;
    }
    int ties = 0, first = INT32_MAX;
#pragma omp simd reduction(+ : ties) reduction(min : first)
    for (int j = 0; j < n; j++) {
        int hit = within(s, pos[j]) & (score[j] <= least);
        int here = hit ? j : INT32_MAX;
        ties += hit;
        first = here < first ? here : first;
    }
    if (ties < 2)
        return ties ? first : -1;
    int32_t oldest = INT32_MAX;
#pragma omp simd reduction(min : oldest)
    for (int j = 0; j < n; j++) {
        int32_t at = within(s, pos[j]) & (score[j] <= least) ? pos[j] : INT32_MAX;
        oldest = at < oldest ? at : oldest;
    }
    first = INT32_MAX;
#pragma omp simd reduction(min : first)
    for (int j = 0; j < n; j++) {
        int here = (pos[j] == oldest) & (score[j] <= least) ? j : INT32_MAX;
        first = here < first ? here : first;
    }
    return first;
}

/* As `lowest` over the free rows of a head. */
static int lowest_free(const Heads *a, const float *score, const int32_t *pos, int n) {
    int found = lowest(score, pos, n, strict(a->newest, a->sinks, a->recent, a->pinned));
    return found >= 0 ? found : lowest(score, pos, n, relaxed(a->newest, a->pinned));
}

/* What the step's query gave the rows of head i: the mean over its G queries. */
static void weigh(const Heads *a, int64_t i, int n, float *p) {
    const float *x = a->logits + i * a->G * a->C, *sums = a->lse + i * a->G;
    for (int64_t g = 0; g < a->G; g++, x += a->C) {
        const float lse = sums[g];
        if (!g) {
#pragma omp simd
            for (int j = 0; j < n; j++)
                p[j] = exp_negative(x[j] - lse);
        } else {
#pragma omp simd
            for (int j = 0; j < n; j++)
                p[j] += exp_negative(x[j] - lse);
        }
    }
    if (a->G > 1) {
        const float group = (float)a->G;
#pragma omp simd
        for (int j = 0; j < n; j++)
            p[j] /= group;
    }
}

static inline int over(const Heads *a, int64_t i) { return a->length[i] > a->cap[i]; }

/* The row that a head which is over gives up: where no row may leave, its first. */
static inline int64_t left(const Heads *a, int64_t i, int found) {
    return a->start[i] + (found < 0 ? 0 : found);
}

/* Threads for this many heads' weights: one, or as many as torch's own loops take, as OpenMP ends
   those that a smaller team leaves over. */
static int team(const Heads *a) {
#ifdef _OPENMP
    int64_t weights = 0;
    for (int64_t i = 0; i < a->L * a->H; i++)
        weights += a->length[i] * a->G;
    return weights < MANY ? 1 : omp_get_max_threads();
#else
    (void)a;
    return 1;
#endif
}

static inline int member(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static void *room(int64_t count, int64_t size) { return malloc(count * size + 1); }

/* -- H2O ---------------------------------------------------------------------------------- */

/* A position below which there are all shown rows that are older than the n-th newest one, and no
   others. There are n rows at least; they have different positions. */
static int32_t edge(const int32_t *pos, int rows, int64_t pinned, int64_t newest, int n) {
    int64_t high = newest + 1; /* fewer than n rows are as late */
    /* Each row that is missing moves the guess by one, which cannot lead below the edge. */
    for (int i = 0, late = 0; i < 8; i++) {
        const int64_t guess = high - (n - late);
        if (guess <= pinned)
            break;
        late = count_within(pos, rows, (Span){narrow(guess), INT32_MAX});
        if (late == n)
            return narrow(guess);
        if (late > n)
            break;
        high = guess;
    }
    int64_t low = pinned < INT32_MIN ? INT32_MIN : pinned; /* n rows are as late */
    if (count_within(pos, rows, (Span){narrow(high), INT32_MAX}) >= n)
        high = (int64_t)INT32_MAX + 1; /* rows of the newest position or later, against the rules */
    while (low + 1 < high) {
        const int64_t middle = low + (high - low) / 2;
        const int late = count_within(pos, rows, (Span){narrow(middle), INT32_MAX});
        if (late == n)
            return narrow(middle);
        if (late > n)
            low = middle;
        else
            high = middle;
    }
    return narrow(low);
}

static int heaviest_stay(const Heads *a, const float *sums, const int32_t *pos, int n,
                         int64_t young) {
    const int shown = count_within(pos, n, (Span){narrow(a->pinned), INT32_MAX});
    if (!shown)
        return -1;
    int64_t count = young < shown - 1 ? young : shown - 1;
    count = count < 1 ? 1 : count;
    const int32_t before = edge(pos, n, a->pinned, a->newest, (int)count);
    Span all = strict(a->newest, a->sinks, a->recent, a->pinned);
    if (!count_within(pos, n, all))
        all = relaxed(a->newest, a->pinned);
    Span older = all;
    if (before == INT32_MIN)
        return lowest(sums, pos, n, all);
    older.high = older.high < before - 1 ? older.high : before - 1;
    const int found = lowest(sums, pos, n, older);
    return found >= 0 ? found : lowest(sums, pos, n, all);
}

/* All return 0, or 1 if there is no memory: then nothing was written. */
int minikv_h2o_step(HEADS, float *sums, const int64_t *young) {
    if (!*go)
        return 0;
    const Heads a = TOGETHER;
    const int threads = team(&a);
    float *scratch = room(threads * C, sizeof(float));
    if (!scratch)
        return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < L * H; i++) {
        const int n = (int)length[i];
        float *p = scratch + member() * C, *total = sums + start[i];
        weigh(&a, i, n, p);
#pragma omp simd
        for (int j = 0; j < n; j++)
            total[j] += p[j];
        hole[i] = over(&a, i)
            ? left(&a, i, heaviest_stay(&a, total, pos + start[i], n, young[i]))
            : -1;
    }
    free(scratch);
    return 0;
}

/* -- TOVA --------------------------------------------------------------------------------- */

typedef struct {
    double sum;
    int32_t at, count;
} Place;

/* Whether the heads of a layer that are over, from head `first` on, hold the same positions in the
   same order, as heads do that evict together. */
static int alike(const Heads *a, int64_t first, int64_t end) {
    const int64_t n = a->length[first];
    for (int64_t i = first + 1; i < end; i++)
        if (over(a, i) && (a->length[i] != n || memcmp(a->pos + a->start[i],
                                                       a->pos + a->start[first],
                                                       n * sizeof(int32_t))))
            return 0;
    return 1;
}

/* Slots for this many rows: a power of two, at most half full. */
static int64_t slots(int64_t rows) {
    int64_t size = 16;
    while (size < 2 * rows)
        size *= 2;
    return size;
}

/* Replace p [H, C] of a layer's rows by the means over the rows of the same position. */
static void average(const Heads *a, int64_t first, int64_t end, float *p, int32_t *slot,
                    Place *table) {
    int64_t rows = 0;
    for (int64_t i = first; i < end; i++)
        rows += over(a, i) ? a->length[i] : 0;
    const int64_t size = slots(rows);
    int shift = 32;
    while ((int64_t)1 << (32 - shift) < size)
        shift--;
    memset(table, 0, size * sizeof(Place));
    for (int64_t i = first; i < end; i++) {
        if (!over(a, i))
            continue;
        const int32_t *pos = a->pos + a->start[i];
        const int64_t mine = (i - first) * a->C;
        for (int64_t j = 0; j < a->length[i]; j++) {
            if (pos[j] < a->pinned)
                continue; /* it does not leave, whatever it got */
            uint32_t s = (uint32_t)pos[j] * 2654435769u >> shift;
            while (table[s].count && table[s].at != pos[j])
                s = (s + 1) & (uint32_t)(size - 1);
            table[s].at = pos[j];
            table[s].sum += p[mine + j];
            table[s].count++;
            slot[mine + j] = (int32_t)s;
        }
    }
    for (int64_t i = first; i < end; i++) {
        if (!over(a, i))
            continue;
        const int32_t *pos = a->pos + a->start[i];
        const int64_t mine = (i - first) * a->C;
        for (int64_t j = 0; j < a->length[i]; j++)
            if (pos[j] >= a->pinned) {
                const Place *all = table + slot[mine + j];
                p[mine + j] = (float)(all->sum / (double)all->count);
            }
    }
}

static void layer_gives_up(const Heads *a, int64_t first, int64_t end, int64_t *hole, float *p,
                           int32_t *slot, Place *table) {
    int64_t one = end, heads = 0;
    for (int64_t i = end - 1; i >= first; i--) {
        hole[i] = -1;
        if (!over(a, i))
            continue;
        weigh(a, i, (int)a->length[i], p + (i - first) * a->C);
        one = i;
        heads++;
    }
    if (one == end)
        return;
    if (alike(a, one, end)) {
        const int n = (int)a->length[one];
        float *mean = p + (one - first) * a->C;
        for (int begin = 0; begin < n; begin += BLOCK) {
            const int size = n - begin < BLOCK ? n - begin : BLOCK;
            double sum[BLOCK] = {0};
            for (int64_t i = one; i < end; i++)
                if (over(a, i)) {
                    const float *mine = p + (i - first) * a->C + begin;
#pragma omp simd
                    for (int j = 0; j < size; j++)
                        sum[j] += mine[j];
                }
#pragma omp simd
            for (int j = 0; j < size; j++)
                mean[begin + j] = (float)(sum[j] / (double)heads);
        }
        const int found = lowest_free(a, mean, a->pos + a->start[one], n);
        for (int64_t i = one; i < end; i++)
            if (over(a, i))
                hole[i] = left(a, i, found);
        return;
    }
    average(a, first, end, p, slot, table);
    for (int64_t i = one; i < end; i++)
        if (over(a, i)) {
            const int n = (int)a->length[i];
            hole[i] = left(a, i, lowest_free(a, p + (i - first) * a->C, a->pos + a->start[i], n));
        }
}

int minikv_tova_step(HEADS, int layerwise) {
    if (!*go)
        return 0;
    const Heads a = TOGETHER;
    const int threads = team(&a);
    const int64_t rows = layerwise ? H * C : C, size = layerwise ? slots(rows) : 0;
    float *scratch = room(threads * rows, sizeof(float));
    int32_t *slot = room(size ? threads * rows : 0, sizeof(int32_t));
    Place *table = room(threads * size, sizeof(Place));
    const int good = scratch && slot && table;
    if (good && layerwise) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t l = 0; l < L; l++)
            layer_gives_up(&a, l * H, l * H + H, hole, scratch + member() * rows,
                           slot + member() * rows, table + member() * size);
    } else if (good) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < L * H; i++) {
            const int n = (int)length[i];
            float *p = scratch + member() * rows;
            hole[i] = -1;
            if (over(&a, i)) {
                weigh(&a, i, n, p);
                hole[i] = left(&a, i, lowest_free(&a, p, pos + start[i], n));
            }
        }
    }
    free(table);
    free(slot);
    free(scratch);
    return !good;
}

/* -- RoCo --------------------------------------------------------------------------------- */

static int steadier(const float *spread, const int32_t *pos, int n, Span s, float limit) {
    int found = 0;
#pragma omp simd reduction(+ : found)
    for (int j = 0; j < n; j++)
        found += within(s, pos[j]) & (spread[j] < limit);
    return found;
}

/* Of the rows whose spread is at most the n-th smallest, the one with the lowest mean. */
static int steady_and_light(const Heads *a, float *mean, const float *spread, const int32_t *pos,
                            int n, int64_t keep) {
    Span s = strict(a->newest, a->sinks, a->recent, a->pinned);
    int rows = count_within(pos, n, s);
    if (!rows) {
        s = relaxed(a->newest, a->pinned);
        rows = count_within(pos, n, s);
    }
    const int found = lowest(mean, pos, n, s);
    if (found < 0)
        return -1;
    int64_t nth = keep < rows ? keep : rows;
    nth = nth < 1 ? 1 : nth;
    /* The lowest mean is nearly always steady enough. */
    if (steadier(spread, pos, n, s, spread[found]) < nth)
        return found;
    /* Not negative, so that bits order as the numbers do. Fewer than n are below `low`. */
    uint32_t low = 0, high = float_bits(spread[found]);
    while (low + 1 < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int below = steadier(spread, pos, n, s, bits_float(middle));
        if (below < nth)
            low = middle;
        else
            high = middle;
        if (below == nth)
            break;
    }
    const float limit = bits_float(high);
#pragma omp simd
    for (int j = 0; j < n; j++)
        mean[j] = spread[j] < limit ? mean[j] : NAN;
    return lowest(mean, pos, n, s);
}

int minikv_roco_step(HEADS, float *sums, float *squares, float *count, const int64_t *keep) {
    if (!*go)
        return 0;
    const Heads a = TOGETHER;
    const int threads = team(&a);
    float *scratch = room(2 * threads * C, sizeof(float));
    if (!scratch)
        return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < L * H; i++) {
        const int n = (int)length[i];
        float *mean = scratch + 2 * member() * C, *spread = mean + C;
        float *sum = sums + start[i], *square = squares + start[i], *seen = count + start[i];
        weigh(&a, i, n, mean);
#pragma omp simd
        for (int j = 0; j < n; j++) {
            const float p = mean[j], total = sum[j] + p, power = square[j] + p * p;
            const float asked = seen[j] + 1.0f, queries = asked < 1.0f ? 1.0f : asked;
            sum[j] = total;
            square[j] = power;
            seen[j] = asked;
            const float middle = total / queries, varies = power / queries - middle * middle;
            mean[j] = middle;
            spread[j] = varies > 0.0f ? varies : 0.0f;
        }
        hole[i] = over(&a, i)
            ? left(&a, i, steady_and_light(&a, mean, spread, pos + start[i], n, keep[i]))
            : -1;
    }
    free(scratch);
    return 0;
}

/* -- ScissorHands ------------------------------------------------------------------------- */

/* The set bits; a loop over it becomes vectors with or without an instruction for it. */
static inline uint32_t ones(uint32_t x) {
#ifdef __AVX512VPOPCNTDQ__
    return (uint32_t)__builtin_popcount(x);
#else
    x = x - ((x >> 1) & 0x55555555u);
    x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
    x = (x + (x >> 4)) & 0x0f0f0f0fu;
    return x * 0x01010101u >> 24;
#endif
}

/* words: `count` columns. */
int minikv_scissorhands_step(HEADS, int64_t count, int64_t *const *words, float *queries,
                             int64_t history, const int64_t *window) {
    if (!*go)
        return 0;
    const Heads a = TOGETHER;
    const int threads = team(&a);
    float *scratch = room(threads * C, sizeof(float));
    if (!scratch)
        return 1;
    const float most = (float)history;
    const int64_t bits = history - 32 * (count - 1);
    const uint32_t last = bits < 32 ? ((uint32_t)1 << bits) - 1 : UINT32_MAX;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < L * H; i++) {
        const int n = (int)length[i];
        const int64_t sees = window[i / H] < n ? window[i / H] : n;
        const float even = 1.0f / (float)sees;
        float *p = scratch + member() * C, *asked = queries + start[i];
        weigh(&a, i, n, p);
        for (int begin = 0; begin < n; begin += BLOCK) {
            const int size = n - begin < BLOCK ? n - begin : BLOCK;
            uint32_t carry[BLOCK], below[BLOCK];
            float *score = p + begin, *told = asked + begin;
#pragma omp simd
            for (int j = 0; j < size; j++) {
                carry[j] = score[j] < even;
                below[j] = 0;
            }
            for (int64_t w = 0; w < count; w++) {
                const uint32_t mask = w < count - 1 ? UINT32_MAX : last;
                int64_t *word = words[w] + start[i] + begin;
#pragma omp simd
                for (int j = 0; j < size; j++) {
                    const uint32_t old = (uint32_t)word[j], new = (old << 1 & mask) | carry[j];
                    carry[j] = old >> 31;
                    below[j] += ones(new);
                    word[j] = (int64_t)new;
                }
            }
#pragma omp simd
            for (int j = 0; j < size; j++) {
                const float one = told[j] + 1.0f, all = one > most ? most : one;
                told[j] = all;
                score[j] = -((float)(int32_t)below[j] / (all < 1.0f ? 1.0f : all));
            }
        }
        hole[i] = over(&a, i) ? left(&a, i, lowest_free(&a, p, pos + start[i], n)) : -1;
    }
    free(scratch);
    return 0;
}

/* -- HashEvict ---------------------------------------------------------------------------- */

static inline float entry(const void *row, int kind, int64_t d) {
    if (kind == F32)
        return ((const float *)row)[d];
    const uint16_t x = ((const uint16_t *)row)[d];
    return kind == BF16 ? from_bf16(x) : from_f16(x);
}

/* The signs of x . matrix [D, B] as bits. With B known the sums stay in registers. */
static inline __attribute__((always_inline)) uint64_t signs(
    const void *x, int kind, int64_t D, const float *matrix, const int B) {
    float sums[64] = {0};
    for (int64_t d = 0; d < D; d++) {
        const float one = entry(x, kind, d);
#pragma omp simd
        for (int b = 0; b < B; b++)
            sums[b] += one * matrix[d * B + b];
    }
    uint64_t found = 0;
    for (int b = 0; b < B; b++)
        found |= (uint64_t)(sums[b] >= 0.0f) << b;
    return found;
}

static uint64_t encode(const void *x, int kind, int64_t D, const float *matrix, int B) {
    switch (B) {
    case 8:
        return signs(x, kind, D, matrix, 8);
    case 16:
        return signs(x, kind, D, matrix, 16);
    case 32:
        return signs(x, kind, D, matrix, 32);
    default:
        return signs(x, kind, D, matrix, B);
    }
}

static inline int64_t stored(const void *code, int size, int64_t row) {
    return size == 2   ? ((const int16_t *)code)[row]
           : size == 4 ? ((const int32_t *)code)[row]
                       : ((const int64_t *)code)[row];
}

/* score = minus the bits in which the rows' codes differ from the probes; exact in float. */
static inline __attribute__((always_inline)) void differ(
    const void *code, const int size, int64_t begin, int n, const uint64_t *probes, int64_t P,
    float *score) {
    memset(score, 0, n * sizeof(float));
    for (int64_t i = 0; i < P; i++) {
        const uint64_t probe = probes[i];
#pragma omp simd
        for (int j = 0; j < n; j++)
            score[j] -=
                (float)__builtin_popcountll(probe ^ (uint64_t)stored(code, size, begin + j));
    }
}

static inline char *row_of(void *rows, int64_t row, int64_t bytes) {
    return (char *)rows + row * bytes;
}

/* code: of `wide` bytes; saved_*: what the twin calls spare. */
int minikv_hash_append(
    int kind, int wide, int64_t H, int64_t P, int64_t D, int64_t B, const void *probe,
    const void *key, const void *value, const float *matrix, const int64_t *start,
    const int64_t *length, const int64_t *cap, int64_t *hole, const int64_t *position, void *k,
    void *v, int32_t *pos, void *code, void *saved_k, void *saved_v, int32_t *saved_pos,
    void *saved_code, int64_t width, int64_t sinks, int64_t recent, int64_t pinned) {
    const int64_t each = D * (kind == F32 ? 4 : 2), newest = *position - 1;
    uint64_t *probes = room(P, sizeof(uint64_t));
    float *score = room(width, sizeof(float));
    const int good = probes && score;
    for (int64_t h = 0; good && h < H; h++) {
        if (hole[h] >= 0 || length[h] < cap[h])
            continue;
        const int n = (int)length[h];
        const int32_t *at = pos + start[h];
        for (int64_t i = 0; i < P; i++)
            probes[i] = encode((const char *)probe + (h * P + i) * each, kind, D, matrix, (int)B);
        if (wide == 2)
            differ(code, 2, start[h], n, probes, P, score);
        else if (wide == 4)
            differ(code, 4, start[h], n, probes, P, score);
        else
            differ(code, 8, start[h], n, probes, P, score);
        int found = lowest(score, at, n, strict(newest, sinks, recent, pinned));
        if (found < 0)
            found = lowest(score, at, n, relaxed(newest, pinned));
        const int64_t row = start[h] + (found < 0 ? 0 : found);
        memcpy(row_of(saved_k, h, each), row_of(k, row, each), each);
        memcpy(row_of(saved_v, h, each), row_of(v, row, each), each);
        memcpy(row_of(saved_code, h, wide), row_of(code, row, wide), wide);
        saved_pos[h] = pos[row];
        hole[h] = row;
    }
    for (int64_t h = 0; good && h < H; h++) {
        const int64_t row = hole[h] >= 0 ? hole[h] : start[h] + length[h];
        const char *mine = (const char *)key + h * each;
        const uint64_t made = encode(mine, kind, D, matrix, (int)B);
        memcpy(row_of(k, row, each), mine, each);
        memcpy(row_of(v, row, each), (const char *)value + h * each, each);
        pos[row] = (int32_t)*position;
        if (wide == 2)
            ((int16_t *)code)[row] = (int16_t)made;
        else if (wide == 4)
            ((int32_t *)code)[row] = (int32_t)made;
        else
            ((int64_t *)code)[row] = (int64_t)made;
    }
    free(score);
    free(probes);
    return !good;
}
