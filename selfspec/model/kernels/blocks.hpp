// Quantised weights: a file's small integers, called quants, in groups that share a scale.
//
// Quants are multiplied without de-quantising, so no weight is rounded. Each group has its own chain
// of additions, or a tile: quants times inputs. Its result times the group's scale is added to the
// output's sum, then the group's minimum times the sum of its inputs. This order is the same for any
// number of rows: few rows read quants from the blocks, many share an expanded piece of a panel.
//
// A panel is a list of units. A unit has float16 scales of PANEL outputs, then minima if there are
// any, then its groups. A group has, with NESTED, a byte for each scale and minimum, with ZEROED a
// byte for the zero point; then its quants, in the layout of `put`.

#pragma once

#include <vector>

#include "panels.hpp"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

inline Vector from_bytes(const uint8_t* bytes) {
#if defined(__AVX512F__)  // compilers would split such short vectors
  const Ints numbers = (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
  const Ints numbers = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
#else
  const Ints numbers = __builtin_convertvector(*(const Bytes*)bytes, Ints);
#endif
  return __builtin_convertvector(numbers, Vector);
}

inline float from_half(uint16_t half) {
  const float size = std::bit_cast<float>(uint32_t(half & 0x7fff) << 13);
  return half & 0x8000 ? size * -0x1p112f : size * 0x1p112f;
}

inline Vector from_halves(const uint8_t* halves) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)halves));
#elif defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else  // shift the bits, then correct the exponent
  const Bits bits = __builtin_convertvector(*(const Halves*)halves, Bits);
  const Vector size = (Vector)((bits & 0x7fffu) << 13) * 0x1p112f;
  return (Vector)((Bits)size | (bits & 0x8000u) << 16);
#endif
}

// A finite number rounded to bfloat16, in the upper half: to the nearest, ties to even. Adding 2^16
// times its power of two drops the digits that bfloat16 lacks.
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

// Swaps the numbers of lanes whose indices differ in the bit `apart`.
inline Vector across(Vector value, int apart) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)(numbered() ^ apart), (__m512)value);
#else
  Vector swapped = {};
  for (int i = 0; i < LANES; i++) swapped[i] = value[i ^ apart];
  return swapped;
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

// Rounds an even number of vectors and stores them in the layout of Kind::prepare.
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

enum Scale {
  HALF,    // a float16 per group
  NESTED,  // a float16 per 256 inputs, times a byte of the group
  ZEROED,  // a float16 per group, and a byte of the group that is subtracted from its quants
};
constexpr int STORED = 0;  // in place of an offset of quants: minima are stored like scales

// The sums of a row's inputs that some of these forms multiply, one for each group.
constexpr int TOGETHER = 32;
constexpr long totals_of(long in) { return in / TOGETHER; }

inline void total(long in, const Input* row, float* to, long apart) {
  constexpr int PER = Kind::STEP / Kind::INPUTS;  // numbers of an Input
  const auto one = Kind::spread(Input(PER == 2 ? 0x3f803f80 : 1));
  for (long k = 0; k < in; k += TOGETHER, to += apart) {
    Vector sum = {};
    for (int i = 0; i < TOGETHER / PER; i += LANES)
      sum = Kind::add(sum, *(const Words*)(row + k / PER + i), one);
    *to = sum_of(sum);
  }
}

// How vectors add quants. A tile has two chains, of even inputs and of odd ones, and rounds each
// addition to float32. So float32 vectors give few rows the same bits, at the speed of memory.
#ifdef TILES
using BlockKind = Float32;
#else
using BlockKind = Kind;
#endif
using Rows = Block<const BlockKind::Input>;
constexpr int ADDED = BlockKind::STEP / BlockKind::TERMS;  // inputs per addition
constexpr bool PAIRED = Kind::STEP / Kind::TERMS == 2, CHAINED = PAIRED && ADDED == 1;

// 4-bit quants may stay in place in a word, where they are larger by a power of two; so their inputs
// are divided by it. Only the last quant is shifted, since it would reach the sign bit.
inline void shrink(long in, const Input* row, Input* to) {
  for (long k = 0; k < in; k++) to[k] = k % 8 == 7 ? row[k] : row[k] * (1.0f / (1 << 4 * (k % 8)));
}

