/* Pack weights to eight and four bits. The results are bit for bit those of `pack_int8` and
   `pack_int4` in models/linear.py, and of models/blocks.py. */
#include "numbers.h"

#include <stdlib.h>

/* The largest group of columns with a scale, the rows of a tile of four bits, and the columns that
   are read together of a row of blocks. */
enum { GROUP = 128, TILE = 64, PART = 32 };

/* The contents of rows: blocks of a GGUF file, by its type numbers, or bfloat16. */
enum { Q4_0 = 2, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q4_K = 12, Q5_K, Q6_K, IQ4_NL = 20, PLAIN = 30 };

/* PART columns of a row of blocks: code * scale + least, with a scale and a least for each half. */
typedef struct {
    uint8_t codes[PART];
    float scale[2], least[2];
} Part;

/* Blocks of PART columns: a scale, its bytes; the offset of the least value, or the number of
   scales that it has; the offsets of the codes' fifth bits and of the codes. */
static const struct {
    uint8_t bytes, least, fifth, codes;
    int8_t scales;
} SMALL[] = {
    [Q4_0] = {18, 0, 0, 2, -8}, [Q4_1] = {20, 2, 0, 4, 0}, [Q5_0] = {22, 0, 2, 6, -16},
    [Q5_1] = {24, 2, 4, 8, 0},  [Q8_0] = {34, 0, 0, 2, 0}, [IQ4_NL] = {18, 0, 0, 2, 0},
};

static inline float half_at(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return from_f16(bits);
}

/* The lower, then the upper four bits of PART / 2 bytes. */
INLINE void nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < PART / 2; i++) codes[i] = from[i] & 15;
    for (int i = 0; i < PART / 2; i++) codes[PART / 2 + i] = from[i] >> 4;
}

/* Part `at` of a row of small blocks. Codes of Q8_0 and IQ4_NL are signed. */
static void read_small(int64_t kind, const uint8_t *row, int64_t at, Part *made) {
    static const int8_t iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
    const uint8_t *from = row + at * SMALL[kind].bytes, *codes = from + SMALL[kind].codes;
    const float scale = half_at(from);
    const int least = SMALL[kind].least, fifth = SMALL[kind].fifth;
    made->scale[0] = made->scale[1] = scale;
    made->least[0] = made->least[1] =
        least ? half_at(from + least) : scale * (float)SMALL[kind].scales;
    if (kind == Q8_0)
        memcpy(made->codes, codes, PART);
    else
        nibbles(codes, made->codes);
    uint32_t bits = 0;
    if (fifth) memcpy(&bits, from + fifth, 4);
    for (int i = 0; i < PART && fifth; i++) made->codes[i] |= (uint8_t)((bits >> i & 1) << 4);
    for (int i = 0; i < PART && kind == IQ4_NL; i++) made->codes[i] = (uint8_t)iq4[made->codes[i]];
}

/* Part `at` of a row. In blocks of 256 columns, numbers of six or eight bits are multiplied by
   float16. */
static void read_part(int64_t kind, const uint8_t *row, int64_t at, Part *made) {
    const int j = (int)(at % 8), four = kind == Q4_K;
    if (kind == Q6_K) {
        const uint8_t *block = row + at / 8 * 210, *low = block + j / 4 * 64 + j % 2 * 32;
        const uint8_t *high = block + 128 + j / 4 * 32;
        for (int i = 0; i < PART; i++)
            made->codes[i] =
                (uint8_t)((low[i] >> j % 4 / 2 * 4 & 15) | (high[i] >> j % 4 * 2 & 3) << 4);
        for (int i = 0; i < 2; i++) {
            made->scale[i] = half_at(block + 208) * (float)(int8_t)block[192 + 2 * j + i];
            made->least[i] = -32 * made->scale[i];
        }
    } else if (four || kind == Q5_K) {
        const uint8_t *block = row + at / 8 * (four ? 144 : 176), *six = block + 4 + j;
        const uint8_t *low = block + (four ? 16 : 48) + j / 2 * 32;
        const int scale = j < 4 ? six[0] & 63 : (six[4] & 15) | six[-4] >> 6 << 4;
        const int least = j < 4 ? six[4] & 63 : six[4] >> 4 | six[0] >> 6 << 4;
        for (int i = 0; i < PART; i++) made->codes[i] = low[i] >> j % 2 * 4 & 15;
        for (int i = 0; i < PART && !four; i++)
            made->codes[i] |= (uint8_t)((block[16 + i] >> j & 1) << 4);
        made->scale[0] = made->scale[1] = half_at(block) * (float)scale;
        made->least[0] = made->least[1] = -half_at(block + 2) * (float)least;
    } else
        read_small(kind, row, at, made);
}

/* The n numbers of a row of blocks, rounded to bfloat16. */
static void read_row(int64_t kind, const uint8_t *row, int64_t n, bf16 *out) {
    const int sign = kind == Q8_0 || kind == IQ4_NL ? 128 : 0;
    for (int64_t at = 0; at < n; at += PART) {
        Part part;
        read_part(kind, row, at / PART, &part);
        for (int half = 0; half < 2; half++) {
            const float scale = part.scale[half], least = part.least[half];
            const uint8_t *codes = part.codes + half * (PART / 2);
            bf16 *to = out + at + half * (PART / 2);
#pragma omp simd
            for (int i = 0; i < PART / 2; i++)
                to[i] = to_bf16((float)((codes[i] ^ sign) - sign) * scale + least);
        }
    }
}

