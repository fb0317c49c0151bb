/* Weights that are kept as integer codes, and sums over them.

   Inputs come in groups: a weight of group g is scale[g] * (code - offset[g]) of its output. A strip holds units of 64
   bytes, four for each output. Of 8 bits, they are the codes of four inputs, each plus 128; of 4 bits, of eight inputs,
   each plus 8: the first four in the low halves, the others in the high ones. Scales and offsets lie apart, [strips,
   groups, LANES].

   There are two ways to sum. In float: codes are unpacked to elements, which hold them exactly, and each group is
   summed as elements are (linear.h), then scaled. And in integers, for bfloat16 where the processor has instructions
   for it: see fixed.h. In both a row has the same bits in any batch. */
#ifndef CODES_H
#define CODES_H

#ifndef CODES
#define CODES 0 /* Without matrices of codes. */
#endif

typedef struct {
    const lanes *weights; /* Elements, or codes. */
    int64_t depth;        /* Steps of a strip. */
    int32_t strips;
    int32_t bits;  /* Of a code; 0 where weights are elements, which have nothing of the following. */
    int32_t group; /* Inputs of one, a multiple of LANES. */
    int32_t scale_form;
    const void *scales;
    const int8_t *offsets; /* NULL where all are zero. */
} matrix_t;

typedef enum { AS_FLOAT32, AS_BFLOAT16, AS_FLOAT16 } scale_form_t;
typedef int8_t octets __attribute__((vector_size(LANES)));
typedef uint16_t sixteens __attribute__((vector_size(LANES * 2)));

#if CODES
INLINE int64_t groups_of(const matrix_t *matrix) { return matrix->depth * (int64_t)STEP / matrix->group; }

/* The at-th LANES scales of a matrix. Those of 16 bits are finite, which who packs them sees to. */
INLINE lanes scales_at(const matrix_t *matrix, int64_t at) {
    if (matrix->scale_form == AS_FLOAT32) return ((const lanes *)matrix->scales)[at];
    words bits = __builtin_convertvector(((const sixteens *)matrix->scales)[at], words);
    if (matrix->scale_form == AS_BFLOAT16) return (lanes)(bits << 16);
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtph_ps(((const __m256i *)matrix->scales)[at]);
#else
    /* Exponent and mantissa in their place, then 2**112 makes up for the other bias; subnormals become exact, too. */
    lanes magnitude = (lanes)((bits & 0x7fff) << 13) * 0x1p112f;
    return (lanes)((words)magnitude | (bits & 0x8000) << 16);
#endif
}

INLINE integers offsets_at(const matrix_t *matrix, int64_t at) {
#if defined(__AVX512F__)
    return (integers)_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)matrix->offsets + at));
#else
    return __builtin_convertvector(((const octets *)matrix->offsets)[at], integers);
#endif
}

/* The code of one input of a unit. */
INLINE lanes unpacked(const int bits, words unit, int input) {
    if (bits == 8) return __builtin_convertvector((integers)(unit >> 8 * input & 255) - 128, lanes);
    int shift = 8 * (input % 4) + input / 4 * 4;
#if defined(__AVX512F__)
    /* An index has four bits, whatever lies above. */
    const lanes values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return (lanes)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)unit, shift), (__m512)values);
#else
    return __builtin_convertvector((integers)(unit >> shift & 15) - 8, lanes);
#endif
}

/* Step j of a unit, as add_step takes it. */
INLINE lanes unpacked_step(const int bits, words unit, int j) {
#if BFLOAT16
    return (lanes)((words)unpacked(bits, unit, 2 * j) >> 16 | ((words)unpacked(bits, unit, 2 * j + 1) & 0xffff0000));
#else
    return unpacked(bits, unit, j);
#endif
}

#include "fixed.h"

#if FIXED
typedef block_t x_group_t;
#define FACTORS 2 /* Of a row, one behind the other. */
#else
#define FACTORS 1
typedef float x_group_t; /* The sum of the inputs of a group; there are none where there are no offsets. */

INLINE int64_t x_groups_of(const matrix_t *matrix) { return matrix->offsets ? groups_of(matrix) : 0; }

