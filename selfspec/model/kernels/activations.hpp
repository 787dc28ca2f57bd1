// What stands between the two products of an MLP.

#pragma once

#include "functions.hpp"

namespace {

enum Activations { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };  // as in asked.py

struct Silu {
  static float of(float x) { return x / (1 + exponential(-x)); }
};

// The tail of the normal distribution is formula 7.1.26 of Abramowitz and Stegun, Handbook of
// Mathematical Functions: off by 1.5e-7 at most.
struct Gelu {
  static float of(float x) {
    const float t = 1 / (1 + 0.3275911f * 0.70710678f * std::fabs(x));
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = 0.5f * p * t * exponential(-0.5f * x * x);
    return x * (x < 0 ? tail : 1 - tail);
  }
};

struct GeluTanh {
  static float of(float x) {
    return x / (1 + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
  }
};

struct Relu {
  static float of(float x) { return x < 0 ? 0 : x; }
};

struct ReluSquared {
  static float of(float x) { return x < 0 ? 0 : x * x; }
};

// from [rows, width], or [rows, 2 * width] whose second halves are multiplied with -> to
// [rows, width].
template <typename Function>
void activate(bool gated, long rows, long width, const Number* from, Number* to) {
  constexpr long CHUNK = 256;  // of a row: threads share even a single one
#pragma omp for collapse(2)
  for (long row = 0; row < rows; row++)
    for (long first = 0; first < width; first += CHUNK) {
      const Number *x = from + (gated ? 2 : 1) * row * width, *times = x + width;
      Number* o = to + row * width;
      const long last = std::min(first + CHUNK, width);
      if (gated) {
#pragma omp simd
        for (long j = first; j < last; j++)
          o[j] = narrow(wide(narrow(Function::of(wide(x[j])))) * wide(times[j]));
      } else {
#pragma omp simd
        for (long j = first; j < last; j++) o[j] = narrow(Function::of(wide(x[j])));
      }
    }
}

// For all threads of a team.
void activate(long activation, bool gated, long rows, long width, const Number* from, Number* to) {
  switch (activation) {
    case SILU:
      return activate<Silu>(gated, rows, width, from, to);
    case GELU:
      return activate<Gelu>(gated, rows, width, from, to);
    case GELU_TANH:
      return activate<GeluTanh>(gated, rows, width, from, to);
    case RELU:
      return activate<Relu>(gated, rows, width, from, to);
    case RELU_SQUARED:
      return activate<ReluSquared>(gated, rows, width, from, to);
  }
}

}  // namespace
