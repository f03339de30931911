/* Copy a piece of a weight and digest its bytes in one pass over memory (llamarl/ddma/copies.py).

   The digest of n bytes: 32 lanes of 64 bits take the bytes in stripes of 256, the last one filled up with zeros,
       lane' = low32(lane) * P + high32(lane) + word,
   and are folded with n at the end. For a given lane the step is a bijection of the word, so any one damaged word shows, and
   stripes in another order do too. Two damages hide each other where one adds to the upper half of a word what the other takes
   from the lower half of the word a stripe on. It guards against accidents, not against forgery. */

#include <stddef.h>
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

static uint64_t copy_run(char *restrict target, const char *restrict source, uint64_t size) {
    digest d;
    begin(&d);
    copy_on(&d, target, source, size);
    fence();
    return end(&d, size);
}

/* Rows of `width` bytes; the target's, or the source's, lie end to end and are what is digested. */
static uint64_t copy_rows(char *target, uint64_t target_stride, const char *source, uint64_t source_stride, uint64_t width,
                          uint64_t rows) {
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

/* Where a part of a run of bytes goes: rows of `width` bytes, `stride` apart. */
typedef struct { char *target; uint64_t start, stride, width, rows; } Move;

/* Compared with copies.py's structure before anything is called. */
size_t size_of_Move(void) { return sizeof(Move); }

/* All parts of a run, but for those that lie where they go already and are only digested. */
void copy_moves(uint64_t count, const Move *moves, const char *source, uint64_t *digests) {
    for (const Move *m = moves; m < moves + count; m++) {
        const char *from = source + m->start;
        *digests++ = from == m->target ? digest_of(from, m->width * m->rows)
                                       : copy_rows(m->target, m->stride, from, m->width, m->width, m->rows);
    }
}

static inline uint16_t bfloat16_of(uint32_t bits) { /* to nearest, ties to even */
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* Rows on their way to a contiguous target; what is not a whole stripe yet, or was cast, waits in `chunk`. */
enum { PACK = 4 * STRIPE }; /* few enough that they are read back before they have left the store buffers */
typedef struct {
    char chunk[PACK] __attribute__((aligned(64)));
    digest d;
    char *target;
    uint64_t waiting, total;
} packer;

static inline void put(packer *p, const char *from, uint64_t size) {
    copy_on(&p->d, p->target, from, size);
    p->target += size;
    p->total += size;
}

static inline void flush(packer *p) {
    put(p, p->chunk, p->waiting);
    p->waiting = 0;
}

static void pack_copy(packer *p, const char *from, uint64_t size) {
    if (p->waiting) {
        uint64_t n = size < STRIPE - p->waiting ? size : STRIPE - p->waiting;
        memcpy(p->chunk + p->waiting, from, n);
        from += n;
        size -= n;
        if ((p->waiting += n) < STRIPE) return;
        flush(p);
    }
    put(p, from, size - size % STRIPE);
    memcpy(p->chunk, from + size - size % STRIPE, p->waiting = size % STRIPE);
}

static void pack_cast(packer *p, const uint32_t *restrict from, uint64_t count) {
    while (count) {
        uint64_t room = (PACK - p->waiting) / 2, n = count < room ? count : room;
        uint16_t *restrict to = (uint16_t *)(p->chunk + p->waiting);
        for (uint64_t i = 0; i < n; i++) to[i] = bfloat16_of(from[i]);
        from += n;
        count -= n;
        if ((p->waiting += 2 * n) == PACK) flush(p);
    }
}

/* Columns of the same rows, each of which becomes contiguous: row i of each is read before row i + 1 of any, so that what lies
   side by side is read in one run. widths: in bytes of the source. casts: float32 to bfloat16, of which the digests are. */
void pack_columns(uint64_t count, char *const *targets, const char *const *sources, const uint64_t *widths,
                  uint64_t source_stride, uint64_t rows, int casts, uint64_t *digests) {
    packer packers[count];
    for (uint64_t i = 0; i < count; i++) {
        begin(&packers[i].d);
        packers[i].target = targets[i];
        packers[i].waiting = packers[i].total = 0;
    }
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t i = 0; i < count; i++) {
            const char *from = sources[i] + row * source_stride;
            if (casts) pack_cast(&packers[i], (const uint32_t *)from, widths[i] / 4);
            else pack_copy(&packers[i], from, widths[i]);
        }
    for (uint64_t i = 0; i < count; i++) {
        flush(&packers[i]);
        digests[i] = end(&packers[i].d, packers[i].total);
    }
    fence();
}

/* The same of one column. */
uint64_t pack_rows(char *target, const char *source, uint64_t width, uint64_t source_stride, uint64_t rows, int casts) {
    uint64_t digest;
    pack_columns(1, &target, &source, &width, source_stride, rows, casts, &digest);
    return digest;
}
