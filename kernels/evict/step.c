/* The end of a decode step: update the statistics of all rows, and choose the victim of each head
   that is over its cap. The arguments are those of kernels/evict/cpu.py and of `lowest` in
   kernels/decode/plain.py.

   The rows that may leave have positions in a span, and the victim is the row with the lowest score
   in it. H2O keeps the n newest rows, and RoCo chooses among the n smallest variances. The
   threshold for this is guessed and checked by counting, and found by bisection if the guess is
   wrong. Nothing is sorted. */

/* Products are rounded before they are added, as in torch: a row that always got the same
   probability has variance 0. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "span.h"
#include "threads.h"

/* THREADS_FROM: from this many probabilities on, about 50 us of one thread, threads are faster.
   BLOCK: how many rows are computed at once, so that their data stays in the L1 cache. */
enum { THREADS_FROM = 30000, BLOCK = 256 };

/* The common arguments of the step functions: logits [L, H, G, C], lse [L, H, G], and the fields of
   `Rows` in kernels/decode/plain.py. */
typedef struct {
    int64_t L, H, G, C;
    const float *logits, *lse;
    const int64_t *start, *length, *cap;
    const int32_t *pos;
    int64_t newest, sinks, recent, pinned;
} Heads;

/* The first parameters of every step function, and a `Heads` of them. */
#define HEAD_PARAMS                                                                          \
    int64_t L, int64_t H, int64_t G, int64_t C, const float *logits, const float *lse,       \
        const int64_t *start, const int64_t *length, const int64_t *cap, const int32_t *pos, \
        const int64_t *newest, int64_t sinks, int64_t recent, int64_t pinned, int64_t *free_slot
#define HEAD_FACTS \
    {L, H, G, C, logits, lse, start, length, cap, pos, *newest, sinks, recent, pinned}

/* p [n] = the probabilities of head i's rows, exp(logit - lse), averaged over its G queries. */
static void mean_probs(const Heads *a, int64_t i, int n, float *p) {
    const float *x = a->logits + i * a->G * a->C, *sums = a->lse + i * a->G;
    for (int64_t g = 0; g < a->G; g++, x += a->C) {
        const float lse = sums[g];
        if (!g) {
#pragma omp simd
            for (int j = 0; j < n; j++) p[j] = exp_negative(x[j] - lse);
        } else {
#pragma omp simd
            for (int j = 0; j < n; j++) p[j] += exp_negative(x[j] - lse);
        }
    }
    if (a->G > 1) {
        const float group = (float)a->G;
#pragma omp simd
        for (int j = 0; j < n; j++) p[j] /= group;
    }
}

/* Whether head i is over its cap. */
static inline int over(const Heads *a, int64_t i) { return a->length[i] > a->cap[i]; }

/* The victim of head i as an index into the columns; the first row if none was found. */
static inline int64_t victim_row(const Heads *a, int64_t i, int found) {
    return a->start[i] + (found < 0 ? 0 : found);
}

/* How many threads to use: one, or all that torch's own loops use. A team of another size would
   make OpenMP end the other threads and start them again. */
static int thread_count(const Heads *a) {
    int64_t weights = 0;
    for (int64_t i = 0; i < a->L * a->H; i++) weights += a->length[i] * a->G;
    return weights < THREADS_FROM ? 1 : (int)most_threads();
}

/* The position of the oldest of the n newest unpinned rows. There are at least n such rows, and
   their positions differ. */
static int32_t recent_edge(const int32_t *pos, int rows, int64_t pinned, int64_t newest, int n) {
    int64_t high = newest + 1; /* fewer than n rows are at it or later */
    /* Each missing row moves the guess by one, which cannot lead below the edge. */
    for (int i = 0, late = 0; i < 8; i++) {
        const int64_t guess = high - (n - late);
        if (guess <= pinned) break;
        late = count_within(pos, rows, (Span){to_int32(guess), INT32_MAX});
        if (late == n) return to_int32(guess);
        if (late > n) break;
        high = guess;
    }
    int64_t low = pinned < INT32_MIN ? INT32_MIN : pinned; /* n rows are at it or later */
    if (count_within(pos, rows, (Span){to_int32(high), INT32_MAX}) >= n)
        high = (int64_t)INT32_MAX + 1; /* rows beyond the newest position, which no cache has */
    while (low + 1 < high) {
        const int64_t middle = low + (high - low) / 2;
        const int late = count_within(pos, rows, (Span){to_int32(middle), INT32_MAX});
        if (late == n) return to_int32(middle);
        if (late > n)
            low = middle;
        else
            high = middle;
    }
    return to_int32(low);
}

/* The victim under H2O: of the evictable rows that are older than the newest_rows newest ones, the
   one with the lowest sum; if there is none, of all evictable rows; -1 if there is none either. */
static int h2o_victim(
    const Heads *a, const float *sums, const int32_t *pos, int n, int64_t newest_rows
) {
    const int unpinned = count_within(pos, n, (Span){to_int32(a->pinned), INT32_MAX});
    if (!unpinned) return -1;
    int64_t count = newest_rows < unpinned - 1 ? newest_rows : unpinned - 1;
    count = count < 1 ? 1 : count;
    const int32_t before = recent_edge(pos, n, a->pinned, a->newest, (int)count);
    Span all = evictable_span(a->newest, a->sinks, a->recent, a->pinned);
    if (!count_within(pos, n, all)) all = fallback_span(a->newest, a->pinned);
    Span older = all;
    if (before == INT32_MIN) return lowest(sums, pos, n, all);
    older.high = older.high < before - 1 ? older.high : before - 1;
    const int found = lowest(sums, pos, n, older);
    return found >= 0 ? found : lowest(sums, pos, n, all);
}

