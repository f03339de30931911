/* Copy a piece of a weight and digest its bytes in one pass over memory (llamarl/ddma/copies.py).

   The digest of n bytes: 32 lanes of 64 bits take the bytes in stripes of 256, the last one filled up with zeros,
       lane' = low32(lane) * P + high32(lane) + word,
   and are folded with n at the end. For a given lane the step is a bijection of the word, so any one damaged word shows, and
   stripes in another order do too. It guards against accidents, not against forgery. */

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define P 0xfffffb3bULL /* a prime close to 2^32 */
#define STRIPE 256
#define CHUNK (64 * STRIPE) /* copied and digested while in the first-level cache */
#define NUM_VECTORS 4

typedef uint64_t vector __attribute__((vector_size(64), aligned(1)));
typedef struct { vector lanes[NUM_VECTORS]; } digest;

static inline vector mixed(vector lane, vector word) {
    vector low = lane & 0xffffffffULL;
#if defined(__AVX512F__)
    vector product = (vector)_mm512_mul_epu32((__m512i)low, _mm512_set1_epi64((long long)P));
#else
    vector product = low * P;
#endif
    return product + (lane >> 32) + word;
}

static inline void stream(void *target, vector value) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)target, (__m512i)value);
#elif defined(__SSE2__)
    for (int i = 0; i < 4; i++) {
        __m128i part;
        memcpy(&part, (char *)&value + 16 * i, 16);
        _mm_stream_si128((__m128i *)target + i, part);
    }
#else
    memcpy(target, &value, sizeof value);
#endif
}

static inline void fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static void begin(digest *d) {
    for (int v = 0; v < NUM_VECTORS; v++)
        for (int i = 0; i < 8; i++) d->lanes[v][i] = 0x9e3779b97f4a7c15ULL * (uint64_t)(8 * v + i + 1);
}

static uint64_t end(const digest *d, uint64_t size) {
    uint64_t h = size * 0x9e3779b97f4a7c15ULL;
    for (int v = 0; v < NUM_VECTORS; v++)
        for (int i = 0; i < 8; i++) {
            h = (h ^ d->lanes[v][i]) * 0xff51afd7ed558ccdULL;
            h ^= h >> 32;
        }
    return h;
}

/* Whole stripes, and at the end of a piece a part of one. */
static void take_in(digest *d, const char *bytes, size_t size) {
    digest s = *d;
    size_t at = 0;
    for (; at + STRIPE <= size; at += STRIPE)
        for (int v = 0; v < NUM_VECTORS; v++) s.lanes[v] = mixed(s.lanes[v], *(const vector *)(bytes + at + 64 * v));
    if (at < size) {
        char last[STRIPE] = {0};
        memcpy(last, bytes + at, size - at);
        for (int v = 0; v < NUM_VECTORS; v++) s.lanes[v] = mixed(s.lanes[v], *(const vector *)(last + 64 * v));
    }
    *d = s;
}

uint64_t digest_of(const char *bytes, uint64_t size) {
    digest d;
    begin(&d);
    take_in(&d, bytes, size);
    return end(&d, size);
}

/* A run of bytes; only the last of a piece may end within a stripe. Stores go past the cache where the target allows it:
   it is far larger, and is read by another core. */
static void copy_on(digest *d, char *restrict target, const char *restrict source, size_t size) {
    digest s = *d;
    size_t at = 0;
    if (((uintptr_t)target & 63) == 0)
        for (; at + STRIPE <= size; at += STRIPE)
            for (int v = 0; v < NUM_VECTORS; v++) {
                vector word = *(const vector *)(source + at + 64 * v);
                stream(target + at + 64 * v, word);
                s.lanes[v] = mixed(s.lanes[v], word);
            }
    *d = s;
    for (; at < size; at += CHUNK) {
        size_t n = size - at < CHUNK ? size - at : CHUNK;
        memcpy(target + at, source + at, n);
        take_in(d, target + at, n);
    }
}

uint64_t copy_run(char *restrict target, const char *restrict source, uint64_t size) {
    digest d;
    begin(&d);
    copy_on(&d, target, source, size);
    fence();
    return end(&d, size);
}

/* Rows of `width` bytes; the target's, or the source's, lie end to end and are what is digested. */
uint64_t copy_rows(char *target, uint64_t target_stride, const char *source, uint64_t source_stride, uint64_t width, uint64_t rows) {
    if (target_stride == width && source_stride == width) return copy_run(target, source, width * rows);
    digest d;
    begin(&d);
    uint64_t total = width * rows;
    if (width % STRIPE == 0) {
        for (uint64_t row = 0; row < rows; row++) copy_on(&d, target + row * target_stride, source + row * source_stride, width);
        fence();
        return end(&d, total);
    }
    int packs = target_stride == width;
    const char *run = packs ? target : source;
    uint64_t digested = 0;
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t needed = packs ? row * width : (row + 1) * width; /* what is copied already, or is read next */
        while (digested + CHUNK <= needed || (!packs && digested < needed)) {
            uint64_t n = total - digested < CHUNK ? total - digested : CHUNK;
            take_in(&d, run + digested, n);
            digested += n;
        }
        memcpy(target + row * target_stride, source + row * source_stride, width);
    }
    if (digested < total) take_in(&d, run + digested, total - digested);
    return end(&d, total);
}

static inline uint16_t bfloat16_of(uint32_t bits) { /* to nearest, ties to even */
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* float32 rows of `width` elements, which need not be end to end, to bfloat16 that are; of which the digest is. */
uint64_t cast_rows(uint16_t *restrict target, const uint32_t *restrict source, uint64_t source_stride, uint64_t width, uint64_t rows) {
    enum { COUNT = 2 * STRIPE }; /* few enough that they are read back before they have left the store buffers */
    digest d;
    begin(&d);
    uint64_t total = width * rows, row = 0, column = 0;
    for (uint64_t at = 0; at < total;) {
        uint16_t chunk[COUNT] __attribute__((aligned(64)));
        uint64_t n = total - at < COUNT ? total - at : COUNT, filled = 0;
        while (filled < n) {
            uint64_t run = width - column < n - filled ? width - column : n - filled;
            const uint32_t *from = source + row * source_stride + column;
            for (uint64_t i = 0; i < run; i++) chunk[filled + i] = bfloat16_of(from[i]);
            filled += run;
            column += run;
            if (column == width) column = 0, row++;
        }
        take_in(&d, (const char *)chunk, 2 * n);
        uint64_t bytes = 0;
        if ((((uintptr_t)(target + at)) & 63) == 0) {
            for (; bytes + 64 <= 2 * n; bytes += 64) stream((char *)(target + at) + bytes, *(const vector *)((char *)chunk + bytes));
        }
        memcpy((char *)(target + at) + bytes, (char *)chunk + bytes, 2 * n - bytes);
        at += n;
    }
    fence();
    return end(&d, 2 * total);
}
