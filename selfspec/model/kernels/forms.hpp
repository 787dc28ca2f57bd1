// The forms in which weights are kept, by number, and what is done with each.

#pragma once

#if BFLOAT16 && defined(__AVX512BF16__)
#include "integers.hpp"
#else
#include "blocks.hpp"
#endif

namespace {

#if BFLOAT16 && defined(__AVX512BF16__)
#ifdef __AMX_BF16__
constexpr bool TILED = true;
#else
constexpr bool TILED = false;  // to convert eight bits would keep the unit busy that multiplies
#endif
template <int BITS, int GROUP, Scale SCALE, int OFFSET>
using KeptAs = std::conditional_t<BITS == 4 || TILED,
                                  Integers<BITS, GROUP, SCALE, OFFSET>,
                                  Blocks<BITS, GROUP, SCALE, OFFSET>>;
#else
constexpr long totals_of(long) { return 0; }  // nobody wants to know what inputs add up to
inline void total(long, const Input*, float*, long) {}
template <int BITS, int GROUP, Scale SCALE, int OFFSET>
using KeptAs = Blocks<BITS, GROUP, SCALE, OFFSET>;
#endif

// How the weights of a panel are kept.
struct Form {
  using Multiply = void (*)(long in, long first, long end, long count, Block<const Input> x,
                            const uint8_t* panel, long size, Block<float> sums);
  void (*expand)(const uint8_t* panel, long first, long count, Number* to);  // if any
  Multiply multiply[ROWS_OF_BLOCKS];  // by rows, from one on
  void (*multiply_tiles)(long in, long groups, long height, long count, Block<const Input> x,
                         const float* totals, const uint8_t* panel, long size,
                         Block<float> sums);  // if any
  void (*put)(const uint8_t* from, int o, uint8_t* to);  // quants of a group of output o
  Scale scale;
  int group, offset, unit, parts, head, small, group_bytes, unit_bytes;

  long bytes(long in) const { return in / unit * unit_bytes; }  // of a panel
};

template <typename Kept>
constexpr auto tiles_of() -> decltype(Form::multiply_tiles) {
#ifdef __AMX_BF16__
  if constexpr (!Kept::EXPANDS) return Kept::multiply_tiles;
#endif
  return nullptr;
}

template <int BITS, int GROUP, Scale SCALE, int OFFSET, int... ROWS>
constexpr Form form_with(std::integer_sequence<int, ROWS...>) {
  using Kept = KeptAs<BITS, GROUP, SCALE, OFFSET>;
  return {Kept::expand, {Kept::template multiply<ROWS + 1>...}, tiles_of<Kept>(), Kept::put,
          SCALE, GROUP, OFFSET, Kept::UNIT, Kept::PARTS, Kept::HEAD, Kept::SMALL, Kept::GROUP_BYTES,
          Kept::UNIT_BYTES};
}

template <int BITS, int GROUP, Scale SCALE, int OFFSET>
constexpr Form form_of() {
  return form_with<BITS, GROUP, SCALE, OFFSET>(std::make_integer_sequence<int, ROWS_OF_BLOCKS>());
}

enum FormNumber {
  PLAIN, Q4_OFFSET, Q4_LEAST, Q4_NESTED, Q5_OFFSET, Q8_OFFSET, Q5_LEAST, Q5_NESTED, Q6_NESTED,
  Q4_ZEROED, Q8_ZEROED
};

constexpr Form FORMS[] = {
    {},
    form_of<4, 32, HALF, 8>(),
    form_of<4, 32, HALF, STORED>(),
    form_of<4, 32, NESTED, STORED>(),
    form_of<8, 32, HALF, 16>(),
    form_of<8, 32, HALF, 128>(),
    form_of<8, 32, HALF, STORED>(),
    form_of<8, 32, NESTED, STORED>(),
    form_of<8, 16, NESTED, 32>(),
    form_of<4, 32, ZEROED, 8>(),
    form_of<8, 32, ZEROED, 128>(),
};

}  // namespace
