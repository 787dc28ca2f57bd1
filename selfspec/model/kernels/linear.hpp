// A linear layer, from one row to thousands, by all threads of a team together.
//
// Weights lie in panels, [out / PANEL][in / STEP][PANEL][STEP]. Few rows read several at once,
// straight through: at the memory's speed. Many rows share a piece of one that stays in the cache:
// at the arithmetic's. Whichever it is, the order of a sum is that of panels.hpp.

#pragma once

#include <type_traits>
#include <vector>

#include <omp.h>

#include "panels.hpp"

namespace {

using Kind = std::conditional_t<BFLOAT16, Bfloat16, Float32>;
using Input = Kind::Input;

constexpr long STEP = Kind::STEP;
constexpr long PIECE = 1024 / STEP;  // steps of a panel that many rows share

// `before` and `times` a value, each rounded.
inline Number added(Number before, Number value, float times) {
  return narrow(wide(before) + wide(times == 1 ? value : narrow(wide(value) * times)));
}

constexpr long up(long number, long unit) { return (number + unit - 1) / unit; }

struct Linear {
  long in, out;
  const Number* panels;
  const Number* bias;  // [out], or none

  long steps() const { return up(in, STEP); }
  long inputs() const { return steps() * Kind::INPUTS; }  // that a row is prepared to

  // inputs [rows, in] -> result [rows, out]; with `adds`, that many times, to what is there. For all
  // threads of a team, which leave when all are done. `room` [rows, inputs()], of the team, is for
  // many rows.
  void run(long rows, const Number* from, Number* result, float adds, Input* room) const {
    const bool few = rows <= MOST_ROWS;
    thread_local std::vector<Input> own;
    thread_local std::vector<float> sums;
    if (few) {  // each thread for itself: nobody waits
      own.resize(rows * inputs());
      for (long r = 0; r < rows; r++) Kind::prepare(from + r * in, in, &own[r * inputs()]);
      room = own.data();
    } else {
#pragma omp for
      for (long r = 0; r < rows; r++) Kind::prepare(from + r * in, in, room + r * inputs());
    }
    const long threads = omp_get_num_threads(), me = omp_get_thread_num();
    const long all = up(out, PANEL), last = all * (me + 1) / threads;
    const long at_once = few ? panels_at_once(rows) : 1;
    for (long p = all * me / threads; p < last; p += at_once) {
      const long count = std::min(at_once, last - p);
      sums.assign(rows * at_once * PANEL, 0.0f);
      add_panels(rows, p, count, room, few ? steps() : PIECE, {sums.data(), at_once * PANEL, PANEL});
      finish(rows, p, count, sums.data(), at_once * PANEL, result, adds);
    }
#pragma omp barrier
  }

 private:
  void add_panels(long rows, long first, long count, const Input* x, long piece,
                  Block<float> sums) const {
    const Number* weights = panels + first * steps() * PANEL * STEP;
    for (long k = 0; k < steps(); k += piece)
      multiply<Kind>(rows, count, std::min(piece, steps() - k),
                     {x + k * Kind::INPUTS, inputs(), 0},
                     {weights + k * PANEL * STEP, PANEL * STEP, steps() * PANEL * STEP}, sums);
  }

  void finish(long rows, long first, long count, const float* sums, long row_sums, Number* result,
              float adds) const {
    const long start = first * PANEL, columns = std::min(count * PANEL, out - start);
    for (long r = 0; r < rows; r++)
      for (long j = 0; j < columns; j++) {
        const float sum = sums[r * row_sums + j];
        const Number value = narrow(bias ? sum + wide(bias[start + j]) : sum);
        Number* to = result + r * out + start + j;
        *to = adds ? added(*to, value, adds) : value;
      }
  }
};

}  // namespace
