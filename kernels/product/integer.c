/* Integer matrix products: packed weights of eight or four bits times activations that are
   quantized to eight bits. See `int8_product` in kernels/product/cpu.py.

   A panel is 64 rows and some columns of the weights, in the order in which they are multiplied:
   four columns of a row make a 32-bit word. A panel stays in the L1 cache while all activations are
   multiplied by it. Sums inside a block are sums of integers, so every variant below gives the same
   result. */
#include "row.h"

#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

/* PART: columns of a panel. SPAN: its rows. ROWS: rows of activations that are multiplied at a
   time. CHUNK: rows of activations whose sums stay in the L2 cache. FEW: up to this many rows, a
   panel of eight bits is not worthwhile. AHEAD, NEAR: as in product.c. PART and FEW are measured
   (docs/measurements/cpu.md). */
enum { SPAN = 64, ROWS = 6, CHUNK = 86 * ROWS };
#ifdef __AMX_TILE__
enum { AHEAD = 6144, NEAR = 2 };
#else
enum { AHEAD = 2048, NEAR = 3 };
#endif
#ifdef __AVX512VNNI__
enum { PART = 512, FEW = 6 };
#else
enum { PART = 128, FEW = 8 };
#endif

/* LANES: numbers of a vector. WIDE: vectors of rows of weights that are multiplied at a time; the
   ROWS x WIDE vectors of sums stay in registers. OFFSET: added to a weight of eight bits where the
   instruction takes one factor as unsigned. PAIRS: no instruction multiplies four bytes and adds
   them, so eight bits are widened to sixteen. KEPT: there are enough registers for the float sums
   over blocks too. */
#if defined(__AVX512BW__)
enum { LANES = 16, WIDE = 2, KEPT = 1 };
#elif defined(__AVX2__)
enum { LANES = 8, WIDE = 2, KEPT = 0 };
#else
enum { LANES = 4, WIDE = 4, KEPT = 0 };
#endif

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))
enum { PAIRS = 0, OFFSET = 128 };
#elif defined(__AVX2__)
enum { PAIRS = 1, OFFSET = 0 };
#else
enum { PAIRS = 0, OFFSET = 0 };
#endif

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float fvec __attribute__((vector_size(4 * LANES)));
typedef fvec floats __attribute__((aligned(4), may_alias)); /* in memory that holds single ones */
typedef uint8_t b16 __attribute__((vector_size(16)));
typedef int16_t h8 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

/* Numbers of two vectors in another order. */
#ifdef __clang__
#define SHUFFLE(TYPE, A, B, ...) ((TYPE)__builtin_shufflevector(A, B, __VA_ARGS__))
#else
#define SHUFFLE(TYPE, A, B, ...) ((TYPE)__builtin_shuffle(A, B, (TYPE){__VA_ARGS__}))
#endif

/* a + the sum of the products of the four bytes of each lane; w is unsigned if OFFSET is not 0. */
INLINE ivec dot_bytes(ivec a, ivec w, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512BW__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)a, (__m256i)w, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ivec)vdotq_s32((int32x4_t)a, (int8x16_t)w, (int8x16_t)x);
#else
    for (int i = 24; i >= 0; i -= 8) a += ((w << i) >> 24) * ((x << i) >> 24);
    return a;
#endif
}

