// Sums of products by a processor's matrix registers: AMX, for bfloat16.
//
// A tile is up to 16 rows of 64 bytes: 32 inputs of each row, the weights of a panel for these
// inputs, or 16 sums of each row. An output of a row is one chain of tiles along the inner dimension.
// Within a tile sums have a special order. So even a single row of plain weights uses tiles, and for
// few rows of blocks vectors add in the same order: bits do not depend on other rows.

#pragma once

#include "forms.hpp"

namespace {

// The counterpart of Vectors in vectors.hpp. It configures the thread's tiles for its lifetime.
class Tiles {
 public:
  static constexpr long FEW = 16;  // rows of one tile
  // The number of tiles of rows with `in` inputs that stay in the L2 cache.
  static long most(long in) { return std::max(4L, (1024L << 10) / (2 * in * ROWS_OF_TILE)); }

  explicit Tiles(long rows) : groups(up(rows, ROWS_OF_TILE)), height(up(rows, groups)) { use(); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;

  // Configures the tiles, also again after other uses; `inner`: inputs in a tile of rows.
  void use(long inner = 2 * STEPS) const {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; tile++) {
      const bool inputs = tile >= ROWS && tile < WEIGHTS;
      shapes.bytes[tile] = uint16_t(inputs ? inner * sizeof(Number) : 64);
      shapes.rows[tile] = uint8_t(tile < WEIGHTS ? height : inner / 2);
    }
    written(&shapes);
    _tile_loadconfig(&shapes);
  }

  // Inputs of a prepared row, in whole cache lines. Not in a multiple of eight, since the rows of a
  // tile would share few sets of the L1 cache.
  static long inputs(long in) {
    const long lines = up(in, 2 * STEPS);
    return (lines % 8 ? lines : lines + 1) * STEPS;
  }
  // Room for all prepared rows, then their totals, and for few rows a float copy for vectors.
  long room(long in) const {
    const long few = height <= ROWS_OF_BLOCKS ? in : 0;
    return places() * (inputs(in) + few) + groups * ROWS_OF_TILE * totals_of(in);
  }
  long places() const { return groups * height; }
  long panels(const Form& form = FORMS[PLAIN]) const {
    return height <= form.few ? panels_of_blocks(int(height)) : 2;
  }

  void multiply(long count, long steps, Block<const Input> x, Block<const Number> w,
                Block<float> sums, long ahead = AHEAD, bool fresh = false) const {
    const long whole = steps / STEPS;
    add(count, whole, x, w, sums, ahead, fresh);
    if (steps == whole * STEPS) return;
    alignas(64) Number last[2][SIZE] = {};  // padded with 0, like the inputs
    for (long p = 0; p < count; p++)
      std::copy_n(w.at + p * w.panel + whole * SIZE, steps % STEPS * PANEL * 2, last[p]);
    add(count, 1, {x.at + whole * STEPS, x.row, 0}, {last[0], 0, SIZE}, sums, 0, fresh && !whole);
  }

  // Sets numbers below 2^-100 to 0, since tiles drop their products and vectors do not.
  void complete(long in, long row, Input* room) const {
    float* const totals = (float*)(room + places() * inputs(in));
    Number* const numbers = (Number*)(room + row * inputs(in));
    for (long k = 0; k < in; k++) numbers[k] = (numbers[k] & 0x7f80) < 27 << 7 ? 0 : numbers[k];
    total(in, room + row * inputs(in),
          totals + row / height * totals_of(in) * ROWS_OF_TILE + row % height, ROWS_OF_TILE);
    float* const few = totals + ROWS_OF_TILE * totals_of(in) + row * in;
    for (long k = 0; height <= ROWS_OF_BLOCKS && k < in; k++) few[k] = wide(numbers[k]);
  }

  void multiply(const Form& form, long in, long count, long left, Block<const Input> x,
                const uint8_t* blocks, Block<float> sums) const {
    const float* const totals = (const float*)(x.at + places() * x.row);
    if (height <= form.few)
      return form.multiply[height - 1](in, count, left, {totals + ROWS_OF_TILE * totals_of(in), in, 0},
                                       {totals, 1, ROWS_OF_TILE}, blocks, form.bytes(in), sums);
    const bool smaller = form.group < 2 * STEPS;
    if (smaller) use(form.group);
    const auto which = std::lower_bound(HEIGHTS, std::end(HEIGHTS), height) - HEIGHTS;
    form.multiply_tiles[which](in, groups, height, count, left, x, totals, blocks, form.bytes(in), sums);
    if (smaller) use();
  }

 private:
  static constexpr long STEPS = 16, SIZE = STEPS * PANEL * 2;
  static constexpr int ROWS = 4, WEIGHTS = 6;  // first of two tiles each; the lower ones are sums
  const long groups, height;         // tiles of rows; rows of each

  // Adds some tiles along the inner dimension; `fresh`: sums start at 0.
  void add(long count, long tiles, Block<const Input> x, Block<const Number> w, Block<float> sums,
           long ahead, bool fresh) const {
    for (long g = 0; g < groups; g += 2) {
      const Block<const Input> from = {x.at + g * height * x.row, x.row, 0};
      const Block<float> to = {sums.at + g * height * sums.row, sums.row, sums.panel};
      const auto some = g + 1 < groups ? count > 1 ? &Tiles::group<2, 2> : &Tiles::group<2, 1>
                        : count > 1    ? &Tiles::group<1, 2>
                                       : &Tiles::group<1, 1>;
      (this->*some)(tiles, from, w, to, g ? 0 : ahead, fresh);  // later groups find weights cached
    }
  }

  template <int GROUPS, int PANELS>
  void group(long tiles, Block<const Input> x, Block<const Number> w, Block<float> sums, long ahead,
             bool fresh) const {
    const long across = sums.row * sizeof(float), along = x.row * sizeof(Input);
    const long lower = height * x.row;
    float* const below = sums.at + height * sums.row;
    const auto weights = [&](long t, long p) {
      const Number* const tile = w.at + p * w.panel + t * SIZE;
      if (ahead) UNROLL for (long line = 0; line < 16; line++)
        __builtin_prefetch((const char*)tile + ahead + 64 * line);
      return tile;
    };
    written(x.at);
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums.at, across);
      if (PANELS > 1) _tile_loadd(1, sums.at + sums.panel, across);
      if (GROUPS > 1) _tile_loadd(2, below, across);
      if (GROUPS * PANELS > 2) _tile_loadd(3, below + sums.panel, across);
    }
    for (long t = 0; t < tiles; t++) {
      const Input* const input = x.at + t * STEPS;
      _tile_loadd(4, input, along);
      if (GROUPS > 1) _tile_loadd(5, input + lower, along);
      _tile_loadd(6, weights(t, 0), 64);
      _tile_dpbf16ps(0, 4, 6);
      if (GROUPS > 1) _tile_dpbf16ps(2, 5, 6);
      if (PANELS > 1) {
        _tile_loadd(7, weights(t, 1), 64);
        _tile_dpbf16ps(1, 4, 7);
        if (GROUPS > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums.at, across);
    if (PANELS > 1) _tile_stored(1, sums.at + sums.panel, across);
    if (GROUPS > 1) _tile_stored(2, below, across);
    if (GROUPS * PANELS > 2) _tile_stored(3, below + sums.panel, across);
  }
};

using Arithmetic = Tiles;

}  // namespace
