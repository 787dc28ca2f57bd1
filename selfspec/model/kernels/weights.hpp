// Packing of weights for multiplication, and single linear layers, for unembeddings and heads.
//
// A block of a GGUF file has some consecutive inputs of one output, and becomes that output's part of
// one unit of blocks.hpp. The formats are ggml's, and values are as in the Python package gguf. Two
// formats are our own: Q4_0 and Q8_0 with a zero point, a byte after the scale.

#pragma once

#include "functions.hpp"
#include "linear.hpp"

namespace {

constexpr long ALONE = 32768;  // multiplications below which one thread is faster

// The contents of one block. Halves and small numbers: of scales, then of minima.
struct Block256 {
  uint8_t quants[256];
  uint16_t halves[2];
  int8_t small[2][16];  // by group
};

inline uint16_t half_at(const uint8_t* at) { return uint16_t(at[0] | at[1] << 8); }

// Low nibbles of `count` bytes, then high ones. __restrict lets compilers vectorise this.
inline void nibbles_of(const uint8_t* __restrict bytes, int count, uint8_t* __restrict quants) {
  for (int i = 0; i < count; i++) quants[i] = bytes[i] & 15, quants[count + i] = bytes[i] >> 4;
}

// Adds bits `mask` from bit `low` on, of 32 bytes, to quants as their fifth bit and above.
inline void add_high(const uint8_t* __restrict bytes, int low, int mask, uint8_t* __restrict quants) {
  for (int k = 0; k < 32; k++) quants[k] |= uint8_t((bytes[k] >> low & mask) << 4);
}

// Reads 32 quants: halves, a byte with ZEROED, fifth bits if there are any, the other bits.
template <int BITS, int HALVES, Scale SCALE = HALF>
void read32(const uint8_t* from, Block256& to) {
  for (int i = 0; i < HALVES; i++, from += 2) to.halves[i] = half_at(from);
  if (SCALE == ZEROED) to.small[0][0] = int8_t(*from++);
  if (BITS == 8)
    for (int k = 0; k < 32; k++) to.quants[k] = from[k] ^ 128;  // from -128.. to 0..
  else
    nibbles_of(from + (BITS == 5 ? 4 : 0), 16, to.quants);
  for (int k = 0; BITS == 5 && k < 32; k++) to.quants[k] |= uint8_t((from[k / 8] >> k % 8 & 1) << 4);
}

// Reads 256 quants of four or five bits. Scales and minima of eight groups, six bits each, are in
// twelve bytes; minima are subtracted.
template <int BITS>
void read256(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from), to.halves[1] = half_at(from + 2) ^ 0x8000;
  const uint8_t *scales = from + 4, *minima = from + 8, *last = from + 12, *fifths = from + 16;
  for (int g = 0; g < 4; g++) {
    to.small[0][g] = scales[g] & 63, to.small[1][g] = minima[g] & 63;
    to.small[0][g + 4] = int8_t((last[g] & 15) | (scales[g] >> 2 & 48));
    to.small[1][g + 4] = int8_t(last[g] >> 4 | (minima[g] >> 2 & 48));
  }
  from = fifths + (BITS == 5 ? 32 : 0);
  for (int i = 0; i < 4; i++) nibbles_of(from + 32 * i, 32, to.quants + 64 * i);
  for (int g = 0; BITS == 5 && g < 8; g++) add_high(fifths, g, 1, to.quants + 32 * g);
}

inline void read_q6_k(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from + 208);
  std::copy_n((const int8_t*)from + 192, 16, to.small[0]);
  for (int i = 0; i < 2; i++) nibbles_of(from + 64 * i, 64, to.quants + 128 * i);
  for (int g = 0; g < 8; g++) add_high(from + 128 + g / 4 * 32, g % 4 * 2, 3, to.quants + 32 * g);
}

// A file format: how a block is read, its bytes, and its form in memory.
struct Format {
  void (*read)(const uint8_t* from, Block256& to);
  long bytes, form;
};

constexpr Format FORMATS[] = {  // in the order of weights.py
    {read32<4, 1>, 18, Q4_OFFSET},         {read32<4, 2>, 20, Q4_LEAST},
    {read256<4>, 144, Q4_NESTED},          {read32<5, 1>, 22, Q5_OFFSET},
    {read32<8, 1>, 34, Q8_OFFSET},         {read32<5, 2>, 24, Q5_LEAST},
    {read256<5>, 176, Q5_NESTED},          {read_q6_k, 210, Q6_NESTED},
    {read32<4, 1, ZEROED>, 19, Q4_ZEROED}, {read32<8, 1, ZEROED>, 35, Q8_ZEROED},
};

