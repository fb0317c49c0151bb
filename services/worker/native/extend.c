/* Prefill attention over paged KV.

   The caller defines HEAD_DIM, GROUP (query heads of one KV head), KEYS, ROWS, TILE_ROWS, SPAN_KEYS, BFLOAT16
   and ROUNDED.

   Blocked attention with an online softmax (FlashAttention, arXiv 2205.14135). A tile is some query rows of one segment
   with all query heads of one KV head; it passes over its keys in blocks of KEYS. A block is packed once, so that it is
   read with unit stride while the tile's rows go over it, ROWS at a time, in registers.

   Keys are summed span by span, and the spans' sums merged in order (flash-decoding). So a few rows that see many keys
   are work for all threads: each takes spans of the same tile, which packs a key once, where tiles of less rows would
   pack it once each.

   What a row gets depends on nothing but its query and the keys it sees: blocks and spans begin at fixed positions,
   each product is summed in the order of its terms, and keys that a row does not see add exact zeros. So neither the
   chunk in which a row is computed, nor the tile, nor the number of threads moves a bit. */

#include <math.h>
#include <string.h>

#include "extend_blocks.h"

#define LOG2_E 1.44269504f

/* e**(x * ln 2) for x <= 0: 2**n times a polynomial on [-1/2, 1/2] (Cephes), relative error below 2e-7; below 2**-126
   exactly zero; NaN stays NaN. */
INLINE vector exp2_negative(vector x) {
    const float magic = 12582912.0f; /* 1.5 * 2**23: the sum is rounded to a whole number, which its low bits hold. */
    vector shifted = x + magic, r = x - (shifted - magic);
    vector p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    vector scale = (vector)(((whole)shifted << 23) + (127 << 23));
    return (vector)((whole)(p * scale) & ~(whole)(x < -126.0f));
}

/* What comes of NaN does not matter: its weight is NaN anyway. */
INLINE vector larger(vector one, vector other) {
#if LANES == 16
    return (vector)_mm512_max_ps((__m512)one, (__m512)other);
#else
    whole more = other > one;
    return (vector)(((whole)other & more) | ((whole)one & ~more));
#endif
}

INLINE float largest(vector x) {
    #pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) {
        x = larger(x, __builtin_shuffle(x, (NUMBERS + half) & (LANES - 1)));
    }
    return x[0];
}

/* scores = ROWS rows of the pack times KEYS keys. */
INLINE void multiply_keys(const term (*restrict query)[ROWS], scratch_t *restrict s) {
    for (int part = 0; part < KEYS / (LANES * WIDE); part++) {
        vector sums[ROWS][WIDE];
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++) sums[r][v] = (vector){0};
        for (int d = 0; d < TERMS(HEAD_DIM); d++)
            #pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
                #pragma GCC unroll 8
                for (int v = 0; v < WIDE; v++)
                    sums[r][v] = multiply_add(sums[r][v], &query[d][r], &s->keys[part][d][v * LANES]);
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++) *(vector *)&s->scores[r][(part * WIDE + v) * LANES] = sums[r][v];
    }
}

/* output = output * scale + weights times values, ``count`` vectors of each row from ``from`` on. */
INLINE void multiply_values(float (*restrict output)[PADDED], const float *scale, int terms, int from, const int count,
                            scratch_t *restrict s) {
    vector sums[ROWS][WIDE];
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < count; v++) sums[r][v] = *(vector *)&output[r][from + v * LANES] * scale[r];
    for (int j = 0; j < terms; j++)
        #pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
            #pragma GCC unroll 8
            for (int v = 0; v < count; v++)
                sums[r][v] = multiply_add(sums[r][v], &s->weights[r][j], &s->values[j][from + v * LANES]);
    #pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        #pragma GCC unroll 8
        for (int v = 0; v < count; v++) *(vector *)&output[r][from + v * LANES] = sums[r][v];
}

/* Hide what a row does not see; its largest score so far, and in ``gap`` by how much that has grown. */
INLINE float find_top(int pack, int r, int position, float scaling, float *gap, scratch_t *restrict s) {
    int first = s->first[pack][r] - position, last = s->last[pack][r] - position;
    float *row = s->scores[r], before = s->span.top[pack][r];
    for (int j = 0; j < first && j < KEYS; j++) row[j] = -INFINITY;
    for (int j = last > 0 ? last : 0; j < KEYS; j++) row[j] = -INFINITY;
    if (first >= KEYS || last <= 0 || first >= last) {
        *gap = 0.0f;
        return before == -INFINITY ? 0.0f : before; /* Any number: its weights are zero. */
    }
    vector most = *(vector *)row;
    #pragma GCC unroll 16
    for (int j = LANES; j < KEYS; j += LANES) most = larger(most, *(vector *)&row[j]);
    float top = largest(most) * scaling;
    top = top > before ? top : before;
    *gap = before - top;
    s->span.top[pack][r] = top;
    return top;
}