#if defined(__AVX512BW__)
/* The sums of the products of two bytes, w unsigned, x signed: int16. */
INLINE ivec pair_bytes(ivec w, ivec x) {
    return (ivec)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
}
/* The sums of the products of two int16. */
INLINE ivec pair_halves(ivec w, ivec x) { return (ivec)_mm512_madd_epi16((__m512i)w, (__m512i)x); }
INLINE ivec add_halves(ivec a, ivec b) { return (ivec)_mm512_add_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
INLINE ivec pair_bytes(ivec w, ivec x) {
    return (ivec)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}
INLINE ivec pair_halves(ivec w, ivec x) { return (ivec)_mm256_madd_epi16((__m256i)w, (__m256i)x); }
INLINE ivec add_halves(ivec a, ivec b) { return (ivec)_mm256_add_epi16((__m256i)a, (__m256i)b); }
#else /* not used: PAIRS is 0 */
INLINE ivec pair_bytes(ivec w, ivec x) { return w * x; }
INLINE ivec pair_halves(ivec w, ivec x) { return w * x; }
INLINE ivec add_halves(ivec a, ivec b) { return a + b; }
#endif

/* a * b + c, rounded once exactly where `multiply_add` is; a compiler might choose otherwise.
 */
INLINE fvec fused(fvec a, float b, fvec c) {
#if defined(__AVX512BW__)
    return (fvec)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (fvec)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = multiply_add(a[i], b, c[i]);
    return c;
#endif
}

/* The 32-bit word at p in all lanes. */
INLINE ivec spread(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return (ivec){0} + word;
}

INLINE ivec load(const void *p) {
    ivec x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* The scale and the sums of one block of columns, for each row of a tile of activations. */
typedef struct {
    float scale[ROWS];
    float sum[ROWS];     /* of the codes, times the scale */
    int32_t start[ROWS]; /* the initial sum of products: cancels an offset of the weights */
} Block;

/* Bytes of a weight in a panel. */
INLINE int64_t width(int form) { return form == EIGHT && PAIRS ? 2 : 1; }

/* Add the products of one block of columns to the sums of `rows` rows of activations, `pitch`
   vectors apart, and WIDE vectors of weights. quads: words of four columns in the block. pairs
   [SPAN]: scale and middle of four bits, as bfloat16. */
INLINE void multiply(
    const int form, const int rows, int64_t quads, const char *panel, const char *x,
    const Block *block, const uint32_t *pairs, floats *sums, const int64_t pitch
) {
    ivec a[ROWS][WIDE];
    if (form == FOUR && PAIRS) {
        /* 15 * 127 * 2 * 8 < 2^15: a block of four bits has eight words, summed in sixteen bits. */
        ivec part[ROWS][WIDE];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++) part[r][v] = (ivec){0};
        for (int64_t i = 0; i < BLOCK / 4; i++) {
            ivec w[WIDE];
            for (int v = 0; v < WIDE; v++) w[v] = load(panel + (i * SPAN + v * LANES) * 4);
            for (int r = 0; r < rows; r++) {
                const ivec y = spread(x + (i * rows + r) * 4);
                for (int v = 0; v < WIDE; v++)
                    part[r][v] = add_halves(part[r][v], pair_bytes(w[v], y));
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++)
                a[r][v] = block->start[r] + pair_halves(part[r][v], (ivec){0} + 0x00010001);
    } else {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++)
                a[r][v] = (ivec){0} + (OFFSET || form == FOUR ? block->start[r] : 0);
        const int64_t steps = quads * width(form);
        for (int64_t i = 0; i < steps; i++) {
            ivec w[WIDE];
            for (int v = 0; v < WIDE; v++) w[v] = load(panel + (i * SPAN + v * LANES) * 4);
            for (int r = 0; r < rows; r++) {
                const ivec y = spread(x + (i * rows + r) * 4);
                for (int v = 0; v < WIDE; v++)
                    a[r][v] = PAIRS ? a[r][v] + pair_halves(w[v], y) : dot_bytes(a[r][v], w[v], y);
            }
        }
    }
    for (int v = 0; v < WIDE; v++) {
        fvec scale = {0}, middle = {0};
        if (form == FOUR) {
            words pair;
            memcpy(&pair, pairs + v * LANES, sizeof pair);
            scale = (fvec)(pair << 16);
            middle = (fvec)(pair & 0xffff0000u);
        }
        for (int r = 0; r < rows; r++) {
            const fvec product = __builtin_convertvector(a[r][v], fvec);
            floats *at = sums + r * pitch + v;
            if (form == FOUR) {
                *at = fused(scale * product, block->scale[r], *at);
                *at = fused(middle, block->sum[r], *at);
            } else {
                *at = fused(product, block->scale[r], *at);
            }
        }
    }
}

/* `multiply` for all rows and `columns` columns of a panel; sums [rows][SPAN]. If there are
   registers for them (KEPT), the sums stay there from block to block. */
INLINE void multiply_panel(
    const int form, const int rows, int64_t columns, const char *panel, const char *x,
    const Block *block, const uint32_t *pairs, float *sums
) {
    for (int o = 0; o < SPAN; o += WIDE * LANES) {
        floats *all = (floats *)(sums + o);
        fvec held[ROWS * WIDE];
        for (int i = 0; KEPT && i < rows * WIDE; i++)
            held[i] = all[i / WIDE * (SPAN / LANES) + i % WIDE];
        for (int64_t c = 0; c < columns; c += BLOCK) {
            const int64_t left = columns - c < BLOCK ? columns - c : BLOCK;
            multiply(
                form, rows, (left + 3) / 4, panel + c * SPAN * width(form) + o * 4,
                x + c * rows * width(form), block + c / BLOCK, pairs + c / BLOCK * SPAN + o,
                KEPT ? (floats *)held : all, KEPT ? WIDE : SPAN / LANES
            );
        }
        for (int i = 0; KEPT && i < rows * WIDE; i++)
            all[i / WIDE * (SPAN / LANES) + i % WIDE] = held[i];
    }
}

/* `multiply_panel` for a number of rows that is known only at run time. */
#define IF_ROWS(R, FORM) \
    if (rows == R) multiply_panel(FORM, R, columns, panel, x, block, pairs, sums);
#define MULTIPLY_ROWS(NAME, FORM)                                                               \
    static void NAME(                                                                           \
        int rows, int64_t columns, const char *panel, const char *x, const Block *block,        \
        const uint32_t *pairs, float *sums                                                      \
    ) {                                                                                         \
        IF_ROWS(1, FORM)                                                                        \
        IF_ROWS(2, FORM) IF_ROWS(3, FORM) IF_ROWS(4, FORM) IF_ROWS(5, FORM) IF_ROWS(ROWS, FORM) \
    }
MULTIPLY_ROWS(multiply_eight, EIGHT)
MULTIPLY_ROWS(multiply_four, FOUR)

/* Quantize n activations to codes of eight bits; returns their scale, or NaN if one of them is
   infinite or NaN. */
INLINE float quantize(const bf16 *x, int64_t n, int8_t *codes) {
    /* Without signs, the largest number has the largest bits, and NaN larger ones. */
    uint16_t bits = 0;
#pragma omp simd reduction(max : bits)
    for (int64_t i = 0; i < n; i++) {
        uint16_t a = x[i] & 0x7fff;
        bits = a > bits ? a : bits;
    }
    if (bits >= 0x7f80) {
        memset(codes, 0, (size_t)n);
        return NAN;
    }
    const float scale = bits ? from_bf16(bits) / 127.0f : 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const int32_t y = (int32_t)rintf(from_bf16(x[i]) / scale);
        codes[i] = (int8_t)(y > 127 ? 127 : y < -127 ? -127 : y);
    }
    return scale;
}

