// Rows times quants, where pairs of bfloat16 are multiplied: by AVX-512, or by matrix registers.
//
// Quants are bfloat16 as they are, so no weight is rounded, and a pair of four bits takes a shift and
// a look-up. The inputs of a group are a chain of their own, or a tile: quants times inputs. What it
// gives, times the group's scale, goes to the output's sum, and then the least weight times the sum
// of the inputs. That is the order for any number of rows.

#pragma once

#include <array>
#include <vector>

#include "blocks.hpp"

namespace {

typedef float Total __attribute__((may_alias));

constexpr long TOGETHER = 32;  // inputs of a group

constexpr long totals_of(long in) { return in / TOGETHER; }

// Sums of a row of `in` inputs, by group, to places that are `apart`.
inline void total(long in, const Input* row, Total* to, long apart) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (long k = 0; k < in; k += TOGETHER, to += apart)
    *to = sum_of(Kind::add(Vector{}, *(const Words*)(row + k / 2), ones));
}

// A whole number of at most eight bits, as bfloat16.
constexpr uint16_t as_bfloat16(int number) {
  const int size = number < 0 ? -number : number;
  int digits = 0;
  while (size >> (digits + 1)) digits++;
  const int bits = (127 + digits) << 7 | (size << (7 - digits) & 127);
  return uint16_t(!size ? 0 : number < 0 ? bits | 0x8000 : bits);
}

template <int BITS, int GROUP, Scale SCALE, int OFFSET>
struct Integers : Layout<BITS, GROUP, SCALE, OFFSET> {
  using Kept = Layout<BITS, GROUP, SCALE, OFFSET>;
  static constexpr bool LEAST = OFFSET == STORED || SCALE == ZEROED;
  static_assert(GROUP == TOGETHER || !LEAST);  // nobody adds up the inputs of others
  static constexpr bool EXPANDS = false;  // it is multiplied as it is
  static constexpr void (*expand)(const uint8_t*, long, long, Number*) = nullptr;

  // Of four bits a pair lies in both halves of a word, the first one lowest; of eight, pairs of all
  // outputs one after the other, less the offset.
  static void put(const uint8_t* from, int o, uint8_t* to) {
    for (int k = 0; BITS == 8 && k < GROUP; k++)
      to[(k / 2 * PANEL + o) * 2 + k % 2] = uint8_t(from[k] - OFFSET);
    for (int k = 0; BITS == 4 && k < GROUP; k += 8) {
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
    Bits terms(int k, int pair, long ahead = AHEAD) const {
      const uint8_t* at = quants + (BITS == 4 ? k * PANEL / 2 : (k + 2 * pair) * PANEL);
      if (BITS == 8 ? pair % 2 == 0 : pair == 0) __builtin_prefetch(at + ahead);
      if (BITS == 8) return (Bits)_mm512_cvtne2ps_pbh(eight(at + PANEL), eight(at));
      const __m512i word = _mm512_loadu_si512(at);
      // what lies above the four bits chooses between two equal halves of the table
      return (Bits)_mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4 * pair), table());
    }

   private:
    static __m512 eight(const uint8_t* from) {
      const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
      const __m512i numbers = OFFSET == STORED ? _mm512_maskz_cvtepu8_epi32(0xffff, bytes)
                                               : _mm512_maskz_cvtepi8_epi32(0xffff, bytes);
      return (__m512)__builtin_convertvector((Ints)numbers, Vector);
    }

    static __m512i table() {  // the sixteen numbers, twice
      alignas(64) static constexpr auto numbers = [] {
        std::array<uint16_t, 32> found{};
        for (int i = 0; i < 32; i++) found[i] = as_bfloat16(i % 16 - OFFSET);
        return found;
      }();
      return _mm512_load_si512(numbers.data());
    }
  };