constexpr int ROWS_OF_BLOCKS = CHAINED ? 4 : WIDE ? 8 : LANES == 8 ? 6 : 4;  // rows sharing a quant

// Panels that are read side by side: with too few sums, each addition would wait for the last one.
constexpr int panels_of_blocks(int rows) {
  if (CHAINED && rows > 2) return 3;
  if (WIDE) return rows == 1 ? 6 : std::min(4, SUMS / rows);
  return LANES == 8 && rows <= 2 ? 2 : 1;
}

// A group of a panel, expanded for many rows.
struct Ready {
  Bits terms[TOGETHER / ADDED][VECTORS];
  Vector scales[VECTORS], minima[VECTORS];
};

// One vector of its outputs, with the interface of Group.
struct ReadyGroup {
  const Ready& ready;
  int v;

  Bits term(int i, int j) const { return hold(ready.terms[(i + j) / ADDED][v]); }
  Vector scale() const { return ready.scales[v]; }
  Vector least() const { return ready.minima[v]; }
  void fetch(int, long) const {}
};

// Adds the inputs from `first` to `end`, whole groups, to the sums of ROWS rows and PANELS panels.
// `group(k, p, v)`: the group of inputs k.. for vector v of panel p. AT_ONCE: inputs of a word, or of
// as many steps as compilers schedule best.
template <int ROWS, int PANELS, int GROUP, bool LEAST, int AT_ONCE, typename Groups>
inline __attribute__((always_inline)) void add_groups(long first, long end, Rows x,
                                                      Block<const float> totals, Block<float> sums,
                                                      long ahead, const Groups& group) {
  constexpr int COUNT = PANELS * VECTORS;
  const auto sum = [&](int r, int c) {
    return sums.at + r * sums.row + c / VECTORS * sums.panel + c % VECTORS * LANES;
  };
  Vector s[ROWS][COUNT];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < COUNT; c++) s[r][c] = *(const Floats*)sum(r, c);
  for (long k = first; k < end; k += GROUP) {
    Vector t[ROWS][COUNT][1 + CHAINED] = {};
    for (int i = 0; i < GROUP; i += AT_ONCE) {
      UNROLL for (int p = 0; p < PANELS; p++) group(k, p, 0).fetch(i, ahead);
      UNROLL for (int j = 0; j < AT_ONCE; j += ADDED) {
        Bits terms[COUNT];
        UNROLL for (int c = 0; c < COUNT; c++) terms[c] = group(k, c / VECTORS, c % VECTORS).term(i, j);
        UNROLL for (int r = 0; r < ROWS; r++) {
          const auto input = BlockKind::spread(x.at[r * x.row + (k + i + j) / ADDED]);
          UNROLL for (int c = 0; c < COUNT; c++) {
            Vector& to = t[r][c][CHAINED ? j % 2 : 0];
            to = BlockKind::add(to, terms[c], input);
          }
        }
      }
    }
    UNROLL for (int c = 0; c < COUNT; c++) {
      const auto one = group(k, c / VECTORS, c % VECTORS);
      const Vector scale = one.scale(), least = LEAST ? one.least() : Vector{};
      UNROLL for (int r = 0; r < ROWS; r++) {
        s[r][c] += scale * (CHAINED ? t[r][c][0] + t[r][c][CHAINED] : t[r][c][0]);
        if (LEAST) s[r][c] += least * totals.at[r * totals.row + k / TOGETHER * totals.panel];
      }
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int c = 0; c < COUNT; c++) *(Floats*)sum(r, c) = s[r][c];
}

template <int BITS, int GROUP, Scale SCALE, int OFFSET>
struct Kept {
  static constexpr int UNIT = SCALE == NESTED ? 256 : GROUP;
  static constexpr int PARTS = OFFSET == STORED ? 2 : 1;
  static constexpr int HEAD = 2 * PARTS * PANEL, SMALL = SCALE == HALF ? 0 : PARTS * PANEL;
  static constexpr int GROUP_BYTES = SMALL + GROUP * PANEL * BITS / 8;
  static constexpr int UNIT_BYTES = HEAD + UNIT / GROUP * GROUP_BYTES;
  static constexpr bool PLACED = BITS == 4 && !PAIRED;  // see `shrink`
  static constexpr int MORE = BITS == 8 ? 0 : BITS - 4;  // bits of a quant beyond four, stored apart
  static constexpr int AT_ONCE = MORE ? 32 / MORE : 8;   // inputs that share a word
  // The offset is already subtracted in tables of pairs and in stored 8-bit quants.
  static constexpr bool LEAST = OFFSET == STORED || SCALE == ZEROED || PLACED;
  static_assert(GROUP == TOGETHER || !LEAST);  // sums of inputs exist only for such groups

