// Functions of one number that compilers vectorise, unlike loops around those of the C library.

#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.hpp"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// e^x for -87 <= x <= 88, beyond that e^ of the bound. The polynomial is that of the Cephes library.
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

// 2^x, to 1e-7, of numbers that are at most 0. Below -126 it is 0: processors take a hundred times as
// long for what is smaller than a normal number.
inline Vector powers_of_two(Vector x) {
#if defined(__AVX512DQ__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  const Vector f = (Vector)_mm512_maskz_reduce_ps(normal, (__m512)x, 1);  // above a whole number
#else
  const Vector magic = Vector{} + 12582912.0f, least = Vector{} - 126;
  const Vector bounded = x < least ? least : x;
  const Vector shifted = bounded - 0.5f + magic, f = bounded - (shifted - magic);
#endif
  Vector p = f * 1.87757661e-3f + 8.98934025e-3f;
  p = p * f + 5.58263179e-2f;
  p = p * f + 2.40153617e-1f;
  p = p * f + 6.93153073e-1f;
  p = p * f + 9.99999925e-1f;
#if defined(__AVX512DQ__)
  return (Vector)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
#else
  p *= (Vector)(((Bits)shifted + 127) << 23);  // what lies above the bits of a whole number goes
  return x < least ? Vector{} : p;
#endif
}

// The polynomial near 0 is that of the Cephes library, too.
inline float hyperbolic_tangent(float x) {
  const float z = x * x;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near = x + x * z * p, far = 1 - 2 / (1 + exponential(2 * x));
  return std::fabs(x) < 0.625f ? near : far;
}

}  // namespace
