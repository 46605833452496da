/* Numbers as torch stores them, their conversion to float and back, and vectors of floats. */
#ifndef MINIKV_NUMBERS_H
#define MINIKV_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Dtypes, as the Python files pass them. */
enum { F32, BF16, F16, INT8 };

/* For functions that only other files of this library call. */
#define HIDDEN __attribute__((visibility("hidden")))

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

/* Floats of a vector: as many as a register of this processor holds. Wider vectors would compile,
   but the compiler would keep them in memory, and sums would be slow. */
#if defined(__AVX512F__)
#define VEC 16
#elif defined(__AVX__)
#define VEC 8
#else
#define VEC 4
#endif

typedef float vec __attribute__((vector_size(4 * VEC)));
typedef uint32_t uvec __attribute__((vector_size(4 * VEC)));
typedef float v4 __attribute__((vector_size(16)));

/* Four sums: result i is x[i] + x[i + 4] + x[i + 8] + ... */
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

/* The sum of all numbers of x. */
static inline float sum_vec(vec x) {
    v4 four = by_fours(x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The float with these bits. */
static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The bits of a float. */
static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* A bfloat16 as a float. */
static inline float from_bf16(bf16 x) { return bits_float((uint32_t)x << 16); }

/* A float16 as a float, including infinity, NaN and subnormal numbers. */
static inline float from_f16(uint16_t x) {
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    bits = (x & 0x7c00) == 0x7c00 ? bits | 0x7f800000 : float_bits(bits_float(bits) * 0x1p112f);
    return bits_float(bits | (uint32_t)(x & 0x8000) << 16);
}

/* Bytes of a number of dtype `kind`. */
static inline long item_size(int kind) { return kind == INT8 ? 1 : kind == F32 ? 4 : 2; }

/* Number i of a row of dtype `kind`, which is not F16. */
static inline float number_at(const void *row, int kind, int64_t i) {
    if (kind == INT8) return ((const int8_t *)row)[i];
    return kind == BF16 ? from_bf16(((const bf16 *)row)[i]) : ((const float *)row)[i];
}

/* The nearest bfloat16, ties to even, as torch rounds. NaN stays NaN. */
static inline bf16 to_bf16(float x) {
    uint32_t bits = float_bits(x);
    bf16 rounded = (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return x != x ? (bf16)0x7fc0 : rounded;
}

/* Write x as number i of a row of bfloat16 or float32. */
static inline void store_number(void *row, int kind, int64_t i, float x) {
    if (kind == BF16)
        ((bf16 *)row)[i] = to_bf16(x);
    else
        ((float *)row)[i] = x;
}

/* a * b + c, rounded once if the processor has an instruction for it, otherwise twice, because the
   library's fmaf is slow. */
static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* exp(x) for x <= 0, including -inf, to 2 units in the last place; 0 for x < -87. NaN stays NaN.
   There are no branches, so that loops over it become vectors. Polynomial: Cephes, expf. */
static inline float exp_negative(float x) {
    float y = x < -87.0f ? -87.0f : x;
    float n = rintf(y * 1.44269504088896341f);
    float r = multiply_add(n, -0.693145751953125f, y);
    r = multiply_add(n, -1.42860682030941723212e-6f, r);
    float p = 1.9875691500e-4f;
    p = multiply_add(p, r, 1.3981999507e-3f);
    p = multiply_add(p, r, 8.3334519073e-3f);
    p = multiply_add(p, r, 4.1665795894e-2f);
    p = multiply_add(p, r, 1.6666665459e-1f);
    p = multiply_add(p, r, 5.0000001201e-1f);
    p = multiply_add(p, r * r, r + 1.0f);
    float power = p * bits_float((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : power;
}

#endif
