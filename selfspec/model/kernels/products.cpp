// One linear layer at a time: for unembeddings and heads. Compiled with BFLOAT16 (0 or 1:
// float32), for a wheel or on the machine that runs it.

#include "linear.hpp"

namespace {

constexpr long ALONE = 32768;  // multiplications below which one thread is faster

}

extern "C" {

// weight [out, in] -> panels [up(out / PANEL), up(in / STEP), PANEL, STEP], filled up with 0.
void pack(long in, long out, const Number* weight, Number* panels) {
  const long steps = up(in, STEP), count = up(out, PANEL);
#pragma omp parallel for
  for (long p = 0; p < count; p++)
    for (long k = 0; k < steps; k++)
      for (long o = 0; o < PANEL; o++)
        for (long i = 0; i < STEP; i++) {
          const long row = p * PANEL + o, column = k * STEP + i;
          const bool there = row < out && column < in;
          panels[((p * steps + k) * PANEL + o) * STEP + i] =
              there ? weight[row * in + column] : Number(0);
        }
}

// rows [count, in] -> result [count, out], plus bias [out] where there is one.
void product(long count, long in, long out, const Number* rows, const Number* panels,
             const Number* bias, Number* result) {
  if (!count) return;
  const Linear linear = {in, out, panels, bias};
  std::vector<Input> room(count > MOST_ROWS ? count * linear.inputs() : 0);
#pragma omp parallel if (count * in * out > ALONE)
  linear.run(count, rows, result, 0, room.data());
}

}
