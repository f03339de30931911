/* Turns the branches of llamarl's kernels that hang on the CPU or the compiler to those that this machine does not take.

       LLAMARL_NATIVE_INCLUDE=$PWD/tests/machines/other_branches.h python ...

   Tile instructions (AMX) are there: arrays of this thread stand in for the tile registers, so that the code around them runs, in C
   and in Python. Pairs of bfloat16 have no instruction, and vectors cannot be shuffled: their plain loops run. */

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h> /* first, while the compiler's own macros say what it may declare */
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#undef __AVX512BF16__
#undef __AMX_BF16__
#define __AMX_BF16__ 1
#define __has_builtin(name) 0

enum { EMULATED_ROWS = 16, EMULATED_UNITS = 16 }; /* a tile: 16 rows of 64 bytes */
static __thread union { uint32_t bits[EMULATED_ROWS][EMULATED_UNITS]; float sums[EMULATED_ROWS][EMULATED_UNITS]; } emulated_tiles[8];

static inline float emulated_half(uint32_t high_bits) {
    union { uint32_t bits; float number; } u = {.bits = high_bits & 0xffff0000u};
    return u.number;
}

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < EMULATED_ROWS; row++)
        memcpy(emulated_tiles[tile].bits[row], (const char *)from + row * stride, sizeof(emulated_tiles[tile].bits[row]));
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
    for (int row = 0; row < EMULATED_ROWS; row++)
        memcpy((char *)to + row * stride, emulated_tiles[tile].bits[row], sizeof(emulated_tiles[tile].bits[row]));
}

/* sums[r][c] += the pair x[r][u] times the pair w[u][c], over all u. */
static inline void emulated_products(int sums, int x, int w) {
    for (int row = 0; row < EMULATED_ROWS; row++)
        for (int u = 0; u < EMULATED_UNITS; u++) {
            const uint32_t pair = emulated_tiles[x].bits[row][u];
            const float low = emulated_half(pair << 16), high = emulated_half(pair);
            for (int c = 0; c < EMULATED_UNITS; c++) {
                const uint32_t of = emulated_tiles[w].bits[u][c];
                emulated_tiles[sums].sums[row][c] += low * emulated_half(of << 16) + high * emulated_half(of);
            }
        }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero(tile) memset(&emulated_tiles[tile], 0, sizeof(emulated_tiles[tile]))
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, x, w) emulated_products(sums, x, w)
#define _tile_loadconfig(shape) ((void)(shape))
#define _tile_release() ((void)0)
#define syscall(...) 0 /* the system lends the registers */
