/* Draw a token from logits without sorting them. See kernels/sample/plain.py.

   Tokens are put into bins by their logits, and the sums of the bins tell which bin has the wanted
   token. Only the tokens of that bin are examined again, in bins of 8 bits of their logits. Masses
   are whole numbers, so sums do not depend on the order. */
#include "span.h"

enum { BINS = 2048, DIGITS = 256, BLOCK = 64, TILE = 1024 };

/* The scale is at most 2^44, so a token with a probability of 2 to this power has mass 0. */
#define LEAST_POWER -46.0

/* A number of tokens, and their mass. */
typedef struct {
    int64_t count, mass;
} Sum;

/* n logits, the mass and the bin of each, the sums of all bins, and memory for n ids. */
typedef struct {
    int64_t n;
    const float *logits;
    int64_t *mass;
    uint16_t *bin;
    uint32_t *ids;
    Sum sums[BINS];
} Tokens;

/* The double with these bits. */
static inline double bits_double(uint64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

/* The bits of a double. */
static inline uint64_t double_bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

/* 2^x for -1000 < x <= 0, to 2 units in the last place. There are no branches, so that loops over
   it become vectors. Added to 1.5 * 2^52, x is rounded to a whole number in the lowest bits. The
   polynomial is the series of exp, up to half of ln 2. */
static inline double power_of_two(double x) {
    const double shifted = x + 0x1.8p52, r = (x - (shifted - 0x1.8p52)) * 0x1.62e42fefa39efp-1;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return bits_double(double_bits(p) + (double_bits(shifted) << 52));
}

/* Fill mass, bin and sums. Returns the mass of the tokens that are at least `min_p` times as likely
   as the best one. No logits, not even NaN, make it write outside its memory. */
static int64_t weigh(Tokens *t, double temperature, double min_p, double scale) {
    /* Local copies of the pointers: otherwise the compiler assumes that a store may change `t`. */
    const float *logits = t->logits;
    int64_t *masses = t->mass;
    uint16_t *bin = t->bin;
    float most = -INFINITY, least = INFINITY;
#pragma omp simd reduction(max : most) reduction(min : least)
    for (int64_t i = 0; i < t->n; i++) {
        most = logits[i] > most ? logits[i] : most;
        least = logits[i] < least ? logits[i] : least;
    }
    /* A token is 2^x as likely as the best one, with x = (its logit - the best) * factor. An
       infinite factor would make NaN of a distance of 0. */
    const double best = most, factor = fmin(0x1.71547652b82fep+0 / temperature, 1e300);
    const double lowest = fmax((least - best) * factor, LEAST_POWER);
    const double bins = lowest < 0.0 ? (BINS - 1) / lowest : 0.0;
    int64_t likely = 0;
    memset(t->sums, 0, sizeof t->sums);
    for (int64_t begin = 0; begin < t->n; begin += TILE) {
        const int64_t end = begin + TILE < t->n ? begin + TILE : t->n;
#pragma omp simd reduction(+ : likely)
        for (int64_t i = begin; i < end; i++) {
            double x = (logits[i] - best) * factor;
            x = x > LEAST_POWER ? x : LEAST_POWER;
            const double chance = power_of_two(x), at = x * bins;
            /* Adding 2^52 leaves the number, rounded to a whole one, in the lowest bits. */
            const int64_t mass = double_bits(chance * scale + 0x1p52) & 0xfffffffffffff;
            masses[i] = mass;
            bin[i] = (uint16_t)(int32_t)(at < BINS - 1 ? at : BINS - 1);
            likely += chance >= min_p ? mass : 0;
        }
        for (int64_t i = begin; i < end; i++) {
            t->sums[bin[i]].count++;
            t->sums[bin[i]].mass += masses[i];
        }
    }
    return likely;
}

/* A number that is smaller the larger the logit is, and the same for 0 and -0. */
static inline uint32_t descending(float x) {
    const uint32_t bits = float_bits(x + 0.0f);
    return bits >> 31 ? bits : ~bits & 0x7fffffff;
}

/* The unit of `limit`: tokens, or their mass. */
typedef enum { COUNT, MASS } Measure;

static inline int64_t measured(Sum s, Measure by) { return by == COUNT ? s.count : s.mass; }

/* The first of `bins` sums at which the running total, which begins at `before`, reaches the limit;
   the last one if none does. The sums before it are added to `before`. */
static int reaching(const Sum *sums, int bins, Measure by, int64_t limit, Sum *before) {
    int b = 0;
    while (b < bins - 1 && measured(*before, by) + measured(sums[b], by) < limit) {
        before->count += sums[b].count;
        before->mass += sums[b].mass;
        b++;
    }
    return b;
}

/* The ids of all tokens in a bin, in order; returns how many. */
static int64_t members(const Tokens *t, int bin, uint32_t *ids) {
    int64_t found = 0;
    for (int64_t begin = 0; begin < t->n; begin += BLOCK) {
        const int64_t end = begin + BLOCK < t->n ? begin + BLOCK : t->n;
        int some = 0;
#pragma omp simd reduction(| : some)
        for (int64_t i = begin; i < end; i++) some |= t->bin[i] == bin;
        if (some)
            for (int64_t i = begin; i < end; i++)
                if (t->bin[i] == bin) ids[found++] = (uint32_t)i;
    }
    return found;
}

/* The first token, from the largest logit down, at which the count of tokens or their mass reaches
   the limit. `end` gets the mass of all tokens up to it. -1 if that token has no mass. */
static int64_t token_at(const Tokens *t, Measure by, int64_t limit, int64_t *end) {
    Sum before = {0, 0};
    const int bin = reaching(t->sums, BINS, by, limit, &before);
    *end = before.mass;
    if (!t->sums[bin].mass) return -1; /* the limit is a count, or a logit is not finite */
    uint32_t *ids = t->ids, differ = 0;
    int64_t found = members(t, bin, ids);
    for (int64_t j = 1; j < found; j++)
        differ |= descending(t->logits[ids[j]]) ^ descending(t->logits[ids[0]]);
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (!(differ >> shift & (DIGITS - 1))) continue; /* all have the same eight bits */
        Sum sums[DIGITS] = {0};
        for (int64_t j = 0; j < found; j++) {
            Sum *own = &sums[descending(t->logits[ids[j]]) >> shift & (DIGITS - 1)];
            own->count++;
            own->mass += t->mass[ids[j]];
        }
        const uint32_t digit = reaching(sums, DIGITS, by, limit, &before);
        int64_t stay = 0;
        for (int64_t j = 0; j < found; j++)
            if ((descending(t->logits[ids[j]]) >> shift & (DIGITS - 1)) == digit)
                ids[stay++] = ids[j];
        found = stay;
    }
    /* All remaining logits are equal, and their ids are in order. */
    int64_t j = 0;
    for (; j < found; j++) {
        before.count++;
        before.mass += t->mass[ids[j]];
        if (measured(before, by) >= limit) break;
    }
    *end = before.mass;
    return ids[j < found ? j : found - 1];
}