#ifdef __AMX_BF16__
  // Adds to the sums of `groups` times `height` rows, which are those of tiles, for panels that lie
  // `size` bytes apart. `totals`: [groups, in / GROUP, ROWS_OF_TILE].
  static void multiply_tiles(long in, long groups, long height, long count, Block<const Input> x,
                             const Total* totals, const uint8_t* panel, long size,
                             Block<float> sums) {
    constexpr decltype(&pass<1>) all[] = {pass<1>, pass<2>, pass<4>, pass<8>, pass<16>};
    const int which = height > 8 ? 4 : height > 4 ? 3 : height > 2 ? 2 : height - 1;
    for (long p = 0; p < count; p++)
      all[which](in, groups, height, x, totals, panel + p * size, sums.from_panel(p));
  }

 private:
  static constexpr int LINES = GROUP / 2;  // of a tile of weights: pairs of inputs
  struct Tile {
    alignas(64) Number weights[LINES][2 * PANEL];
    Vector scale, least;

    void take(const uint8_t* panel, long k) {
      Group group;
      group.find(panel, k);
      UNROLL for (int line = 0; line < LINES; line++)
        *(Words*)weights[line] = group.terms(line / 4 * 8, line % 4);
      scale = group.scale;
      if (LEAST) least = group.least;
    }
  };

  // Adds groups from `first` to `end`, which are `tiles`, to the sums of `height` rows, at most ROWS.
  template <int ROWS>
  static void add(long height, Block<const Input> x, const Total* totals, const Tile* tiles, long first,
                  long end, Block<float> to) {
    alignas(64) float products[4][ROWS_OF_TILE][PANEL];
    if (height < ROWS) std::memset(products, 0, sizeof products);  // no odd numbers: they are slow
    Vector sums[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
      sums[r] = r < height ? Vector(*(const Floats*)(to.at + r * to.row)) : Vector{};
    // registers have no names but in the text of a program
#define MULTIPLY(SUMS, ROW, WEIGHTS, PLACE)                              \
  if (PLACE < end) {                                                     \
    _tile_zero(SUMS);                                                    \
    _tile_loadd(ROW, x.at + (PLACE) * GROUP / 2, x.row * sizeof(Input)); \
    _tile_loadd(WEIGHTS, tiles[PLACE - first].weights, 64);              \
    _tile_dpbf16ps(SUMS, ROW, WEIGHTS);                                  \
  }
    const auto add = [&](int which, long place) __attribute__((always_inline)) {
      if (place >= end) return;
      const Vector scale = tiles[place - first].scale, least = tiles[place - first].least;
      const Total* const total = totals + place * ROWS_OF_TILE;
      UNROLL for (int r = 0; r < ROWS; r++) {
        sums[r] += scale * *(const Floats*)products[which][r];
        if (LEAST) sums[r] += least * total[r];
      }
    };
    // two on their way while two are added
    MULTIPLY(0, 4, 6, first)
    MULTIPLY(1, 5, 7, first + 1)
    for (long place = first; place < end; place += 4) {
      MULTIPLY(2, 4, 6, place + 2)
      MULTIPLY(3, 5, 7, place + 3)
      _tile_stored(0, products[0], 64);
      _tile_stored(1, products[1], 64);
      add(0, place), add(1, place + 1);
      MULTIPLY(0, 4, 6, place + 4)
      MULTIPLY(1, 5, 7, place + 5)
      _tile_stored(2, products[2], 64);
      _tile_stored(3, products[3], 64);
      add(2, place + 2), add(3, place + 3);
    }
#undef MULTIPLY
    UNROLL for (int r = 0; r < ROWS; r++)
      if (r < height) *(Floats*)(to.at + r * to.row) = sums[r];
  }

  // Some inputs of a panel stay in the cache while all rows pass them.
  template <int ROWS>
  static void pass(long in, long groups, long height, Block<const Input> x, const Total* totals,
                   const uint8_t* panel, Block<float> sums) {
    constexpr long MOST = 24;
    thread_local std::vector<Tile> tiles(MOST);
    for (long first = 0; first < in / GROUP; first += MOST) {
      const long end = std::min(in / GROUP, first + MOST);
      for (long g = first; g < end; g++) tiles[g - first].take(panel, g * GROUP);
      for (long g = 0; g < groups; g++)
        add<ROWS>(height, {x.at + g * height * x.row, x.row, 0},
                  totals + g * in / GROUP * ROWS_OF_TILE, tiles.data(), first, end,
                  {sums.at + g * height * sums.row, sums.row, 0});
    }
  }

 public:
#endif

  // Adds the inputs from `first` to `end`, whole groups of `in`, to the sums of ROWS rows, for panels
  // that lie `size` bytes apart.
  template <int ROWS>
  static void multiply(long in, long first, long end, long count, Block<const Input> x,
                       const uint8_t* panel, long size, Block<float> sums) {
    constexpr int MOST = ROWS == 1 ? 6 : ROWS == 2 ? 4 : ROWS <= 4 ? 3 : 2, HALF = MOST / 2;
    const long ahead = ahead_of(MOST, size);
    long p = 0;
    for (; p + MOST <= count; p += MOST)  // few sums would wait for themselves
      some<ROWS, MOST>(in, first, end, x, panel + p * size, size, ahead, sums.from_panel(p));
    for (; p + HALF <= count; p += HALF)
      some<ROWS, HALF>(in, first, end, x, panel + p * size, size, ahead, sums.from_panel(p));
    for (; p < count; p++)
      some<ROWS, 1>(in, first, end, x, panel + p * size, size, ahead, sums.from_panel(p));
  }

 private:
  template <int ROWS, int PANELS>
  static void some(long in, long first, long end, Block<const Input> x, const uint8_t* panel,
                   long size, long ahead, Block<float> sums) {
    const Total* totals = (const Total*)(x.at + in / 2);
    Vector s[ROWS][PANELS];
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int p = 0; p < PANELS; p++)
        s[r][p] = *(const Floats*)(sums.at + r * sums.row + p * sums.panel);
    for (long k = first; k < end; k += GROUP) {
      Group groups[PANELS];
      UNROLL for (int p = 0; p < PANELS; p++) groups[p].find(panel + p * size, k);
      Vector t[ROWS][PANELS] = {};
      for (int i = 0; i < GROUP; i += 8)
        UNROLL for (int pair = 0; pair < 4; pair++) {
          Bits terms[PANELS];
          UNROLL for (int p = 0; p < PANELS; p++) terms[p] = groups[p].terms(i, pair, ahead);
          UNROLL for (int r = 0; r < ROWS; r++) {
            const auto input = Kind::spread(x.at[r * x.row + (k + i) / 2 + pair]);
            UNROLL for (int p = 0; p < PANELS; p++) t[r][p] = Kind::add(t[r][p], terms[p], input);
          }
        }
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int p = 0; p < PANELS; p++) {
          s[r][p] += groups[p].scale * t[r][p];
          if (LEAST) s[r][p] += groups[p].least * totals[r * x.row + k / TOGETHER];
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int p = 0; p < PANELS; p++)
        *(Floats*)(sums.at + r * sums.row + p * sums.panel) = s[r][p];
  }
};

}  // namespace
