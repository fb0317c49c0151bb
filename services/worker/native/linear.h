/* Numbers of the fused forward, strips of weights, and linear layers over them.

   A weight matrix [outputs, inputs] is stored as strips of LANES outputs. A strip holds, for each step along the inputs
   (two inputs in bfloat16, one in float), the 64 bytes that belong to its outputs: exactly one vector register. So one
   output is one lane, and its sum runs along the inputs in one order in one accumulator, whatever else is computed
   beside it: an output of a row has the same bits alone and in any batch, in whatever tile and by whatever thread it is
   computed. */
#ifndef LINEAR_H
#define LINEAR_H

#include <omp.h>
#include <string.h>

/* Registers of 32 bytes, with fused multiply and add, are the widest. */
#define AVX2_ALONE (!defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__))
#if defined(__AVX512F__) || AVX2_ALONE
#include <immintrin.h>
#endif

#include "element.h"

#define BLOCK 96 /* Rows that are taken through all stages before the next ones. */
#if defined(__AVX512F__)
#define TALL 6 /* Rows and strips of the largest tiles: 24 sums, 4 weights and a factor fit 32 registers. */
#define CODED_TALL 6
#define WIDE 4
#elif AVX2_ALONE
#define TALL 6 /* A strip is two registers, one after the other: 12 sums, 2 weights and a factor fit 16. */
#define CODED_TALL 4
#define WIDE 2
#else
#define TALL 4
#define CODED_TALL 4
#define WIDE 2
#endif
#define STAGES 8

typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));

#if BFLOAT16
typedef uint32_t factor; /* Neighbouring inputs of a row that one step takes together. */
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef uint16_t halves_anywhere __attribute__((vector_size(LANES * 2), aligned(2)));
INLINE lanes load(const element *from) {
    return (lanes)(__builtin_convertvector(*(const halves_anywhere *)from, words) << 16);
}
INLINE words rounded_bits(lanes x) {
    words bits = (words)x, even = bits + 0x7fff + ((bits >> 16) & 1), nan = (words)(x != x);
    return (even & ~nan) | ((bits | 0x400000) & nan);
}
INLINE lanes rounded(lanes x) { return (lanes)(rounded_bits(x) & 0xffff0000); }
INLINE void store(element *to, lanes x) {
    *(halves_anywhere *)to = __builtin_convertvector(rounded_bits(x) >> 16, halves);
}
#else
typedef float factor;
typedef float lanes_anywhere __attribute__((vector_size(LANES * 4), aligned(4)));
INLINE lanes load(const element *from) { return *(const lanes_anywhere *)from; }
INLINE lanes rounded(lanes x) { return x; }
INLINE void store(element *to, lanes x) { *(lanes_anywhere *)to = x; }
#endif
#define STEP (sizeof(factor) / sizeof(element))

INLINE lanes add_product(lanes sum, lanes weights, float x) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)weights, _mm512_set1_ps(x), (__m512)sum);
#else
    return sum + weights * x;
#endif
}

/* One step along the inputs for LANES outputs of one row. */
INLINE lanes add_step(lanes sum, lanes weights, factor x) {
#if !BFLOAT16
    return add_product(sum, weights, x);
#elif defined(__AVX512BF16__)
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)x));
#else
    sum = add_product(sum, (lanes)((words)weights & 0xffff0000), widen((element)(x >> 16)));
    return add_product(sum, (lanes)((words)weights << 16), widen((element)x));
#endif
}

#include "codes.h"

/* Threads that work on the same rows, each with its own copy of this and scratch memory of its own. next has a counter
   for every stage, from which they draw work: a thread that lost its core holds the others up by one piece only. */
typedef struct {
    int32_t members;
    int32_t *next;
    factor *packed;
    element *gated;
    x_group_t *x_groups;
} team_t;

INLINE int claim(const team_t *team) { return __atomic_fetch_add(team->next, 1, __ATOMIC_RELAXED); }

static void end_stage(team_t *team) {
    team->next++;
    if (team->members > 1) {
        #pragma omp barrier
    }
}

#if AVX2_ALONE
/* As add_step, for half of a strip. */
INLINE __m256 add_half_step(__m256 sum, __m256i weights, factor x) {
#if BFLOAT16
    __m256i odd = _mm256_and_si256(weights, _mm256_set1_epi32((int)0xffff0000)), even = _mm256_slli_epi32(weights, 16);
    sum = _mm256_fmadd_ps((__m256)odd, _mm256_set1_ps(widen((element)(x >> 16))), sum);
    return _mm256_fmadd_ps((__m256)even, _mm256_set1_ps(widen((element)x)), sum);
#else
    return _mm256_fmadd_ps((__m256)weights, _mm256_set1_ps(x), sum);
#endif
}

/* x holds height factors for each step. sums [height, width]. GCC keeps lanes, which are wider than a register here, in
   memory: so a strip is two halves. */
