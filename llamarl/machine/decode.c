/* One pass of a Llama decoder on a CPU over a token a row or over whole prompts, and the sampler. llamarl/inference/decode.py calls
   both.

   Element type of weights, activations and cache: float, or bfloat16 with -DBF16. Sums, norms, softmax and the residual stream
   are float. Every output number is summed by one thread in one order, so it depends neither on the threads nor on the other rows.

   A weight [out, in] lies in panels of WIDTH outputs. A panel holds, for one unit of inputs after another, that unit of each output:
   [out / WIDTH, in / unit, WIDTH, unit], zeros behind the last output. A unit is one float or two bfloat16, 4 bytes.

   Shapes: N rows, D model, H query heads, G key/value heads, R = H / G, K head dim, I hidden units, V vocabulary, L places. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(BF16) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILES /* this CPU multiplies tiles of 16 x 32 by 32 x 16 bfloat16: matrix products are an instruction */
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16
#define ROWS 8 /* a block of ROWS x COLS vectors, one COLS and one broadcast fill the registers */
#else
#define LANES 8
#define ROWS 4
#endif
#ifdef TILES
#define TILE 16              /* rows of a tile, each of 16 units: 64 bytes */
#define COLS (2 * TILE / LANES) /* two tiles of weights, by two of rows, with their four sums, are all eight tile registers */
#else
#define COLS (LANES == 16 ? 3 : 2)
#endif
#define WIDTH (LANES * COLS)
#define ROW_BLOCK 64 /* rows that one thread takes through a panel */
#define PLACES 32    /* that attention reads at once */
#define VOCAB_BLOCK 256

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int64_t i64;
#define INLINE static inline __attribute__((always_inline))

#ifdef BF16
typedef uint16_t elem;
typedef int32_t unit;
INLINE float widen(elem x) {
    union { uint32_t bits; float number; } u = {.bits = (uint32_t)x << 16};
    return u.number;
}
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
INLINE vec load(const elem *from) {
#ifdef __AVX512F__
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)from, ivec) << 16);
#endif
}
INLINE elem narrow(float x) { /* to nearest even; NaN stays one */
    union { float number; uint32_t bits; } u = {.number = x};
    return x != x ? 0x7fc0 : (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}
INLINE vec multiply_add(vec sum, unit x, ivec w) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
#else
    return sum + widen(x) * (vec)(w << 16) + widen(x >> 16) * (vec)(w & (int32_t)0xffff0000);
#endif
}
#else
typedef float elem, unit;
INLINE float widen(elem x) { return x; }
INLINE vec load(const elem *from) { return *(const loose_vec *)from; }
INLINE elem narrow(float x) { return x; }
INLINE vec multiply_add(vec sum, unit x, ivec w) { return sum + x * (vec)w; }
#endif
#define ELEMS (sizeof(unit) / sizeof(elem))

typedef struct {
    const void *qkv, *output, *gate, *up, *down; /* panels; qkv: by key/value head its R queries, its key, its value */
    const void *qkv_low, *output_low, *mlp_low, *down_low; /* panels: the adapters' A [rank, in]; see `lower` */
    const float *qkv_bias, *attention_norm, *mlp_norm; /* qkv_bias may be NULL */
    elem *keys, *values;                                /* [slots, G, capacity, K] */
} Layer;

typedef struct {
    i64 layers, hidden, heads, groups, head_dim, units, vocab;
    i64 qkv_rank, output_rank, mlp_rank, down_rank; /* of the adapters of a product's weights together; 0 without any */
    i64 tiles; /* whether products are made by tile instructions where a weight's shape allows; only after tiles_allowed() */
    double eps, scaling;
    const Layer *layer;
    const elem *embedding; /* [V, D] */
    const float *norm;
    const void *head; /* panels */
} Model;

typedef struct {
    i64 rows, outputs, capacity, threads;
    const i64 *tokens, *positions, *slots; /* [N]; a slot may have many rows: each sees the places up to its own */
    const i64 *last;                       /* [outputs]: rows whose logits are wanted; NULL for all */
    const float *cos, *sin;        /* [N, K] */
    float *h, *qkv;                /* scratch: [N, D], [N, (H + 2 G) K] */
    elem *x, *gated;               /* scratch: [N', max(D, H K) + rank], [N', I + rank], N' the next multiple of row_multiple() */
    float *logits;                 /* [outputs, V] */
} Step;

INLINE float sum_of(vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
#endif
}