/* `quantize` of a block. With the constant number of columns of a whole block, it compiles to a few
   instructions. */
static float quantize_block(const bf16 *x, int64_t n, int8_t *codes) {
    return n == BLOCK ? quantize(x, BLOCK, codes) : quantize(x, n, codes);
}

/* A product of integers: x [t, n], its rows `pitch` apart, and the packed weights m. */
typedef struct {
    Matrix m;
    int64_t pitch;
    const bf16 *x;
    bf16 *out; /* [t, outs] */
} Product;

/* The number of parts of a row (a panel has the columns of one part), the columns of a part, and
   the bytes of a row of its activations in the order of `multiply`. */
INLINE int64_t parts_of(const Product *p) { return (p->m.n + PART - 1) / PART; }
INLINE int64_t columns_of(const Product *p, int64_t part) {
    const int64_t left = p->m.n - part * PART;
    return left < PART ? left : PART;
}
INLINE int64_t part_bytes(const Product *p) { return PART * width(p->m.form); }

/* Of four bits: the scales of the group of column `c`, from row `first` on. */
INLINE const bf16 *pairs_of(const Product *p, int64_t c, int64_t first) {
    return (const bf16 *)p->m.scales + (c / p->m.group * p->m.stride + first) * 2;
}

/* Quantize a block of activations of row r of a tile with `rows` rows, and write the codes in the
   order of `multiply`. */
static void load_block(
    const Product *p, const bf16 *x, int64_t columns, int r, int rows, char *out, Block *block
) {
    int8_t codes[BLOCK] = {0};
    const float scale = quantize_block(x, columns, codes);
    int32_t sum = 0;
    for (int64_t i = 0; i < BLOCK; i++) sum += codes[i];
    block->scale[r] = scale;
    block->sum[r] = scale * (float)sum;
    block->start[r] = -sum * (p->m.form == FOUR ? 8 : OFFSET);
    for (int64_t q = 0; q < (columns + 3) / 4; q++) {
        const int8_t *four = codes + q * 4;
        if (width(p->m.form) == 1) {
            memcpy(out + (q * rows + r) * 4, four, 4);
        } else { /* columns 0 and 2, then 1 and 3: see `load_eight` */
            const int16_t even[2] = {four[0], four[2]}, odd[2] = {four[1], four[3]};
            memcpy(out + (2 * q * rows + r) * 4, even, 4);
            memcpy(out + ((2 * q + 1) * rows + r) * 4, odd, 4);
        }
    }
}

/* `load_block` for all blocks of `rows` rows from row `first` on. From one part to the next, `out`
   advances by `stride` bytes and `blocks` by `tiles` * PART / BLOCK. */
static void load_tile(
    const Product *p, int64_t first, int rows, int64_t stride, int64_t tiles, char *out,
    Block *blocks
) {
    for (int64_t part = 0; part < parts_of(p); part++) {
        const int64_t columns = columns_of(p, part);
        for (int64_t c = 0; c < columns; c += BLOCK)
            for (int r = 0; r < rows; r++)
                load_block(
                    p, p->x + (first + r) * p->pitch + part * PART + c,
                    columns - c < BLOCK ? columns - c : BLOCK, r, rows,
                    out + part * stride + c * rows * width(p->m.form),
                    blocks + part * tiles * (PART / BLOCK) + c / BLOCK
                );
    }
}

