// Scalar functions that compilers can vectorise, unlike those of the C library; and the activations
// between the two linear layers of an MLP.

#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.hpp"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// e^x, with x clamped to -87 <= x <= 88. The polynomial is that of the Cephes library.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
  const float n = (x * 1.44269504f + magic) - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, in two steps
  float p = (1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f;
  p = (p * r + 4.1665795894e-2f) * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>(uint32_t(int32_t(n) + 127) << 23);  // 2^n
}

// 2^x, to 1e-7, for x <= 0. Below -126 it is 0, since denormal numbers take processors a hundred
// times as long.
inline Vector powers_of_two(Vector x) {
#if defined(__AVX512DQ__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  const Vector f = (Vector)_mm512_maskz_reduce_ps(normal, (__m512)x, 1);  // above a whole number
#else
  const Vector magic = Vector{} + 12582912.0f, least = Vector{} - 126;
  const Vector bounded = x < least ? least : x;
  const Vector shifted = bounded - 0.5f + magic, f = bounded - (shifted - magic);
#endif
  Vector p = (f * 1.87757661e-3f + 8.98934025e-3f) * f + 5.58263179e-2f;
  p = (p * f + 2.40153617e-1f) * f + 6.93153073e-1f;
  p = p * f + 9.99999925e-1f;
#if defined(__AVX512DQ__)
  return (Vector)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
  p *= (Vector)(((Bits)shifted + 127) << 23);  // shifts out the bits above the integer
  return x < least ? Vector{} : p;
#endif
}

// Near 0 by the polynomial of the Cephes library, since the exponential formula loses digits there.
inline float hyperbolic_tangent(float x) {
  const float z = x * x, p = (-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f;
  const float near = ((p * z + 1.33314422036e-1f) * z - 3.33332819422e-1f) * z * x + x;
  return z < 0.390625f ? near : 1 - 2 / (1 + exponential(2 * x));
}

// The indices and values of the `most` largest of softmax(logits / temperature), [count], descending;
// ties go to the first.
template <typename T>
inline void likeliest(long count, const T* logits, float temperature, long most, long* places,
                      float* shares) {
  std::fill_n(shares, most, -INFINITY), std::fill_n(places, most, 0);
  for (long e = 0; e < count; e++) {
    if (!(wide(logits[e]) > shares[most - 1])) continue;
    long i = most - 1;
    for (; i && shares[i - 1] < wide(logits[e]); i--)
      places[i] = places[i - 1], shares[i] = shares[i - 1];
    places[i] = e, shares[i] = wide(logits[e]);
  }
  const float top = shares[0];
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (long e = 0; e < count; e++) total += exponential((wide(logits[e]) - top) / temperature);
  for (long i = 0; i < most; i++) shares[i] = exponential((shares[i] - top) / temperature) / total;
}

// RMSNorm without its weights, or LayerNorm if `centred`.
template <typename T>
inline void standardise(bool centred, float eps, long count, const T* from, float* to) {
  float sum = 0, squares = 0;
  if (centred) {
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < count; j++) sum += wide(from[j]);
  }
  const float mean = sum / count;
#pragma omp simd reduction(+ : squares)
  for (long j = 0; j < count; j++) squares += (wide(from[j]) - mean) * (wide(from[j]) - mean);
  const float scale = 1 / std::sqrt(squares / count + eps);
#pragma omp simd
  for (long j = 0; j < count; j++) to[j] = (wide(from[j]) - mean) * scale;
}

inline float silu(float x) { return x / (1 + exponential(-x)); }

// The tail of the normal distribution is formula 7.1.26 of Abramowitz and Stegun, Handbook of
// Mathematical Functions; its error is at most 1.5e-7.
inline float gelu(float x) {
  const float t = 1 / (1 + 0.3275911f * 0.70710678f * std::fabs(x));
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = 0.5f * p * t * exponential(-0.5f * x * x);
  return x * (x < 0 ? tail : 1 - tail);
}

inline float gelu_tanh(float x) {
  return x / (1 + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
}

inline float relu(float x) { return x < 0 ? 0 : x; }

inline float relu_squared(float x) { return x < 0 ? 0 : x * x; }

// from [rows, width], or gated [rows, 2 * width] with factors in second halves -> to [rows, width].
template <float (*FUNCTION)(float)>
void apply(bool gated, long rows, long width, const Number* from, Number* to) {
  constexpr long CHUNK = 256;  // numbers of a row, so that threads share even a single row
#pragma omp for collapse(2)
  for (long row = 0; row < rows; row++)
    for (long first = 0; first < width; first += CHUNK) {
      const Number *x = from + (gated ? 2 : 1) * row * width, *times = x + width;
      Number* o = to + row * width;
      const long last = std::min(first + CHUNK, width);
      if (gated) {
#pragma omp simd
        for (long j = first; j < last; j++)
          o[j] = narrow(wide(narrow(FUNCTION(wide(x[j])))) * wide(times[j]));
      } else {
#pragma omp simd
        for (long j = first; j < last; j++) o[j] = narrow(FUNCTION(wide(x[j])));
      }
    }
}

// Called by all threads of a team. `activation`: by number, as in recipe.py.
inline void activate(long activation, bool gated, long rows, long width, const Number* from,
                     Number* to) {
  constexpr decltype(&apply<silu>) ALL[] = {apply<silu>, apply<gelu>, apply<gelu_tanh>, apply<relu>,
                                            apply<relu_squared>};
  ALL[activation](gated, rows, width, from, to);
}

}  // namespace