INLINE vec pick(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

/* The largest number in `count` vectors. */
INLINE float largest(const vec *v, i64 count) {
    vec most = v[0];
    for (i64 i = 1; i < count; i++) most = pick(v[i] > most, v[i], most);
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)most);
#else
    for (int i = 1; i < LANES; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    return most[0];
#endif
}

/* e^x for x <= 0 to 2 units in the last place; 0 below -87, NaN for NaN. */
INLINE vec exponential(vec x) {
    const vec far = {0};
    vec clamped = pick(x < -87.0f, far - 87.0f, x);
    vec shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 x 2^23: its last bits are the nearest integer */
    vec n = shifted - 12582912.0f;
    vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec y = (vec)((ivec)p + ((ivec)shifted << 23));
    return pick(x != x, x, pick(x < -87.0f, far, y));
}

/* --- products --- */

INLINE void block(const unit *x, i64 stride, const unit *panel, i64 units, const int rows, vec out[ROWS][COLS]) {
    vec sums[ROWS][COLS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < COLS; c++) sums[r][c] = (vec){0};
    for (i64 u = 0; u < units; u++, panel += WIDTH) {
        ivec w[COLS];
#pragma GCC unroll 3
        for (int c = 0; c < COLS; c++) w[c] = ((const ivec *)panel)[c];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
            for (int c = 0; c < COLS; c++) sums[r][c] = multiply_add(sums[r][c], x[r * stride + u], w[c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int c = 0; c < COLS; c++) out[r][c] = sums[r][c];
}

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* Rows of x times a panel, ROWS at a time. */
static void multiply_vectors(const unit *x, i64 stride, const unit *w, i64 units, i64 rows, vec out[ROW_BLOCK][COLS]) {
    for (i64 row = 0; row < rows; row += ROWS, x += ROWS * stride, out += ROWS)
        switch (least(ROWS, rows - row)) {
#define BLOCK(n) case n: block(x, stride, w, units, n, out); break
            BLOCK(1); BLOCK(2); BLOCK(3);
#if ROWS > 4
            BLOCK(4); BLOCK(5); BLOCK(6); BLOCK(7);
#endif
            default: block(x, stride, w, units, ROWS, out);
        }
}

#ifdef TILES
/* Rows of x times a panel by tile instructions, 32 rows at a time. Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
   x is read up to the next multiple of TILE rows; a row's sums are in one order, whatever lies beside it. */
static void multiply_tiles(const unit *x, i64 stride, const unit *w, i64 units, i64 rows, vec out[ROW_BLOCK][COLS]) {
    const i64 row_bytes = stride * sizeof(unit);
    for (i64 row = 0; row < rows; row += 2 * TILE, x += 2 * TILE * stride, out += 2 * TILE) {
        const unit *panel = w;
        if (rows - row <= TILE) {
            _tile_zero(0);
            _tile_zero(1);
            for (i64 u = 0; u < units; u += TILE, panel += TILE * WIDTH) {
                _tile_loadd(4, x + u, row_bytes);
                _tile_loadd(6, panel, sizeof(vec) * COLS);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, panel + TILE, sizeof(vec) * COLS);
                _tile_dpbf16ps(1, 4, 7);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (i64 u = 0; u < units; u += TILE, panel += TILE * WIDTH) {
                _tile_loadd(4, x + u, row_bytes);
                _tile_loadd(6, panel, sizeof(vec) * COLS);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, panel + TILE, sizeof(vec) * COLS);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, x + TILE * stride + u, row_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(2, out + TILE, sizeof(vec) * COLS);
            _tile_stored(3, (float *)(out + TILE) + TILE, sizeof(vec) * COLS);
        }
        _tile_stored(0, out, sizeof(vec) * COLS);
        _tile_stored(1, (float *)out + TILE, sizeof(vec) * COLS);
    }
}

/* Eight tiles of 16 rows of 64 bytes, for this thread. */
static void begin_tiles(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = TILE;
    _tile_loadconfig(&shape);
}

static void end_tiles(void) { _tile_release(); }
#else
static void begin_tiles(void) {}
static void end_tiles(void) {}
#endif

/* Whether there are tile instructions and the system lends their registers to this process, which this asks for. */
int tiles_allowed(void) {
#ifdef TILES
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: asm/prctl.h */
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}

/* out = the first `inputs` numbers of up to ROW_BLOCK rows of x, `stride` apart, times a panel. Which kernel it is depends on the
   weight's shape alone, never on the rows. */
static void multiply(const elem *x, i64 stride, const void *panels, i64 panel, i64 inputs, i64 rows, i64 tiles,
                     vec out[ROW_BLOCK][COLS]) {
    const i64 units = inputs / ELEMS;
    const unit *w = (const unit *)panels + panel * units * WIDTH;
#ifdef TILES
    if (tiles && units % TILE == 0) {
        multiply_tiles((const unit *)x, stride / ELEMS, w, units, rows, out);
        return;
    }
#endif
    (void)tiles;
    multiply_vectors((const unit *)x, stride / ELEMS, w, units, rows, out);
}

/* y [N, outputs] = (add ? y : bias or 0) + x [N, inputs] w. By all threads. */
static void project(const elem *x, const void *panels, i64 inputs, i64 outputs, i64 rows, i64 tiles, const float *bias, int add,
                    float *y) {
    const i64 num_panels = (outputs + WIDTH - 1) / WIDTH, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp for schedule(dynamic)
    for (i64 item = 0; item < num_panels * blocks; item++) {
        const i64 panel = item / blocks, column = panel * WIDTH, wide = least(WIDTH, outputs - column);
        const i64 first = item % blocks * ROW_BLOCK, count = least(ROW_BLOCK, rows - first);
        vec out[ROW_BLOCK][COLS];
        multiply(x + first * inputs, inputs, panels, panel, inputs, count, tiles, out);
        for (i64 r = 0; r < count; r++) {
            float *to = y + (first + r) * outputs + column;
            const float *from = (const float *)out[r], *plus = add ? to : bias ? bias + column : NULL;
            if (plus)
                for (i64 j = 0; j < wide; j++) to[j] = plus[j] + from[j];
            else
                memcpy(to, from, wide * sizeof(float));
        }
    }
}

/* Adapters: behind the first `inputs` numbers of each row of x comes scaling * A times these, `rank` numbers. B, behind a weight's
   columns, then adds up in the weight's own product. By all threads. */
static void lower(elem *x, const void *panels, i64 inputs, i64 rank, i64 rows, i64 tiles, float scaling) {
    const i64 num_panels = (rank + WIDTH - 1) / WIDTH, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, stride = inputs + rank;
    if (!rank) return;
#pragma omp for schedule(dynamic)
    for (i64 item = 0; item < num_panels * blocks; item++) {
        const i64 panel = item / blocks, column = panel * WIDTH, wide = least(WIDTH, rank - column);
        const i64 first = item % blocks * ROW_BLOCK, count = least(ROW_BLOCK, rows - first);
        vec out[ROW_BLOCK][COLS];
        multiply(x + first * stride, stride, panels, panel, inputs, count, tiles, out);
        for (i64 r = 0; r < count; r++)
            for (i64 j = 0; j < wide; j++)
                x[(first + r) * stride + inputs + column + j] = narrow(scaling * ((const float *)out[r])[j]);
    }
}

/* y [N, I], its rows `stride` apart, = silu(x gate) * (x up). By all threads. */
static void project_gated(const elem *x, const Layer *layer, i64 inputs, i64 outputs, i64 rows, i64 tiles, elem *y, i64 stride) {
    const i64 num_panels = (outputs + WIDTH - 1) / WIDTH, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp for schedule(dynamic)
    for (i64 item = 0; item < num_panels * blocks; item++) {
        const i64 panel = item / blocks, column = panel * WIDTH, wide = least(WIDTH, outputs - column);
        const i64 first = item % blocks * ROW_BLOCK, count = least(ROW_BLOCK, rows - first);
        vec gate[ROW_BLOCK][COLS], up[ROW_BLOCK][COLS];
        multiply(x + first * inputs, inputs, layer->gate, panel, inputs, count, tiles, gate);
        multiply(x + first * inputs, inputs, layer->up, panel, inputs, count, tiles, up);
        for (i64 r = 0; r < count; r++) {
            for (int c = 0; c < COLS; c++) {
                const vec g = gate[r][c], low = exponential(pick(g < 0.0f, g, -g)); /* of -|g| */
                up[r][c] *= g * pick(g < 0.0f, low, (vec){0} + 1.0f) / (1.0f + low);
            }
            for (i64 j = 0; j < wide; j++) y[(first + r) * stride + column + j] = narrow(((const float *)up[r])[j]);
        }
    }
}

/* y, its rows `stride` apart, = h / rms(h) * scale, row by row, or of the rows in `which`. By all threads. */
static void normalise(const float *h, const float *scale, const i64 *which, i64 rows, i64 wide, double eps, elem *y, i64 stride) {
#pragma omp for schedule(static)
    for (i64 row = 0; row < rows; row++) {
        const float *from = h + (which ? which[row] : row) * wide;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (i64 i = 0; i < wide; i++) squares += from[i] * from[i];
        const float factor = 1 / sqrtf(squares / wide + (float)eps);
        for (i64 i = 0; i < wide; i++) y[row * stride + i] = narrow(from[i] * factor * scale[i]);
    }
}

/* --- attention --- */

/* The sums of LANES vectors, as one vector. */
INLINE vec sums_of(vec *v) {
#ifdef __AVX512F__
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) { /* of two vectors: what was added up in each lane, its halves added */
        const ivec low = (lane & -half) * 2 + (lane & (half - 1)), high = low + half;
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
            v[i] = (vec)_mm512_permutex2var_ps(a, (__m512i)low, b) + (vec)_mm512_permutex2var_ps(a, (__m512i)high, b);
        }
    }
    return v[0];
#else
    vec sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(v[i]);
    return sums;
#endif
}