/* Interleave the numbers of A and B: the lower half of each, or the upper half. */
#define LOWER_BYTES(A, B) SHUFFLE(b16, A, B, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define UPPER_BYTES(A, B) \
    SHUFFLE(b16, A, B, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LOWER_HALVES(A, B) SHUFFLE(h8, A, B, 0, 8, 1, 9, 2, 10, 3, 11)
#define UPPER_HALVES(A, B) SHUFFLE(h8, A, B, 4, 12, 5, 13, 6, 14, 7, 15)

/* Transpose four vectors of four words. */
INLINE void transpose_words(i4 *w) {
    const i4 a = SHUFFLE(i4, w[0], w[1], 0, 4, 1, 5), b = SHUFFLE(i4, w[0], w[1], 2, 6, 3, 7);
    const i4 c = SHUFFLE(i4, w[2], w[3], 0, 4, 1, 5), d = SHUFFLE(i4, w[2], w[3], 2, 6, 3, 7);
    w[0] = SHUFFLE(i4, a, c, 0, 1, 4, 5);
    w[1] = SHUFFLE(i4, a, c, 2, 3, 6, 7);
    w[2] = SHUFFLE(i4, b, d, 0, 1, 4, 5);
    w[3] = SHUFFLE(i4, b, d, 2, 3, 6, 7);
}

/* Make the panel of a part of eight-bit weights, from row `first` on. */
static void load_eight(const Product *p, int64_t first, int64_t part, char *panel) {
    static const int8_t none[PART];
    const int64_t columns = columns_of(p, part), left = p->m.outs - first;
    const int8_t *codes = p->m.weights;
    const int64_t more = part + 1 < parts_of(p) ? columns_of(p, part + 1) : 0;
    for (int64_t o = 0; o < SPAN; o += 4) {
        /* A row has too few bytes in a part for the processor to predict the next read. */
        for (int64_t i = o; i < o + 4 && i < left; i++)
            for (int64_t c = 0; c < more; c += 64)
                __builtin_prefetch(codes + (first + i) * p->m.n + (part + 1) * PART + c, 0, 2);
        for (int64_t c = 0; c < columns; c += 16) {
            i4 w[4];
            for (int i = 0; i < 4; i++) {
                const int8_t *at =
                    o + i < left ? codes + (first + o + i) * p->m.n + part * PART : none;
                w[i] = (i4){0};
                if (c + 16 <= columns)
                    memcpy(&w[i], at + c, 16);
                else
                    memcpy(&w[i], at + c, (size_t)(columns - c));
            }
            transpose_words(w);
            for (int i = 0; i < 4; i++) {
                const int64_t q = c / 4 + i;
                if (PAIRS) { /* each int16 is two bytes: the even ones, and the odd ones */
                    const h8 even = ((h8)w[i] << 8) >> 8, odd = (h8)w[i] >> 8;
                    memcpy(panel + (2 * q * SPAN + o) * 4, &even, 16);
                    memcpy(panel + ((2 * q + 1) * SPAN + o) * 4, &odd, 16);
                } else {
                    const b16 bytes = (b16)w[i] ^ (uint8_t)OFFSET;
                    memcpy(panel + (q * SPAN + o) * 4, &bytes, 16);
                }
            }
        }
    }
}

/* Make the panel of a part of four-bit weights, from row `first` on. */
static void load_four(const Product *p, int64_t first, int64_t part, char *panel) {
    const int64_t half = p->m.half;
    for (int side = 0; side < 2; side++) { /* each side has 16 bytes of a column */
        const int64_t tile = half == 16 ? side * 32 : 0, low = half == 16 ? tile : side * 16;
        const uint8_t *bytes =
            (const uint8_t *)p->m.weights + (first + tile) * (p->m.n / 2) + part * PART * half;
        bytes += half == 16 ? 0 : side * 16;
        for (int64_t q = 0; q < columns_of(p, part) / 4; q++) {
            b16 c[4], word[4];
            __builtin_prefetch(bytes + q * 4 * half + AHEAD, 0, NEAR);
            for (int i = 0; i < 4; i++) memcpy(&c[i], bytes + (q * 4 + i) * half, 16);
            const h8 ab = (h8)LOWER_BYTES(c[0], c[1]), cd = (h8)LOWER_BYTES(c[2], c[3]);
            const h8 ef = (h8)UPPER_BYTES(c[0], c[1]), gh = (h8)UPPER_BYTES(c[2], c[3]);
            word[0] = (b16)LOWER_HALVES(ab, cd);
            word[1] = (b16)UPPER_HALVES(ab, cd);
            word[2] = (b16)LOWER_HALVES(ef, gh);
            word[3] = (b16)UPPER_HALVES(ef, gh);
            for (int i = 0; i < 4; i++) {
                const b16 below = word[i] & 15, above = word[i] >> 4;
                memcpy(panel + (q * SPAN + low + i * 4) * 4, &below, 16);
                memcpy(panel + (q * SPAN + low + half + i * 4) * 4, &above, 16);
            }
        }
    }
}

/* Write the sums [rows][SPAN] of a panel to `out`, from row `first` and column `from` on. */
static void write_out(
    const Product *p, int64_t first, int64_t rows, int64_t from, const float *sums
) {
    const int64_t left = p->m.outs - from, count = left < SPAN ? left : SPAN;
    const bf16 *scales = p->m.scales;
    float scale[SPAN];
    for (int64_t o = 0; o < count; o++)
        scale[o] = p->m.form == EIGHT ? from_bf16(scales[from + o]) : 1.0f;
    for (int64_t r = 0; r < rows; r++) {
        bf16 *out = p->out + (first + r) * p->m.outs + from;
#pragma omp simd
        for (int64_t o = 0; o < count; o++) out[o] = to_bf16(sums[r * SPAN + o] * scale[o]);
    }
}

/* The product of t rows of activations, panel by panel; returns 0, or 1 if there is no memory. */
static int product(const Product *p, int64_t t) {
    const int64_t chunk = t < CHUNK ? t : CHUNK, tiles = (chunk + ROWS - 1) / ROWS;
    const int64_t parts = parts_of(p), bytes = part_bytes(p), stride = chunk * bytes;
    char *x = malloc((size_t)(parts * stride + 1));
    Block *blocks = malloc((size_t)(parts * tiles * (PART / BLOCK)) * sizeof *blocks + 1);
    int failed = !x || !blocks;
#pragma omp parallel if (t * p->m.n * p->m.outs > 65536)
    {
        float *sums = malloc((size_t)(chunk * SPAN) * sizeof *sums + 1);
        if (!sums)
#pragma omp atomic write
            failed = 1;
        char panel[SPAN * PART * 2] __attribute__((aligned(64)));
        uint32_t pairs[PART / BLOCK][SPAN] = {0};
#pragma omp barrier
        for (int64_t first = 0; first < t && !failed; first += chunk) {
            const int64_t rows = t - first < chunk ? t - first : chunk;
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r += ROWS)
                load_tile(
                    p, first + r, rows - r < ROWS ? (int)(rows - r) : ROWS, stride, tiles,
                    x + r * bytes, blocks + r / ROWS * (PART / BLOCK)
                );
#pragma omp for schedule(dynamic)
            for (int64_t from = 0; from < p->m.outs; from += SPAN) {
                memset(sums, 0, (size_t)(rows * SPAN) * sizeof *sums);
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t columns = columns_of(p, part);
                    if (p->m.form == EIGHT)
                        load_eight(p, from, part, panel);
                    else
                        load_four(p, from, part, panel);
                    for (int64_t c = 0; p->m.form == FOUR && c < columns; c += BLOCK) {
                        const bf16 *at = pairs_of(p, part * PART + c, from);
                        memcpy(pairs[c / BLOCK], at, sizeof pairs[0]);
                        if (part + 1 < parts) /* the scales of the next part are not adjacent */
                            for (int64_t i = 0; i < SPAN * 2; i += 32)
                                __builtin_prefetch(at + (PART / p->m.group) * p->m.stride * 2 + i);
                    }
                    for (int64_t r = 0; r < rows; r += ROWS)
                        (p->m.form == EIGHT ? multiply_eight : multiply_four)(
                            rows - r < ROWS ? (int)(rows - r) : ROWS, columns, panel,
                            x + part * stride + r * bytes,
                            blocks + (part * tiles + r / ROWS) * (PART / BLOCK), pairs[0],
                            sums + r * SPAN
                        );
                }
                write_out(p, first, rows, from, sums);
            }
        }
        free(sums);
    }
    free(x);
    free(blocks);
    return failed;
}

