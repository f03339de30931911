/* The parts of a training step between its products, forward and backward: each reads and writes its operands once.
   llamarl/models/fused.py and llamarl/learning/logprobs.py call them, and hold the equation and an equal in PyTorch beside each.

   Element type of activations: float, or bfloat16 with -DBF16. All arithmetic and all sums are float's. Every output number is
   computed by one thread in one order, so nothing depends on the number of threads. The loops are plain ones that a compiler makes
   vectors of, on any CPU.

   Shapes: T rows, D features, V vocabulary, H heads, K head dim, M keys. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")
#endif

typedef int64_t i64;
#define INLINE static inline __attribute__((always_inline))

INLINE float as_float(uint32_t bits) {
    union { uint32_t bits; float number; } u = {.bits = bits};
    return u.number;
}

INLINE uint32_t as_bits(float number) {
    union { float number; uint32_t bits; } u = {.number = number};
    return u.bits;
}

#ifdef BF16
typedef uint16_t elem;
INLINE float widen(elem x) { return as_float((uint32_t)x << 16); }
INLINE elem narrow(float x) { /* to nearest even; NaN stays one */
    uint32_t bits = as_bits(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x != x ? 0x7fc0 : rounded;
}
#else
typedef float elem;
INLINE float widen(elem x) { return x; }
INLINE elem narrow(float x) { return x; }
#endif

/* e^x for x <= 0 to 2 units in the last place; 0 below -87, NaN for NaN. */
INLINE float exponential(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 x 2^23: its last bits are the nearest integer */
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    float power = as_float((as_bits(shifted) << 23) + 0x3f800000u);
    return x < -87.0f ? 0.0f : p * power;
}

INLINE float sigmoid(float x) {
    float low = exponential(x < 0.0f ? x : -x), over = 1.0f / (1.0f + low);
    return x < 0.0f ? low * over : over;
}

/* sum += part, n numbers. */
void add_up(float *restrict sum, const elem *restrict part, i64 n, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (i64 i = 0; i < n; i++) sum[i] += widen(part[i]);
}

/* h = x + change, rounded;  inverse[t] = 1 / rms(h[t]);  y = h inverse, rounded, times scale. change NULL: h is x already. */
void rms_norm(elem *restrict y, float *restrict inverse, elem *h, const elem *x, const elem *restrict change,
              const elem *restrict scale, i64 rows, i64 dim, double eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < rows; t++) {
        elem *own = h + t * dim, *restrict to = y + t * dim;
        if (change) {
            const elem *restrict from = x + t * dim, *restrict added = change + t * dim;
#pragma omp simd
            for (i64 i = 0; i < dim; i++) own[i] = narrow(widen(from[i]) + widen(added[i]));
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (i64 i = 0; i < dim; i++) squares += widen(own[i]) * widen(own[i]);
        const float r = 1.0f / sqrtf(squares / (float)dim + (float)eps);
        inverse[t] = r;
#pragma omp simd
        for (i64 i = 0; i < dim; i++) to[i] = narrow(widen(narrow(widen(own[i]) * r)) * widen(scale[i]));
    }
}

/* n = h inverse, s = g scale:  dh = inverse (s - n mean(s n)) + of_h,  dscale = sum_t g n. of_h and dscale may be NULL. */
void rms_norm_backward(elem *restrict dh, float *restrict dscale, const elem *restrict of_h, const elem *restrict g,
                       const elem *restrict h, const float *restrict inverse, const elem *restrict scale, i64 rows, i64 dim,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < rows; t++) {
        const elem *restrict own = h + t * dim, *restrict of_y = g + t * dim;
        elem *restrict to = dh + t * dim;
        const float r = inverse[t];
        float along = 0;
#pragma omp simd reduction(+ : along)
        for (i64 i = 0; i < dim; i++) along += widen(of_y[i]) * widen(scale[i]) * widen(own[i]);
        const float back = along * r * r / (float)dim;
        if (of_h) {
            const elem *restrict more = of_h + t * dim;
#pragma omp simd
            for (i64 i = 0; i < dim; i++)
                to[i] = narrow(r * (widen(of_y[i]) * widen(scale[i]) - widen(own[i]) * back) + widen(more[i]));
        } else {
#pragma omp simd
            for (i64 i = 0; i < dim; i++) to[i] = narrow(r * (widen(of_y[i]) * widen(scale[i]) - widen(own[i]) * back));
        }
    }
    if (!dscale) return;
    enum { COLUMNS = 64 };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 first = 0; first < dim; first += COLUMNS) {
        const i64 count = dim - first < COLUMNS ? dim - first : COLUMNS;
        float sums[COLUMNS] = {0};
        for (i64 t = 0; t < rows; t++) {
            const elem *restrict own = h + t * dim + first, *restrict of_y = g + t * dim + first;
            const float r = inverse[t];
#pragma omp simd
            for (i64 i = 0; i < count; i++) sums[i] += widen(of_y[i]) * widen(narrow(widen(own[i]) * r));
        }
        for (i64 i = 0; i < count; i++) dscale[first + i] = sums[i];
    }
}