/* Places as rows of `vectors` vectors of float, with zeros behind K: as they lie, or put into `buffer`. */
INLINE const loose_vec *widened(const elem *from, i64 places, i64 K, const i64 vectors, const int ragged, vec *buffer) {
#ifndef BF16
    if (!ragged) return (const loose_vec *)from;
#endif
    const vec *start = buffer;
    for (i64 place = 0; place < places; place++, from += K, buffer += vectors)
        if (ragged)
            for (i64 k = 0; k < K; k++) ((float *)buffer)[k] = widen(from[k]);
        else
#pragma GCC unroll 8
            for (i64 v = 0; v < vectors; v++) buffer[v] = load(from + v * LANES);
    return (const loose_vec *)start;
}

INLINE void fetch(const elem *from, i64 places, i64 K) { /* ahead of use: memory answers late */
    for (i64 at = 0; at < places * K; at += 64 / sizeof(elem)) __builtin_prefetch(from + at);
}

/* to [K] = x turned by its place: x cos + (its halves exchanged, the first negated) sin */
INLINE void rotate(const float *x, const float *cos, const float *sin, i64 K, float *to) {
    const i64 half = K / 2;
    for (i64 k = 0; k < half; k++) {
        to[k] = x[k] * cos[k] - x[k + half] * sin[k];
        to[k + half] = x[k + half] * cos[k + half] + x[k] * sin[k + half];
    }
}