#ifdef __AVX2__
/* The sums of the products of four bytes, a unsigned, b signed. Two products must fit 16 bits. */
INLINE __m256i dot_bytes8(__m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), a, b);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), a, b);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#endif
}

/* `fused` for eight numbers. */
INLINE __m256 fused8(__m256 a, float b, __m256 c) {
#ifdef __FMA__
    return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c);
#else
    return _mm256_add_ps(_mm256_mul_ps(a, _mm256_set1_ps(b)), c);
#endif
}
#endif

/* See row.h. */
void minikv_round_blocks(const bf16 *x, int64_t n, int64_t first, int64_t end, Rounded out) {
    for (int64_t b = first; b < end; b++) {
        const int64_t at = b * BLOCK, columns = n - at < BLOCK ? n - at : BLOCK;
        int32_t sum = 0;
        out.scale[b] = quantize_block(x + at, columns, out.codes + at);
        for (int64_t i = 0; i < columns; i++) sum += out.codes[at + i];
        out.sum[b] = out.scale[b] * (float)sum;
        out.start[b] = -8 * sum;
    }
}

/* OUTS: rows of eight-bit weights whose sums are computed together. SHORT: the next rows are
   prefetched if a row has at most this many bytes. Measured: for longer rows, processors with only
   AVX2 prefetch enough by themselves; those with AVX-512 do not. */
