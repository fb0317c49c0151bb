/* Blocks of keys and values as prefill attention reads them: packed, so that whatever is read next lies next. */
#ifndef EXTEND_BLOCKS_H
#define EXTEND_BLOCKS_H

#include "kept.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define NUMBERS ((whole){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#define WIDE 4 /* Vectors of a row that are summed at a time: ROWS * WIDE registers. */
#elif defined(__AVX__)
#define LANES 8
#define NUMBERS ((whole){0, 1, 2, 3, 4, 5, 6, 7})
#define WIDE 2
#else
#define LANES 4
#define NUMBERS ((whole){0, 1, 2, 3})
#define WIDE 4
#endif

#define ALIGNED __attribute__((aligned(64)))
#define PADDED ((HEAD_DIM + LANES - 1) / LANES * LANES)
#define TILE_TOKENS (TILE_ROWS / GROUP > 0 ? TILE_ROWS / GROUP : 1)
#define PACKS ((TILE_TOKENS * GROUP + ROWS - 1) / ROWS)

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t whole __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t loose_whole __attribute__((vector_size(LANES * 4), aligned(2), may_alias));

/* A term is what one multiply-add takes of each factor: a pair of bfloat16, or one float. */
#if BFLOAT16 && defined(__AVX512BF16__)
#define PAIRS 1
typedef uint32_t term;
#define TERMS(n) (((n) + 1) / 2)
INLINE vector multiply_add(vector sum, const term *one, const term *many) {
    __m512i right = _mm512_loadu_si512(many);
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int32_t)*one), (__m512bh)right);
}
#else
#define PAIRS 0
typedef float term;
#define TERMS(n) (n)
INLINE vector multiply_add(vector sum, const term *one, const term *many) { return sum + *one * *(const loose *)many; }
#endif

/* Keys [0, keys) of a segment lie in slots of pages; their positions begin at ``shift``. */
typedef struct {
    int32_t table, keys, shift;
} segment_t;

/* Rows [first, last) of the batch. Where each span is a unit of its own, [first_part, last_part) is what these leave,
   from that of first_span on. */
typedef struct {
    int32_t segment, first, last, first_span, first_part, last_part;
} tile_t;

/* Spans [first, last) of the keys that a tile sees, which lie at multiples of SPAN_KEYS. ``part`` is where a unit of
   one span leaves what it found; -1 where a unit has all spans of its tile. */
typedef struct {
    int32_t tile, first, last, part;
} unit_t;

typedef struct {
    const kept *keys_at, *values_at;
    const int32_t *table;
    int64_t slot_stride;
    int32_t page_size, keys, shift;
} source_t;

/* A tile's rows over some keys: the largest score, and sums of the weights relative to it and of the weighted values.
 */
typedef struct {
    float output[PACKS][ROWS][PADDED] ALIGNED;
    vector sum[PACKS][ROWS];
    float top[PACKS][ROWS];
} state_t;

typedef struct {
    term query[PACKS][TERMS(HEAD_DIM)][ROWS];
    state_t span, all;                             /* Of the span at hand, and of those before it. */
    int32_t first[PACKS][ROWS], last[PACKS][ROWS]; /* Positions that a row sees; none at all where it is padding. */
    term keys[KEYS / (LANES * WIDE)][TERMS(HEAD_DIM)][LANES * WIDE] ALIGNED;
    term values[TERMS(KEYS)][PADDED] ALIGNED;
    float scores[ROWS][KEYS] ALIGNED;
    term weights[ROWS][TERMS(KEYS)] ALIGNED;
#if ROUNDED
    element scaled[KEYS * HEAD_DIM] ALIGNED;
#endif
} scratch_t;

static _Thread_local scratch_t scratch ALIGNED;

/* Where the keys of a block lie, in kept values from the base; -1 where there is no key, so that nothing is read. */
INLINE void find_slots(const source_t *source, int position, int64_t *restrict slots) {
    int key = position - source->shift, page = key > 0 ? key / source->page_size : 0;
    int offset = key - page * source->page_size;
    for (int j = 0; j < KEYS; j++, key++, offset++) {
        if (offset == source->page_size) page++, offset = 0;
        int exists = key >= 0 && key < source->keys;
        slots[j] = exists ? ((int64_t)source->table[page] * source->page_size + offset) * source->slot_stride : -1;
    }
}

/* A head of a slot, or zeros. */
INLINE const element *slot_at(const element *base, int64_t slot) {
    static const element nothing[HEAD_DIM];
    return slot < 0 ? nothing : base + slot;
}