/* Scores to weights relative to each row's largest score; ``scale`` is the factor for what was summed before. */
INLINE void weigh(int pack, int position, float scaling, float *scale, scratch_t *restrict s) {
    float tops[ROWS];
    for (int r = 0; r < ROWS; r++) tops[r] = find_top(pack, r, position, scaling, scale + r, s);
    for (int r = 0; r < ROWS; r += LANES) *(vector *)(scale + r) = exp2_negative(*(vector *)(scale + r));
    for (int r = 0; r < ROWS; r++) {
        vector sum = {0};
        #pragma GCC unroll 16
        for (int j = 0; j < KEYS; j += LANES) {
            vector weight = exp2_negative(*(vector *)&s->scores[r][j] * scaling - tops[r]);
            sum += weight;
#if PAIRS
            _mm256_store_si256((__m256i *)&s->weights[r][j / 2], (__m256i)_mm512_cvtneps_pbh((__m512)weight));
#else
            *(vector *)&s->weights[r][j] = weight;
#endif
        }
        s->span.sum[pack][r] = s->span.sum[pack][r] * scale[r] + sum;
    }
}

/* One pack of rows over one packed block of keys. */
static void attend_block(int pack, int position, int end, float scaling, scratch_t *restrict s) {
    float scale[(ROWS + LANES - 1) / LANES * LANES] ALIGNED = {0};
    multiply_keys(s->query[pack], s);
    weigh(pack, position, scaling, scale, s);
    int terms = end - position < KEYS ? TERMS(end - position) : TERMS(KEYS), from = 0;
    for (; from + WIDE * LANES <= PADDED; from += WIDE * LANES)
        multiply_values(s->span.output[pack], scale, terms, from, WIDE, s);
    for (; from < PADDED; from += LANES) multiply_values(s->span.output[pack], scale, terms, from, 1, s);
}

static void load_rows(const element *query, int64_t row_stride, int64_t head_stride, const int32_t *bounds, int count,
                      scratch_t *restrict s) {
    for (int i = 0; i < (count + ROWS - 1) / ROWS * ROWS; i++) {
        int pack = i / ROWS, r = i % ROWS, token = i / GROUP;
        s->first[pack][r] = i < count ? bounds[2 * token] : 0;
        s->last[pack][r] = i < count ? bounds[2 * token + 1] : 0;
        const element *from = query + token * row_stride + i % GROUP * head_stride;
        for (int d = 0; d < TERMS(HEAD_DIM); d++) s->query[pack][d][r] = i < count ? term_at(from, d) : 0;
    }
}

static void empty(state_t *restrict state) {
    memset(state, 0, sizeof *state);
    for (int pack = 0; pack < PACKS; pack++)
        for (int r = 0; r < ROWS; r++) state->top[pack][r] = -INFINITY;
}

/* Add what the rows got of one span to what they got of those before it; rows that see nothing of it are left alone. */
static void merge(int span, const int32_t *bounds, int count, const state_t *restrict part, state_t *restrict all) {
    for (int i = 0; i < count; i++) {
        const int32_t *bound = bounds + i / GROUP * 2;
        if (bound[0] >= (span + 1) * SPAN_KEYS || bound[1] <= span * SPAN_KEYS) continue;
        int pack = i / ROWS, r = i % ROWS;
        float one = all->top[pack][r], other = part->top[pack][r], top = other > one ? other : one;
        vector before = exp2_negative((vector){0} + (one - top)), now = exp2_negative((vector){0} + (other - top));
        all->top[pack][r] = top;
        all->sum[pack][r] = all->sum[pack][r] * before + part->sum[pack][r] * now;
        for (int d = 0; d < PADDED; d += LANES) {
            vector *into = (vector *)&all->output[pack][r][d];
            *into = *into * before + *(const vector *)&part->output[pack][r][d] * now;
        }
    }
}

/* sinks [GROUP], or null for none: one more score of each head, whose value is zero. Scores are in powers of two here.
 */
static void store_rows(element *out, int64_t row_stride, int count, const float *sinks, const state_t *all) {
    for (int i = 0; i < count; i++) {
        int pack = i / ROWS, r = i % ROWS;
        float total = 0;
        for (int l = 0; l < LANES; l++) total += all->sum[pack][r][l];
        float scale = 1.0f;
        if (sinks) {
            float sink = sinks[i % GROUP] * LOG2_E, top = all->top[pack][r], most = sink > top ? sink : top;
            scale = exp2_negative((vector){0} + (top - most))[0];
            total = total * scale + exp2_negative((vector){0} + (sink - most))[0];
        }
        element *row = out + i / GROUP * row_stride + i % GROUP * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) row[d] = narrow(all->output[pack][r][d] * scale / total);
    }
}