#ifdef __AVX512BW__
enum { OUTS = 8, SHORT = 1 << 30 };
#else
enum { OUTS = 8, SHORT = 2048 };
#endif

/* out [OUTS] += one block of activations x [columns] times OUTS rows of eight-bit weights w,
   `pitch` apart. Sums are made in the order of `multiply`, so the results are the same. */
INLINE void dot_block(
    int64_t columns, int64_t pitch, const int8_t *w, const int8_t *x, float scale, float *out
) {
    for (int o = 0; o < OUTS; o++) {
        int32_t products = 0;
        for (int64_t i = 0; i < columns; i++) products += w[o * pitch + i] * x[i];
        out[o] = multiply_add((float)products, scale, out[o]);
    }
}

/* out [OUTS]: one row of activations x [n] times OUTS rows of eight-bit weights w, `pitch` apart.
   brief: the rows are short. The processor prefetches within a row, but not the next rows, so here
   the OUTS rows after the next OUTS are prefetched. */
INLINE void dot_rows(
    const int brief, int64_t n, int64_t pitch, const int8_t *w, const int8_t *x,
    const float *scales, float *out
) {
    float sums[OUTS] = {0};
    int64_t b = 0;
#ifdef __AVX2__
    __m256 total = _mm256_setzero_ps();
    for (; b + BLOCK <= n; b += BLOCK) {
        const __m256i y = _mm256_loadu_si256((const void *)(x + b)), size = _mm256_abs_epi8(y);
        const int8_t *at = w + b, *below = at + 4 * pitch;
        __m256i a[OUTS];
        for (int o = 0; o < OUTS; o++) {
            /* |y| * (w with the sign of y): codes are -127 to 127, so two products fit 16 bits. */
            const int8_t *row = o < 4 ? at + o * pitch : below + (o - 4) * pitch;
            const __m256i v = _mm256_sign_epi8(_mm256_loadu_si256((const void *)row), y);
            if (brief && o < 4) /* as many bytes as are read here, in order of address */
                __builtin_prefetch(w + 2 * OUTS * pitch + b * OUTS + o * 64, 0, 2);
            a[o] = dot_bytes8(size, v);
        }
        for (int o = 0; o < 4; o++) a[o] = _mm256_hadd_epi32(a[2 * o], a[2 * o + 1]);
        for (int o = 0; o < 2; o++) a[o] = _mm256_hadd_epi32(a[2 * o], a[2 * o + 1]);
        a[0] = _mm256_add_epi32(
            _mm256_permute2x128_si256(a[0], a[1], 0x20), _mm256_permute2x128_si256(a[0], a[1], 0x31)
        );
        total = fused8(_mm256_cvtepi32_ps(a[0]), scales[b / BLOCK], total);
    }
    memcpy(sums, &total, sizeof sums);
#else
    (void)brief;
#endif
    for (; b < n; b += BLOCK)
        dot_block(n - b < BLOCK ? n - b : BLOCK, pitch, w + b, x + b, scales[b / BLOCK], sums);
    memcpy(out, sums, sizeof sums);
}

/* TILE: rows of a tile of four-bit weights that can be multiplied without a panel; 0: none. SINGLE:
   up to this many rows of activations, that is faster. */
#if defined(__AVX2__) && !defined(__AVX512BW__)
enum { TILE = 32, SINGLE = 1 };

/* out [TILE]: one row of activations times the tile of four-bit weights from row `from` on. A
   column of the tile is 16 bytes: byte i has row i in its lower four bits and row 16 + i in the
   upper ones. Sums are made in the order of `multiply`, so the results are the same. */
