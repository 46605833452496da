/* Eviction before attention, for all heads of all layers: in each full head, the victim's row
   becomes that of the new token, after it was copied aside. Which row leaves is the rule of
   StreamingLLM, L2 or Random; the specification is in the files of these policies. */
#include "span.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* The rules, as the Python file passes them. */
enum { STREAMING, L2, RANDOM };

/* THREADS_FROM: from about so many rows on, 130 to 320 us of one thread on a Xeon, two are faster.
 */
enum { THREADS_FROM = 200000 };

/* One round of splitmix64 (Steele et al. 2014), as in kernels/torch/counter_rng.py. */
static inline uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* score [n] of rows at positions pos [n]: the lowest leaves. norm [n]: for L2. state: for RANDOM.
 */
static void find_scores(
    int rule, int64_t n, const int32_t *pos, int64_t sinks, const float *norm, uint64_t state,
    float *score
) {
    if (rule == STREAMING) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            score[j] = (float)(pos[j] >= sinks ? pos[j] : -pos[j]);
    } else if (rule == L2) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            score[j] = -norm[j];
    } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            const uint64_t drawn = mixed(state ^ mixed((uint64_t)(int64_t)pos[j])) >> 41;
            score[j] = ((float)(int64_t)drawn + 0.5f) * 0x1p-23f;
        }
    }
}

/* See kernels/cpu/overwrite.py. Arguments of heads [L, H]; columns: `count` columns of sizes[i]
   bytes a row, and where their rows are copied, a row for each head. norm [R] and seed are for
   their rules. Returns 0, or 1 if there is no memory; then nothing was written. */
int minikv_overwrite(
    int rule, int64_t L, int64_t H, const int64_t *start, const int64_t *length, const int64_t *cap,
    const int32_t *pos, const int64_t *newest, int64_t sinks, int64_t recent, int64_t pinned,
    const float *norm, int64_t seed, int64_t *free_slot, int64_t *slot, int64_t count,
    const char *const *column, char *const *undo, const int64_t *sizes
) {
    int64_t most = 0, all = 0;
    for (int64_t i = 0; i < L * H; i++) {
        most = length[i] > most ? length[i] : most;
        all += length[i];
    }
#ifdef _OPENMP
    const int threads = all > THREADS_FROM ? omp_get_max_threads() : 1;
#else
    const int threads = 1;
    (void)all;
#endif
    float *memory = scratch(threads * most, sizeof(float));
    if (!memory)
        return 1;
    const int64_t last = *newest - 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < L * H; i++) {
        if (free_slot[i] >= 0 || length[i] < cap[i])
            continue;
#ifdef _OPENMP
        float *score = memory + omp_get_thread_num() * most;
#else
        float *score = memory;
#endif
        const int32_t *at = pos + start[i];
        uint64_t state = mixed((uint64_t)seed ^ mixed((uint64_t)(i / H)));
        state = mixed(state ^ mixed((uint64_t)(i % H)));
        state = mixed(state ^ mixed((uint64_t)*newest));
        find_scores(rule, length[i], at, sinks, norm ? norm + start[i] : NULL, state, score);
        const int n = (int)length[i];
        int found = lowest(score, at, n, evictable_span(last, sinks, recent, pinned));
        if (found < 0)
            found = lowest(score, at, n, fallback_span(last, pinned));
        const int64_t row = start[i] + (found < 0 ? 0 : found);
        for (int64_t c = 0; c < count; c++)
            memcpy(undo[c] + i * sizes[c], column[c] + row * sizes[c], sizes[c]);
        slot[i] = free_slot[i] = row;
    }
    free(memory);
    return 0;
}
