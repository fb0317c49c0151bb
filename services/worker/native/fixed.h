/* Sums over codes in integers, for bfloat16.

   Each block of up to 128 inputs of a row becomes fixed point: a power of two times integers below 2**14, the nearest
   ones. So inputs of at least a 64th of the block's largest are exact, because they have eight bits, and others are
   wrong by at most 2**-14 of it, which is a 64th of what rounding the largest to bfloat16 may have done. Products and
   sums of a block are exact.

   An integer is two planes of signed bytes, high * 256 + low, whose products with codes are summed four inputs at a
   time. */
#ifndef FIXED_H
#define FIXED_H

#define FIXED (BFLOAT16 && defined(__AVX512VNNI__) && defined(__AVX512BW__))
#define MOST_BLOCK 128

/* Of a row. */
typedef struct {
    float scale;
    int32_t high, low; /* Sums over each plane. */
} block_t;

#if FIXED
/* Inputs of a block: the largest power of two that divides groups. */
INLINE int64_t block_of(const matrix_t *matrix) {
    int64_t block = MOST_BLOCK;
    while (matrix->group % block) block /= 2;
    return block;
}

INLINE int64_t x_groups_of(const matrix_t *matrix) { return matrix->depth * (int64_t)STEP / block_of(matrix); }

/* Takes one row into a tile of height rows: for four inputs their high bytes, then their low ones. */
static void pack_row(const matrix_t *matrix, const element *x, int height, factor *packed, block_t *blocks) {
    int64_t size = block_of(matrix), count = x_groups_of(matrix);
    for (int64_t b = 0; b < count; b++, x += size) {
        __m512i largest = _mm512_setzero_si512();
        for (int i = 0; i < size; i += LANES)
            largest = _mm512_max_epu32(largest, _mm512_and_si512((__m512i)load(x + i), _mm512_set1_epi32(0x7fffffff)));
        uint32_t bits = _mm512_reduce_max_epu32(largest);
        int exponent = (int)(bits >> 23) - 127;
        if (exponent < -100) exponent = -100; /* Its power would be infinite, and such numbers do not matter. */
        int is_finite = exponent < 128;
        float up = is_finite ? __builtin_ldexpf(1.0f, 13 - exponent) : 0.0f;
        __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
        for (int i = 0; i < size; i += LANES) {
            __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + i) * up));
            __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
            __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
            high_sum = _mm512_add_epi32(high_sum, high);
            low_sum = _mm512_add_epi32(low_sum, low);
            factor planes[2][LANES / 4];
            _mm_storeu_si128((__m128i *)planes[0], _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((__m128i *)planes[1], _mm512_cvtepi32_epi8(low));
            for (int k = 0; k < LANES / 4; k++, packed += 2 * height) {
                packed[0] = planes[0][k];
                packed[1] = planes[1][k];
            }
        }
        block_t *block = blocks + b * height;
        block->scale = is_finite ? __builtin_ldexpf(1.0f, exponent - 13) : __builtin_nanf("");
        block->high = _mm512_reduce_add_epi32(high_sum);
        block->low = _mm512_reduce_add_epi32(low_sum);
    }
}

INLINE integers add_four(integers sum, __m512i codes, factor x) {
    return (integers)_mm512_dpbusd_epi32((__m512i)sum, codes, _mm512_set1_epi32((int)x));
}

/* As multiply, for these strips of a matrix of codes, to sums that are stride apart from row to row. */
INLINE void multiply_codes(const int bits, const int height, const int width, const factor *restrict x,
                           const matrix_t *matrix, const int64_t *strips, const block_t *restrict blocks,
                           lanes *restrict sums, int stride) {
    const int fours = bits == 4 ? 2 : 1, zero = 1 << (bits - 1);
    int64_t size = block_of(matrix), count = x_groups_of(matrix), units = size / (4 * fours);
    int64_t groups = groups_of(matrix), share = matrix->group / size;
    const __m512i *unit[WIDE];
    #pragma GCC unroll 4
    for (int s = 0; s < width; s++) unit[s] = (const __m512i *)matrix->weights + strips[s] * count * units;
    for (int64_t b = 0; b < count; b++, blocks += height) {
        integers high[TALL][WIDE], low[TALL][WIDE];
        #pragma GCC unroll 6
        for (int r = 0; r < height; r++) {
            #pragma GCC unroll 4
            for (int s = 0; s < width; s++) {
                high[r][s] = (integers){0} - zero * blocks[r].high;
                low[r][s] = (integers){0} - zero * blocks[r].low;
            }
        }
        for (int64_t u = 0; u < units; u++) {
            #pragma GCC unroll 2
            for (int f = 0; f < fours; f++, x += 2 * height) {
                #pragma GCC unroll 4
                for (int s = 0; s < width; s++) {
                    __m512i codes = unit[s][u];
                    if (bits == 4) {
                        if (f) codes = _mm512_srli_epi16(codes, 4);
                        codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
                    }
                    #pragma GCC unroll 6
                    for (int r = 0; r < height; r++) {
                        high[r][s] = add_four(high[r][s], codes, x[2 * r]);
                        low[r][s] = add_four(low[r][s], codes, x[2 * r + 1]);
                    }
                }
            }
        }
        #pragma GCC unroll 4
        for (int s = 0; s < width; s++) {
            int64_t at = strips[s] * groups + b / share;
            lanes scales = scales_at(matrix, at);
            integers offsets = {0};
            if (matrix->offsets) offsets = offsets_at(matrix, at);
            unit[s] += units;
            #pragma GCC unroll 6
            for (int r = 0; r < height; r++) {
                integers upper = high[r][s], lower = low[r][s];
                if (matrix->offsets) {
                    upper -= offsets * blocks[r].high;
                    lower -= offsets * blocks[r].low;
                }
                lanes part = __builtin_convertvector(upper, lanes) * 256.0f + __builtin_convertvector(lower, lanes);
                sums[r * stride + s] = (b ? sums[r * stride + s] : (lanes){0}) + scales * blocks[r].scale * part;
            }
        }
    }
}
#endif

#endif
