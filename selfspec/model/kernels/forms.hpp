// The storage forms of weights, by number, and the functions of each.

#pragma once

#include "blocks.hpp"

namespace {

// The storage form of a panel's weights.
struct Form {
  using Multiply = void(long in, long count, long left, Rows x, Block<const float> totals,
                        const uint8_t* panel, long size, Block<float> sums);
  using MultiplyReady = void(long first, long end, Rows x, Block<const float> totals,
                             const Ready* ready, Block<float> sums);
  using MultiplyTiles = void(long in, long groups, long height, long count, long left,
                             Block<const Input> x, const float* totals, const uint8_t* panel,
                             long size, Block<float> sums);
  std::array<Multiply*, ROWS_OF_BLOCKS> multiply;  // by rows, from one on
  void (*make_ready)(const uint8_t* panel, long first, long end, Ready* to);
  std::array<MultiplyReady*, ROWS_OF_BLOCKS> multiply_ready;
  std::array<MultiplyTiles*, 5> multiply_tiles;  // by HEIGHTS, if any
  void (*put)(const uint8_t* from, int o, uint8_t* to);  // stores the quants of a group of output o
  bool placed;
  int few;  // with tiles: up to so many rows are added by vectors
  Scale scale;
  int group, offset, unit, parts, head, small, group_bytes, unit_bytes;

  long bytes(long in) const { return in / unit * unit_bytes; }  // of a panel
};

constexpr int HEIGHTS[] = {4, 6, 8, 12, 16};  // maximum rows of a tile, by function
template <typename As>
constexpr auto tiles_of() -> decltype(Form::multiply_tiles) {
#ifdef TILES
  return each(std::make_integer_sequence<int, 5>(),
              []<int I>() { return &As::template multiply_tiles<HEIGHTS[I - 1]>; });
#endif
  return {};
}

template <int BITS, int GROUP, Scale SCALE, int OFFSET>
constexpr Form form_of() {
  using As = Kept<BITS, GROUP, SCALE, OFFSET>;
  constexpr std::make_integer_sequence<int, ROWS_OF_BLOCKS> rows;
  return {each(rows, []<int ROWS>() { return &As::template multiply<ROWS>; }),
          As::make_ready,
          each(rows, []<int ROWS>() { return &multiply_ready<GROUP, As::LEAST, ROWS>; }),
          tiles_of<As>(),
          As::put,
          As::PLACED,
          BITS == 4 ? 2 : 4,
          SCALE, GROUP, OFFSET, As::UNIT, As::PARTS, As::HEAD, As::SMALL, As::GROUP_BYTES,
          As::UNIT_BYTES};
}

enum FormNumber {
  PLAIN, Q4_OFFSET, Q4_LEAST, Q4_NESTED, Q5_OFFSET, Q8_OFFSET, Q5_LEAST, Q5_NESTED, Q6_NESTED,
  Q4_ZEROED, Q8_ZEROED
};

constexpr int FIVE = PAIRED ? 5 : 8, SIX = PAIRED ? 6 : 8;  // bits in memory

constexpr Form FORMS[] = {
    {},
    form_of<4, 32, HALF, 8>(),
    form_of<4, 32, HALF, STORED>(),
    form_of<4, 32, NESTED, STORED>(),
    form_of<FIVE, 32, HALF, 16>(),
    form_of<8, 32, HALF, 128>(),
    form_of<FIVE, 32, HALF, STORED>(),
    form_of<FIVE, 32, NESTED, STORED>(),
    form_of<SIX, 16, NESTED, 32>(),
    form_of<4, 32, ZEROED, 8>(),
    form_of<8, 32, ZEROED, 128>(),
};

}  // namespace