#define TINY 1.17549435e-38f /* the smallest normal number: no scale is 0 */

/* The nearest whole number within low .. high, ties to even; 0 for NaN, which has no integer. */
static inline float step_of(float x, float low, float high) {
    float y = rintf(x);
    return y != y ? 0.0f : y < low ? low : y > high ? high : y;
}

/* pack_int8: w [rows, wide bytes], of n columns each -> codes [rows, n], scale bfloat16 [rows]. A
   row's scale is its largest magnitude / 127. kind: the contents of a row of w. A result other than
   0 means no memory. */
int minikv_pack_int8(
    int64_t kind, int64_t rows, int64_t n, int64_t wide, const uint8_t *w, int8_t *codes,
    bf16 *scale
) {
    int failed = 0;
#pragma omp parallel for schedule(static) reduction(| : failed) if (rows * n > 65536)
    for (int64_t o = 0; o < rows; o++) {
        bf16 *made = kind == PLAIN ? NULL : malloc((size_t)n * sizeof *made);
        const bf16 *row = made ? made : (const bf16 *)(w + o * wide);
        if (made)
            read_row(kind, w + o * wide, n, made);
        else if (kind != PLAIN) {
            failed = 1;
            continue;
        }
        /* Without signs, the largest number has the largest bits, and NaN larger ones. */
        uint16_t bits = 0;
#pragma omp simd reduction(max : bits)
        for (int64_t i = 0; i < n; i++) {
            uint16_t x = row[i] & 0x7fff;
            bits = x > bits ? x : bits;
        }
        float step = from_bf16(bits) / 127.0f;
        scale[o] = to_bf16(step < TINY ? TINY : step);
        step = from_bf16(scale[o]);
        int8_t *out = codes + o * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            out[i] = (int8_t)step_of(from_bf16(row[i]) / step, -127.0f, 127.0f);
        free(made);
    }
    return failed;
}

/* Quantize a group w [size] to codes 0 .. 15. pair gets its scale and its middle, the value of code
   8. */
static inline void pack_group(const bf16 *w, int64_t size, uint8_t *codes, bf16 *pair) {
    float least = INFINITY, most = -INFINITY;
#pragma omp simd reduction(min : least) reduction(max : most)
    for (int64_t i = 0; i < size; i++) {
        float x = from_bf16(w[i]);
        least = x < least ? x : least;
        most = x > most ? x : most;
    }
    float step = (most - least) / 15.0f;
    pair[0] = to_bf16(step < TINY ? TINY : step);
    step = from_bf16(pair[0]);
    pair[1] = to_bf16(least + 8.0f * step);
    const float middle = from_bf16(pair[1]);
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        codes[i] =
            (uint8_t)(int32_t)step_of(rintf((from_bf16(w[i]) - middle) / step) + 8.0f, 0.0f, 15.0f);
}

/* pack_int4: w [rows, wide bytes], of n columns each -> packed [padded, n / 2], scales bfloat16 [n
   / group, stride, 2]: the scale and the middle of each group. `padded` is rows, rounded up to a
   multiple of TILE. A tile of 2 * half rows has `half` bytes for each column: byte i has row i in
   its lower four bits and row half + i in the upper ones. Rows beyond the last are 0. kind: the
   contents of a row of w. The codes of four-bit blocks are kept, in groups of PART columns. */
void minikv_pack_int4(
    int64_t kind, int64_t rows, int64_t n, int64_t wide, int64_t group, int64_t half,
    int64_t stride, const uint8_t *w, uint8_t *packed, bf16 *scales
) {
    const int64_t tiles = (rows + TILE - 1) / TILE * TILE / (2 * half);
#pragma omp parallel for schedule(static) if (rows * n > 65536)
    for (int64_t tile = 0; tile < tiles; tile++) {
        uint8_t codes[TILE][GROUP], both[TILE / 2][GROUP];
        const int64_t first = tile * 2 * half;
        for (int64_t at = 0; at < n; at += group) {
            for (int64_t i = 0; i < 2 * half; i++) {
                const uint8_t *row = w + (first + i) * wide;
                bf16 *pair = scales + (at / group * stride + first + i) * 2;
                if (first + i >= rows)
                    memset(codes[i], 0, GROUP);
                else if (kind == PLAIN) {
                    const bf16 *from = (const bf16 *)row + at;
                    /* The row's next group, which is far from this one of the next row. */
                    for (int64_t c = group; c < 2 * group; c += 32) __builtin_prefetch(from + c);
                    pack_group(from, group, codes[i], pair);
                } else {
                    Part part;
                    read_part(kind, row, at / PART, &part);
                    memcpy(codes[i], part.codes, PART);
                    pair[0] = to_bf16(part.scale[0]);
                    pair[1] = to_bf16(part.least[0] + 8 * part.scale[0]);
                }
            }
            for (int64_t i = 0; i < half; i++)
                for (int64_t c = 0; c < group; c++)
                    both[i][c] = codes[i][c] | (uint8_t)(codes[half + i][c] << 4);
            uint8_t *out = packed + first * (n / 2) + at * half;
            for (int64_t c = 0; c < group; c++)
                for (int64_t i = 0; i < half; i++) out[c * half + i] = both[i][c];
        }
    }
}