/* All packs of a tile over the keys of one span that its rows see. */
static __attribute__((noinline)) void attend_span(const source_t *source, int span, int count, float scaling,
                                                  scratch_t *restrict s) {
    int packs = (count + ROWS - 1) / ROWS, first = INT32_MAX, last = 0;
    for (int i = 0; i < count; i++) {
        first = s->first[i / ROWS][i % ROWS] < first ? s->first[i / ROWS][i % ROWS] : first;
        last = s->last[i / ROWS][i % ROWS] > last ? s->last[i / ROWS][i % ROWS] : last;
    }
    first = first > span * SPAN_KEYS ? first / KEYS * KEYS : span * SPAN_KEYS;
    last = last < (span + 1) * SPAN_KEYS ? last : (span + 1) * SPAN_KEYS;
    empty(&s->span);
    int64_t slots[KEYS];
#if ROUNDED
    int64_t at[KEYS];
#else
    const int64_t *at = slots;
#endif
    find_slots(source, first, slots);
    for (int position = first; position < last; position += KEYS) {
        pack_keys(elements_of(source->keys_at, slots, at, s), at, s);
        pack_values(elements_of(source->values_at, slots, at, s), at, s);
        find_slots(source, position + KEYS, slots);
        int asked = 0;
        for (int pack = 0; pack < packs; pack++) {
            for (; asked < KEYS * (pack + 1) / packs; asked++) prefetch(source, slots[asked]);
            int begin = INT32_MAX, end = 0;
            for (int r = 0; r < ROWS && pack * ROWS + r < count; r++) {
                begin = s->first[pack][r] < begin ? s->first[pack][r] : begin;
                end = s->last[pack][r] > end ? s->last[pack][r] : end;
            }
            if (begin < position + KEYS && end > position) attend_block(pack, position, end, scaling, s);
        }
    }
}

int64_t part_bytes(void) { return sizeof(state_t); }

/* query [rows, heads, HEAD_DIM] by strides in elements; out [rows, heads, HEAD_DIM] contiguous. k and v are read at
   (page * page_size + offset) * slot_stride + head * kv_head_stride; tables holds the segments' page tables one after
   the other. bounds [kv_heads or 1, rows, 2]: the first position that a row sees, and the one behind its last. parts,
   aligned to 64 bytes, has room for what units of one span leave, each KV head's. sinks [heads], or null for none. */
void extend(const element *query, int64_t row_stride, int64_t head_stride, const kept *k, const kept *v,
            int64_t slot_stride, int64_t kv_head_stride, int32_t page_size, int32_t kv_heads, const int32_t *tables,
            const segment_t *segments, const tile_t *tiles, int32_t tile_count, const unit_t *units, int32_t unit_count,
            const int32_t *bounds, int64_t bounds_stride, state_t *parts, element *out, float scaling, int32_t threads,
            const float *sinks) {
    #pragma omp parallel num_threads(threads) if (unit_count * kv_heads > 1 && threads > 1)
    {
        scratch_t *own = &scratch;
        __asm__("" : "+r"(own)); /* Or the compiler would ask for the thread's own address in every loop. */
        #pragma omp for schedule(dynamic)
        for (int32_t i = 0; i < unit_count * kv_heads; i++) {
            int head = i % kv_heads;
            const unit_t *unit = units + i / kv_heads;
            const tile_t *tile = tiles + unit->tile;
            const segment_t *segment = segments + tile->segment;
            source_t source = {
                k + head * kv_head_stride,
                v + head * kv_head_stride,
                tables + segment->table,
                slot_stride,
                page_size,
                segment->keys,
                segment->shift,
            };
            const int32_t *bound = bounds + head * bounds_stride + 2 * (int64_t)tile->first;
            int count = (tile->last - tile->first) * GROUP;
            load_rows(query + tile->first * row_stride + (int64_t)head * GROUP * head_stride, row_stride, head_stride,
                      bound, count, own);
            empty(&own->all);
            for (int span = unit->first; span < unit->last; span++) {
                attend_span(&source, span, count, scaling * LOG2_E, own);
                if (unit->part < 0) merge(span, bound, count, &own->span, &own->all);
            }
            if (unit->part < 0)
                store_rows(out + ((int64_t)tile->first * kv_heads + head) * GROUP * HEAD_DIM,
                           (int64_t)kv_heads * GROUP * HEAD_DIM, count, sinks ? sinks + head * GROUP : NULL, &own->all);
            else
                parts[(int64_t)unit->part * kv_heads + head] = own->span;
        }
        #pragma omp for schedule(dynamic)
        for (int32_t i = 0; i < tile_count * kv_heads; i++) {
            int head = i % kv_heads;
            const tile_t *tile = tiles + i / kv_heads;
            if (tile->first_part == tile->last_part) continue;
            const int32_t *bound = bounds + head * bounds_stride + 2 * (int64_t)tile->first;
            int count = (tile->last - tile->first) * GROUP, span = tile->first_span;
            empty(&own->all);
            for (int32_t part = tile->first_part; part < tile->last_part; part++, span++)
                merge(span, bound, count, parts + (int64_t)part * kv_heads + head, &own->all);
            store_rows(out + ((int64_t)tile->first * kv_heads + head) * GROUP * HEAD_DIM,
                       (int64_t)kv_heads * GROUP * HEAD_DIM, count, sinks ? sinks + head * GROUP : NULL, &own->all);
        }
    }
}