/* y = silu(gate), rounded, times up. */
void swiglu(elem *restrict y, const elem *restrict gate, const elem *restrict up, i64 n, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (i64 i = 0; i < n; i++) {
        const float x = widen(gate[i]);
        y[i] = narrow(widen(narrow(x * sigmoid(x))) * widen(up[i]));
    }
}

void swiglu_backward(elem *restrict dgate, elem *restrict dup, const elem *restrict g, const elem *restrict gate,
                     const elem *restrict up, i64 n, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (i64 i = 0; i < n; i++) {
        const float x = widen(gate[i]), s = sigmoid(x), out = widen(g[i]);
        dup[i] = narrow(out * x * s);
        dgate[i] = narrow(out * widen(up[i]) * s * (1.0f + x * (1.0f - s)));
    }
}

/* Each head's pairs (i, i + K/2) turned by the angle of its row; direction -1 turns back. cos, sin [T, K]. */
void rotate(elem *restrict y, const elem *restrict x, const float *restrict cos, const float *restrict sin, i64 rows, i64 heads,
            i64 head_dim, float direction, int threads) {
    const i64 half = head_dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < rows; t++) {
        const float *restrict c = cos + t * head_dim, *restrict s = sin + t * head_dim;
        for (i64 h = 0; h < heads; h++) {
            const elem *restrict from = x + (t * heads + h) * head_dim;
            elem *restrict to = y + (t * heads + h) * head_dim;
#pragma omp simd
            for (i64 i = 0; i < half; i++) {
                const float a = widen(from[i]), b = widen(from[i + half]);
                to[i] = narrow(a * c[i] - direction * b * s[i]);
                to[i + half] = narrow(b * c[i] + direction * a * s[i]);
            }
        }
    }
}

/* Segments of tokens, padded to equal length, as attention's products want them: [segments, kv_heads, rows, K], where a K/V head has
   `rows` = R x places: place l of head j R + r is row r places + l. index [segments, places]: the token at each place.
   heads = kv_heads x R. */

/* to = the tokens' heads at their places; zeros behind the first lengths[n] places of segment n. lengths may be NULL. */
void gather(elem *restrict to, const elem *restrict from, const i64 *restrict index, const i64 *restrict lengths, i64 segments,
            i64 places, i64 heads, i64 head_dim, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 n = 0; n < segments * heads; n++) {
        const i64 *restrict tokens = index + n / heads * places;
        const i64 valid = lengths ? lengths[n / heads] : places;
        elem *restrict row = to + n * places * head_dim;
        for (i64 l = 0; l < places; l++, row += head_dim) {
            if (l < valid) memcpy(row, from + (tokens[l] * heads + n % heads) * head_dim, head_dim * sizeof(elem));
            else memset(row, 0, head_dim * sizeof(elem));
        }
    }
}

/* The tokens' heads = what is at the first lengths[n] places of each segment n. */
void scatter(elem *restrict to, const elem *restrict from, const i64 *restrict index, const i64 *restrict lengths, i64 segments,
             i64 places, i64 heads, i64 head_dim, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 n = 0; n < segments * heads; n++) {
        const i64 *restrict tokens = index + n / heads * places;
        const elem *restrict row = from + n * places * head_dim;
        for (i64 l = 0; l < lengths[n / heads]; l++, row += head_dim)
            memcpy(to + (tokens[l] * heads + n % heads) * head_dim, row, head_dim * sizeof(elem));
    }
}

/* The tokens' heads += what is at all places; a token may be at many. A thread takes whole heads, so the order is always one. */
void scatter_add(float *restrict to, const elem *restrict from, const i64 *restrict index, i64 segments, i64 places, i64 heads,
                 i64 head_dim, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 h = 0; h < heads; h++)
        for (i64 n = 0; n < segments; n++)
            for (i64 l = 0; l < places; l++) {
                float *restrict sum = to + (index[n * places + l] * heads + h) * head_dim;
                const elem *restrict row = from + ((n * heads + h) * places + l) * head_dim;
#pragma omp simd
                for (i64 i = 0; i < head_dim; i++) sum[i] += widen(row[i]);
            }
}

