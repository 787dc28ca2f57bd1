// Products of rows with one weight, from one row to thousands: a row's bits depend on the row alone.
//
// products.py compiles this file on the machine that runs it, with BFLOAT16 (0 or 1: float32).
//
// Every output is one chain of additions, from the first input to the last, whatever the number of
// rows or of threads and wherever the output stands: a vector holds outputs side by side, never
// parts of a sum. Weights lie in panels of PANEL outputs, [out / PANEL][in / STEP][PANEL][STEP].
// Few rows read several panels at once, straight through: at the memory's speed. Many rows run in
// groups, as many as registers hold sums for, over a piece of one panel that stays in the cache:
// at the arithmetic's.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 24;  // numbers of a vector; vectors of sums that are kept at once
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12;
#else  // NEON, or what the compiler makes of it
constexpr int LANES = 4, SUMS = 24;
#endif

constexpr int PANEL = 16, VECTORS = PANEL / LANES;
constexpr int MOST_ROWS = std::min(8, SUMS / VECTORS);  // of a group
constexpr int MOST_PANELS = 8;                          // that are read side by side
constexpr long PIECE = 1024;                            // inputs of a panel that many rows share
constexpr long AHEAD = 2048;                            // bytes that are fetched before their turn
constexpr long ALONE = 32768;                           // multiplications below which one thread is faster

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

#if BFLOAT16

using Number = uint16_t;  // the upper half of a float
constexpr long STEP = 2;  // inputs of one vector of weights