INLINE i64 place_in_cache(const Model *m, const Step *s, i64 row, i64 group) { /* of its slot's first key or value */
    return (s->slots[row] * m->groups + group) * s->capacity * m->head_dim;
}

INLINE const float *queries_of(const Model *m, const Step *s, i64 row, i64 group) { /* then come the key and the value */
    return s->qkv + (row * m->groups + group) * (m->heads / m->groups + 2) * m->head_dim;
}

/* Turn the key of one row and one key/value head by its place; keep it and the value. */
static void keep(const Model *m, const Step *s, const Layer *layer, i64 row, i64 group) {
    const i64 K = m->head_dim, at = place_in_cache(m, s, row, group) + s->positions[row] * K;
    const float *k = queries_of(m, s, row, group) + m->heads / m->groups * K, *v = k + K;
    float key[K];
    rotate(k, s->cos + row * K, s->sin + row * K, K, key);
    for (i64 i = 0; i < K; i++) layer->keys[at + i] = narrow(key[i]), layer->values[at + i] = narrow(v[i]);
}

/* The R query heads of one key/value head of one row: turn them, attend to all places up to the row's own. */
INLINE void attend_in(const Model *m, const Step *s, const Layer *layer, i64 row, i64 group, const i64 vectors, const int ragged) {
    const i64 K = m->head_dim, R = m->heads / m->groups, place = s->positions[row];
    const float *q = queries_of(m, s, row, group), *cos = s->cos + row * K, *sin = s->sin + row * K;
    const elem *keys = layer->keys + place_in_cache(m, s, row, group), *values = layer->values + (keys - layer->keys);
    vec turned[R * vectors], sums[R * vectors], buffer[PLACES * vectors], weights[R][PLACES / LANES], parts[LANES];
    float most[R], total[R];
    memset(turned, 0, sizeof turned);
    memset(sums, 0, sizeof sums);
    if (ragged) memset(buffer, 0, sizeof buffer);
    for (i64 r = 0; r < R; r++) {
        rotate(q + r * K, cos, sin, K, (float *)(turned + r * vectors));
        for (i64 v = 0; v < vectors; v++) turned[r * vectors + v] *= 1 / sqrtf(K);
        most[r] = -INFINITY, total[r] = 0;
    }
    for (i64 first = 0; first <= place; first += PLACES) {
        const i64 count = least(PLACES, place + 1 - first), groups = (count + LANES - 1) / LANES;
        fetch(values + first * K, count, K);
        const loose_vec *k = widened(keys + first * K, count, K, vectors, ragged, buffer);
        for (i64 r = 0; r < R; r++) {
            float *scores = (float *)weights[r];
            for (i64 g = 0; g < groups; g++) {
                for (i64 i = 0; i < LANES; i++) { /* behind the last place: its own again */
                    const loose_vec *at = k + least(g * LANES + i, count - 1) * vectors;
                    parts[i] = turned[r * vectors] * at[0];
#pragma GCC unroll 8
                    for (i64 v = 1; v < vectors; v++) parts[i] += turned[r * vectors + v] * at[v];
                }
                weights[r][g] = sums_of(parts);
            }
            for (i64 i = count; i < groups * LANES; i++) scores[i] = -INFINITY;
            const float here = largest(weights[r], groups), top = here > most[r] ? here : most[r];
            const float kept = exponential((vec){0} + (most[r] - top))[0];
            vec added = {0};
            for (i64 g = 0; g < groups; g++) added += weights[r][g] = exponential(weights[r][g] - top);
            most[r] = top, total[r] = total[r] * kept + sum_of(added);
            for (i64 v = 0; v < vectors; v++) sums[r * vectors + v] *= kept;
        }
        if (first + PLACES <= place)
            fetch(keys + (first + PLACES) * K, least(PLACES, place + 1 - first - PLACES), K);
        else
            fetch(keys + s->capacity * K, least(PLACES, place + 1), K); /* of the next head, or of the next row */
        const loose_vec *values_here = widened(values + first * K, count, K, vectors, ragged, buffer);
        for (i64 r = 0; r < R; r++) {
            vec sum[vectors];
#pragma GCC unroll 8
            for (i64 v = 0; v < vectors; v++) sum[v] = sums[r * vectors + v];
            for (i64 i = 0; i < count; i++)
#pragma GCC unroll 8
                for (i64 v = 0; v < vectors; v++) sum[v] += ((float *)weights[r])[i] * values_here[i * vectors + v];
#pragma GCC unroll 8
            for (i64 v = 0; v < vectors; v++) sums[r * vectors + v] = sum[v];
        }
    }
    elem *to = s->x + row * (m->heads * K + m->output_rank) + group * R * K;
    for (i64 r = 0; r < R; r++)
        for (i64 k = 0; k < K; k++) to[r * K + k] = narrow(((float *)(sums + r * vectors))[k] / total[r]);
}

