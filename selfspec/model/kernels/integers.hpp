// Rows times quants of four bits, where AVX-512 multiplies pairs of bfloat16.
//
// Quants are bfloat16 as they are, so no weight is rounded, and a pair of them takes a shift and a
// look-up. The inputs of a group are a chain of their own: quants times inputs. What it gives, times
// the group's scale, goes to the output's sum, and then the least weight times the sum of the inputs.
// That is the order for any number of rows. (Of eight bits: conversions wait for the unit that
// multiplies. One row gained a tenth, many lost a fifth.)

#pragma once

#include <array>

#include "blocks.hpp"

namespace {

typedef float Total __attribute__((may_alias));

constexpr long TOGETHER = 32;  // inputs of a group

constexpr long totals_of(long in) { return in / TOGETHER; }

// Sums of a row of `in` inputs, by group, to behind it.
inline void total(long in, Input* row) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  const Ints places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Total* to = (Total*)(row + in / 2);
  for (long k = 0; k < in; k += TOGETHER) {
    Vector sums = Kind::add(Vector{}, *(const Words*)(row + k / 2), ones);
    for (int apart = 8; apart; apart /= 2)
      sums += (Vector)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(places ^ apart), (__m512)sums);
    *to++ = sums[0];
  }
}

// A whole number of at most eight bits, as bfloat16.
constexpr uint16_t as_bfloat16(int number) {
  const int size = number < 0 ? -number : number;
  int digits = 0;
  while (size >> (digits + 1)) digits++;
  const int bits = (127 + digits) << 7 | (size << (7 - digits) & 127);
  return uint16_t(!size ? 0 : number < 0 ? bits | 0x8000 : bits);
}

template <int GROUP, Scale SCALE, int OFFSET>
struct Integers : Layout<4, GROUP, SCALE, OFFSET> {
  static_assert(GROUP == TOGETHER);
  using Kept = Layout<4, GROUP, SCALE, OFFSET>;
  static constexpr bool LEAST = OFFSET == STORED || SCALE == ZEROED;
  static constexpr void (*expand)(const uint8_t*, long, long, Number*) = nullptr;

  // A pair lies in both halves of a word, the first one lowest.
  static void put(const uint8_t* from, int o, uint8_t* to) {
    for (int k = 0; k < GROUP; k += 8) {
      uint32_t quants = 0;
      for (int j = 0; j < 8; j++) quants |= uint32_t(from[k + j]) << (j / 2 * 4 + j % 2 * 16);
      std::memcpy(to + (k / 8 * PANEL + o) * 4, &quants, 4);
    }
  }

  // One group of a panel.
  struct Group {
    const uint8_t* quants;
    Vector scale, least;

    void find(const uint8_t* panel, long k) {
      const uint8_t *unit = panel + k / Kept::UNIT * Kept::UNIT_BYTES, *group = Kept::group(panel, k);
      scale = Kept::factor(unit, group);
      if (OFFSET == STORED) least = Kept::factor(unit + 2 * PANEL, group + PANEL);
      if (SCALE == ZEROED) least = scale * -from_bytes(group);
      quants = group + Kept::SMALL;
    }

    // Of the eight inputs from `k` on, the numbers 2 * pair and the next.
    Bits terms(int k, int pair) const {
      const uint8_t* at = quants + k * PANEL / 2;
      if (pair == 0) __builtin_prefetch(at + AHEAD);
      const __m512i word = _mm512_loadu_si512(at);
      // what lies above the four bits chooses between two equal halves of the table
      return (Bits)_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4 * pair), table());
    }

   private:
    static __m512i table() {  // the sixteen numbers, twice
      alignas(64) static constexpr auto numbers = [] {
        std::array<uint16_t, 32> found{};
        for (int i = 0; i < 32; i++) found[i] = as_bfloat16(i % 16 - OFFSET);
        return found;
      }();
      return _mm512_load_si512(numbers.data());
    }
  };

  // Adds the inputs from `first` to `end`, whole groups of `in`, to the sums of ROWS rows, for panels
  // that lie `size` bytes apart.
  template <int ROWS>
  static void multiply(long in, long first, long end, long count, Block<const Input> x,
                       const uint8_t* panel, long size, Block<float> sums) {
    constexpr int MOST = ROWS == 1 ? 6 : ROWS == 2 ? 4 : ROWS <= 4 ? 3 : 2, HALF = MOST / 2;
    long p = 0;
    for (; p + MOST <= count; p += MOST)  // few sums would wait for themselves
      some<ROWS, MOST>(in, first, end, x, panel + p * size, size, sums.from_panel(p));
    for (; p + HALF <= count; p += HALF)
      some<ROWS, HALF>(in, first, end, x, panel + p * size, size, sums.from_panel(p));
    for (; p < count; p++)
      some<ROWS, 1>(in, first, end, x, panel + p * size, size, sums.from_panel(p));
  }

 private:
  template <int ROWS, int PANELS>
  static void some(long in, long first, long end, Block<const Input> x, const uint8_t* panel,
                   long size, Block<float> sums) {
    const Total* totals = (const Total*)(x.at + in / 2);
    Vector s[ROWS][PANELS];
#pragma GCC unroll 10
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 6
      for (int p = 0; p < PANELS; p++)
        s[r][p] = *(const Floats*)(sums.at + r * sums.row + p * sums.panel);
    for (long k = first; k < end; k += GROUP) {
      Group groups[PANELS];
#pragma GCC unroll 6
      for (int p = 0; p < PANELS; p++) groups[p].find(panel + p * size, k);
      Vector t[ROWS][PANELS] = {};
      for (int i = 0; i < GROUP; i += 8)
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
          Bits terms[PANELS];
#pragma GCC unroll 6
          for (int p = 0; p < PANELS; p++) terms[p] = groups[p].terms(i, pair);
#pragma GCC unroll 10
          for (int r = 0; r < ROWS; r++) {
            const auto input = Kind::spread(x.at[r * x.row + (k + i) / 2 + pair]);
#pragma GCC unroll 6
            for (int p = 0; p < PANELS; p++) t[r][p] = Kind::add(t[r][p], terms[p], input);
          }
        }
#pragma GCC unroll 10
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 6
        for (int p = 0; p < PANELS; p++) {
          s[r][p] += groups[p].scale * t[r][p];
          if (LEAST) s[r][p] += groups[p].least * totals[r * x.row + k / TOGETHER];
        }
    }
#pragma GCC unroll 10
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 6
      for (int p = 0; p < PANELS; p++)
        *(Floats*)(sums.at + r * sums.row + p * sums.panel) = s[r][p];
  }
};

}  // namespace
