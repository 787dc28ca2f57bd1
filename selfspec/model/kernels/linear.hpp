// A linear layer for one row to thousands, computed by all threads of a team together.
//
// Weights lie in panels, [out / PANEL][in / STEP][PANEL][STEP], or as blocks. Few rows read several
// panels at once, straight through, at the speed of memory. Many rows share a piece of a panel in the
// cache, at the speed of arithmetic. Either way a sum has the order of panels.hpp, or of blocks.hpp.

#pragma once

#include <vector>

#include <omp.h>

#include "numbers.hpp"
#ifdef TILES
#include "tiles.hpp"
#else
#include "vectors.hpp"
#endif

namespace {

constexpr long STEP = Kind::STEP;
constexpr long PIECE = WIDE ? 256 : 1024 / STEP;  // steps of a panel that many rows share

// before + times * value, each step rounded.
inline Number added(Number before, Number value, float times) {
  return narrow(wide(before) + wide(times == 1 ? value : narrow(wide(value) * times)));
}

// Stores a row of values, rounded; with `adds`, adds that times the values.
inline void put(long count, const float* values, float adds, Number* to) {
  if (adds) {
#pragma omp simd
    for (long j = 0; j < count; j++) to[j] = added(to[j], narrow(values[j]), adds);
  } else {
#pragma omp simd
    for (long j = 0; j < count; j++) to[j] = narrow(values[j]);
  }
}

// Adjacent panels of one storage form.
struct Stripe {
  long panels, form;
  const void* weights;
};

struct Linear {
  long in, out;
  const Stripe* stripes;
  const Number* bias;  // [out], or none

  long steps() const { return up(in, STEP); }
  long inputs() const { return Arithmetic::inputs(in); }  // of a prepared row

  // inputs [rows, in] -> result [rows, out]; with `adds`, adds that times the result. Called by all
  // threads of a team, which return when all are done. `room`: the team's buffer for many rows.
  void run(long rows, const Number* from, Number* result, float adds, Input* room) const {
    const long tiles = up(rows, ROWS_OF_TILE), pieces = up(tiles, Arithmetic::most(in));
    for (long i = 0; i < pieces; i++) {
      const long first = tiles * i / pieces * ROWS_OF_TILE, end = tiles * (i + 1) / pieces * ROWS_OF_TILE;
      run_piece(std::min(rows, end) - first, from + first * in, result + first * out, adds, room);
    }
  }

 private:
  void run_piece(long rows, const Number* from, Number* result, float adds, Input* room) const {
    const Arithmetic by(rows);
    const bool few = rows <= Arithmetic::FEW;
    thread_local std::vector<Input> own;
    thread_local std::vector<float> sums;
    if (few) {  // each thread prepares its own copy, without waiting
      own.resize(by.room(in) + 64 / sizeof(Input));
      room = (Input*)((intptr_t(own.data()) + 63) / 64 * 64);
      for (long r = 0; r < by.places(); r++) prepare(by, rows, r, from, room);
    } else {
#pragma omp for
      for (long r = 0; r < by.places(); r++) prepare(by, rows, r, from, room);
    }
    const long threads = omp_get_num_threads(), me = omp_get_thread_num();
    const long all = up(out, PANEL), first = all * me / threads, last = all * (me + 1) / threads;
    long start = 0, end;  // of a stripe
    for (const Stripe* stripe = stripes; start < last; start = end, stripe++) {
      end = start + stripe->panels;
      const Form& form = FORMS[stripe->form];
      const long until = std::min(last, end), at_once = by.panels(form);
      for (long p = std::max(first, start); p < until; p += at_once) {
        const long count = std::min(at_once, until - p);
        sums.resize(by.places() * at_once * PANEL);
        const Block<float> to = {sums.data(), at_once * PANEL, PANEL};
        const Block<const Input> x = {room, inputs(), 0};
        if (stripe->form == PLAIN)
          add_panels(by, *stripe, p - start, count, x, few ? steps() : PIECE, to);
        else {
          std::fill(sums.begin(), sums.end(), 0.0f);
          by.multiply(form, in, count, last - p, x,
                      (const uint8_t*)stripe->weights + (p - start) * form.bytes(in), to);
        }
        finish(rows, p, count, to.at, to.row, result, adds);
      }
    }
#pragma omp barrier
  }

  bool has_blocks() const {
    long panel = 0;
    for (const Stripe* stripe = stripes; panel < up(out, PANEL); panel += stripe++->panels)
      if (stripe->form != PLAIN) return true;
    return false;
  }

  // Prepares row `r`, or a row of zeros after the last.
  void prepare(const Arithmetic& by, long rows, long r, const Number* from, Input* room) const {
    Input* const to = room + r * inputs();
    const long filled = r < rows ? steps() * Kind::INPUTS : 0;
    if (filled) Kind::prepare(from + r * in, in, to);
    std::fill(to + filled, to + inputs(), Input(0));
    if (has_blocks()) by.complete(in, r, room);
  }

  void add_panels(const Arithmetic& by, const Stripe& stripe, long first, long count,
                  Block<const Input> x, long piece, Block<float> sums) const {
    const Number* weights = (const Number*)stripe.weights + first * steps() * PANEL * STEP;
    const long all = up(steps(), 16), pieces = up(steps(), piece);  // of about equal size
    for (long i = 0; i < pieces; i++) {
      const long k = all * i / pieces * 16, end = std::min(steps(), all * (i + 1) / pieces * 16);
      by.multiply(count, end - k, {x.at + k * Kind::INPUTS, x.row, 0},
                  {weights + k * PANEL * STEP, PANEL * STEP, steps() * PANEL * STEP}, sums, AHEAD,
                  i == 0);
    }
  }

  void finish(long rows, long first, long count, float* sums, long row_sums, Number* result,
              float adds) const {
    const long start = first * PANEL, columns = std::min(count * PANEL, out - start);
    for (long r = 0; r < rows; r++) {
      float* const sum = sums + r * row_sums;
      if (bias) {
#pragma omp simd
        for (long j = 0; j < columns; j++) sum[j] += wide(bias[start + j]);
      }
      put(columns, sum, adds, result + r * out + start);
    }
  }
};

}  // namespace
