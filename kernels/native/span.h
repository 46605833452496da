/* Finds the rows of a head that a decode step may evict, and the one with the lowest score. */
#ifndef MINIKV_SPAN_H
#define MINIKV_SPAN_H

#include "numbers.h"

#include <stdlib.h>

/* Memory for `count` items of `size` bytes, to be freed by the caller; NULL if there is none. For
   no items, it is still an address. */
static inline void *scratch(int64_t count, int64_t size) { return malloc(count * size + 1); }

/* Positions low .. high. */
typedef struct {
    int32_t low, high;
} Span;

/* The nearest int32. */
static inline int32_t to_int32(int64_t x) {
    return x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : (int32_t)x;
}

/* Positions of the evictable rows: see `Rows` in kernels/decode/plain.py. */
static inline Span evictable_span(int64_t newest, int64_t sinks, int64_t recent, int64_t pinned) {
    return (Span){to_int32(sinks > pinned ? sinks : pinned), to_int32(newest - recent)};
}

/* Positions of the rows that are evictable if no row is in `evictable_span`. */
static inline Span fallback_span(int64_t newest, int64_t pinned) {
    return (Span){to_int32(pinned), to_int32(newest - 1)};
}

/* Whether a position is in the span. */
static inline int within(Span s, int32_t at) { return (at >= s.low) & (at <= s.high); }

/* The number of rows, of pos [n], in the span. */
static inline int count_within(const int32_t *pos, int n, Span s) {
    int found = 0;
#pragma omp simd reduction(+ : found)
    for (int j = 0; j < n; j++) found += within(s, pos[j]);
    return found;
}

/* Of n rows with score and pos [n], the index of the row with the lowest score among those whose
   position is in the span. Of equal scores, the smallest position wins. -1 if there is none. A row
   whose score is NaN does not leave. */
static inline int lowest(const float *score, const int32_t *pos, int n, Span s) {
    float least = INFINITY;
#pragma omp simd reduction(min : least)
    for (int j = 0; j < n; j++) {
        float x = within(s, pos[j]) ? score[j] : INFINITY;
        least = x < least ? x : least;
    }
    int ties = 0, first = INT32_MAX;
#pragma omp simd reduction(+ : ties) reduction(min : first)
    for (int j = 0; j < n; j++) {
        int tied = within(s, pos[j]) & (score[j] <= least);
        int here = tied ? j : INT32_MAX;
        ties += tied;
        first = here < first ? here : first;
    }
    if (ties < 2) return ties ? first : -1;
    int32_t oldest = INT32_MAX;
#pragma omp simd reduction(min : oldest)
    for (int j = 0; j < n; j++) {
        int32_t at = within(s, pos[j]) & (score[j] <= least) ? pos[j] : INT32_MAX;
        oldest = at < oldest ? at : oldest;
    }
    first = INT32_MAX;
#pragma omp simd reduction(min : first)
    for (int j = 0; j < n; j++) {
        int same = within(s, pos[j]) & (pos[j] == oldest) & (score[j] <= least);
        int here = same ? j : INT32_MAX;
        first = here < first ? here : first;
    }
    return first;
}

#endif