  // The group of input k.
  static const uint8_t* group(const uint8_t* panel, long k) {
    return panel + k / UNIT * UNIT_BYTES + HEAD + k % UNIT / GROUP * GROUP_BYTES;
  }

  // The factor from a unit's halves and, if scales are nested, the group's own bytes.
  static Vector factor(const uint8_t* halves, const uint8_t* small) {
    const Vector half = from_halves(halves);
    return SCALE == NESTED ? half * from_bytes(small) : half;
  }

  // Stores a group's quants for output `o`. With eight bits: a byte for each output, input by input.
  // Else a word for each output with the lowest four bits of eight inputs, the first input lowest, or
  // for pairs, one input of each pair in each half. MORE bits follow, in words of AT_ONCE inputs.
  static void put(const uint8_t* from, int o, uint8_t* to) {
    for (int k = 0; BITS == 8 && k < GROUP; k++) to[k * PANEL + o] = uint8_t(from[k] - OFFSET);
    if (BITS < 8) to = put<4>(from, o, to, 0);
    if (MORE) put<std::max(1, MORE)>(from, o, to, 4);
  }

  // Stores COUNT bits of each quant from bit `low` on; returns the address after them.
  template <int COUNT>
  static uint8_t* put(const uint8_t* from, int o, uint8_t* to, int low) {
    constexpr int INPUTS = 32 / COUNT;
    for (int k = 0; k < GROUP; k += INPUTS, to += PANEL * 4) {
      uint32_t word = 0;
      UNROLL for (int i = 0; i < INPUTS; i++) {
        const int place = PAIRED ? i / 2 + i % 2 * INPUTS / 2 : i;
        word |= (from[k + i] >> low & ((1u << COUNT) - 1)) << place * COUNT;
      }
      std::memcpy(to + o * 4, &word, 4);
    }
    return to;
  }

  // One group of a vector of outputs.
  struct Group {
    const uint8_t *halves, *small, *quants;

    Group(const uint8_t* panel, long k, int v) {
      halves = panel + k / UNIT * UNIT_BYTES + 2 * v * LANES;
      small = group(panel, k) + v * LANES;
      quants = group(panel, k) + SMALL + v * LANES * (BITS == 4 ? 4 : 1);
    }

    Vector scale() const { return factor(halves, small); }

    Vector least() const {
      if (OFFSET == STORED) return factor(halves + 2 * PANEL, small + PANEL);
      const Vector usual = Vector{} + (PLACED ? float(OFFSET) : 0.0f);
      return -scale() * (SCALE == ZEROED ? usual + from_bytes(small) : usual);
    }

    void fetch(int k, long ahead) const {
      for (int line = 0; line < AT_ONCE * BITS / 32; line++)
        __builtin_prefetch(quants + k * PANEL * BITS / 8 + 64 * line + ahead);
    }

#if BFLOAT16 && defined(__AVX512BF16__)
    // Inputs i + j and i + j + 1 as bfloat16.
    Bits pair(int i, int j) const {
      if (BITS == 8) return byte(i + j) >> 16 | byte(i + j + 1);
      const __m512i four = _mm512_srli_epi16(word((i + j) / 8), j % 8 * 2);
      if (!MORE) return (Bits)_mm512_permutexvar_epi16(four, table(0, 0));
      const int above = j / 2 * MORE - 4;  // shift of the further bits to their place above the four
      const __m512i more = word(GROUP / 8 + i / AT_ONCE);
      const __m512i high = above < 0 ? _mm512_slli_epi16(more, -above) : _mm512_srli_epi16(more, above);
      const __m512i place = _mm512_ternarylogic_epi32(four, high, _mm512_set1_epi16(15), 0xe4);
      if (MORE == 1) return (Bits)_mm512_permutexvar_epi16(place, table(0, 16));
      return (Bits)_mm512_permutex2var_epi16(table(0, 16), place, table(32, 48));
    }
#endif

