/* Decode attention over the paged pool.

   The caller defines HEAD_DIM, KV_HEADS, GROUP (query heads of one KV head), SLOT (elements from one slot of the pool
   to the next), PAGE_SIZE, ITEM_KEYS, and BFLOAT16.

   One query row per segment, split into items of up to ITEM_KEYS keys at fixed positions (flash-decoding). Each item
   reads its keys once, in the order of memory, for all heads: with KV heads interleaved in a slot, that is what the
   hardware prefetcher follows, and decode is bound by memory. Items keep their own maximum, sum and weighted values; a
   second pass merges them in order, so the result depends neither on the batch nor on the number of threads. Items are
   computed in the order in which they are given: those that read the same keys stand together, so that only the first
   of them fetches these from memory. */

#include "element.h"

#define HEADS (KV_HEADS * GROUP)
#define BLOCK 16
#define AHEAD 8

/* e**x for x <= 0: 2**n times a polynomial on [-ln2/2, ln2/2] (Cephes), relative error below 2e-7; NaN stays NaN. */
static inline float exp_negative(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float n = __builtin_floorf(clamped * 1.44269504f + 0.5f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union {
        int32_t bits;
        float value;
    } scale = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1.0f) * scale.value;
}

/* Keys [first, last) of a segment, whose result is a partial of that number. */
typedef struct {
    int32_t segment, first, last, partial;
} item_t;

typedef struct {
    int32_t row, table, first_partial, last_partial;
} segment_t;

typedef struct {
    float top[HEADS], sum[HEADS], values[HEADS * HEAD_DIM];
} partial_t;

int64_t partial_bytes(void) { return sizeof(partial_t); }

static inline const element *slot_of(const element *pool, const int32_t *table, int key) {
    return pool + ((int64_t)table[key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE) * SLOT;
}

/* Pages lie anywhere, so the hardware starts anew at each; it is told of a slot AHEAD keys before it is needed. */
static inline void prefetch(const element *pool, const int32_t *table, int key, int last) {
    if (key >= last) return;
    const char *slot = (const char *)slot_of(pool, table, key);
    for (int i = 0; i < (int)(KV_HEADS * HEAD_DIM * sizeof(element)); i += 64) __builtin_prefetch(slot + i);
}

static void attend_item(const float *query, const element *k_pool, const element *v_pool, const int32_t *table,
                        int first, int last, partial_t *restrict out) {
    float scores[HEADS][ITEM_KEYS];
    int count = last - first;
    for (int j = 0; j < count; j++) {
        const element *slot = slot_of(k_pool, table, first + j);
        prefetch(k_pool, table, first + j + AHEAD, last);
        for (int h = 0; h < KV_HEADS; h++) {
            float key[HEAD_DIM];
            for (int d = 0; d < HEAD_DIM; d++) key[d] = widen(slot[h * HEAD_DIM + d]);
            for (int g = 0; g < GROUP; g++) {
                const float *q = query + (h * GROUP + g) * HEAD_DIM;
                float sum = 0;
                for (int d = 0; d < HEAD_DIM; d++) sum += q[d] * key[d];
                scores[h * GROUP + g][j] = sum;
            }
        }
    }
    for (int head = 0; head < HEADS; head++) {
        float *row = scores[head], top = row[0], sum = 0;
        for (int j = 1; j < count; j++) top = row[j] > top ? row[j] : top;
        for (int j = 0; j < count; j++) row[j] = exp_negative(row[j] - top);
        for (int j = 0; j < count; j++) sum += row[j];
        out->top[head] = top;
        out->sum[head] = sum;
    }
    for (int i = 0; i < HEADS * HEAD_DIM; i++) out->values[i] = 0;
    for (int start = 0; start < count; start += BLOCK) {
        int end = start + BLOCK < count ? start + BLOCK : count;
        const element *slots[BLOCK];
        for (int j = start; j < end; j++) {
            slots[j - start] = slot_of(v_pool, table, first + j);
            prefetch(v_pool, table, first + j + AHEAD, last);
        }
        for (int h = 0; h < KV_HEADS; h++) {
            float sums[GROUP][HEAD_DIM];
            for (int g = 0; g < GROUP; g++)
                for (int d = 0; d < HEAD_DIM; d++) sums[g][d] = out->values[(h * GROUP + g) * HEAD_DIM + d];
            for (int j = start; j < end; j++) {
                const element *value = slots[j - start] + h * HEAD_DIM;
                for (int g = 0; g < GROUP; g++) {
                    float weight = scores[h * GROUP + g][j];
                    for (int d = 0; d < HEAD_DIM; d++) sums[g][d] += weight * widen(value[d]);
                }
            }
            for (int g = 0; g < GROUP; g++)
                for (int d = 0; d < HEAD_DIM; d++) out->values[(h * GROUP + g) * HEAD_DIM + d] = sums[g][d];
        }
    }
}

/* A sink is one more score of its head, whose value is zero. */
static void merge(const partial_t *parts, int count, const float *sinks, element *restrict out) {
    for (int head = 0; head < HEADS; head++) {
        float top = parts[0].top[head], sum = 0, values[HEAD_DIM] = {0};
        for (int i = 1; i < count; i++) top = parts[i].top[head] > top ? parts[i].top[head] : top;
        if (sinks) {
            top = sinks[head] > top ? sinks[head] : top;
            sum = exp_negative(sinks[head] - top);
        }
        for (int i = 0; i < count; i++) {
            float scale = exp_negative(parts[i].top[head] - top);
            sum += scale * parts[i].sum[head];
            for (int d = 0; d < HEAD_DIM; d++) values[d] += scale * parts[i].values[head * HEAD_DIM + d];
        }
        for (int d = 0; d < HEAD_DIM; d++) out[head * HEAD_DIM + d] = narrow(values[d] / sum);
    }
}

/* query [rows, heads, head_dim] by strides in elements, out [rows, heads, head_dim] contiguous; tables holds page
   tables one after the other; partials has room for item_count entries. sinks [heads], or null for none. */
void decode(const element *query, int64_t row_stride, int64_t head_stride, const element *k_pool, const element *v_pool,
            const int32_t *tables, const segment_t *segments, int32_t segment_count, const item_t *items,
            int32_t item_count, partial_t *partials, element *out, float scaling, int32_t threads, const float *sinks) {
    #pragma omp parallel num_threads(threads) if (item_count > 1 && threads > 1)
    {
        #pragma omp for schedule(dynamic)
        for (int i = 0; i < item_count; i++) {
            const segment_t *segment = segments + items[i].segment;
            const element *source = query + segment->row * row_stride;
            float scaled[HEADS * HEAD_DIM];
            for (int head = 0; head < HEADS; head++)
                for (int d = 0; d < HEAD_DIM; d++)
                    scaled[head * HEAD_DIM + d] = scaling * widen(source[head * head_stride + d]);
            attend_item(scaled, k_pool, v_pool, tables + segment->table, items[i].first, items[i].last,
                        partials + items[i].partial);
        }
        #pragma omp for schedule(static)
        for (int s = 0; s < segment_count; s++)
            merge(partials + segments[s].first_partial, segments[s].last_partial - segments[s].first_partial, sinks,
                  out + (int64_t)segments[s].row * HEADS * HEAD_DIM);
    }
}
