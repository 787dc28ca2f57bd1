// The arithmetic of linear.hpp by vectors, from panels.hpp and blocks.hpp.

#pragma once

#include "forms.hpp"

namespace {

// For `rows` rows.
class Vectors {
 public:
  static constexpr long FEW = MOST_ROWS;  // rows that share a read of panels
  static long most(long) { return 1L << 32; }  // no limit: arithmetic is slower than reading rows

  explicit Vectors(long rows) : rows(rows) {}

  // Inputs of a prepared row of `in` numbers, padded with 0.
  static long inputs(long in) { return up(in, Kind::STEP) * Kind::INPUTS; }
  // Room for all prepared rows, then, for blocks, for the same rows after `shrink`, and totals.
  long room(long in) const { return places() * ((PAIRED ? 1 : 2) * inputs(in) + totals_of(in)); }
  // Rows that are prepared and have sums.
  long places() const { return rows; }
  // Panels read side by side: for few rows as for blocks, for many so that panels share inputs.
  long panels(const Form& form = FORMS[PLAIN]) const {
    const long most = panels_at_once(up(rows, groups_of(rows)));
    const int height = int(up(rows, up(rows, ROWS_OF_BLOCKS)));
    const long together = rows > FEW_OF_BLOCKS ? 2 : panels_of_blocks(height);
    if (WIDE) return &form == &FORMS[PLAIN] ? most : together;
    return up(most, together) * together;
  }

  void use() const {}

  void multiply(long count, long steps, Block<const Input> x, Block<const Number> w,
                Block<float> sums, long ahead = AHEAD, bool fresh = false) const {
    for (long r = 0; fresh && r < rows; r++)
      for (long p = 0; p < count; p++)
        std::fill_n(sums.at + r * sums.row + p * sums.panel, PANEL, 0.0f);
    ::multiply(rows, count, steps, x, w, sums, ahead);
  }

  void complete(long in, long row, Input* room) const {
    const Input* const from = room + row * inputs(in);
    Input* const shrunk = room + places() * inputs(in);
    total(in, from, (float*)(shrunk + (PAIRED ? 0 : places() * inputs(in))) + row * totals_of(in), 1);
    if (!PAIRED) shrink(in, from, shrunk + row * inputs(in));
  }

  void multiply(const Form& form, long in, long count, long left, Block<const Input> x,
                const uint8_t* blocks, Block<float> sums) const {
    const long all = places() * x.row, size = form.bytes(in);
    const Block<const float> totals = {(const float*)(x.at + (PAIRED ? 1 : 2) * all), totals_of(in), 1};
    if (form.placed) x = x.from_row(places());
    if (rows <= FEW_OF_BLOCKS)
      return in_groups([&](long r, long height) {
        form.multiply[height - 1](in, count, left, x.from_row(r), totals.from_row(r), blocks, size,
                                  sums.from_row(r));
      });
    thread_local std::vector<Ready> ready;
    ready.resize(count * READY);
    for (long k = 0; k < in; k += READY * form.group) {
      const long end = std::min(in, k + READY * form.group);
      for (long p = 0; p < count; p++)
        form.make_ready(blocks + p * size, k, end, &ready[p * READY]);
      in_groups([&](long r, long height) {
        for (long p = 0; p < count; p++)
          form.multiply_ready[height - 1](k, end, x.from_row(r), totals.from_row(r), &ready[p * READY],
                                          sums.from_panel(p).from_row(r));
      });
    }
  }

 private:
  static constexpr long FEW_OF_BLOCKS = WIDE ? 1L << 32 : 12;  // rows that take quants from blocks
  static constexpr long READY = 32;  // expanded groups in the cache, which more rows share

  // Calls `work` for groups of rows of nearly equal size.
  template <typename Work>
  void in_groups(const Work& work) const {
    const long groups = up(rows, ROWS_OF_BLOCKS);
    for (long g = 0; g < groups; g++)
      work(rows * g / groups, rows * (g + 1) / groups - rows * g / groups);
  }

  const long rows;
};

using Arithmetic = Vectors;

}  // namespace