/* Takes one row into a tile of height rows. */
static void pack_row(const matrix_t *matrix, const element *x, int height, factor *packed, float *sums) {
    const factor *from = (const factor *)x;
    for (int64_t k = 0; k < matrix->depth; k++) packed[k * height] = from[k];
    for (int64_t g = 0, groups = x_groups_of(matrix); g < groups; g++, x += matrix->group) {
        lanes parts = {0};
        for (int i = 0; i < matrix->group; i += LANES) parts += load(x + i);
        float sum = 0;
        for (int i = 0; i < LANES; i++) sum += parts[i];
        sums[g * height] = sum;
    }
}

/* As multiply, for these strips of a matrix of codes, to sums that are stride apart from row to row. */
INLINE void multiply_codes(const int bits, const int height, const int width, const factor *restrict x,
                           const matrix_t *matrix, const int64_t *strips, const float *restrict x_sums,
                           lanes *restrict sums, int stride) {
    const int steps = (bits == 4 ? 8 : 4) / (int)STEP;
    int64_t groups = groups_of(matrix), units = matrix->group / (steps * (int64_t)STEP);
    const words *unit[WIDE];
    #pragma GCC unroll 4
    for (int s = 0; s < width; s++) unit[s] = (const words *)matrix->weights + strips[s] * groups * units;
    for (int64_t g = 0; g < groups; g++) {
        lanes sum[CODED_TALL][WIDE];
        #pragma GCC unroll 6
        for (int r = 0; r < height; r++) {
            #pragma GCC unroll 4
            for (int s = 0; s < width; s++) sum[r][s] = (lanes){0};
        }
        for (int64_t u = 0; u < units; u++, x += steps * height) {
            #pragma GCC unroll 8
            for (int j = 0; j < steps; j++) {
                lanes weights[WIDE];
                #pragma GCC unroll 4
                for (int s = 0; s < width; s++) weights[s] = unpacked_step(bits, unit[s][u], j);
                #pragma GCC unroll 6
                for (int r = 0; r < height; r++) {
                    factor each = x[j * height + r];
                    #pragma GCC unroll 4
                    for (int s = 0; s < width; s++) sum[r][s] = add_step(sum[r][s], weights[s], each);
                }
            }
        }
        #pragma GCC unroll 4
        for (int s = 0; s < width; s++) {
            int64_t at = strips[s] * groups + g;
            lanes scales = scales_at(matrix, at), offsets = {0};
            if (matrix->offsets) offsets = __builtin_convertvector(offsets_at(matrix, at), lanes);
            unit[s] += units;
            #pragma GCC unroll 6
            for (int r = 0; r < height; r++) {
                lanes part = sum[r][s];
                if (matrix->offsets) part -= offsets * x_sums[g * height + r];
                sums[r * stride + s] = (g ? sums[r * stride + s] : (lanes){0}) + scales * part;
            }
        }
    }
}
#endif

/* clang-format off */
#define CODES_TILE(h, w) case (h) * 8 + (w): \
    if (matrix->bits == 4) multiply_codes(4, h, w, x, matrix, strips, x_groups, sums, stride); \
    else multiply_codes(8, h, w, x, matrix, strips, x_groups, sums, stride); \
    return;
static void multiply_codes_tile(int height, int width, const factor *x, const matrix_t *matrix, const int64_t *strips,
                                const x_group_t *x_groups, lanes *sums, int stride) {
    switch (height * 8 + width) {
        CODES_TILE(1, 1) CODES_TILE(2, 1) CODES_TILE(3, 1) CODES_TILE(4, 1)
        CODES_TILE(1, 2) CODES_TILE(2, 2) CODES_TILE(3, 2) CODES_TILE(4, 2)
#if CODED_TALL == 6
        CODES_TILE(5, 1) CODES_TILE(6, 1) CODES_TILE(5, 2) CODES_TILE(6, 2)
#endif
#if WIDE == 4
        CODES_TILE(1, 4) CODES_TILE(2, 4) CODES_TILE(3, 4)
        default: /* Sums of two planes, or unpacked weights beside them, take more registers. */
            multiply_codes_tile(height, 2, x, matrix, strips, x_groups, sums, stride);
            multiply_codes_tile(height, 2, x, matrix, strips + 2, x_groups, sums + 2, stride);
#endif
    }
}
/* clang-format on */
#else
typedef int8_t x_group_t;
#endif

#endif