INLINE void multiply(const int height, const int width, const factor *restrict x, const lanes *const *strips,
                     int64_t depth, lanes *restrict sums) {
    #pragma GCC unroll 2
    for (int s = 0; s < width; s++) {
        const __m256i *strip = (const __m256i *)strips[s];
        __m256 low[TALL], high[TALL];
        #pragma GCC unroll 6
        for (int r = 0; r < height; r++) low[r] = high[r] = _mm256_setzero_ps();
        for (int64_t k = 0; k < depth; k++) {
            __m256i first = _mm256_load_si256(strip + 2 * k), second = _mm256_load_si256(strip + 2 * k + 1);
            #pragma GCC unroll 6
            for (int r = 0; r < height; r++) {
                factor each = x[k * height + r];
                low[r] = add_half_step(low[r], first, each);
                high[r] = add_half_step(high[r], second, each);
            }
        }
        #pragma GCC unroll 6
        for (int r = 0; r < height; r++) {
            __m256 *to = (__m256 *)&sums[r * width + s];
            to[0] = low[r], to[1] = high[r];
        }
    }
}
#else
/* x holds height factors for each step. sums [height, width]. */
INLINE void multiply(const int height, const int width, const factor *restrict x, const lanes *const *strips,
                     int64_t depth, lanes *restrict sums) {
    lanes sum[TALL][WIDE];
    const lanes *strip[WIDE];
    #pragma GCC unroll 4
    for (int s = 0; s < width; s++) strip[s] = strips[s];
    #pragma GCC unroll 6
    for (int r = 0; r < height; r++) {
        #pragma GCC unroll 4
        for (int s = 0; s < width; s++) sum[r][s] = (lanes){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        lanes weights[WIDE];
        #pragma GCC unroll 4
        for (int s = 0; s < width; s++) weights[s] = strip[s][k];
        #pragma GCC unroll 6
        for (int r = 0; r < height; r++) {
            factor each = x[k * height + r];
            #pragma GCC unroll 4
            for (int s = 0; s < width; s++) sum[r][s] = add_step(sum[r][s], weights[s], each);
        }
    }
    #pragma GCC unroll 6
    for (int r = 0; r < height; r++) {
        #pragma GCC unroll 4
        for (int s = 0; s < width; s++) sums[r * width + s] = sum[r][s];
    }
}
#endif

/* clang-format off */
#define TILE(h, w) case (h) * 8 + (w): multiply(h, w, x, strips, depth, sums); return;
static void multiply_tile(int height, int width, const factor *x, const lanes *const *strips, int64_t depth,
                          lanes *sums) {
    switch (height * 8 + width) {
        TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)
        TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2)
#if TALL == 6
        TILE(5, 1) TILE(6, 1) TILE(5, 2) TILE(6, 2)
#endif
#if WIDE == 4
        TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)
#endif
    }
}
/* clang-format on */

/* e**x: 2**n times a polynomial on [-ln2/2, ln2/2] (Cephes), relative error below 2e-7; NaN stays NaN. */
INLINE lanes exp_of(lanes x) {
    words low = (words)(x < -87.0f), high = (words)(x > 88.0f);
    lanes least = (lanes){0} - 87.0f, most = (lanes){0} + 88.0f;
    x = (lanes)(((words)x & ~low & ~high) | ((words)least & low) | ((words)most & high));
    lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* To the nearest integer. */
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * (lanes)((__builtin_convertvector(n, integers) + 127) << 23);
}

/* What an adapter adds to a linear layer for its rows: b @ (a @ x) (LoRA), in float whatever the type of x. a
   [ranks, inputs] is stored as strips of LANES ranks, one input a step, b [outputs, ranks] as strips of LANES outputs,
   one rank a step. ranks is a multiple of LANES, padded with zeros; 0 adds nothing. */
typedef struct {
    const lanes *a, *b;
    int64_t ranks;
} low_rank_t;

/* What becomes of outputs. STORE: they are the result. ADD: they are added to what is there. GATED: the first half of
   them through SiLU times the second half. LOGITS: as STORE, to float32, columns of them. */
typedef enum { STORE, ADD, GATED, LOGITS } kind_t;
typedef struct {
    kind_t kind;
    element *to;
    float *logits;
    int64_t stride, columns;
    const element *bias;
    const int32_t *adapters;          /* Of each row, -1 without one; NULL: of none. */
    const low_rank_t *const *adapted; /* Terms of each adapter, those of this layer at place term. */
    int64_t term, most_ranks;
} target_t;

/* The terms of a row, or NULL. */
INLINE const low_rank_t *term_of(const target_t *target, int64_t row) {
    if (!target->adapters || target->adapters[row] < 0) return NULL;
    const low_rank_t *term = target->adapted[target->adapters[row]] + target->term;
    return term->ranks ? term : NULL;
}

