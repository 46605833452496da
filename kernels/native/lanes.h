/* Operations on vectors of floats, for code in which each lane is a query or a key. */
#ifndef MINIKV_LANES_H
#define MINIKV_LANES_H

#include "numbers.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 16")

enum { LANES = VEC };

typedef int32_t ivec __attribute__((vector_size(4 * VEC)));

/* x in all lanes. */
INLINE vec fill(float x) { return x - (vec){0}; }

/* The vector at x, which is aligned. */
INLINE vec load(const float *x) { return *(const vec *)x; }

/* Write v to x, which is aligned. */
INLINE void store(float *x, vec v) { *(vec *)x = v; }

/* a where `those` is -1, b where it is 0. */
INLINE vec where(ivec those, vec a, vec b) { return (vec)((those & (ivec)a) | (~those & (ivec)b)); }

/* The larger of a and b; a if that is NaN. */
INLINE vec larger(vec a, vec b) {
#if VEC == 16
    return _mm512_max_ps(b, a);
#elif VEC == 8
    return _mm256_max_ps(b, a);
#else
    return where(a < b, b, a);
#endif
}

/* Whether any lane is -1. */
INLINE int any(ivec those) {
    int32_t found = 0;
    for (int i = 0; i < VEC; i++) found |= those[i];
    return found != 0;
}

/* 2^x with a relative error of at most 2e-7. For x < -126 it is 0 (with AVX-512 perhaps a subnormal
   number), for x >= 126 at least 2^126. NaN stays NaN. */
INLINE vec power(vec x) {
#if defined(__AVX512DQ__)
    vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    vec y = larger(x, fill(-126.0f));
    y = -larger(-y, fill(-126.0f));
    vec whole = (y - 0.5f + 0x1.8p23f) - 0x1.8p23f; /* -126 .. 126: y, rounded down or nearly so */
    vec f = y - whole;                              /* 0 .. 1 */
#endif
    vec p = f * 1.8775766e-3f + 8.9893406e-3f;
    p = p * f + 5.5826318e-2f;
    p = p * f + 2.4015361e-1f;
    p = p * f + 6.9315308e-1f;
    p = p * f + 9.9999994e-1f;
#if defined(__AVX512DQ__)
    return _mm512_scalef_ps(p, x);
#else
    p *= (vec)((__builtin_convertvector(whole, ivec) + 127) << 23);
    return (vec)((ivec)p & ~(x < fill(-126.0f)));
#endif
}

#endif
