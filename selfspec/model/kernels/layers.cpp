// Decoder layers as a list of operations that all threads of one team run together.
//
// program.py compiles this file for one model, on the machine that runs it:
//   BFLOAT16 (0 or 1: float32), HEAD_SIZE, GROUP (query heads that share a key head).
// Every row is computed by itself, in an order that depends on its own position alone: its bits
// cannot depend on the rows that run beside it.

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.hpp"

namespace {

constexpr long SIZE = HEAD_SIZE;
constexpr long WIDTH = (SIZE + PANEL - 1) / PANEL * PANEL;  // of a value, filled up with 0
constexpr long BLOCK = 64;  // positions whose scores are weighed together, from 0 on

// e^x for -87 <= x <= 88, beyond that e^ of the bound. Written out (the polynomial is that of the
// Cephes library) since loops around std::exp are not vectorised everywhere.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
  const float n = (x * 1.44269504f + magic) - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, in two steps
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;  // 2^n
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float dot(const float* a, const float* b) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long j = 0; j < SIZE; j++) sum += a[j] * b[j];
  return sum;
}

// One head of a query or key: normed if the model does that, then rotated. What a rotation turns
// together, (j, j + SIZE / 2) in the model, are neighbours here.
inline void turn(const Number* head, const float* norm, float eps, const float* rotation,
                 float* out) {
  for (long j = 0; j < SIZE; j++) out[j] = wide(head[j]);
  if (norm) {
    const float scale = 1 / std::sqrt(dot(out, out) / SIZE + eps);
    for (long j = 0; j < SIZE; j++) out[j] *= scale * norm[j];
  }
  for (long j = 0; j < SIZE; j += 2) {
    const float a = out[j], b = out[j + 1], cos = rotation[j], sin = rotation[j + 1];
    out[j] = a * cos - b * sin;
    out[j + 1] = a * sin + b * cos;
  }
}

// Keys of a head lie in panels of PANEL positions, [slots / PANEL][SIZE][PANEL]; its values lie one
// after the other, [slots][WIDTH]. Both take slots * WIDTH numbers, of which keys leave some unused.

inline long key_at(long slot) { return slot / PANEL * PANEL * WIDTH + slot % PANEL; }

// BLOCK positions of one head as floats.
struct Positions {
  const float *keys, *values;

  // `room` is for those that are not floats where they lie.
  Positions(const Number* from_keys, const Number* from_values, float* room) {
#if BFLOAT16
    for (long i = 0; i < BLOCK * WIDTH; i++) {
      room[i] = wide(from_keys[i]);
      room[BLOCK * WIDTH + i] = wide(from_values[i]);
    }
    keys = room, values = room + BLOCK * WIDTH;
#else
    keys = from_keys, values = from_values;
    (void)room;
#endif
  }
};

// What the queries of one head and row range have seen so far: a softmax that runs along.
struct Running {
  long queries = 0;
  std::vector<float> top, total, sums, scores;

  void start(long count) {
    queries = count;
    top.assign(count, -INFINITY);
    total.assign(count, 0.0f);
    sums.assign(count * WIDTH, 0.0f);
    scores.resize(count * BLOCK);
  }

  // Scores of one query to weights, those outside of [low, high) to 0.
  void weigh(long query, long low, long high, float scaling) {
    float *s = &scores[query * BLOCK], *o = &sums[query * WIDTH];
    float best = top[query], added = 0;
    for (long i = low; i < high; i++) best = std::max(best, s[i]);
    const float shrunk = exponential((top[query] - best) * scaling);
    for (long i = 0; i < BLOCK; i++) {
      const float weight = exponential((s[i] - best) * scaling);
      s[i] = i >= low && i < high ? weight : 0.0f;
    }
#pragma omp simd reduction(+ : added)
    for (long i = 0; i < BLOCK; i++) added += s[i];
    top[query] = best, total[query] = total[query] * shrunk + added;
    for (long j = 0; j < WIDTH; j++) o[j] *= shrunk;
  }

