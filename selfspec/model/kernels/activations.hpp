// What stands between the two products of an MLP.

#pragma once

#include "functions.hpp"

namespace {

inline float silu(float x) { return x / (1 + exponential(-x)); }

// The tail of the normal distribution is formula 7.1.26 of Abramowitz and Stegun, Handbook of
// Mathematical Functions: off by 1.5e-7 at most.
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

// from [rows, width], or [rows, 2 * width] whose second halves are multiplied with -> to
// [rows, width].
template <float (*FUNCTION)(float)>
void apply(bool gated, long rows, long width, const Number* from, Number* to) {
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
          o[j] = narrow(wide(narrow(FUNCTION(wide(x[j])))) * wide(times[j]));
      } else {
#pragma omp simd
        for (long j = first; j < last; j++) o[j] = narrow(FUNCTION(wide(x[j])));
      }
    }
}

// For all threads of a team. `activation`: by number, as in recipe.py.
void activate(long activation, bool gated, long rows, long width, const Number* from, Number* to) {
  constexpr decltype(&apply<silu>) ALL[] = {apply<silu>, apply<gelu>, apply<gelu_tanh>, apply<relu>,
                                            apply<relu_squared>};
  ALL[activation](gated, rows, width, from, to);
}

}  // namespace
