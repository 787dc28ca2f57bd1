// Weights that a file keeps as small whole numbers, in groups that share a scale.
//
// A weight is scale * quant + least, rounded to the numbers of the model as if all weights had been
// de-quantised. Few rows multiply it while it is in a register. Many rows share a piece of a panel
// that is expanded into the cache, as panels.hpp reads it. Either way a sum has the order, and the
// bits, that it has with weights that are kept as numbers.
//
// A panel is a list of units. A unit: float16 scales of PANEL outputs, and minima where there are
// any; then its groups. A group: with NESTED a byte for each of these, with ZEROED one for where
// quants are counted from; then words, each of an output's next inputs, the first in the lowest
// bits. (integers.hpp has another order of quants.)

#pragma once

#include "panels.hpp"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

inline Vector from_bytes(const uint8_t* bytes) {
#if defined(__AVX512F__)  // compilers take such short vectors apart
  const Ints numbers = (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
  const Ints numbers = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#else
  const Ints numbers = __builtin_convertvector(*(const Bytes*)bytes, Ints);
#endif
  return __builtin_convertvector(numbers, Vector);
}

inline float from_half(uint16_t half) {
  const uint32_t bits = uint32_t(half & 0x7fff) << 13;
  float size;
  std::memcpy(&size, &bits, sizeof size);
  return half & 0x8000 ? size * -0x1p112f : size * 0x1p112f;
}

inline Vector from_halves(const uint8_t* halves) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)halves));
#elif defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else  // the same number, its exponent moved
  const Bits bits = __builtin_convertvector(*(const Halves*)halves, Bits);
  const Vector size = (Vector)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (Vector)((Bits)size | (bits & 0x8000u) << 16);
#endif
}

// A finite number as bfloat16, in the upper half: to the nearest, ties to even. Added to 2^16 times
// its power of two, it loses the digits that bfloat16 lacks.
inline Bits rounded(Vector value) {
  const Vector large = (Vector)((Bits)value & 0xff800000u) * 65536.0f;
  return (Bits)(value + large - large);
}

// 0, 1, ..
inline Ints numbered() {
  Ints numbers = {};
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  return numbers;
}

// Each number to the place whose number differs by the bit `apart`.
inline Vector across(Vector value, int apart) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(numbered() ^ apart), (__m512)value);
#else
  Vector found = {};
  for (int i = 0; i < LANES; i++) found[i] = value[i ^ apart];
  return found;
#endif
}

inline float largest_of(Vector value) {
  for (int apart = LANES / 2; apart; apart /= 2) {
    const Vector other = across(value, apart);
    value = value > other ? value : other;
  }
  return value[0];
}

inline float sum_of(Vector value) {
  for (int apart = LANES / 2; apart; apart /= 2) value += across(value, apart);
  return value[0];
}

// The same numbers side by side, the even one lower. What is too small for a usual bfloat16 may
// become 0: the instruction that adds them takes it for 0, too.
inline Bits pairs(Vector even, Vector odd) {
#if defined(__AVX512BF16__)
  const Ints places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Ints order = places | (places + 16) << 16;  // evens come first in what is rounded
  const __m512bh numbers = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Bits)_mm512_permutexvar_epi16((__m512i)order, (__m512i)numbers);
#else
  return rounded(even) >> 16 | rounded(odd);
#endif
}

// An even number of vectors, rounded, to what Kind prepares of them.
inline void round(const Vector* values, int count, Input* to) {
  for (int v = 0; v < count; v += 2, to += 2 * LANES / Kind::STEP * Kind::INPUTS) {
#if !BFLOAT16
    *(Floats*)to = values[v], *(Floats*)(to + LANES) = values[v + 1];
#elif defined(__AVX512BF16__)
    *(Words*)to = (Bits)_mm512_cvtne2ps_pbh((__m512)values[v + 1], (__m512)values[v]);
#else
    *(Words*)to = rounded(values[v]), *(Words*)(to + LANES) = rounded(values[v + 1]);
#endif
  }
}

// Weights of two inputs, for a vector of outputs: as Kind adds them, and as panels hold them.

