/* Copies that bypass the cache where the processor has such stores: a plain store first reads the line that it is about
   to overwrite. */
#ifndef STREAM_H
#define STREAM_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR 64
#define STREAM(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512((const void *)(from)))
#elif defined(__AVX__)
#define VECTOR 32
#define STREAM(to, from) _mm256_stream_si256((void *)(to), _mm256_loadu_si256((const void *)(from)))
#endif

static inline void put(uint8_t *to, const uint8_t *from, int64_t nbytes) {
#ifdef VECTOR
    if ((((uintptr_t)to | (uintptr_t)nbytes) & (VECTOR - 1)) == 0) {
        for (int64_t at = 0; at < nbytes; at += VECTOR) STREAM(to + at, from + at);
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

/* Streamed stores are ordered with later ones (the flag that says "done") only by a fence. */
static inline void settle(void) {
#ifdef VECTOR
    _mm_sfence();
#endif
}

#endif