    // The quant of input i + j, or of it and the next, for BlockKind::add; `i` a multiple of AT_ONCE.
    Bits term(int i, int j) const {
#if BFLOAT16 && defined(__AVX512BF16__)
      if (ADDED == 2) return pair(i, j);
#endif
      if (BITS == 8) return byte(i + j);
#ifdef TILES
      if (MORE) return j % 2 ? pair(i, j - 1) & 0xffff0000u : pair(i, j) << 16;
      const __m512i place = (__m512i)((Bits)word(i / 8) >> j / 2 * 4);
      if (j % 2) return (Bits)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, place, table(0, 0));
      return (Bits)_mm512_maskz_permutexvar_ps(0xffff, place, (__m512)numbers(0));
#else
      const Bits eight = *(const Words*)(quants + i / 8 * PANEL * 4);
      const Bits quant = j == 7 ? eight >> 28 : eight & 15u << 4 * j;
      return (Bits)__builtin_convertvector((Ints)quant, Vector);
#endif
    }

   private:
    Bits byte(int k) const { return (Bits)from_bytes(quants + k * PANEL); }
#if BFLOAT16 && defined(__AVX512BF16__)
    __m512i word(int line) const { return _mm512_loadu_si512(quants + line * PANEL * 4); }
    static Vector numbers(int first) { return __builtin_convertvector(numbered() + (first - OFFSET), Vector); }
    // The values of 16 quants from `low` on, then of 16 from `high` on, as bfloat16. For four bits
    // both halves are equal, since the bits above these select one of them.
    static __m512i table(int low, int high) {
      return (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers(high), (__m512)numbers(low));
    }
#endif
  };

#ifdef TILES
 private:
  static constexpr int LINES = GROUP / 2;  // lines of a tile of weights: pairs of inputs
  // Some of a group's bytes are prefetched when a tile is made, the others when products are added.
  static constexpr int EACH = UNIT_BYTES / (UNIT / GROUP), MADE = EACH * 2 / 5 / 64 * 64;

  template <int SIZE>
  static void fetch(const uint8_t* from) {
    UNROLL for (int at = 0; at < SIZE; at += 64) __builtin_prefetch(from + at, 0, 2);
  }

  struct Tile {
    alignas(64) Number weights[LINES][2 * PANEL];
    Vector scale, least;

    void take(const uint8_t* panel, long k) {
      const Group group(panel, k, 0);
      UNROLL for (int line = 0; line < LINES; line++)
        *(Words*)weights[line] = group.pair(2 * line / AT_ONCE * AT_ONCE, 2 * line % AT_ONCE);
      scale = group.scale();
      if (LEAST) least = group.least();
    }
  };

  // Adds groups from `first` to `end`, made into `tiles`, to the sums of `height` rows, at most ROWS.
  template <int ROWS>
  static void add(long height, Block<const Input> x, const float* totals, const Tile* tiles, long first,
                  long end, const uint8_t* next, Block<float> to) {
    alignas(64) float products[4][ROWS_OF_TILE][PANEL];
    if (height < ROWS) std::memset(products, 0, sizeof products);  // stale denormals are slow
    Vector sums[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
      sums[r] = r < height ? Vector(*(const Floats*)(to.at + r * to.row)) : Vector{};
    // a macro, since tile registers must be literals
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
      const float* const total = totals + place * ROWS_OF_TILE;
      fetch<EACH - MADE>(next + (place - first) * (EACH - MADE));
      UNROLL for (int r = 0; r < ROWS; r++) {
        sums[r] += scale * *(const Floats*)products[which][r];
        if (LEAST) sums[r] += least * total[r];
      }
    };
    written(tiles);
    // two products are computed while two are added
    MULTIPLY(0, 4, 6, first)
    MULTIPLY(1, 5, 7, first + 1)
    for (long place = first; place < end; place += 4) {
      MULTIPLY(2, 4, 6, place + 2)
      MULTIPLY(3, 5, 7, place + 3)
      _tile_stored(0, products[0], 64);
      if (place + 1 < end) _tile_stored(1, products[1], 64);
      add(0, place), add(1, place + 1);
      if (place + 2 >= end) break;
      MULTIPLY(0, 4, 6, place + 4)
      MULTIPLY(1, 5, 7, place + 5)
      _tile_stored(2, products[2], 64);
      if (place + 3 < end) _tile_stored(3, products[3], 64);
      add(2, place + 2), add(3, place + 3);
    }
#undef MULTIPLY
    UNROLL for (int r = 0; r < ROWS; r++)
      if (r < height) *(Floats*)(to.at + r * to.row) = sums[r];
  }

 public:
  // Adds to the sums of `groups` times `height` rows, at most ROWS each, for `count` of `left` panels
  // that lie `size` bytes apart. A piece of a panel stays in the cache for all rows. `totals`:
  // [groups, in / GROUP, ROWS_OF_TILE].
  template <int ROWS>
  static void multiply_tiles(long in, long groups, long height, long count, long left,
                             Block<const Input> x, const float* totals, const uint8_t* panel,
                             long size, Block<float> sums) {
    constexpr long MOST = 12;  // with their rows these tiles take half of the L1 cache
    thread_local std::vector<Tile> tiles(MOST);
    const long all = in / GROUP, pieces = up(all, MOST);
    const uint8_t* const behind = panel + left * size;
    for (long p = 0; p < count; p++, panel += size)
      for (long piece = 0; piece < pieces; piece++) {
        const long first = all * piece / pieces, end = all * (piece + 1) / pieces;
        const uint8_t *const here = group(panel, first * GROUP), *const there = here + 2 * AHEAD,
                      *const next = there < behind ? there : here;
        for (long g = first; g < end; g++) {
          fetch<MADE>(next + (g - first) * MADE);
          tiles[g - first].take(panel, g * GROUP);
        }
        for (long g = 0; g < groups; g++)
          add<ROWS>(height, x.from_row(g * height), totals + g * all * ROWS_OF_TILE, tiles.data(), first,
                    end, next + (end - first) * MADE, sums.from_row(g * height).from_panel(p));
      }
  }