/* A block of heads as elements; head j lies at[j] from what is returned; -1 where there is none. */
#if ROUNDED
static const element *elements_of(const kept *base, const int64_t *slots, int64_t *at, scratch_t *restrict s) {
    for (int j = 0; j < KEYS; j++) {
        at[j] = slots[j] < 0 ? -1 : j * HEAD_DIM;
        if (slots[j] < 0) continue;
        const kept *head = base + slots[j];
        element *into = s->scaled + j * HEAD_DIM;
        float scale = scale_at(head, HEAD_DIM);
        int d = 0;
#if LANES == 16
        /* A code is a number of half precision with fewer bits, 256 times as small. */
        for (; d + LANES <= HEAD_DIM; d += LANES) {
            __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(head + d)));
            __m256i sign = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(128)), 8);
            __m256i size = _mm256_slli_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(127)), 7);
            vector x = (vector)_mm512_cvtph_ps(_mm256_or_si256(sign, size)) * 256.0f * scale;
#if BFLOAT16
            _mm256_storeu_si256((__m256i *)(into + d), _mm512_cvtepi32_epi16((__m512i)((whole)x >> 16)));
#else
            *(loose *)(into + d) = x;
#endif
        }
#endif
        for (; d < HEAD_DIM; d++) into[d] = exactly(decoded(head[d]) * scale);
    }
    return s->scaled;
}
#else
#define elements_of(base, slots, at, s) (base)
#endif

/* Slots lie anywhere, and what is packed next should be near by then. */
INLINE void prefetch(const source_t *source, int64_t slot) {
    if (slot < 0) return;
    const char *key = (const char *)(source->keys_at + slot), *value = (const char *)(source->values_at + slot);
    for (int i = 0; i < KEPT_WIDTH(HEAD_DIM) * (int)sizeof(kept); i += 64) {
        __builtin_prefetch(key + i);
        __builtin_prefetch(value + i);
    }
}

INLINE term term_at(const element *slot, int d) {
#if PAIRS
    return (term)slot[2 * d] | (2 * d + 1 < HEAD_DIM ? (term)slot[2 * d + 1] << 16 : 0);
#else
    return widen(slot[d]);
#endif
}

/* LANES terms from the d-th on. */
INLINE whole terms_at(const element *slot, int d) {
#if BFLOAT16 && !PAIRS
    typedef uint16_t narrow_t __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
    return __builtin_convertvector(*(const narrow_t *)(slot + d), whole) << 16;
#else
    return *(const loose_whole *)(slot + d * (int)(sizeof(term) / sizeof(element)));
#endif
}

/* Exchange rows and columns of LANES vectors: in each step, blocks of ``half`` lanes across the diagonal. */
INLINE void transpose(whole *x) {
    #pragma GCC unroll 4
    for (int half = 1; half < LANES; half *= 2) {
        whole moved = ((NUMBERS & half) != 0) & (LANES - half), low = NUMBERS + moved, high = low + half;
        #pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & half) continue;
            whole one = x[i], other = x[i + half];
            x[i] = __builtin_shuffle(one, other, low);
            x[i + half] = __builtin_shuffle(one, other, high);
        }
    }
}

static void pack_keys(const element *base, const int64_t *slots, scratch_t *restrict s) {
    for (int j = 0; j < KEYS; j += LANES) {
        int part = j / (LANES * WIDE), column = j % (LANES * WIDE), d = 0;
        for (; d + LANES <= HEAD_DIM / (1 + PAIRS); d += LANES) {
            whole x[LANES];
            #pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) x[l] = terms_at(slot_at(base, slots[j + l]), d);
            transpose(x);
            #pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) *(loose_whole *)&s->keys[part][d + l][column] = x[l];
        }
        for (; d < TERMS(HEAD_DIM); d++)
            for (int l = 0; l < LANES; l++) s->keys[part][d][column + l] = term_at(slot_at(base, slots[j + l]), d);
    }
}

static void pack_values(const element *base, const int64_t *slots, scratch_t *restrict s) {
    for (int j = 0; j < TERMS(KEYS); j++) {
#if PAIRS
        const element *low = slot_at(base, slots[2 * j]), *high = slot_at(base, slots[2 * j + 1]);
        for (int d = 0; d < HEAD_DIM; d++) s->values[j][d] = (term)low[d] | (term)high[d] << 16;
#else
        const element *slot = slot_at(base, slots[j]);
        for (int d = 0; d < HEAD_DIM; d++) s->values[j][d] = widen(slot[d]);
#endif
    }
}

#endif