inline float wide(Number value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Number narrow(float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return Number(bits >> 16 | 0x40);  // not a number
  return Number((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#else

using Number = float;
constexpr long STEP = 1;

inline float wide(Number value) { return value; }
inline Number narrow(float value) { return value; }

#endif

// How one vector of weights meets a row. `Stored` are weights as they lie in memory, `Widened` what
// a piece that many rows share is turned into first; both give the same sums.
//   Input, INPUTS: what a row is made of for this, how many per STEP; TERMS: additions per STEP.

#if BFLOAT16 && defined(__AVX512BF16__)

constexpr bool WIDENS = false;
using Input = uint32_t;  // two numbers

struct Stored {
  static constexpr int TERMS = 1;
  static void load(const Number* weights, Bits* loaded) { *loaded = *(const Words*)weights; }
};

inline __m512bh spread(Input pair) { return (__m512bh)_mm512_set1_epi32(int(pair)); }
inline Vector add(Vector sum, Bits weights, __m512bh input) {
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, input);
}
inline void prepare(const Number* row, long count, Input* to) {
  for (long j = 0; j < count; j += 2)
    to[j / 2] = row[j] | (j + 1 < count ? uint32_t(row[j + 1]) << 16 : 0);
}
constexpr long INPUTS = 1;

#else

constexpr bool WIDENS = BFLOAT16;
using Input = float;

#if BFLOAT16
struct Stored {
  static constexpr int TERMS = 2;
  static void load(const Number* weights, Bits* loaded) {
    const Bits pairs = *(const Words*)weights;
    loaded[0] = pairs << 16, loaded[1] = pairs & 0xffff0000u;
  }
};
#else
struct Stored {
  static constexpr int TERMS = 1;
  static void load(const Number* weights, Bits* loaded) { *loaded = *(const Words*)weights; }
};
#endif

inline Vector spread(Input number) { return number - Vector{}; }
inline Vector add(Vector sum, Bits weights, Vector input) { return sum + (Vector)weights * input; }
inline void prepare(const Number* row, long count, Input* to) {
  for (long j = 0; j < count; j++) to[j] = wide(row[j]);
  if (count % STEP) to[count] = 0;
}
constexpr long INPUTS = STEP;

#endif

struct Widened {  // [in][PANEL] of float
  static constexpr int TERMS = Stored::TERMS;
  static void load(const float* weights, Bits* loaded) {
    for (int i = 0; i < TERMS; i++) loaded[i] = *(const Words*)(weights + i * PANEL);
  }
};

// Where sums or inputs of several rows and panels are, and how far apart.
template <typename T>
struct Block {
  T* at;
  long row, panel;
};

// Adds `steps` of the inner dimension to the sums of ROWS rows and PANELS panels.
template <typename Kind, typename Weight, int ROWS, int PANELS>
void group(long steps, Block<const Input> x, Block<const Weight> w, Block<float> sums) {
  constexpr long VECTOR = sizeof(Weight) == 2 ? LANES * STEP : LANES;
  constexpr long ADVANCE = PANEL * STEP;
  Vector s[ROWS][PANELS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        s[r][p][v] = *(const Floats*)(sums.at + r * sums.row + p * sums.panel + v * LANES);
  for (long k = 0; k < steps; k++) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) {
      const Weight* from = w.at + p * w.panel + k * ADVANCE;
      __builtin_prefetch((const char*)from + AHEAD);
      Bits loaded[VECTORS][Kind::TERMS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) Kind::load(from + v * VECTOR, loaded[v]);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < Kind::TERMS; i++) {
          const auto input = spread(x.at[r * x.row + k * INPUTS + i]);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) s[r][p][v] = add(s[r][p][v], loaded[v][i], input);
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        *(Floats*)(sums.at + r * sums.row + p * sums.panel + v * LANES) = s[r][p][v];
}

constexpr int panels_at_once(int rows) {
  return std::min(MOST_PANELS, std::max(1, SUMS / VECTORS / rows));
}

template <typename Kind, typename Weight, int ROWS>
void panels(long count, long steps, Block<const Input> x, Block<const Weight> w,
            Block<float> sums) {
  constexpr int MOST = panels_at_once(ROWS);
  long p = 0;
  for (; p + MOST <= count; p += MOST)
    group<Kind, Weight, ROWS, MOST>(steps, x, {w.at + p * w.panel, w.row, w.panel},
                                    {sums.at + p * sums.panel, sums.row, sums.panel});
  for (; p < count; p++)
    group<Kind, Weight, ROWS, 1>(steps, x, {w.at + p * w.panel, w.row, w.panel},
                                 {sums.at + p * sums.panel, sums.row, sums.panel});
}

// `panels` for a number of rows that is known when it runs, 1 to MOST_ROWS.
template <typename Kind, typename Weight, int... ROWS>
void any(int rows, std::integer_sequence<int, ROWS...>, long count, long steps,
         Block<const Input> x, Block<const Weight> w, Block<float> sums) {
  using Function = decltype(&panels<Kind, Weight, 1>);
  static constexpr Function all[] = {panels<Kind, Weight, ROWS + 1>...};
  all[rows - 1](count, steps, x, w, sums);
}

template <typename Kind, typename Weight>
void any(int rows, long count, long steps, Block<const Input> x, Block<const Weight> w,
         Block<float> sums) {
  any<Kind>(rows, std::make_integer_sequence<int, MOST_ROWS>(), count, steps, x, w, sums);
}

void widen(const Number* weights, long steps, float* to) {
  for (long k = 0; k < steps; k++)
    for (long o = 0; o < PANEL; o++)
      for (long i = 0; i < STEP; i++)
        to[(k * STEP + i) * PANEL + o] = wide(weights[(k * PANEL + o) * STEP + i]);
}

struct Shape {
  long rows, in, out;
  long steps() const { return (in + STEP - 1) / STEP; }
  long panels() const { return (out + PANEL - 1) / PANEL; }
};

// One panel for all rows, in groups that differ by one row at most.
void shared(const Shape& shape, const Input* inputs, const Number* weights, float* widened,
            float* sums) {
  const long steps = shape.steps(), height = steps * INPUTS;
  const long groups = (shape.rows + MOST_ROWS - 1) / MOST_ROWS;
  const bool widens = WIDENS && groups > 2;
  for (long k = 0; k < steps; k += PIECE / STEP) {
    const long length = std::min(PIECE / STEP, steps - k);
    const Number* piece = weights + k * PANEL * STEP;
    if (widens) widen(piece, length, widened);
    for (long g = 0; g < groups; g++) {
      const long first = shape.rows * g / groups, last = shape.rows * (g + 1) / groups;
      const Block<const Input> x = {inputs + first * height + k * INPUTS, height, 0};
      const Block<float> to = {sums + first * PANEL, PANEL, 0};
      if (widens)
        any<Widened, float>(int(last - first), 1, length, x, {widened, 0, 0}, to);
      else
        any<Stored, Number>(int(last - first), 1, length, x, {piece, 0, 0}, to);
    }
  }
}

}  // namespace

extern "C" {

// weight [out, in] -> [ceil(out / PANEL), ceil(in / STEP), PANEL, STEP], filled up with 0.
void pack(long in, long out, const Number* weight, Number* packed) {
  const long steps = Shape{0, in, out}.steps(), panels = Shape{0, in, out}.panels();
#pragma omp parallel for
  for (long p = 0; p < panels; p++)
    for (long k = 0; k < steps; k++)
      for (long o = 0; o < PANEL; o++)
        for (long i = 0; i < STEP; i++) {
          const long row = p * PANEL + o, column = k * STEP + i;
          const bool there = row < out && column < in;
          packed[((p * steps + k) * PANEL + o) * STEP + i] =
              there ? weight[row * in + column] : Number(0);
        }
}

// rows [rows, in] -> result [rows, out], plus bias [out] where there is one.
void product(long count, long in, long out, const Number* rows, const Number* packed,
             const Number* bias, Number* result) {
  const Shape s = {count, in, out};
  const long height = s.steps() * INPUTS, panel = s.steps() * PANEL * STEP;
  const bool few = s.rows <= MOST_ROWS;
  std::vector<Input> inputs(s.rows * height);
#pragma omp parallel if (s.rows * s.in * s.out > ALONE)
  {
#pragma omp for
    for (long r = 0; r < s.rows; r++) prepare(rows + r * s.in, s.in, &inputs[r * height]);
    const long threads = omp_get_num_threads(), me = omp_get_thread_num();
    const long first = s.panels() * me / threads, last = s.panels() * (me + 1) / threads;
    const long at_once = few ? panels_at_once(int(s.rows)) : 1;
    std::vector<float> sums(s.rows * at_once * PANEL), widened(few ? 0 : PIECE * PANEL);
    for (long p = first; p < last; p += at_once) {
      const long panels = std::min(at_once, last - p);
      const Number* weights = packed + p * panel;
      std::fill(sums.begin(), sums.end(), 0.0f);
      if (few)
        any<Stored, Number>(int(s.rows), panels, s.steps(), {inputs.data(), height, 0},
                            {weights, 0, panel}, {sums.data(), at_once * PANEL, PANEL});
      else
        shared(s, inputs.data(), weights, widened.data(), sums.data());
      const long start = p * PANEL, columns = std::min(panels * PANEL, s.out - start);
      for (long r = 0; r < s.rows; r++)
        for (long j = 0; j < columns; j++) {
          const float sum = sums[r * at_once * PANEL + j];
          result[r * s.out + start + j] = narrow(bias ? sum + wide(bias[start + j]) : sum);
        }
    }
  }
}

}