static void attend(const Model *m, const Step *s, const Layer *layer, i64 row, i64 group) {
    const i64 vectors = (m->head_dim + LANES - 1) / LANES;
    switch (m->head_dim % LANES ? 0 : vectors) { /* usual ones, with loops unrolled */
#define ATTEND(n) case n: attend_in(m, s, layer, row, group, n, 0); break
        ATTEND(2); ATTEND(3); ATTEND(4); ATTEND(8);
        default: attend_in(m, s, layer, row, group, vectors, 1);
    }
}

/* --- the pass --- */

int panel_width(void) { return WIDTH; }

int row_multiple(void) {
#ifdef TILES
    return TILE;
#else
    return 1;
#endif
}

/* Compared with decode.py's structures before anything is called. */
size_t size_of_Layer(void) { return sizeof(Layer); }
size_t size_of_Model(void) { return sizeof(Model); }
size_t size_of_Step(void) { return sizeof(Step); }

void decode(const Model *m, const Step *s) {
    const i64 N = s->rows, D = m->hidden, I = m->units, seen = m->heads * m->head_dim;
    const i64 of_qkv = D + m->qkv_rank, of_output = seen + m->output_rank, of_mlp = D + m->mlp_rank, of_down = I + m->down_rank;
#pragma omp parallel num_threads(s->threads)
    {
        if (m->tiles) begin_tiles();
#pragma omp for schedule(static)
        for (i64 row = 0; row < N; row++)
            for (i64 i = 0; i < D; i++) s->h[row * D + i] = widen(m->embedding[s->tokens[row] * D + i]);
        for (i64 i = 0; i < m->layers; i++) {
            const Layer *layer = m->layer + i;
            normalise(s->h, layer->attention_norm, NULL, N, D, m->eps, s->x, of_qkv);
            lower(s->x, layer->qkv_low, D, m->qkv_rank, N, m->tiles, m->scaling);
            project(s->x, layer->qkv, of_qkv, seen + 2 * m->groups * m->head_dim, N, m->tiles, layer->qkv_bias, 0, s->qkv);
#pragma omp for schedule(static)
            for (i64 item = 0; item < N * m->groups; item++) keep(m, s, layer, item / m->groups, item % m->groups);
#pragma omp for schedule(dynamic, 4)
            for (i64 item = 0; item < N * m->groups; item++) attend(m, s, layer, item / m->groups, item % m->groups);
            lower(s->x, layer->output_low, seen, m->output_rank, N, m->tiles, m->scaling);
            project(s->x, layer->output, of_output, D, N, m->tiles, NULL, 1, s->h);
            normalise(s->h, layer->mlp_norm, NULL, N, D, m->eps, s->x, of_mlp);
            lower(s->x, layer->mlp_low, D, m->mlp_rank, N, m->tiles, m->scaling);
            project_gated(s->x, layer, of_mlp, I, N, m->tiles, s->gated, of_down);
            lower(s->gated, layer->down_low, I, m->down_rank, N, m->tiles, m->scaling);
            project(s->gated, layer->down, of_down, D, N, m->tiles, NULL, 1, s->h);
        }
        normalise(s->h, m->norm, s->last, s->outputs, D, m->eps, s->x, D);
        project(s->x, m->head, D, m->vocab, s->outputs, m->tiles, NULL, 0, s->logits);
        if (m->tiles) end_tiles();
    }
}