  // `count` queries from `first` on add the values at [low, high).
  void mix(const Positions& block, long first, long count, long low, long high) {
    multiply<Float32>(count, WIDTH / PANEL, high - low, {&scores[first * BLOCK + low], BLOCK, 0},
                      {block.values + low * WIDTH, WIDTH, PANEL}, {&sums[first * WIDTH], WIDTH, PANEL});
  }
};

// What an operation is, and what its fields mean, as in program.py.
enum Kinds { NORM, PRODUCT, ATTEND, GATE };

struct Operation {
  long kind, from, to;      // buffers by number
  long in, out;             // numbers of a row; GATE: out; ATTEND: unused
  const Number* weight;     // NORM [in]; PRODUCT panels
  const Number* bias;       // PRODUCT [out], or none
  const float* head_norms;  // ATTEND [heads + kv_heads, SIZE], or none
  long adds;                // PRODUCT: to what its buffer holds
  long layer, kv_heads;     // ATTEND
  long window;              // ATTEND: positions that a query may look at, 0 for all
  float eps, scaling;       // NORM, ATTEND; ATTEND
};

struct Pass {
  long rows;
  long held;                // positions before these rows
  Number* const* buffers;   // [rows, ..] each
  Number* const* keys;      // by layer, [kv_heads, slots, WIDTH]
  Number* const* values;
  const long* slots;        // by layer, of one head: a multiple of BLOCK
  const float* rotations;   // [rows, SIZE / 2] cosines and sines
  Input* room;              // for linear layers of many rows
};

// RMSNorm(from) * weight, [rows, width].
void norm(long rows, long width, const Number* from, const Number* weight, float eps, Number* to) {
#pragma omp for
  for (long row = 0; row < rows; row++) {
    const Number* h = from + row * width;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long j = 0; j < width; j++) squares += wide(h[j]) * wide(h[j]);
    const float scale = 1 / std::sqrt(squares / width + eps);
    Number* o = to + row * width;
    for (long j = 0; j < width; j++) {
      const Number normed = narrow(wide(h[j]) * scale);  // rounded here too, as the model does
      o[j] = narrow(wide(normed) * wide(weight[j]));
    }
  }
}

// gate_up [rows, 2 * width] -> to [rows, width]: silu(first half) * second half.
void gate(long rows, long width, const Number* gate_up, Number* to) {
  constexpr long CHUNK = 256;  // of a row: threads share even a single one
#pragma omp for collapse(2)
  for (long row = 0; row < rows; row++)
    for (long first = 0; first < width; first += CHUNK) {
      const Number *g = gate_up + 2 * row * width, *u = g + width;
      Number* o = to + row * width;
      const long last = std::min(first + CHUNK, width);
#pragma omp simd
      for (long j = first; j < last; j++) {
        const float x = wide(g[j]);
        const Number silu = narrow(x / (1 + exponential(-x)));
        o[j] = narrow(wide(silu) * wide(u[j]));
      }
    }
}

// Rows [first, last) of one key head's queries, normed and rotated, attend to all before them.
void attend_tile(const Operation& op, const Pass& pass, long head, long first, long last,
                 const float* queries, Running& seen, float* room) {
  const long slots = pass.slots[op.layer];
  const auto start = [&](long row) {
    return op.window ? std::max(0L, pass.held + row + 1 - op.window) : 0;
  };
  seen.start((last - first) * GROUP);
  for (long at = start(first) / BLOCK * BLOCK; at < pass.held + last; at += BLOCK) {
    const long slot = (head * slots + at) * WIDTH;
    const Positions block(pass.keys[op.layer] + slot, pass.values[op.layer] + slot, room);
    std::fill(seen.scores.begin(), seen.scores.begin() + seen.queries * BLOCK, 0.0f);
    multiply<Float32>(seen.queries, BLOCK / PANEL, SIZE, {queries, SIZE, 0},
                      {block.keys, PANEL, PANEL * WIDTH}, {seen.scores.data(), BLOCK, PANEL});
    long whole = 0;  // queries so far that add all values of this block, and wait to do so together
    const auto flush = [&](long query) {
      if (whole) seen.mix(block, query - whole, whole, 0, BLOCK);
      whole = 0;
    };
    for (long row = first; row < last; row++) {
      const long query = (row - first) * GROUP;
      const long low = std::max(0L, start(row) - at);
      const long high = std::min(BLOCK, pass.held + row + 1 - at);
      if (low >= high) {
        flush(query);
        continue;
      }
      for (long g = 0; g < GROUP; g++) seen.weigh(query + g, low, high, op.scaling);
      if (low == 0 && high == BLOCK) {
        whole += GROUP;
      } else {
        flush(query);
        seen.mix(block, query, GROUP, low, high);
      }
    }
    flush(seen.queries);
  }
}