#endif

  // Adds all inputs to the sums of ROWS rows, for `count` of `left` panels that lie `size` bytes apart.
  template <int ROWS>
  static void multiply(long in, long count, long left, Rows x, Block<const float> totals,
                       const uint8_t* panel, long size, Block<float> sums) {
    constexpr int MOST = panels_of_blocks(ROWS), FEWER = MOST > 3 ? MOST / 2 : 1;
    long p = 0;
    const auto some = [&]<int PANELS>() __attribute__((noinline)) {  // for its own registers
      for (; p + PANELS <= count; p += PANELS) {
        const auto group = [&](long k, int q, int v) { return Group(panel + (p + q) * size, k, v); };
        const long ahead = ahead_of(MOST, size, p + PANELS >= left);
        add_groups<ROWS, PANELS, GROUP, LEAST, AT_ONCE>(0, in, x, totals, sums.from_panel(p), ahead, group);
      }
    };
    some.template operator()<MOST>(), some.template operator()<FEWER>(), some.template operator()<1>();
  }

  // Expands the groups from `first` to `end` of a panel, and prefetches as many after them.
  static void make_ready(const uint8_t* panel, long first, long end, Ready* to) {
    for (long k = first; k < end; k += GROUP, to++)
      for (int v = 0; v < VECTORS; v++) {
        const Group group(panel, k, v);
        for (int i = 0; i < GROUP; i += AT_ONCE) {
          group.fetch(i, (end - first) / GROUP * GROUP_BYTES);
          UNROLL for (int j = 0; j < AT_ONCE; j += ADDED) to->terms[(i + j) / ADDED][v] = group.term(i, j);
        }
        to->scales[v] = group.scale();
        if (LEAST) to->minima[v] = group.least();
      }
  }
};

// The same as `multiply` for one panel, whose groups from `first` on are expanded in `ready`.
template <int GROUP, bool LEAST, int ROWS>
void multiply_ready(long first, long end, Rows x, Block<const float> totals, const Ready* ready,
                    Block<float> sums) {
  const auto group = [&](long k, int, int v) { return ReadyGroup{ready[(k - first) / GROUP], v}; };
  add_groups<ROWS, 1, GROUP, LEAST, LANES == 8 ? 2 : ADDED>(first, end, x, totals, sums, 0, group);
}

}  // namespace