constexpr int TERMS = 2 / Kind::STEP * Kind::TERMS;  // additions
constexpr int ACROSS = Kind::STEP * LANES;           // numbers to the next outputs of a panel

inline void take(Vector even, Vector odd, Bits* terms) {
#if !BFLOAT16
  terms[0] = (Bits)even, terms[1] = (Bits)odd;
#elif defined(__AVX512BF16__)
  terms[0] = pairs(even, odd);
#else
  terms[0] = rounded(even), terms[1] = rounded(odd);
#endif
}

inline void store(Vector even, Vector odd, Number* to) {
#if BFLOAT16
  *(Words*)to = pairs(even, odd);
#else
  *(Floats*)to = even, *(Floats*)(to + PANEL) = odd;
#endif
}

enum Scale {
  HALF,    // of a group
  NESTED,  // of 256 inputs, times a byte of the group
  ZEROED,  // of a group, whose byte is taken off each quant as well
};
constexpr int ROWS_OF_BLOCKS = WIDE ? 8 : 4;  // that multiply weights in registers

// Panels that are read side by side: a few sums alone would wait for themselves.
constexpr int panels_of_blocks(int rows) { return !WIDE ? 1 : rows <= 2 ? 4 : 2; }

constexpr int STORED = 0;  // in place of what is taken off each quant: minima, as scales are

// Where what is kept of a panel lies.
template <int BITS, int GROUP, Scale SCALE, int OFFSET>
struct Layout {
  static constexpr int UNIT = SCALE == NESTED ? 256 : GROUP;
  static constexpr int PARTS = OFFSET == STORED ? 2 : 1;
  static constexpr int HEAD = 2 * PARTS * PANEL, SMALL = SCALE == HALF ? 0 : PARTS * PANEL;
  static constexpr int GROUP_BYTES = SMALL + GROUP * PANEL * BITS / 8;
  static constexpr int UNIT_BYTES = HEAD + UNIT / GROUP * GROUP_BYTES;

  // The group of input k.
  static const uint8_t* group(const uint8_t* panel, long k) {
    return panel + k / UNIT * UNIT_BYTES + HEAD + k % UNIT / GROUP * GROUP_BYTES;
  }

  // From halves of a unit, and a group's own bytes where scales are nested.
  static Vector factor(const uint8_t* halves, const uint8_t* small) {
    const Vector half = from_halves(halves);
    return SCALE == NESTED ? half * from_bytes(small) : half;
  }
};

template <int BITS, int GROUP, Scale SCALE, int OFFSET>
struct Blocks : Layout<BITS, GROUP, SCALE, OFFSET> {
  using Kept = Layout<BITS, GROUP, SCALE, OFFSET>;
  static constexpr bool EXPANDS = true;
  static constexpr int WORD = 32 / BITS;  // inputs

  static void put(const uint8_t* from, int o, uint8_t* to) {
    for (int k = 0; k < GROUP; k += WORD) {
      uint32_t quants = 0;
      for (int j = 0; j < WORD; j++) quants |= uint32_t(from[k + j]) << BITS * j;
      std::memcpy(to + (k / WORD * PANEL + o) * 4, &quants, 4);
    }
  }

  // One group of a vector of outputs.
  struct Group {
    const uint8_t* quants;
    Vector scales[WORD - 1], least;

    // That of input k of a panel.
    void find(const uint8_t* panel, long k, int v) {
      const uint8_t* unit = panel + k / Kept::UNIT * Kept::UNIT_BYTES + 2 * v * LANES;
      const uint8_t* group = Kept::group(panel, k);
      const uint8_t* small = group + v * LANES;
      const Vector scale = Kept::factor(unit, small);
      least = OFFSET == STORED ? Kept::factor(unit + 2 * PANEL, small + PANEL) : scale * -zero(small);
      quants = group + Kept::SMALL + 4 * v * LANES;
      UNROLL for (int j = 0; j < WORD - 1; j++) scales[j] = scale * (1.0f / (1 << BITS * j));
    }

    Bits word(int k, long ahead = AHEAD) const {
      const uint8_t* at = quants + k / WORD * PANEL * 4;
      __builtin_prefetch(at + ahead);
      return *(const Words*)at;
    }

