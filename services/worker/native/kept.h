/* What a pool keeps of K and V: elements or, where ROUNDED is 1, codes of eight bits (float8_e4m3fn) and, behind those
   of each head, its scale, a power of two. So a rounded value is an element again without being rounded again. */
#ifndef KEPT_H
#define KEPT_H

#include <string.h>

#include "element.h"

#ifndef ROUNDED
#error "ROUNDED must be 0 or 1"
#endif

#if ROUNDED
typedef uint8_t kept;

typedef union {
    float value;
    uint32_t bits;
} float_bits;

#define SCALE_OFFSET(head_dim) (((head_dim) + 3) / 4 * 4)
/* Kept values from one head to the next. */
#define KEPT_WIDTH(head_dim) (SCALE_OFFSET(head_dim) + 4)

INLINE float scale_at(const kept *head, int64_t head_dim) {
    float scale;
    memcpy(&scale, head + SCALE_OFFSET(head_dim), sizeof scale);
    return scale;
}

/* A rounded value as an element, which has bits enough for it. */
INLINE element exactly(float x) {
#if BFLOAT16
    return (element)(((float_bits){x}).bits >> 16);
#else
    return x;
#endif
}

/* What a code means before it is scaled. Codes below 8 lack the leading one that numbers of float have. */
INLINE float decoded(kept code) {
    uint32_t size = (uint32_t)(code & 127) << 20, is_small = size < 1u << 23;
    float_bits x = {.bits = size + (120u << 23) + (is_small << 23)};
    x.value -= is_small ? 0x1p-6f : 0.0f;
    x.bits |= (uint32_t)(code & 128) << 24;
    return x.value;
}

/* Round to nearest even what is at most 448. */
INLINE kept encoded(float x) {
    float_bits whole = {x}, size = {.bits = whole.bits & 0x7fffffff};
    uint32_t sign = whole.bits >> 24 & 128;
    float_bits small = {size.value + 0x1p14f}; /* Whose last bit is worth what that of the smallest codes is. */
    uint32_t large = size.bits + 0x7ffff + (size.bits >> 20 & 1);
    return (kept)(sign | (size.bits < 121u << 23 ? small.bits - (141u << 23) : (large >> 20) - (120 << 3)));
}

/* The scale is the smallest power of two by which no value exceeds 448, the largest code. A head with a value that is
   not finite is NaN altogether. */
INLINE void keep_head(const element *head, int64_t head_dim, kept *to) {
    uint32_t top = 0;
    for (int64_t d = 0; d < head_dim; d++) {
        float_bits x = {widen(head[d])};
        uint32_t size = x.bits & 0x7fffffff;
        top = size > top ? size : top;
    }
    int32_t exponent = (int32_t)((top + 0x1fffff) >> 23) - 8, is_finite = top < 0x7f800000;
    if (exponent < 1) exponent = 1;
    float_bits scale = {.bits = is_finite ? (uint32_t)exponent << 23 : 0x7fc00000};
    float_bits inverse = {.bits = (uint32_t)(254 - exponent) << 23};
    for (int64_t d = 0; d < head_dim; d++) to[d] = is_finite ? encoded(widen(head[d]) * inverse.value) : 0;
    for (int64_t d = head_dim; d < SCALE_OFFSET(head_dim); d++) to[d] = 0;
    memcpy(to + SCALE_OFFSET(head_dim), &scale.value, sizeof scale.value);
}
#else
typedef element kept;
#define KEPT_WIDTH(head_dim) (head_dim)
#endif

#endif