/* H2O (arXiv 2306.14048, section 4). Adds this step's probabilities to sums [R] and writes each
   head's victim, a row of the arena, or -1, to free_slot [L, H]. newest_rows [L, H]: how many of
   the newest rows are kept. Returns 0, or 1 if there is no memory; then nothing was written. */
int minikv_h2o_step(HEAD_PARAMS, float *sums, const int64_t *newest_rows) {
    const Heads a = HEAD_FACTS;
    const int threads = thread_count(&a);
    float *memory = scratch(threads * C, sizeof(float));
    if (!memory) return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < L * H; i++) {
        const int n = (int)length[i];
        float *p = memory + this_thread() * C, *total = sums + start[i];
        mean_probs(&a, i, n, p);
#pragma omp simd
        for (int j = 0; j < n; j++) total[j] += p[j];
        free_slot[i] =
            over(&a, i)
                ? victim_row(&a, i, h2o_victim(&a, total, pos + start[i], n, newest_rows[i]))
                : -1;
    }
    free(memory);
    return 0;
}

/* How many rows in the span have a variance below the limit. */
static int count_below(const float *variance, const int32_t *pos, int n, Span s, float limit) {
    int found = 0;
#pragma omp simd reduction(+ : found)
    for (int j = 0; j < n; j++) found += within(s, pos[j]) & (variance[j] < limit);
    return found;
}

/* The victim under RoCo: of the evictable rows whose variance is at most the steady_rows-th
   smallest, the one with the lowest mean; -1 if there is none. If fewer rows are evictable, all of
   them are candidates. May overwrite the mean of the other rows with NaN. */
static int roco_victim(
    const Heads *a, float *mean, const float *variance, const int32_t *pos, int n,
    int64_t steady_rows
) {
    Span s = evictable_span(a->newest, a->sinks, a->recent, a->pinned);
    int rows = count_within(pos, n, s);
    if (!rows) {
        s = fallback_span(a->newest, a->pinned);
        rows = count_within(pos, n, s);
    }
    const int found = lowest(mean, pos, n, s);
    if (found < 0) return -1;
    int64_t nth = steady_rows < rows ? steady_rows : rows;
    nth = nth < 1 ? 1 : nth;
    /* The row with the lowest mean nearly always has one of the smallest variances. */
    if (count_below(variance, pos, n, s, variance[found]) < nth) return found;
    /* Variances are not negative, so their bits are ordered as they are. Fewer than nth are below
       `low`. */
    uint32_t low = 0, high = float_bits(variance[found]);
    while (low + 1 < high) {
        const uint32_t middle = low + (high - low) / 2;
        const int below = count_below(variance, pos, n, s, bits_float(middle));
        if (below < nth)
            low = middle;
        else
            high = middle;
        if (below == nth) break;
    }
    const float limit = bits_float(high);
#pragma omp simd
    for (int j = 0; j < n; j++) mean[j] = variance[j] < limit ? mean[j] : NAN;
    return lowest(mean, pos, n, s);
}

/* RoCo (arXiv 2402.06262, section 4.2). Adds this step's p, p * p and 1 to sums, squares and count
   [R]. steady_rows [L, H]: how many rows with the smallest variances are candidates. Returns as
   minikv_h2o_step. */
int minikv_roco_step(
    HEAD_PARAMS, float *sums, float *squares, float *count, const int64_t *steady_rows
) {
    const Heads a = HEAD_FACTS;
    const int threads = thread_count(&a);
    float *memory = scratch(2 * threads * C, sizeof(float));
    if (!memory) return 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < L * H; i++) {
        const int n = (int)length[i];
        float *mean = memory + 2 * this_thread() * C, *variance = mean + C;
        float *sum = sums + start[i], *square = squares + start[i], *seen = count + start[i];
        mean_probs(&a, i, n, mean);
#pragma omp simd
        for (int j = 0; j < n; j++) {
            const float p = mean[j], total = sum[j] + p, power = square[j] + p * p;
            const float seen_by = seen[j] + 1.0f, queries = seen_by < 1.0f ? 1.0f : seen_by;
            sum[j] = total;
            square[j] = power;
            seen[j] = seen_by;
            const float middle = total / queries, varies = power / queries - middle * middle;
            mean[j] = middle;
            variance[j] = varies > 0.0f ? varies : 0.0f;
        }
        free_slot[i] =
            over(&a, i)
                ? victim_row(
                      &a, i, roco_victim(&a, mean, variance, pos + start[i], n, steady_rows[i])
                  )
                : -1;
    }
    free(memory);
    return 0;
}

/* lowest: in each of the F heads that is over its cap, free_slot gets the row with the lowest
   score, of equal scores the one with the smallest position; the first row if none may leave. score
   and pos [F, C]; start, over and free_slot [F]. A row whose score is infinite or NaN may not
   leave. */
void minikv_lowest(
    int64_t F, int64_t C, const float *score, const int64_t *pos, const int64_t *start,
    const uint8_t *over, int64_t *free_slot
) {
    for (int64_t i = 0; i < F; i++, score += C, pos += C) {
        if (!over[i]) continue;
        float least = INFINITY;
#pragma omp simd reduction(min : least)
        for (int64_t j = 0; j < C; j++) least = score[j] < least ? score[j] : least;
        int64_t oldest = INT64_MAX, found = 0;
        for (int64_t j = 0; j < C; j++)
            if (score[j] == least && least < INFINITY && pos[j] < oldest) {
                oldest = pos[j];
                found = j;
            }
        free_slot[i] = start[i] + found;
    }
}