/* a @ x of every row that has an adapter, into low [rows, most_ranks]; four sums, always the same. */
static void lower(const target_t *target, const element *x, int64_t stride, int rows, int64_t inputs, float *low) {
    for (int r = 0; r < rows; r++) {
        const low_rank_t *term = term_of(target, r);
        const element *from = x + r * stride;
        for (int64_t s = 0; term && s < term->ranks / LANES; s++) {
            const lanes *a = term->a + s * inputs;
            lanes sums[4] = {{0}};
            for (int64_t k = 0; k < inputs; k++) sums[k % 4] = add_product(sums[k % 4], a[k], widen(from[k]));
            lanes sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            memcpy(low + r * target->most_ranks + s * LANES, &sum, sizeof sum);
        }
    }
}

/* y of one strip of outputs, with what the row's adapter adds to it. */
INLINE lanes with_term(lanes y, const target_t *target, const float *low, int64_t row, int64_t strip) {
    const low_rank_t *term = term_of(target, row);
    if (!term) return y;
    const lanes *b = term->b + strip * term->ranks;
    lanes sum = {0};
    for (int64_t k = 0; k < term->ranks; k++) sum = add_product(sum, b[k], low[row * target->most_ranks + k]);
    return y + sum;
}

INLINE lanes with_bias(lanes sum, const target_t *target, int64_t column) {
    return target->bias ? sum + load(target->bias + column) : sum;
}

/* sums [height, width] belong to rows from row on and to output strips from strip on; GATED: gates, then the rest. low
   is what rows of adapters have there. */
static void emit(const target_t *target, const lanes *sums, const float *low, int64_t row, int height, int64_t strip,
                 int width) {
    int outputs = target->kind == GATED ? width / 2 : width;
    for (int r = 0; r < height; r++, sums += width) {
        for (int s = 0; s < outputs; s++) {
            int64_t column = (strip + s) * LANES, at = (row + r) * target->stride + column;
            lanes y = with_term(with_bias(sums[s], target, column), target, low, row + r, strip + s);
            if (target->kind == LOGITS) {
                y = rounded(y);
                for (int i = 0; i < LANES && column + i < target->columns; i++) target->logits[at + i] = y[i];
                continue;
            }
            if (target->kind == ADD) y += load(target->to + at);
            if (target->kind == GATED) {
                lanes up = with_bias(sums[outputs + s], target, target->columns + column);
                up = with_term(up, target, low, row + r, target->columns / LANES + strip + s);
                y = y / (exp_of(-y) + 1.0f) * up;
            }
            store(target->to + at, y);
        }
    }
}

/* One linear layer over rows of x, stride elements apart. Ends a stage. */
static void linear(team_t *team, const matrix_t *matrix, const element *x, int64_t stride, int rows,
                   const target_t *target) {
    int64_t depth = matrix->depth;
    float low[target->adapters ? rows * target->most_ranks : 1];
    if (target->adapters) lower(target, x, stride, rows, depth * (int64_t)STEP, low);
    int tall = matrix->bits ? CODED_TALL : TALL, tiles = (rows + tall - 1) / tall;
    for (int t = 0; t < tiles; t++) { /* From rows one behind the other to tiles, step by step. */
        int first = t * rows / tiles, height = (t + 1) * rows / tiles - first;
        factor *packed = team->packed + first * depth;
#if CODES
        if (matrix->bits) {
            x_group_t *groups = team->x_groups + first * x_groups_of(matrix);
            for (int r = 0; r < height; r++)
                pack_row(matrix, x + (first + r) * stride, height, packed + r * FACTORS, groups + r);
            continue;
        }
#endif
        for (int r = 0; r < height; r++) {
            const factor *from = (const factor *)(x + (first + r) * stride);
            for (int64_t k = 0; k < depth; k++) packed[k * height + r] = from[k];
        }
    }
    int paired = target->kind == GATED ? 2 : 1;
    int outputs = matrix->strips / paired, most = WIDE / paired;
    for (int begin; (begin = claim(team) * most) < outputs;) {
        int end = begin + most < outputs ? begin + most : outputs;
        for (int strip = begin, count; strip < end; strip += count) {
            count = end - strip >= 4 ? 4 : end - strip >= 2 ? 2 : 1;
            int64_t numbers[WIDE];
            const lanes *strips[WIDE];
            for (int s = 0; s < count; s++) numbers[s] = strip + s;
            if (paired == 2)
                for (int s = 0; s < count; s++) numbers[count + s] = outputs + strip + s;
            for (int s = 0; s < count * paired; s++) strips[s] = matrix->weights + numbers[s] * depth;
            for (int t = 0; t < tiles; t++) {
                int first = t * rows / tiles, height = (t + 1) * rows / tiles - first;
                lanes sums[TALL * WIDE];
                const factor *packed = team->packed + first * depth;
#if CODES
                if (matrix->bits)
                    multiply_codes_tile(height, count * paired, packed, matrix, numbers,
                                        team->x_groups + first * x_groups_of(matrix), sums, count * paired);
                else
#endif
                    multiply_tile(height, count * paired, packed, strips, depth, sums);
                emit(target, sums, low, first, height, strip, count * paired);
            }
        }
    }
    end_stage(team);
}

#endif
