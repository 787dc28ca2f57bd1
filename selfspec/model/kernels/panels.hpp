// Sums of products for groups of rows: the inner loop of linear layers and of attention.
//
// Weights lie in panels of PANEL outputs. The lanes of a vector are different outputs, never parts of
// one sum: every output of every row is one chain of additions along the inner dimension. So its bits
// depend on neither the other rows of a group nor the other panels.

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "numbers.hpp"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int PANEL = 16, VECTORS = PANEL / LANES;
constexpr bool WIDE = LANES == 16;
constexpr int MOST_PANELS = WIDE ? 6 : 8;  // maximum panels that are read side by side
constexpr long ROWS_OF_TILE = 16;          // rows of a matrix register
#ifdef __AMX_BF16__
constexpr long AHEAD = 4096;  // distance of prefetches in bytes
#else
constexpr long AHEAD = 2048;
#endif
constexpr long SHORT = 16384;

// The distance for `panels` of `size` bytes that are read side by side. After the end of each follows
// its neighbour, which is already being read. So for short panels the same place of the next ones is
// prefetched, unless these panels are the thread's last.
constexpr long ahead_of(int panels, long size, bool last = false) {
  return panels > 1 && size <= SHORT ? last ? 0 : panels * size : AHEAD;
}

// How a step along the inner dimension is stored and added: STEP weights of an output, INPUTS
// elements of a prepared row, TERMS additions.

struct Float32 {
  using Input = float;
  static constexpr int STEP = 1, INPUTS = 1, TERMS = 1;

  static void load(const Number* weights, Bits* terms) { *terms = *(const Words*)weights; }
  static Vector spread(Input number) { return number - Vector{}; }
  static Vector add(Vector sum, Bits weights, Vector input) { return sum + (Vector)weights * input; }
  static void prepare(const Number* row, long count, Input* to) { std::copy(row, row + count, to); }
};

// Pairs of adjacent weights.
#ifdef __AVX512BF16__
struct Bfloat16 {
  using Input = uint32_t;  // two numbers
  static constexpr int STEP = 2, INPUTS = 1, TERMS = 1;

  static void load(const Number* weights, Bits* terms) { *terms = *(const Words*)weights; }
  static __m512bh spread(Input pair) { return (__m512bh)_mm512_set1_epi32(int(pair)); }
  static Vector add(Vector sum, Bits weights, __m512bh input) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, input);
  }
  static void prepare(const Number* row, long count, Input* to) {
    std::memcpy(to, row, count / 2 * sizeof(Input));
    if (count % 2) to[count / 2] = row[count - 1];
  }
};
#else
struct Bfloat16 : Float32 {
  static constexpr int STEP = 2, INPUTS = 2, TERMS = 2;

  static void load(const Number* weights, Bits* terms) {
    const Bits pairs = *(const Words*)weights;
    terms[0] = pairs << 16, terms[1] = pairs & 0xffff0000u;
  }
  static void prepare(const Number* row, long count, Input* to) {
    for (long j = 0; j < count; j++) to[j] = wide(row[j]);
    if (count % 2) to[count] = 0;
  }
};
#endif

using Kind = std::conditional_t<BFLOAT16, Bfloat16, Float32>;
using Input = Kind::Input;

// Vectors of sums that fit in registers beside weights and inputs; and maximum rows of a group.
constexpr int SUMS = WIDE ? 20 : LANES == 8 ? 14 - 2 * Kind::TERMS : 24;
constexpr int MOST_ROWS = std::min(WIDE ? 10 : 8, SUMS / VECTORS);

// An array by rows (or steps) and panels, with the strides of both.
template <typename T>
struct Block {
  T* at;
  long row, panel;

  Block from_row(long r) const { return {at + r * row, row, panel}; }
  Block from_panel(long p) const { return {at + p * panel, row, panel}; }
};

// Adds `steps` of the inner dimension to the sums of ROWS rows and PANELS panels. `w.row` is the
// stride of steps. Weights are prefetched `ahead` bytes before their use.
template <int ROWS, int PANELS>
void group(long steps, Block<const Input> x, Block<const Number> w, Block<float> sums, long ahead) {
  Vector s[ROWS][PANELS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int p = 0; p < PANELS; p++)
      UNROLL for (int v = 0; v < VECTORS; v++)
        s[r][p][v] = *(const Floats*)(sums.at + r * sums.row + p * sums.panel + v * LANES);
  for (long k = 0; k < steps; k++) {
    UNROLL for (int p = 0; p < PANELS; p++) {
      const Number* from = w.at + p * w.panel + k * w.row;
      __builtin_prefetch((const char*)from + ahead);
      Bits terms[VECTORS][Kind::TERMS];
      UNROLL for (int v = 0; v < VECTORS; v++) {
        Kind::load(from + v * LANES * Kind::STEP, terms[v]);
        if (PANELS == 1) terms[v][0] = hold(terms[v][0]);
      }
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int i = 0; i < Kind::TERMS; i++) {
          const auto input = Kind::spread(x.at[r * x.row + k * Kind::INPUTS + i]);
          UNROLL for (int v = 0; v < VECTORS; v++)
            s[r][p][v] = Kind::add(s[r][p][v], terms[v][i], input);
        }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int p = 0; p < PANELS; p++)
      UNROLL for (int v = 0; v < VECTORS; v++)
        *(Floats*)(sums.at + r * sums.row + p * sums.panel + v * LANES) = s[r][p][v];
}

constexpr long up(long number, long unit) { return (number + unit - 1) / unit; }

constexpr int panels_at_once(long rows) {
  return int(std::min<long>(MOST_PANELS, std::max<long>(1, SUMS / VECTORS / rows)));
}

// An array of `make<I + 1>()` for each I.
template <int... I>
constexpr auto each(std::integer_sequence<int, I...>, const auto& make) {
  return std::array{make.template operator()<I + 1>()...};
}

// Any number of panels, in even groups: with too few sums, each addition would wait for the last one.
template <int ROWS>
void panels(long count, long steps, Block<const Input> x, Block<const Number> w, Block<float> sums,
            long ahead) {
  static constexpr auto all = each(std::make_integer_sequence<int, panels_at_once(ROWS)>(),
                                   []<int PANELS>() { return &group<ROWS, PANELS>; });
  const long groups = up(count, all.size());
  for (long g = 0; g < groups; g++) {
    const long first = count * g / groups, last = count * (g + 1) / groups;
    all[last - first - 1](steps, x, w.from_panel(first), sums.from_panel(first), ahead);
  }
}

constexpr long groups_of(long rows) { return up(rows, MOST_ROWS); }

// Any number of rows, in groups that differ by one row at most.
inline void multiply(long rows, long count, long steps, Block<const Input> x, Block<const Number> w,
                     Block<float> sums, long ahead) {
  static constexpr auto all = each(std::make_integer_sequence<int, MOST_ROWS>(),
                                   []<int ROWS>() { return &panels<ROWS>; });
  const long groups = groups_of(rows);
  for (long g = 0; g < groups; g++) {
    const long first = rows * g / groups, last = rows * (g + 1) / groups;
    all[last - first - 1](count, steps, x.from_row(first), w, sums.from_row(first), ahead);
  }
}

}  // namespace