/* drawn: draw a token from logits [n] after top_k, top_p and min_p; 0 if a logit is not finite.
   point: 0 <= point < 1, the position of the token in the remaining mass; scale: the mass of the
   best token. Returns 0, or 1 if there is no memory. */
int minikv_drawn(
    int64_t n, const float *logits, double temperature, int64_t top_k, double top_p, double min_p,
    double point, double scale, int64_t *token
) {
    Tokens *t = scratch(1, sizeof(Tokens));
    char *memory = scratch(n, sizeof(int64_t) + sizeof(uint32_t) + sizeof(uint16_t));
    if (!t || !memory) {
        free(t);
        free(memory);
        return 1;
    }
    t->n = n;
    t->logits = logits;
    t->mass = (int64_t *)memory;
    t->ids = (uint32_t *)(t->mass + n);
    t->bin = (uint16_t *)(t->ids + n);
    const int64_t likely = weigh(t, temperature, min_p, scale);
    int64_t kept = 0;
    for (int b = 0; b < BINS; b++) kept += t->sums[b].mass;
    if (top_k && top_k < n) token_at(t, COUNT, top_k, &kept);
    if (top_p < 1.0) {
        const int64_t least = (int64_t)ceil((double)kept * top_p);
        token_at(t, MASS, least > 1 ? least : 1, &kept);
    }
    kept = likely < kept ? likely : kept;
    const int64_t found = token_at(t, MASS, (int64_t)((double)kept * point) + 1, &kept);
    *token = found < 0 ? 0 : found; /* none has a mass if a logit is not finite */
    free(t);
    free(memory);
    return 0;
}
