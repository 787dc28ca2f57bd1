// Linear layers, from one row to thousands: a row's bits depend on the row alone.
//
// products.py compiles this file on the machine that runs it. Weights lie in panels,
// [out / PANEL][in / STEP][PANEL][STEP]. Few rows read several at once, straight through: at the
// memory's speed. Many rows share a piece of one that stays in the cache: at the arithmetic's.
// Whichever it is, the order of a sum is that of panels.hpp.

#include <type_traits>
#include <vector>

#include <omp.h>

#include "panels.hpp"

namespace {

using Kind = std::conditional_t<BFLOAT16, Bfloat16, Float32>;

constexpr long STEP = Kind::STEP;
constexpr long PIECE = 1024 / STEP;  // steps of a panel that many rows share
constexpr long ALONE = 32768;        // multiplications below which one thread is faster

constexpr long up(long number, long unit) { return (number + unit - 1) / unit; }

}  // namespace

extern "C" {

// weight [out, in] -> [up(out / PANEL), up(in / STEP), PANEL, STEP], filled up with 0.
void pack(long in, long out, const Number* weight, Number* packed) {
  const long steps = up(in, STEP), count = up(out, PANEL);
#pragma omp parallel for
  for (long p = 0; p < count; p++)
    for (long k = 0; k < steps; k++)
      for (long o = 0; o < PANEL; o++)
        for (long i = 0; i < STEP; i++) {
          const long row = p * PANEL + o, column = k * STEP + i;
          const bool there = row < out && column < in;
          packed[((p * steps + k) * PANEL + o) * STEP + i] =
              there ? weight[row * in + column] : Number(0);
        }
}

// inputs [rows, in] -> result [rows, out], plus bias [out] where there is one.
void product(long rows, long in, long out, const Number* inputs, const Number* packed,
             const Number* bias, Number* result) {
  const long steps = up(in, STEP), panel = steps * PANEL * STEP, width = steps * Kind::INPUTS;
  const bool few = rows <= MOST_ROWS;
  const long at_once = few ? panels_at_once(rows) : 1, piece = few ? steps : PIECE;
  std::vector<Kind::Input> x(rows * width);
#pragma omp parallel if (rows * in * out > ALONE)
  {
#pragma omp for
    for (long r = 0; r < rows; r++) Kind::prepare(inputs + r * in, in, &x[r * width]);
    const long threads = omp_get_num_threads(), me = omp_get_thread_num();
    const long all = up(out, PANEL), last = all * (me + 1) / threads;
    std::vector<float> sums(rows * at_once * PANEL);
    for (long p = all * me / threads; p < last; p += at_once) {
      const long count = std::min(at_once, last - p);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (long k = 0; k < steps; k += piece)
        multiply<Kind>(rows, count, std::min(piece, steps - k), {&x[k * Kind::INPUTS], width, 0},
                       {packed + p * panel + k * PANEL * STEP, PANEL * STEP, panel},
                       {sums.data(), at_once * PANEL, PANEL});
      const long start = p * PANEL, columns = std::min(count * PANEL, out - start);
      for (long r = 0; r < rows; r++)
        for (long j = 0; j < columns; j++) {
          const float sum = sums[r * at_once * PANEL + j];
          result[r * out + start + j] = narrow(bias ? sum + wide(bias[start + j]) : sum);
        }
    }
  }
}

}