    // A quant stays at its place in the word, and the scale of that place is smaller; the last one
    // would be taken for a sign.
    Vector value(Bits word, int j) const {
      const bool last = j == WORD - 1;
      const Bits quant = last ? word >> (32 - BITS) : word & (((1u << BITS) - 1) << BITS * j);
      return __builtin_convertvector((Ints)quant, Vector) * scales[last ? 0 : j] + least;
    }

   private:
    static Vector zero(const uint8_t* small) {
      const Vector usual = Vector{} + float(OFFSET);
      return SCALE == ZEROED ? usual + from_bytes(small) : usual;
    }
  };

  // Inputs first.. of a panel, in whole groups -> [count / STEP][PANEL][STEP]
  static void expand(const uint8_t* panel, long first, long count, Number* to) {
    for (long k = first; k < first + count; k += GROUP, to += GROUP * PANEL)
      for (int v = 0; v < VECTORS; v++) {
        Group group;
        group.find(panel, k, v);
        for (int i = 0; i < GROUP; i += WORD) {
          const Bits word = group.word(i);
          UNROLL for (int j = 0; j < WORD; j += 2)
            store(group.value(word, j), group.value(word, j + 1), to + (i + j) * PANEL + v * ACROSS);
        }
      }
  }

  // Adds the inputs from `first` to `end`, whole groups, to the sums of ROWS rows, for panels that
  // lie `size` bytes apart.
  template <int ROWS>
  static void multiply(long, long first, long end, long count, Block<const Input> x,
                       const uint8_t* panel, long size, Block<float> sums) {
    constexpr int MOST = panels_of_blocks(ROWS);
    const long ahead = ahead_of(MOST, size);
    long p = 0;
    for (; p + MOST <= count; p += MOST)
      some<ROWS, MOST>(first, end, x, panel + p * size, size, ahead, sums.from_panel(p));
    for (; p < count; p++)
      some<ROWS, 1>(first, end, x, panel + p * size, size, ahead, sums.from_panel(p));
  }

 private:
  template <int ROWS, int PANELS>
  static void some(long first, long end, Block<const Input> x, const uint8_t* panel, long size,
                   long ahead, Block<float> sums) {
    constexpr int COUNT = PANELS * VECTORS;
    const auto sum = [&](int r, int v) {
      return sums.at + r * sums.row + v / VECTORS * sums.panel + v % VECTORS * LANES;
    };
    Vector s[ROWS][COUNT];
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int v = 0; v < COUNT; v++) s[r][v] = *(const Floats*)sum(r, v);
    for (long k = first; k < end; k += GROUP) {
      Group groups[COUNT];
      UNROLL for (int v = 0; v < COUNT; v++)
        groups[v].find(panel + v / VECTORS * size, k, v % VECTORS);
      for (int i = 0; i < GROUP; i += WORD) add_word(groups, i, k + i, x, s, ahead);
    }
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int v = 0; v < COUNT; v++) *(Floats*)sum(r, v) = s[r][v];
  }

  // The inputs of word `i` of the groups, which are `first`.. of a row, to the sums of all rows.
  template <int ROWS, int COUNT>
  static inline __attribute__((always_inline)) void add_word(const Group (&groups)[COUNT], int i,
                                                             long first, Block<const Input> x,
                                                             Vector (&s)[ROWS][COUNT], long ahead) {
    Bits words[COUNT];
    UNROLL for (int v = 0; v < COUNT; v++) words[v] = groups[v].word(i, ahead);
    UNROLL for (int j = 0; j < WORD; j += 2) {
      Bits terms[COUNT][TERMS];
      UNROLL for (int v = 0; v < COUNT; v++)
        take(groups[v].value(words[v], j), groups[v].value(words[v], j + 1), terms[v]);
      UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int t = 0; t < TERMS; t++) {
          const auto input = Kind::spread(x.at[r * x.row + (first + j) / 2 * TERMS + t]);
          UNROLL for (int v = 0; v < COUNT; v++) s[r][v] = Kind::add(s[r][v], terms[v][t], input);
        }
    }
  }
};

}  // namespace