// Keys and values of the new rows join those that are held.
void keep(const Operation& op, const Pass& pass, const Number* projected) {
  const long heads = GROUP * op.kv_heads, width = (heads + 2 * op.kv_heads) * SIZE;
#pragma omp for collapse(2)
  for (long row = 0; row < pass.rows; row++)
    for (long head = 0; head < op.kv_heads; head++) {
      const Number* key = projected + row * width + (heads + head) * SIZE;
      const Number* value = key + op.kv_heads * SIZE;
      const long slot = pass.held + row, base = head * pass.slots[op.layer] * WIDTH;
      Number *keys = pass.keys[op.layer] + base + key_at(slot),
             *values = pass.values[op.layer] + base + slot * WIDTH;
      float turned[SIZE];
      turn(key, op.head_norms ? op.head_norms + (heads + head) * SIZE : nullptr, op.eps,
           pass.rotations + row * SIZE, turned);
      for (long j = 0; j < SIZE; j++) keys[j * PANEL] = narrow(turned[j]), values[j] = value[j];
    }
}

// projected [rows, heads + 2 kv_heads, SIZE]: queries, keys, values -> out [rows, heads, SIZE].
void attend(const Operation& op, const Pass& pass, const Number* projected, Number* out) {
  const long heads = GROUP * op.kv_heads, width = (heads + 2 * op.kv_heads) * SIZE;
  // rows that read keys and values together; no sum depends on it
  const long tile = std::min(16L, (pass.rows + 1) / 2), tiles = up(pass.rows, tile);
  thread_local Running seen;
  thread_local std::vector<float> queries, room;
  queries.resize(tile * GROUP * SIZE);
  room.resize(BFLOAT16 ? 2 * BLOCK * WIDTH : 0);
  keep(op, pass, projected);
#pragma omp for collapse(2) schedule(dynamic, 1)
  for (long part = 0; part < tiles; part++)
    for (long head = 0; head < op.kv_heads; head++) {
      const long first = part * tile, last = std::min(first + tile, pass.rows);
      for (long row = first; row < last; row++)
        for (long g = 0; g < GROUP; g++)
          turn(projected + row * width + (head * GROUP + g) * SIZE,
               op.head_norms ? op.head_norms + (head * GROUP + g) * SIZE : nullptr, op.eps,
               pass.rotations + row * SIZE, &queries[((row - first) * GROUP + g) * SIZE]);
      attend_tile(op, pass, head, first, last, queries.data(), seen, room.data());
      for (long q = 0; q < (last - first) * GROUP; q++) {
        Number* o = out + ((first + q / GROUP) * heads + head * GROUP + q % GROUP) * SIZE;
        for (long j = 0; j < SIZE; j++) o[j] = narrow(seen.sums[q * WIDTH + j] / seen.total[q]);
      }
    }
}

void step(const Operation& op, const Pass& pass) {
  const Number* from = pass.buffers[op.from];
  Number* to = pass.buffers[op.to];
  switch (op.kind) {
    case NORM:
      return norm(pass.rows, op.in, from, op.weight, op.eps, to);
    case PRODUCT:
      return Linear{op.in, op.out, op.weight, op.bias}.run(pass.rows, from, to, op.adds, pass.room);
    case ATTEND:
      return attend(op, pass, from, to);
    case GATE:
      return gate(pass.rows, op.out, from, to);
  }
}

}  // namespace

extern "C" {

// All operations, one after the other, on one team of threads.
void run(const Operation* operations, long count, const Pass* pass) {
  if (!pass->rows) return;
#pragma omp parallel
  for (long i = 0; i < count; i++) step(operations[i], *pass);
}

}
