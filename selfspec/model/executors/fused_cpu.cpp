// What lies between the matrix products of a Llama-like layer, each part in one pass over memory.
//
// fused_cpu.py compiles this file for one model, on the machine that runs it:
//   BFLOAT16 (0 or 1: float32), HEAD_SIZE, GROUP (query heads that share a key head).
// Every row is computed by itself, in an order that depends on its own position alone: its bits
// cannot depend on the rows that run beside it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long SIZE = HEAD_SIZE;

#if BFLOAT16

using Number = uint16_t;  // the upper half of a float

inline float wide(Number value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Number narrow(float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return Number((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#else

using Number = float;

inline float wide(Number value) { return value; }
inline Number narrow(float value) { return value; }

#endif

// e^x for -87 <= x <= 88, beyond that e^ of the bound. Written out (the polynomial is that of the
// Cephes library) since loops around std::exp are not vectorised everywhere.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
  const float n = (x * 1.44269504f + magic) - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, in two steps
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;  // 2^n
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float dot(const float* a, const float* b) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long j = 0; j < SIZE; j++) sum += a[j] * b[j];
  return sum;
}

// One head of a query or key: normed if the model does that, then rotated. What a rotation turns
// together, (j, j + SIZE / 2) in the model, are neighbours here.
inline void turn(const Number* head, const float* norm, float eps, const float* rotation,
                 float* out) {
  for (long j = 0; j < SIZE; j++) out[j] = wide(head[j]);
  if (norm) {
    const float scale = 1 / std::sqrt(dot(out, out) / SIZE + eps);
    for (long j = 0; j < SIZE; j++) out[j] *= scale * norm[j];
  }
  for (long j = 0; j < SIZE; j += 2) {
    const float a = out[j], b = out[j + 1], cos = rotation[j], sin = rotation[j + 1];
    out[j] = a * cos - b * sin;
    out[j + 1] = a * sin + b * cos;
  }
}

// Scores to weights, in place.
inline void softmax(float* scores, long count, float scaling) {
  float top = -INFINITY, sum = 0;
#pragma omp simd reduction(max : top)
  for (long i = 0; i < count; i++) top = std::max(top, scores[i]);
#pragma omp simd reduction(+ : sum)
  for (long i = 0; i < count; i++) sum += scores[i] = exponential((scores[i] - top) * scaling);
  for (long i = 0; i < count; i++) scores[i] /= sum;
}

// The queries [GROUP, SIZE] that share a key head, by its `count` keys [count, SIZE], to weights
// [GROUP, count]. A key is fetched once for the whole group; four at a time, since their sums do
// not wait for each other.
void score(const float* queries, const float* keys, long count, float* __restrict weights) {
  const long fours = count - count % 4;
  for (long i = 0; i < fours; i += 4)
    for (long g = 0; g < GROUP; g++) {
      const float *q = queries + g * SIZE, *k = keys + i * SIZE;
      float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
      for (long j = 0; j < SIZE; j++) {
        a += q[j] * k[j];
        b += q[j] * k[SIZE + j];
        c += q[j] * k[2 * SIZE + j];
        d += q[j] * k[3 * SIZE + j];
      }
      float* w = weights + g * count + i;
      w[0] = a, w[1] = b, w[2] = c, w[3] = d;
    }
  for (long i = fours; i < count; i++)
    for (long g = 0; g < GROUP; g++)
      weights[g * count + i] = dot(queries + g * SIZE, keys + i * SIZE);
}

// weights [GROUP, count] by values [count, SIZE] to out [GROUP, SIZE]; likewise.
void mix(const float* weights, const float* values, long count, float* __restrict out) {
  const long fours = count - count % 4;
  std::fill(out, out + GROUP * SIZE, 0.0f);
  for (long i = 0; i < fours; i += 4)
    for (long g = 0; g < GROUP; g++) {
      const float *v = values + i * SIZE, *w = weights + g * count + i;
      float* o = out + g * SIZE;
      for (long j = 0; j < SIZE; j++) {
        const float first = w[0] * v[j] + w[1] * v[SIZE + j];
        o[j] += first + (w[2] * v[2 * SIZE + j] + w[3] * v[3 * SIZE + j]);
      }
    }
  for (long i = fours; i < count; i++)
    for (long g = 0; g < GROUP; g++)
      for (long j = 0; j < SIZE; j++)
        out[g * SIZE + j] += weights[g * count + i] * values[i * SIZE + j];
}

}  // namespace

extern "C" {

// hidden += added, where there is any; out = RMSNorm(hidden) * weight. All [rows, width].
void norm(long rows, long width, Number* hidden, const Number* added, const Number* weight,
          float eps, Number* out) {
#pragma omp parallel for if (rows > 8)
  for (long row = 0; row < rows; row++) {
    Number* h = hidden + row * width;
    if (added)
      for (long j = 0; j < width; j++) h[j] = narrow(wide(h[j]) + wide(added[row * width + j]));
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long j = 0; j < width; j++) squares += wide(h[j]) * wide(h[j]);
    const float scale = 1 / std::sqrt(squares / width + eps);
    Number* o = out + row * width;
    for (long j = 0; j < width; j++) {
      const Number normed = narrow(wide(h[j]) * scale);  // rounded here too, as the model does
      o[j] = narrow(wide(normed) * wide(weight[j]));
    }
  }
}

// gate_up [rows, 2 * width] -> out [rows, width]: silu(first half) * second half.
void gate(long rows, long width, const Number* gate_up, Number* out) {
#pragma omp parallel for if (rows > 1)
  for (long row = 0; row < rows; row++) {
    const Number *g = gate_up + 2 * row * width, *up = g + width;
    Number* o = out + row * width;
#pragma omp simd
    for (long j = 0; j < width; j++) {
      const float x = wide(g[j]);
      const Number silu = narrow(x / (1 + exponential(-x)));
      o[j] = narrow(wide(silu) * wide(up[j]));
    }
  }
}

struct Shape {
  long rows, kv_heads;
  long held;    // positions before these rows
  long window;  // positions that a query may look at, 0 for all
  long slots;   // of one head's keys
  float scaling, eps;
};

// projected [rows, heads + 2 kv_heads, SIZE]: queries, keys, values, of which the latter two join
// keys and values [kv_heads, slots, SIZE]; out [rows, heads, SIZE].
void attend(const Shape* s, const Number* projected, const float* norms, const float* rotations,
            float* keys, float* values, Number* out) {
  const long heads = GROUP * s->kv_heads, width = (heads + 2 * s->kv_heads) * SIZE;
#pragma omp parallel if (s->rows * (s->held + s->rows) > 64)
  {
#pragma omp for collapse(2)
    for (long row = 0; row < s->rows; row++)
      for (long head = 0; head < s->kv_heads; head++) {
        const Number* key = projected + row * width + (heads + head) * SIZE;
        const Number* value = key + s->kv_heads * SIZE;
        const long slot = (head * s->slots + s->held + row) * SIZE;
        const float* norm = norms ? norms + (heads + head) * SIZE : nullptr;
        turn(key, norm, s->eps, rotations + row * SIZE, keys + slot);
        for (long j = 0; j < SIZE; j++) values[slot + j] = wide(value[j]);
      }
    std::vector<float> weights(GROUP * (s->held + s->rows));
    float queries[GROUP * SIZE], sums[GROUP * SIZE];
#pragma omp for collapse(2) schedule(static, 1)
    for (long row = 0; row < s->rows; row++)
      for (long head = 0; head < s->kv_heads; head++) {
        const long end = s->held + row + 1, first = s->window ? std::max(0L, end - s->window) : 0;
        const long slot = (head * s->slots + first) * SIZE, at = head * GROUP * SIZE;
        for (long g = 0; g < GROUP * SIZE; g += SIZE)
          turn(projected + row * width + at + g, norms ? norms + at + g : nullptr, s->eps,
               rotations + row * SIZE, queries + g);
        score(queries, keys + slot, end - first, weights.data());
        for (long g = 0; g < GROUP; g++)
          softmax(weights.data() + g * (end - first), end - first, s->scaling);
        mix(weights.data(), values + slot, end - first, sums);
        Number* o = out + row * heads * SIZE + at;
        for (long j = 0; j < GROUP * SIZE; j++) o[j] = narrow(sums[j]);
      }
  }
}

}
