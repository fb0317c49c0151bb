/* XXH3 with 64 bits and a seed (XXH3 specification, doc/xxhash_spec.md), for inputs of more than 240 bytes. */
#ifndef XXH3_H
#define XXH3_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define P32_1 0x9E3779B1ULL
#define P32_2 0x85EBCA77ULL
#define P32_3 0xC2B2AE3DULL
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL
#define SECRET_BYTES 192
#define STRIPE 64
#define BLOCK_STRIPES 16
#define BLOCK (BLOCK_STRIPES * STRIPE)

/* clang-format off */
static const uint8_t default_secret[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
/* clang-format on */

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static void seed_secret(uint8_t *secret, uint64_t seed) {
    for (int at = 0; at < SECRET_BYTES; at += 16) {
        uint64_t low = word(default_secret + at) + seed, high = word(default_secret + at + 8) - seed;
        memcpy(secret + at, &low, 8);
        memcpy(secret + at + 8, &high, 8);
    }
}

#if defined(__AVX512F__)
typedef __m512i lanes;
static inline lanes take(const uint8_t *at) { return _mm512_loadu_si512((const void *)at); }
static inline lanes stir(lanes acc, lanes data, lanes secret) {
    lanes key = _mm512_xor_si512(data, secret);
    lanes product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    return _mm512_add_epi64(acc, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, _MM_PERM_BADC)));
}
static inline lanes scramble(lanes acc, lanes secret) {
    lanes prime = _mm512_set1_epi64(P32_1);
    acc = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), secret);
    lanes high = _mm512_mul_epu32(_mm512_srli_epi64(acc, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(acc, prime), _mm512_slli_epi64(high, 32));
}
#elif defined(__AVX2__)
typedef struct {
    __m256i low, high;
} lanes;
static inline lanes take(const uint8_t *at) {
    return (lanes){_mm256_loadu_si256((const void *)at), _mm256_loadu_si256((const void *)(at + 32))};
}
static inline __m256i stir_half(__m256i acc, __m256i data, __m256i secret) {
    __m256i key = _mm256_xor_si256(data, secret);
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
}
static inline lanes stir(lanes acc, lanes data, lanes secret) {
    return (lanes){stir_half(acc.low, data.low, secret.low), stir_half(acc.high, data.high, secret.high)};
}
static inline __m256i scramble_half(__m256i acc, __m256i secret) {
    __m256i prime = _mm256_set1_epi64x(P32_1);
    acc = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), secret);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(acc, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(acc, prime), _mm256_slli_epi64(high, 32));
}
static inline lanes scramble(lanes acc, lanes secret) {
    return (lanes){scramble_half(acc.low, secret.low), scramble_half(acc.high, secret.high)};
}
#else
typedef struct {
    uint64_t lane[8];
} lanes;
static inline lanes take(const uint8_t *at) {
    lanes x;
    memcpy(&x, at, 64);
    return x;
}
static inline lanes stir(lanes acc, lanes data, lanes secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t key = data.lane[i] ^ secret.lane[i];
        acc.lane[i] += data.lane[i ^ 1] + (uint64_t)(uint32_t)key * (key >> 32);
    }
    return acc;
}
static inline lanes scramble(lanes acc, lanes secret) {
    for (int i = 0; i < 8; i++) acc.lane[i] = (acc.lane[i] ^ (acc.lane[i] >> 47) ^ secret.lane[i]) * P32_1;
    return acc;
}
#endif

static uint64_t xxh3_64(const uint8_t *data, int64_t nbytes, uint64_t seed) {
    const uint64_t start[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint8_t secret[SECRET_BYTES];
    lanes state;
    seed_secret(secret, seed);
    memcpy(&state, start, 64);
    int64_t blocks = (nbytes - 1) / BLOCK, at = 0;
    lanes last = take(secret + SECRET_BYTES - STRIPE);
#if defined(__AVX512F__)
    /* All stripes of a block at once, with the secret in registers. */
    lanes keys[BLOCK_STRIPES];
    for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++) keys[stripe] = take(secret + 8 * stripe);
    for (int64_t block = 0; block < blocks; block++, at += BLOCK) {
        #pragma GCC unroll 16
        for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++)
            state = stir(state, take(data + at + STRIPE * stripe), keys[stripe]);
        state = scramble(state, last);
    }
#else
    /* With fewer registers the same would move the secret to and from the stack: half as long again. */
    for (int64_t block = 0; block < blocks; block++, at += BLOCK) {
        for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++)
            state = stir(state, take(data + at + STRIPE * stripe), take(secret + 8 * stripe));
        state = scramble(state, last);
    }
#endif
    int64_t stripes = (nbytes - 1 - blocks * BLOCK) / STRIPE;
    for (int64_t stripe = 0; stripe < stripes; stripe++, at += STRIPE)
        state = stir(state, take(data + at), take(secret + 8 * stripe));
    state = stir(state, take(data + nbytes - STRIPE), take(secret + SECRET_BYTES - STRIPE - 7));
    uint64_t acc[8], result = (uint64_t)nbytes * P64_1;
    memcpy(acc, &state, 64);
    for (int i = 0; i < 4; i++)
        result += fold(acc[2 * i] ^ word(secret + 11 + 16 * i), acc[2 * i + 1] ^ word(secret + 19 + 16 * i));
    result = (result ^ (result >> 37)) * 0x165667919E3779F9ULL;
    return result ^ (result >> 32);
}

#endif