// Stores a block as output `o` of a unit.
inline void put(const Form& form, const Block256& block, int o, uint8_t* unit) {
  for (int part = 0; part < form.parts; part++)
    std::memcpy(unit + 2 * (part * PANEL + o), &block.halves[part], 2);
  for (int first = 0; first < form.unit; first += form.group) {
    uint8_t* at = unit + form.head + first / form.group * form.group_bytes;
    if (form.small)
      for (int part = 0; part < form.parts; part++, at += PANEL)
        at[o] = uint8_t(block.small[part][first / form.group]);
    form.put(block.quants + first, o, at);
  }
}

// Up to PANEL rows of a tensor, each [in], -> a panel; missing rows are 0.
inline void pack_panel(const Format& format, long in, long count, const long* rows,
                       const uint8_t* from, uint8_t* panel) {
  const Form& form = FORMS[format.form];
  const long units = in / form.unit;
  std::fill_n(panel, units * form.unit_bytes, 0);
  Block256 block = {};
  for (long u = 0; u < units; u++)
    for (long o = 0; o < count; o++) {
      format.read(from + (rows[o] * units + u) * format.bytes, block);
      put(form, block, int(o), panel + u * form.unit_bytes);
    }
}

// One row of a tensor -> its values, [in].
inline void expand_row(const Format& format, long in, const uint8_t* from, Number* to) {
  const Form& form = FORMS[format.form];
  Block256 block = {};
  for (long k = 0; k < in; k += form.unit, from += format.bytes) {
    format.read(from, block);
    for (int first = 0, g = 0; first < form.unit; first += form.group, g++) {
      float scale = from_half(block.halves[0]), least = from_half(block.halves[1]);
      if (form.scale == NESTED) scale *= block.small[0][g], least *= block.small[1][g];
      const int zero = form.offset + (form.scale == ZEROED ? block.small[0][g] : 0);
      for (int i = first; i < first + form.group; i++) {
        const int quant = block.quants[i] - zero;  // a zero keeps the scale's sign
        to[k + i] = narrow(form.parts == 1 ? scale * quant : scale * quant + least);
      }
    }
  }
}

}  // namespace

extern "C" {

// weight [out, in] -> panels [up(out / PANEL), up(in / STEP), PANEL, STEP], padded with 0.
void pack(long in, long out, const Number* weight, Number* panels) {
  const long size = up(in, STEP) * PANEL * STEP, count = up(out, PANEL);
#pragma omp parallel for
  for (long p = 0; p < count; p++)
    for (long i = 0; i < size; i++) {
      const long row = p * PANEL + i / STEP % PANEL, column = i / (PANEL * STEP) * STEP + i % STEP;
      panels[p * size + i] = row < out && column < in ? weight[row * in + column] : Number(0);
    }
}

// rows [count, in] -> result [count, out], plus bias [out] if given.
void linear_layer(long count, long in, long out, const Number* rows, const Stripe* stripes,
                  const Number* bias, Number* result) {
  if (!count) return;
  const Linear linear = {in, out, stripes, bias};
  std::vector<Input> room(count > Arithmetic::FEW ? Arithmetic(count).room(in) : 0);
#pragma omp parallel if (count * in * out > ALONE)
  linear.run(count, rows, result, 0, room.data());
}

// The `count` likeliest of each row of logits [rows, size]: their `ids` [size], or if none indices,
// then their probabilities, [rows, 2 * count].
void likeliest(long rows, long size, long count, float temperature, const float* logits,
               const long* ids, float* found) {
  std::vector<long> places(count);
  for (long row = 0; row < rows; row++, logits += size, found += 2 * count) {
    likeliest(size, logits, temperature, count, places.data(), found + count);
    for (long i = 0; i < count; i++) found[i] = float(ids ? ids[places[i]] : places[i]);
  }
}

// The bytes of a panel of `in` inputs from this format.
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

// The same rows -> their values, [count, in].
void expand_blocks(long format, long in, long count, const long* rows, const uint8_t* from,
                   Number* to) {
  const long size = in / FORMS[FORMATS[format].form].unit * FORMATS[format].bytes;
#pragma omp parallel for if (count * in > ALONE)
  for (long row = 0; row < count; row++)
    expand_row(FORMATS[format], in, from + rows[row] * size, to + row * in);
}

}
