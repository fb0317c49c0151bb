/* Rows of pages moved and checked.

   A row is K (or V) of one page in one layer; both ends of a move are described by byte strides, so the same loop
   serves page-first and layer-first memory in any combination. Rows are written with stores that bypass the cache where
   the processor has them: a plain store first reads the line that it is about to overwrite, which costs a third of the
   memory's bandwidth, and the loaded rows are far more than the cache holds. Where rows are checked and moved, each is
   copied to a buffer that stays in the first cache levels, hashed there, and written from there, so what was verified
   is what is written. Rows that are only checked are hashed where they are. */

#include "stream.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as little-endian"
#endif

typedef struct {
    const uint8_t *source;
    int64_t source_page, source_layer, source_half;
    uint8_t *target;
    int64_t target_page, target_layer, target_half;
    int64_t half_bytes;
    const int32_t *source_pages, *target_pages;
    int64_t count;
    int32_t first_layer, layers;
} move_t;

/* Short rows end before the hardware prefetcher has found them: a few rows ahead are asked for, past the caches. */
#define AHEAD 4
#define AHEAD_BYTES 4096

static inline void ask_ahead(const move_t *m, int32_t layer, int64_t i) {
    if (2 * m->half_bytes > AHEAD_BYTES || i + AHEAD >= m->count) return;
    const uint8_t *row = m->source + m->source_pages[i + AHEAD] * m->source_page + layer * m->source_layer;
    for (int half = 0; half < 2; half++)
        for (int64_t at = 0; at < m->half_bytes; at += 64) __builtin_prefetch(row + half * m->source_half + at, 0, 0);
}

void move_rows(const move_t *m) {
    for (int32_t layer = m->first_layer; layer < m->first_layer + m->layers; layer++)
        for (int64_t i = 0; i < m->count; i++) {
            const uint8_t *from = m->source + m->source_pages[i] * m->source_page + layer * m->source_layer;
            uint8_t *to = m->target + m->target_pages[i] * m->target_page + layer * m->target_layer;
            ask_ahead(m, layer, i);
            put(to, from, m->half_bytes);
            put(to + m->target_half, from + m->source_half, m->half_bytes);
        }
    settle();
}

/* The checksum of a row of more than 240 bytes. */
uint64_t hash_row(const uint8_t *row, int64_t nbytes, uint64_t seed) { return xxh3_64(row, nbytes, seed); }

/* seeds, wanted, wrong: [count]; expected: [count, layers]; row: 2 * half_bytes of scratch. A page that is wrong in one
   layer is not moved in any later one. Without a target, rows are only checked. */
void move_checked(const move_t *m, const uint64_t *seeds, const uint64_t *expected, const uint8_t *wanted,
                  uint8_t *wrong, uint8_t *row) {
    int64_t half = m->half_bytes;
    for (int32_t layer = m->first_layer; layer < m->first_layer + m->layers; layer++)
        for (int64_t i = 0; i < m->count; i++) {
            const uint8_t *from = m->source + m->source_pages[i] * m->source_page + layer * m->source_layer;
            const uint8_t *second = from + m->source_half;
            if (wrong[i]) continue;
            ask_ahead(m, layer, i);
            if (wanted[i]) {
                const uint8_t *hashed = from;
                if (m->target != 0 || m->source_half != half) {
                    memcpy(row, from, half);
                    memcpy(row + half, second, half);
                    hashed = row;
                }
                if (hash_row(hashed, 2 * half, seeds[i]) != expected[i * m->layers + layer - m->first_layer]) {
                    wrong[i] = 1;
                    continue;
                }
                from = row;
                second = row + half;
            }
            if (m->target == 0) continue;
            uint8_t *to = m->target + m->target_pages[i] * m->target_page + layer * m->target_layer;
            put(to, from, half);
            put(to + m->target_half, second, half);
        }
    settle();
}
