/* What kernels read and write: float, or bfloat16 where BFLOAT16 is 1. All of them compute in float. */
#ifndef ELEMENT_H
#define ELEMENT_H

#include <stdint.h>

#ifndef BFLOAT16
#error "BFLOAT16 must be 0 or 1"
#endif

/* Kernels are written once and specialised by constant arguments, which takes inlining whatever the size. */
#define INLINE static inline __attribute__((always_inline))

#if BFLOAT16
typedef uint16_t element;
INLINE float widen(element x) {
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)x << 16};
    return u.value;
}
/* Rounds to nearest even; NaN stays NaN. */
INLINE element narrow(float x) {
    union {
        float value;
        uint32_t bits;
    } u = {x};
    uint32_t even = (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    return (element)(x != x ? (u.bits >> 16) | 64 : even);
}
#else
typedef float element;
INLINE float widen(element x) { return x; }
INLINE element narrow(float x) { return x; }
#endif

#endif