static void dot_tile(const Product *p, int64_t from, Rounded x, float *out) {
    const uint8_t *bytes = (const uint8_t *)p->m.weights + from * (p->m.n / 2);
    const __m256i low = _mm256_set1_epi8(15);
    /* The activations of four columns: the first two fill one half of a vector, the others the
       other half. */
    const __m256i two = _mm256_set_epi64x(
        0x0302030203020302, 0x0302030203020302, 0x0100010001000100, 0x0100010001000100
    );
    __m256 total[4] = {
        _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()
    };
    for (int64_t b = 0; b < p->m.n / BLOCK; b++) {
        /* 15 * 127 * 2 * 8 < 2^15: the products of a block, summed in sixteen bits. */
        __m256i sums[4] = {
            _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
            _mm256_setzero_si256()
        };
        for (int64_t c = b * BLOCK; c < (b + 1) * BLOCK; c += 4) {
            const __m256i *at = (const void *)(bytes + c * (TILE / 2));
            __builtin_prefetch((const char *)at + AHEAD, 0, NEAR);
            const __m256i first = _mm256_loadu_si256(at), second = _mm256_loadu_si256(at + 1);
            const __m256i even = _mm256_permute2x128_si256(first, second, 0x20);
            const __m256i odd = _mm256_permute2x128_si256(first, second, 0x31);
            const __m256i y = _mm256_shuffle_epi8((__m256i)spread(x.codes + c), two);
            const __m256i a = _mm256_and_si256(even, low), d = _mm256_and_si256(odd, low);
            const __m256i e = _mm256_and_si256(_mm256_srli_epi16(even, 4), low);
            const __m256i f = _mm256_and_si256(_mm256_srli_epi16(odd, 4), low);
            const __m256i pairs[4] = {
                _mm256_unpacklo_epi8(a, d), _mm256_unpackhi_epi8(a, d), _mm256_unpacklo_epi8(e, f),
                _mm256_unpackhi_epi8(e, f)
            };
            for (int v = 0; v < 4; v++)
                sums[v] = _mm256_add_epi16(sums[v], _mm256_maddubs_epi16(pairs[v], y));
        }
        const bf16 *pair = pairs_of(p, b * BLOCK, from);
        if (b * BLOCK % p->m.group == 0) /* the scales of the next tiles, which are not adjacent */
            for (int i = 0; i < 2; i++) __builtin_prefetch(pair + 4 * TILE + i * 32);
        for (int v = 0; v < 4; v++) {
            const __m256i words = _mm256_loadu_si256((const void *)(pair + v * 16));
            const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
            const __m256 middle =
                _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000)));
            __m256i whole = _mm256_add_epi32(
                _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sums[v])),
                _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sums[v], 1))
            );
            whole = _mm256_add_epi32(whole, _mm256_set1_epi32(x.start[b]));
            const __m256 product = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(whole));
            total[v] = fused8(product, x.scale[b], total[v]);
            total[v] = fused8(middle, x.sum[b], total[v]);
        }
    }
    memcpy(out, total, sizeof total);
}
#elif defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
enum { TILE = 64, SINGLE = 8 };

/* As above. A column of the tile is 32 bytes: byte i has rows i and 32 + i. */
static void dot_tile(const Product *p, int64_t from, Rounded x, float *out) {
    const uint8_t *bytes = (const uint8_t *)p->m.weights + from * (p->m.n / 2);
    const __m512i low = _mm512_set1_epi8(15);
    /* From four columns in two vectors: the indices that put the four bytes of a row together. */
    const __m512i four = _mm512_set1_epi32(0x60402000);
    const __m512i rows = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i each = _mm512_mullo_epi32(rows, _mm512_set1_epi32(0x01010101));
    const __m512i lower = _mm512_add_epi8(four, each);
    const __m512i upper = _mm512_add_epi8(lower, _mm512_set1_epi8(16));
    __m512 total[4];
    for (int v = 0; v < 4; v++) total[v] = _mm512_setzero_ps();
    for (int64_t b = 0; b < p->m.n / BLOCK; b++) {
        __m512i sums[4];
        for (int v = 0; v < 4; v++) sums[v] = _mm512_set1_epi32(x.start[b]);
        for (int64_t c = b * BLOCK; c < (b + 1) * BLOCK; c += 4) {
            const char *at = (const char *)bytes + c * (TILE / 2);
            __builtin_prefetch(at + AHEAD, 0, NEAR);
            __builtin_prefetch(at + AHEAD + 64, 0, NEAR);
            const __m512i first = _mm512_loadu_si512(at), second = _mm512_loadu_si512(at + 64);
            const __m512i a = _mm512_permutex2var_epi8(first, lower, second);
            const __m512i d = _mm512_permutex2var_epi8(first, upper, second);
            const __m512i y = (__m512i)spread(x.codes + c);
            const __m512i weights[4] = {
                _mm512_and_si512(a, low), _mm512_and_si512(d, low),
                _mm512_and_si512(_mm512_srli_epi16(a, 4), low),
                _mm512_and_si512(_mm512_srli_epi16(d, 4), low)
            };
            for (int v = 0; v < 4; v++) sums[v] = _mm512_dpbusd_epi32(sums[v], weights[v], y);
        }
        const bf16 *pair = pairs_of(p, b * BLOCK, from);
        if (b * BLOCK % p->m.group == 0)
            for (int i = 0; i < 4; i++) __builtin_prefetch(pair + 2 * TILE + i * 32);
        for (int v = 0; v < 4; v++) {
            const __m512i words = _mm512_loadu_si512(pair + v * 32);
            const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            const __m512 middle =
                _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
            const __m512 product = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums[v]));
            total[v] = _mm512_fmadd_ps(product, _mm512_set1_ps(x.scale[b]), total[v]);
            total[v] = _mm512_fmadd_ps(middle, _mm512_set1_ps(x.sum[b]), total[v]);
        }
    }
    memcpy(out, total, sizeof total);
}
#else
enum { TILE = 0, SINGLE = 1 };
static void dot_tile(const Product *p, int64_t from, Rounded x, float *out) {
    (void)p, (void)from, (void)x, (void)out;
}
#endif

