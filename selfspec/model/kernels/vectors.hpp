// How a linear layer adds up rows by vectors: panels.hpp and blocks.hpp, as linear.hpp asks for it.

#pragma once

#include "forms.hpp"

namespace {

// For `rows` rows.
class Vectors {
 public:
  static constexpr long FEW = MOST_ROWS;  // rows that share what is read of panels

  explicit Vectors(long rows) : rows(rows) {}

  // That a row of `in` numbers is prepared to, the last ones 0 or what the others add up to.
  static long inputs(long in) { return up(in, Kind::STEP) * Kind::INPUTS + totals_of(in); }
  long room(long in) const { return places() * inputs(in); }
  // Rows that are prepared and have sums.
  long places() const { return rows; }
  // That are read side by side.
  long panels() const { return panels_at_once(up(rows, groups_of(rows))); }

  void use() const {}

  void multiply(long count, long steps, Block<const Input> x, Block<const Number> w,
                Block<float> sums, long ahead = AHEAD, bool fresh = false) const {
    for (long r = 0; fresh && r < rows; r++)
      for (long p = 0; p < count; p++)
        std::fill_n(sums.at + r * sums.row + p * sums.panel, PANEL, 0.0f);
    ::multiply(rows, count, steps, x, w, sums, ahead);
  }

  void total_row(long in, long row, Input* room) const {
    Input* const from = room + row * inputs(in);
    total(in, from, (float*)(from + up(in, Kind::STEP) * Kind::INPUTS), 1);
  }

  // While they are in registers.
  bool reads_blocks() const { return rows <= ROWS_OF_BLOCKS; }

  void multiply(const Form& form, long in, long count, Block<const Input> x, const uint8_t* blocks,
                Block<float> sums) const {
    const long groups = up(rows, ROWS_OF_BLOCKS), piece = groups > 1 ? CACHED : in;
    for (long k = 0; k < in; k += piece)
      for (long g = 0; g < groups; g++) {
        const long start = rows * g / groups, end = rows * (g + 1) / groups;
        form.multiply[end - start - 1](in, k, std::min(in, k + piece), count,
                                       x.from_row(start), blocks, form.bytes(in),
                                       sums.from_row(start));
      }
  }

 private:
  static constexpr long CACHED = 1024;  // inputs of panels that groups of rows read from a cache
  const long rows;
};

using Arithmetic = Vectors;

}  // namespace