/* --- the sampler --- */

/* Sum of e^(logit - top) over a block of the vocabulary. */
INLINE float block_sum(const float *logits, i64 count, float top) {
    vec sum = {0};
    i64 i = 0;
    for (; i + LANES <= count; i += LANES) sum += exponential(*(const loose_vec *)(logits + i) - top);
    if (i < count) {
        vec rest = {0};
        rest -= INFINITY;
        memcpy(&rest, logits + i, (count - i) * sizeof(float));
        sum += exponential(rest - top);
    }
    return sum_of(sum);
}

static void sample_row(const float *logits, i64 vocab, double uniform, int greedy, i64 *token, float *logprob) {
    const i64 blocks = (vocab + VOCAB_BLOCK - 1) / VOCAB_BLOCK;
    double before[blocks + 1];
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (i64 i = 0; i < vocab; i++) top = logits[i] > top ? logits[i] : top;
    before[0] = 0;
    for (i64 b = 0; b < blocks; b++)
        before[b + 1] = before[b] + block_sum(logits + b * VOCAB_BLOCK, least(VOCAB_BLOCK, vocab - b * VOCAB_BLOCK), top);
    const double total = before[blocks], target = uniform * total;
    i64 chosen = vocab - 1; /* where the logits are NaN, which the logprob shows */
    if (greedy) {
        for (chosen = 0; chosen < vocab - 1 && logits[chosen] != top; chosen++);
    } else {
        /* Rounding may carry the target behind the last possible token: the last one is kept in mind. */
        i64 block = 0;
        for (i64 b = 0; b < blocks; b++)
            if (before[b + 1] > before[b]) {
                block = b;
                if (before[b + 1] > target) break;
            }
        double sum = before[block];
        for (i64 i = block * VOCAB_BLOCK; i < least(vocab, (block + 1) * VOCAB_BLOCK); i++) {
            const double weight = exp((double)logits[i] - top);
            if (weight > 0) {
                chosen = i, sum += weight;
                if (sum > target) break;
            }
        }
    }
    *token = chosen;
    *logprob = (float)((double)logits[chosen] - top - log(total));
}

/* logits [N, V] float -> tokens [N], their logprobs [N], by the inverse CDF; the likeliest (first) where greedy [N], which may be NULL. */
void sample(const float *logits, const double *uniforms, const uint8_t *greedy, i64 *tokens, float *logprobs, i64 rows, i64 vocab,
            i64 threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 row = 0; row < rows; row++)
        sample_row(logits + row * vocab, vocab, uniforms[row], greedy && greedy[row], tokens + row, logprobs + row);
}