/* Write the sums of row r for `count` rows of weights from `from` on. */
INLINE void write_row(const Product *p, int64_t r, int64_t from, int64_t count, const float *sums) {
    const bf16 *scales = p->m.scales;
    for (int64_t i = 0; i < count; i++) {
        const float scale = p->m.form == EIGHT ? from_bf16(scales[from + i]) : 1.0f;
        p->out[r * p->m.outs + from + i] = to_bf16(sums[i] * scale);
    }
}

/* Row r of activations times up to OUTS rows of eight-bit weights from row `from` on. */
static void eight_bits(const Product *p, int64_t r, int64_t from, Rounded x) {
    const int64_t n = p->m.n, left = p->m.outs - from, count = left < OUTS ? left : OUTS;
    const int8_t *w = (const int8_t *)p->m.weights + from * n;
    float sums[OUTS];
    if (count == OUTS && n <= SHORT)
        dot_rows(1, n, n, w, x.codes, x.scale, sums);
    else if (count == OUTS)
        dot_rows(0, n, n, w, x.codes, x.scale, sums);
    for (int64_t i = 0; count < OUTS && i < count; i++) {
        float same[OUTS]; /* with a pitch of 0, one row is computed OUTS times */
        dot_rows(0, n, 0, w + i * n, x.codes, x.scale, same);
        sums[i] = same[0];
    }
    write_row(p, r, from, count, sums);
}

/* Row r of activations times the tile of four-bit weights from row `from` on. */
static void four_bits(const Product *p, int64_t r, int64_t from, Rounded x) {
    const int64_t left = p->m.outs - from;
    float sums[TILE + 1];
    dot_tile(p, from, x, sums);
    write_row(p, r, from, left < TILE ? left : TILE, sums);
}

/* The product of t rows of activations without panels: the weights are read in place. Returns as
   `product`. */
static int few_rows(const Product *p, int64_t t) {
    const int64_t n = p->m.n, blocks = (n + BLOCK - 1) / BLOCK,
                  step = p->m.form == EIGHT ? OUTS : TILE;
    int8_t *codes = malloc((size_t)(t * n) + 1);
    float *scale = malloc((size_t)(2 * t * blocks) * sizeof *scale + 1);
    int32_t *start = malloc((size_t)(t * blocks) * sizeof *start + 1);
    const int failed = !codes || !scale || !start;
    if (!failed) {
#define ROUNDED(R)                                                                              \
    ((Rounded){                                                                                 \
        codes + (R) * n, scale + (R) * blocks, scale + (t + (R)) * blocks, start + (R) * blocks \
    })
        for (int64_t r = 0; r < t; r++)
            minikv_round_blocks(p->x + r * p->pitch, n, 0, blocks, ROUNDED(r));
#pragma omp parallel for schedule(static) if (p->m.outs * n > 65536)
        for (int64_t from = 0; from < p->m.outs; from += step)
            for (int64_t r = 0; r < t; r++) {
                if (p->m.form == EIGHT)
                    eight_bits(p, r, from, ROUNDED(r));
                else
                    four_bits(p, r, from, ROUNDED(r));
            }
#undef ROUNDED
    }
    free(codes);
    free(scale);
    free(start);
    return failed;
}

/* integer_product: out bfloat16 [t, outs] = x times the transpose of the packed matrix m, with x
   quantized to int8. x bfloat16 [t, n], its rows `pitch` apart; no bias is added. Returns 0, or 1
   if there is no memory. */
int minikv_integer_product(int64_t t, int64_t pitch, const Matrix *m, const bf16 *x, bf16 *out) {
    const Product p = {*m, pitch, x, out};
    const int few = m->form == EIGHT ? t <= FEW : t <= SINGLE && 2 * m->half == TILE;
    return few ? few_rows(&p, t) : product(&p, t);
}

/* See row.h. */
int64_t minikv_rows_together(const Matrix *m) {
    return m->form == PLAIN ? 8 : m->form == EIGHT ? OUTS : 2 * m->half == TILE ? TILE : 0;
}

/* See row.h. */
void minikv_packed_rows(const Matrix *m, Rounded x, int64_t first, int64_t end, bf16 *out) {
    const Product p = {*m, 0, NULL, out};
    const int64_t step = minikv_rows_together(m);
    for (int64_t from = first; from < end; from += step) {
        if (m->form == EIGHT)
            eight_bits(&p, 0, from, x);
        else
            four_bits(&p, 0, from, x);
    }
}