/* Scores [batches, rows, keys], as many batches of each segment, whose row r is of query r % queries. The keys that query i of a
   segment sees: the first `seen` of the keys - queries places before its own, and its own up to i. */

INLINE float largest(const elem *restrict x, i64 first, i64 end, float most) {
    int broken = 0; /* a comparison passes over NaN */
#pragma omp simd reduction(max : most) reduction(| : broken)
    for (i64 i = first; i < end; i++) {
        most = widen(x[i]) > most ? widen(x[i]) : most;
        broken |= widen(x[i]) != widen(x[i]);
    }
    return broken ? NAN : most;
}

/* to[i] = e^(scale (x[i] - most)); their sum. */
INLINE float exponentials(float *restrict to, const elem *restrict x, i64 first, i64 end, float most, float scale) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = first; i < end; i++) {
        to[i] = exponential((widen(x[i]) - most) * scale);
        sum += to[i];
    }
    return sum;
}

/* scores become their softmax over the keys seen, times `scale` before; 0 elsewhere. room: [threads, keys]. */
void causal_softmax(elem *restrict scores, float *restrict room, const i64 *restrict seen, i64 segments, i64 queries,
                    i64 batches, i64 rows, i64 keys, float scale, int threads) {
    const i64 total = batches * rows, of_segment = total / segments, prefix = keys - queries;
    const i64 each = (total + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 thread = 0; thread < threads; thread++) {
        float *restrict e = room + thread * keys;
        for (i64 row = thread * each; row < (thread + 1) * each && row < total; row++) {
            elem *restrict own = scores + row * keys;
            const i64 behind = seen ? seen[row / of_segment] : 0, last = prefix + row % queries + 1;
            const float most = largest(own, prefix, last, largest(own, 0, behind, -INFINITY));
            float sum = exponentials(e, own, 0, behind, most, scale);
            sum += exponentials(e, own, prefix, last, most, scale);
            for (i64 i = behind; i < prefix; i++) e[i] = 0.0f;
            for (i64 i = last; i < keys; i++) e[i] = 0.0f;
            const float over = 1.0f / sum;
#pragma omp simd
            for (i64 i = 0; i < keys; i++) own[i] = narrow(e[i] * over);
        }
    }
}

/* g, the gradient of the weights w, becomes that of the scores: scale w (g - sum g w). */
void causal_softmax_backward(elem *restrict g, const elem *restrict w, i64 queries, i64 batches, i64 rows, i64 keys,
                             float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 row = 0; row < batches * rows; row++) {
        elem *restrict own = g + row * keys;
        const elem *restrict weight = w + row * keys;
        const i64 last = keys - queries + row % queries + 1;
        float along = 0;
#pragma omp simd reduction(+ : along)
        for (i64 i = 0; i < last; i++) along += widen(own[i]) * widen(weight[i]);
#pragma omp simd
        for (i64 i = 0; i < last; i++) own[i] = narrow(scale * widen(weight[i]) * (widen(own[i]) - along));
        for (i64 i = last; i < keys; i++) own[i] = narrow(0.0f);
    }
}

enum { BLOCK = 1024 }; /* of the vocabulary, summed in float; blocks add up in double */

/* x = (z - top) / temperature:  logprob = x[label] - log_sum,  entropy = log_sum - sum p x  with  log_sum = log sum e^x. */
void log_softmax(float *restrict logprob, float *restrict entropy, float *restrict top, float *restrict log_sum,
                 const elem *restrict logits, const i64 *restrict labels, i64 rows, i64 vocab, double temperature, int threads) {
    const float over = (float)(1.0 / temperature);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < rows; t++) {
        const elem *restrict z = logits + t * vocab;
        float most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (i64 i = 0; i < vocab; i++) most = widen(z[i]) > most ? widen(z[i]) : most;
        double sum = 0, weighed = 0;
        for (i64 first = 0; first < vocab; first += BLOCK) {
            const i64 end = vocab - first < BLOCK ? vocab : first + BLOCK;
            float of_block = 0, weighed_of_block = 0;
#pragma omp simd reduction(+ : of_block, weighed_of_block)
            for (i64 i = first; i < end; i++) {
                const float x = (widen(z[i]) - most) * over, e = exponential(x);
                of_block += e;
                weighed_of_block += e == 0.0f ? 0.0f : e * x; /* x may be -infinite */
            }
            sum += of_block;
            weighed += weighed_of_block;
        }
        logprob[t] = (float)((double)(widen(z[labels[t]]) - most) / temperature - log(sum));
        entropy[t] = (float)(log(sum) - weighed / sum);
        top[t] = most;
        log_sum[t] = (float)log(sum);
    }
}

