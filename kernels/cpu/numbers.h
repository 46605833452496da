/* Numbers as torch stores them, and how they become float and back. */
#ifndef MINIKV_NUMBERS_H
#define MINIKV_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32, BF16, F16 };

typedef uint16_t bf16;

/* Numbers of a vector: as many as a register of this processor holds. Wider ones would compile, but
   live in memory, where a sum waits for itself. */
#if defined(__AVX512F__)
#define VEC 16
#elif defined(__AVX__)
#define VEC 8
#else
#define VEC 4
#endif

typedef float vec __attribute__((vector_size(4 * VEC)));
typedef uint32_t words __attribute__((vector_size(4 * VEC)));
typedef float v4 __attribute__((vector_size(16)));

/* The sum of every fourth number. */
static inline v4 by_fours(vec x) {
#if VEC == 4
    return x;
#else
    v4 part[VEC / 4];
    memcpy(part, &x, sizeof x);
#if VEC == 8
    return part[0] + part[1];
#else
    return (part[0] + part[2]) + (part[1] + part[3]);
#endif
#endif
}

static inline float total(vec x) {
    v4 four = by_fours(x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float from_bf16(bf16 x) { return bits_float((uint32_t)x << 16); }

static inline float from_f16(uint16_t x) {
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    bits = (x & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : float_bits(bits_float(bits) * 0x1p112f);
    return bits_float(bits | (uint32_t)(x & 0x8000) << 16);
}

/* To the nearest, ties to even, as torch rounds; NaN stays NaN. */
static inline bf16 to_bf16(float x) {
    uint32_t bits = float_bits(x);
    bf16 near = (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return x != x ? (bf16)0x7fc0 : near;
}

/* a * b + c, rounded once where the processor does that; elsewhere a library would, slowly. */
static inline float mad(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* exp for x <= 0, also -inf, to 2 units in the last place; smaller than -87 is 0. NaN stays NaN.
   Branch-free, so that a loop over it becomes vectors. */
static inline float exp_negative(float x) {
    float y = x < -87.0f ? -87.0f : x;
    float n = rintf(y * 1.44269504088896341f);
    float r = mad(n, -0.693145751953125f, y);
    r = mad(n, -1.42860682030941723212e-6f, r);
    float p = 1.9875691500e-4f;
    p = mad(p, r, 1.3981999507e-3f);
    p = mad(p, r, 8.3334519073e-3f);
    p = mad(p, r, 4.1665795894e-2f);
    p = mad(p, r, 1.6666665459e-1f);
    p = mad(p, r, 5.0000001201e-1f);
    p = mad(p, r * r, r + 1.0f);
    float made = p * bits_float((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : made;
}

#endif
