// One linear layer at a time: for unembeddings and heads. Compiled with BFLOAT16 (0 or 1:
// float32), for a wheel or on the machine that runs it.

#include "gguf.hpp"
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
void product(long count, long in, long out, const Number* rows, const Stripe* stripes,
             const Number* bias, Number* result) {
  if (!count) return;
  const Linear linear = {in, out, stripes, bias};
  std::vector<Input> room(count > Arithmetic::FEW ? Arithmetic(count).room(in) : 0);
#pragma omp parallel if (count * in * out > ALONE)
  linear.run(count, rows, result, 0, room.data());
}

// Of a panel of `in` inputs from this format.
long panel_bytes(long format, long in) { return FORMS[FORMATS[format].form].bytes(in); }

long form_of(long format) { return FORMATS[format].form; }

// The rows `rows` [count] of a tensor [.., in] in this format -> panels.
void pack_blocks(long format, long in, long count, const long* rows, const uint8_t* from,
                 uint8_t* panels) {
  const long size = panel_bytes(format, in);
#pragma omp parallel for
  for (long p = 0; p < up(count, PANEL); p++)
    pack_panel(FORMATS[format], in, std::min<long>(PANEL, count - p * PANEL), rows + p * PANEL, from,
               panels + p * size);
}

// The same rows -> what they stand for, [count, in].
void expand_blocks(long format, long in, long count, const long* rows, const uint8_t* from,
                   Number* to) {
  const long size = in / FORMS[FORMATS[format].form].unit * FORMATS[format].bytes;
#pragma omp parallel for if (count * in > ALONE)
  for (long row = 0; row < count; row++)
    expand_row(FORMATS[format], in, from + rows[row] * size, to + row * in);
}

// Whether blocks are faster than numbers in the dtype: pairs of bfloat16 are one instruction.
long blocks_pay() { return !BFLOAT16 || Kind::TERMS == 1; }

// Whether weights of this format are multiplied as they are in the file, none of them rounded.
long as_they_are(long format) { return !BFLOAT16 || !FORMS[FORMATS[format].form].expand; }

}