/* p = e^l, l = (z - top) / temperature - log_sum:  dz = (a (onehot(label) - p) - b p (l + entropy)) / temperature, in the logits'
   place. b may be NULL. */
void log_softmax_backward(elem *restrict logits, const i64 *restrict labels, const float *restrict top,
                          const float *restrict log_sum, const float *restrict entropy, const float *restrict a,
                          const float *restrict b, i64 rows, i64 vocab, double temperature, int threads) {
    const float over = (float)(1.0 / temperature);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < rows; t++) {
        elem *restrict z = logits + t * vocab;
        const float of_a = a[t] * over, of_b = b ? b[t] * over : 0.0f, most = top[t], shift = log_sum[t], h = entropy[t];
        const float l_label = (widen(z[labels[t]]) - most) * over - shift, p_label = exponential(l_label);
        if (b) {
#pragma omp simd
            for (i64 i = 0; i < vocab; i++) {
                const float l = (widen(z[i]) - most) * over - shift, p = exponential(l);
                z[i] = narrow(p == 0.0f ? 0.0f : -p * (of_a + of_b * (l + h)));
            }
        } else {
#pragma omp simd
            for (i64 i = 0; i < vocab; i++) z[i] = narrow(-of_a * exponential((widen(z[i]) - most) * over - shift));
        }
        const float of_entropy = p_label == 0.0f ? 0.0f : of_b * p_label * (l_label + h);
        z[labels[t]] = narrow(of_a * (1.0f - p_label) - of_entropy);
    }
}

/* Whether oneDNN multiplies by tile instructions here (AMX): it turns a transposed left operand for them by itself, and slowly. */
int has_tiles(void) {
#if defined BF16 && defined __AMX_BF16__
    return 1;
#else
    return 0;
#endif
}

enum { SIDE = 32, LANES = 8 }; /* of a square that lies in the nearest cache, and of one in registers */

#if defined BF16 && defined __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLES
typedef elem lanes __attribute__((vector_size(LANES * sizeof(elem)), aligned(sizeof(elem))));

/* Rows i and i + 4 interleaved, three times: row i is column i then. */
INLINE void turn_lanes(lanes row[LANES]) {
    for (int round = 0; round < 3; round++) {
        lanes next[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shufflevector(row[i], row[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(row, next, sizeof(next));
    }
}
#endif
#endif

/* A whole square is copied to the nearest cache first: rows that lie a power of two apart would push each other out of it. */
INLINE void turn_square(elem *restrict to, const elem *restrict from, i64 rows, i64 stride, i64 height, i64 width) {
#ifdef SHUFFLES
    if (width == SIDE && height == SIDE) {
        elem square[SIDE][SIDE];
        for (i64 r = 0; r < SIDE; r++) memcpy(square[r], from + r * stride, sizeof(square[r]));
        for (i64 c = 0; c < SIDE; c += LANES) {
            elem turned[LANES][SIDE];
            for (i64 r = 0; r < SIDE; r += LANES) {
                lanes row[LANES];
                for (int i = 0; i < LANES; i++) memcpy(&row[i], &square[r + i][c], sizeof(row[i]));
                turn_lanes(row);
                for (int i = 0; i < LANES; i++) memcpy(&turned[i][r], &row[i], sizeof(row[i]));
            }
            for (int i = 0; i < LANES; i++) memcpy(to + (c + i) * rows, turned[i], sizeof(turned[i]));
        }
        return;
    }
#endif
    for (i64 c = 0; c < width; c++)
        for (i64 r = 0; r < height; r++) to[c * rows + r] = from[r * stride + c];
}

/* to[c, r] = from[r, c], by squares. A row of `from` is `stride` numbers long, of which the first `columns` are turned. */
void transpose(elem *restrict to, const elem *restrict from, i64 rows, i64 columns, i64 stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 top = 0; top < rows; top += SIDE) {
        const i64 height = rows - top < SIDE ? rows - top : SIDE;
        for (i64 left = 0; left < columns; left += SIDE) {
            const i64 width = columns - left < SIDE ? columns - left : SIDE;
            turn_square(to + left * rows + top, from + top * stride + left, rows, stride, height, width);
        }
    }
}
