// Blocks of weights as GGUF files have them, and how they become panels of blocks.hpp.
//
// A block is a stretch of one output's inputs, and becomes that output's part of one unit. The
// formats are those of ggml; which values a block stands for is as in the Python package gguf. Two
// are our own: Q4_0 and Q8_0 with a byte behind the scale, for weights counted from elsewhere.

#pragma once

#include "forms.hpp"

namespace {

// What one block says. Halves and small numbers: of scales, then of minima.
struct Block256 {
  uint8_t quants[256];
  uint16_t halves[2];
  int8_t small[2][16];  // by group
};

inline uint16_t half_at(const uint8_t* at) { return uint16_t(at[0] | at[1] << 8); }

// Low nibbles of `count` bytes, then high ones.
inline void nibbles_of(const uint8_t* bytes, int count, uint8_t* quants) {
  for (int i = 0; i < count; i++) quants[i] = bytes[i] & 15, quants[count + i] = bytes[i] >> 4;
}

inline void fifth_bits(const uint8_t* bits, uint8_t* quants) {
  for (int i = 0; i < 32; i++) quants[i] |= uint8_t((bits[i / 8] >> i % 8 & 1) << 4);
}

inline void q4_0(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from);
  nibbles_of(from + 2, 16, to.quants);
}

inline void q4_1(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from), to.halves[1] = half_at(from + 2);
  nibbles_of(from + 4, 16, to.quants);
}

inline void q5_0(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from);
  nibbles_of(from + 6, 16, to.quants);
  fifth_bits(from + 2, to.quants);
}

inline void q5_1(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from), to.halves[1] = half_at(from + 2);
  nibbles_of(from + 8, 16, to.quants);
  fifth_bits(from + 4, to.quants);
}

inline void q8_0(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from);
  for (int k = 0; k < 32; k++) to.quants[k] = from[2 + k] ^ 128;  // from -128.. to 0..
}

// Scales and minima of eight groups, six bits each, in twelve bytes; minima are taken off.
inline void k_scales(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from), to.halves[1] = half_at(from + 2) ^ 0x8000;
  const uint8_t *scales = from + 4, *minima = from + 8, *last = from + 12;
  for (int g = 0; g < 4; g++) {
    to.small[0][g] = scales[g] & 63, to.small[1][g] = minima[g] & 63;
    to.small[0][g + 4] = int8_t((last[g] & 15) | (scales[g] >> 2 & 48));
    to.small[1][g + 4] = int8_t(last[g] >> 4 | (minima[g] >> 2 & 48));
  }
}

inline void q4_k(const uint8_t* from, Block256& to) {
  k_scales(from, to);
  for (int i = 0; i < 4; i++) nibbles_of(from + 16 + 32 * i, 32, to.quants + 64 * i);
}

inline void q5_k(const uint8_t* from, Block256& to) {
  k_scales(from, to);
  for (int i = 0; i < 4; i++) nibbles_of(from + 48 + 32 * i, 32, to.quants + 64 * i);
  for (int k = 0; k < 256; k++) to.quants[k] |= uint8_t((from[16 + k % 32] >> k / 32 & 1) << 4);
}

inline void q6_k(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from + 208);
  std::copy_n((const int8_t*)from + 192, 16, to.small[0]);
  for (int i = 0; i < 2; i++) nibbles_of(from + 64 * i, 64, to.quants + 128 * i);
  for (int k = 0; k < 256; k++) {
    const int high = from[128 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3;
    to.quants[k] |= uint8_t(high << 4);
  }
}

inline void q4_zeroed(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from), to.small[0][0] = int8_t(from[2]);
  nibbles_of(from + 3, 16, to.quants);
}

inline void q8_zeroed(const uint8_t* from, Block256& to) {
  to.halves[0] = half_at(from), to.small[0][0] = int8_t(from[2]);
  for (int k = 0; k < 32; k++) to.quants[k] = from[3 + k] ^ 128;
}

// A format: how a block is read, its bytes, and the form that it becomes.
struct Format {
  void (*read)(const uint8_t* from, Block256& to);
  long bytes, form;
};

constexpr Format FORMATS[] = {  // in the order of weights.py
    {q4_0, 18, Q4_OFFSET}, {q4_1, 20, Q4_LEAST},  {q4_k, 144, Q4_NESTED}, {q5_0, 22, Q5_OFFSET},
    {q8_0, 34, Q8_OFFSET}, {q5_1, 24, Q5_LEAST}, {q5_k, 176, Q5_NESTED}, {q6_k, 210, Q6_NESTED},
    {q4_zeroed, 19, Q4_ZEROED}, {q8_zeroed, 35, Q8_ZEROED},
};

// Output `o` of a unit.
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

// Up to PANEL rows of a tensor, each [in], -> a panel; what is not there is 0.
inline void pack_panel(const Format& format, long in, long count, const long* rows,
                       const uint8_t* from, uint8_t* panel) {
  const Form& form = FORMS[format.form];
  const long units = in / form.unit;
  std::fill_n(panel, units * form.unit_bytes, 0);
  Block256 block = {};
  for (long o = 0; o < count; o++)
    for (long u = 0; u < units; u++) {
      format.read(from + (rows[o] * units + u) * format.bytes, block);
      put(form, block, int(o), panel + u * form.unit_bytes);
    }
}

// One row of a tensor -> what it stands for, [in].
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
