// Causal attention of one layer: queries, keys and values in, one row of heads out.
//
// Every row sums the positions that it sees in chunks at fixed places, which are then added in order.
// So its bits depend neither on the other rows of the pass nor on how the text was split into
// passes, and threads can share a long text. A row of a tree sees the held text and its ancestors,
// each at the position that it would have in a chain.

#pragma once

#include <optional>
#include <vector>

#include "functions.hpp"
#include "linear.hpp"

namespace {

constexpr long BLOCK = 64;         // positions whose scores are weighed together, from 0 on
constexpr long CHUNK = 8 * BLOCK;  // positions that are summed separately, from 0 on
constexpr long UNBROKEN = 32;      // positions that Arithmetic may sum before adding them
constexpr long QUERIES = 16;       // queries per block of keys, so that their data stays in the cache
constexpr long FEW_ROWS = 5;       // up to so many rows read keys and values once, not twice
constexpr long HEADER = PANEL;     // numbers before a query's sums: reference score, sum of weights

struct Heads {
  long size, group, kv;         // numbers of a head; query heads per key head; key heads
  long rotated;                 // numbers of a head that are rotated, from the first on
  const float* norms;           // [queries() + kv, size], or none
  long centred, norms_last;     // norms: whether they subtract a mean; whether they follow rotation
  long window;                  // positions that a query may attend to, 0 for all
  float eps, scaling, softcap;  // of the norms; of scores; of scores, 0: none

  long queries() const { return group * kv; }
  long row() const { return (queries() + 2 * kv) * size; }  // of queries, keys and values
  long width() const { return up(size, PANEL) * PANEL; }    // of a value, padded with 0
};

// The keys and values of a layer and a key head, in pages of BLOCK positions, laid out like the
// weights of a linear layer: keys in panels of positions, [BLOCK / PANEL][size / STEP][PANEL][STEP],
// values in panels of numbers, [width / PANEL][BLOCK / STEP][PANEL][STEP]. Both take BLOCK * width
// numbers, of which keys leave some unused.
struct Store {
  Number* const* pages;  // of all positions
  long keys, values;     // offsets in a page
  long width;

  Store of(const Heads& heads, long head) const {
    const long size = BLOCK * heads.width();
    return {pages, keys + head * size, keys + (heads.kv + head) * size, heads.width()};
  }

  // The start of a block's keys and values.
  Number* key_block(long slot) const { return pages[slot / BLOCK] + keys; }
  Number* value_block(long slot) const { return pages[slot / BLOCK] + values; }

  // Stores a position's key and value, [width], in a block. A value shares cache lines with its
  // neighbours, whose numbers must not be touched: other threads write them.
  void put_key(const Number* key, long place, Number* block) const {
    Number* const to = block + place / PANEL * PANEL * width + place % PANEL * STEP;
    for (long j = 0; j < width; j += STEP) std::copy_n(key + j, STEP, to + j * PANEL);
  }
  void put_value(const Number* value, long place, Number* block) const {
    for (long j = 0; j < width; j += PANEL) {
      Number* const to = block + value_at(place, j);
#if BFLOAT16 && defined(__AVX512BW__)
      const __m512i line = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)(value + j)));
      _mm512_mask_storeu_epi16(to, 0x55555555, line);
#else
      for (long i = 0; i < PANEL; i++) to[i * STEP] = value[j + i];
#endif
    }
  }
  void copy_value(const Number* block, long there, long place, Number* to) const {
    for (long j = 0; j < width; j += PANEL)
      for (long i = 0; i < PANEL; i++)
        to[value_at(place, j) + i * STEP] = block[value_at(there, j) + i * STEP];
  }
  void clear_value(long place, Number* block) const {
    for (long j = 0; j < width; j += PANEL)
      for (long i = 0; i < PANEL; i++) block[value_at(place, j) + i * STEP] = 0;
  }

 private:
  static long value_at(long place, long j) { return j * BLOCK + place / STEP * STEP * PANEL + place % STEP; }
};

// The adjacent rows of one sequence in a pass.
struct Span {
  long first, rows, held;  // first row in the pass; number of rows; positions before them
  const long* parents;     // [rows] the row that each follows; -1: the newest held position, -2 the
                           // one before, and so on. None: a chain
  Number* const* pages;    // of BLOCK positions and all layers each

  long position(long row) const {
    if (!parents) return held + row;
    long depth = 0;
    while ((row = parents[row]) >= 0) depth++;
    return held + row + 1 + depth;
  }

  // The number of held positions that all rows see.
  long common() const {
    long count = held;
    for (long row = 0; parents && row < rows; row++) count = std::min(count, held + parents[row] + 1);
    return count;
  }

  // The slots of positions [at, last) as a row sees them.
  void path(long row, long at, long last, long* slots) const {
    for (long place = at; place < last; place++) slots[place - at] = place;
    if (!parents) return;
    for (long place = position(row); row >= 0 && place >= at; place--, row = parents[row])
      if (place < last) slots[place - at] = held + row;
  }
};

inline void norm_head(const Heads& heads, const float* weight, float* x) {
  standardise(heads.centred, heads.eps, heads.size, x, x);
  for (long j = 0; j < heads.size; j++) x[j] *= weight[j];
}

// One query or key, normed if the model norms them, and rotated. `number`: that of the head, queries
// first. The two numbers of a rotated pair are neighbours.
inline void norm_and_rotate(const Heads& heads, long number, const Number* head,
                            const float* rotation, float* out) {
  const float* norm = heads.norms ? heads.norms + number * heads.size : nullptr;
  for (long j = 0; j < heads.size; j++) out[j] = wide(head[j]);
  if (norm && !heads.norms_last) norm_head(heads, norm, out);
  for (long j = 0; j < heads.rotated; j += 2) {
    const float a = out[j], b = out[j + 1], cos = rotation[j], sin = rotation[j + 1];
    out[j] = a * cos - b * sin;
    out[j + 1] = a * sin + b * cos;
  }
  if (norm && heads.norms_last) norm_head(heads, norm, out);
}

// The distance in bytes between any two addresses.
inline long bytes(const Number* from, const Number* to) { return intptr_t(to) - intptr_t(from); }

// Multiplies `count` panels, as many at a time as `by` takes.
inline void multiply_panels(const Arithmetic& by, long count, long steps, Block<const Input> x,
                            Block<const Number> w, Block<float> sums, long ahead, bool fresh) {
  for (long p = 0; p < count; p += by.panels())
    by.multiply(std::min(by.panels(), count - p), steps, x, w.from_panel(p), sums.from_panel(p),
                ahead, fresh);
}

// Lines of `length` numbers, aligned to cache lines, with a spare cache line between them: accesses a
// multiple of the page size apart would delay each other.
template <typename T>
struct Lines {
  static constexpr long LINE = 64 / sizeof(T);
  std::vector<T> held;
  T* first = nullptr;
  long count = 0, apart = 0;

  void shape(long lines, long length) {
    count = lines, apart = (up(length, LINE) + 1) * LINE;
    held.resize((count + 1) * apart);
    first = (T*)((intptr_t(held.data()) + 63) / 64 * 64);
  }
  void clear() { std::fill_n(first, count * apart, T(0)); }
  T* operator[](long line) const { return first + line * apart; }
};

// The running softmax of the queries of one key head over a text.
struct Softmax {
  Heads heads = {};
  long queries = 0;
  Lines<Input> prepared, weights;  // [places] queries; [QUERIES] of BLOCK
  Lines<float> scores, sums;       // [QUERIES, BLOCK and more]; [places, width]
  std::vector<float> reference;    // [queries] the reference score of the weights
  std::vector<Vector> totals;      // [queries] partial sums of weights

  // Numbers to store the result of `count` queries.
  static long room(const Heads& heads, long count) { return count * (HEADER + heads.width()); }

  // `more`: room for scores after those of a block.
  void shape(const Heads& its, long count, long more) {
    const long places = count < QUERIES ? count : up(count, QUERIES) * QUERIES;
    heads = its, queries = count;
    prepared.shape(places, Arithmetic::inputs(heads.size)), prepared.clear();
    weights.shape(QUERIES, Arithmetic::inputs(BLOCK)), weights.clear();
    scores.shape(QUERIES, BLOCK + up(more, PANEL) * PANEL), sums.shape(places, heads.width());
    reference.resize(count), totals.resize(count);
  }

  void reset() {
    sums.clear();
    std::fill(reference.begin(), reference.end(), -INFINITY);
    std::fill(totals.begin(), totals.end(), Vector{});
  }

  void set_query(long query, const float* rotated_head) {
    thread_local std::vector<Number> rounded;
    rounded.resize(heads.size);
    for (long j = 0; j < heads.size; j++) rounded[j] = narrow(rotated_head[j]);
    Kind::prepare(rounded.data(), heads.size, prepared[query]);
  }

  // Multiplies queries from `first` on with `count` keys, in whole panels; scores go to `low` and on.
  void score(const Arithmetic& by, long first, long low, long count, const Number* keys, long ahead) {
    multiply_panels(by, up(count, PANEL), up(heads.size, STEP), {prepared[first], prepared.apart, 0},
                    {keys, PANEL * STEP, PANEL * heads.width()},
                    {scores[first % QUERIES] + low, scores.apart, PANEL}, ahead, true);
  }

  // Turns scores of queries from `first` on into weights, 0 outside of `sees(query)`: [low, high).
  // Weights are relative to a reference score, which is raised to the largest score only if that is
  // STALE binary digits ahead, so that sums rarely have to be rescaled.
  template <typename Sees>
  void weigh_positions(long first, long count, bool whole, const Sees& sees) {
    constexpr int COUNT = BLOCK / LANES;
    constexpr float STALE = 8;
    const float scaling = (heads.softcap ? 1 : heads.scaling) * 1.44269504f, slack = STALE / scaling;
    alignas(64) float before[QUERIES] = {}, tops[QUERIES] = {}, factors[QUERIES];
    for (long q = 0; q < count; q++) {
      if (heads.softcap) cap(scores[q]);
      Vector s[COUNT], largest = Vector{} - INFINITY;
      UNROLL for (int v = 0; v < COUNT; v++) s[v] = *(const Floats*)(scores[q] + v * LANES);
      if (!whole) {
        const auto [low, high] = sees(first + q);
        for (int v = 0; v < COUNT; v++) {
          const Ints place = numbered() + v * LANES;
          s[v] = (place >= int(low)) & (place < int(high)) ? s[v] : Vector{} - INFINITY;
          *(Floats*)(scores[q] + v * LANES) = s[v];
        }
      }
      for (int v = 0; v < COUNT; v++) largest = s[v] > largest ? s[v] : largest;
      const float top = largest_of(largest);
      before[q] = reference[first + q];
      tops[q] = reference[first + q] = top > before[q] + slack ? top : before[q];
    }
    bool stay = true;
    for (long q = 0; q < count; q++) stay &= before[q] == tops[q];
    if (!stay) {
      for (long q = 0; q < QUERIES; q += LANES) {
        const Vector here = *(const Floats*)(tops + q), earlier = *(const Floats*)(before + q);
        const Vector shrunk = powers_of_two((earlier - here) * scaling);
        *(Floats*)(factors + q) = earlier == here ? Vector{} + 1 : shrunk;
      }
      for (long q = 0; q < count; q++) {
        totals[first + q] *= factors[q];
        for (long j = 0; j < heads.width(); j++) sums[first + q][j] *= factors[q];
      }
    }
    for (long q = 0; q < count; q++) {
      Vector s[COUNT], added = {};
      UNROLL for (int v = 0; v < COUNT; v++) s[v] = *(const Floats*)(scores[q] + v * LANES);
      const float top = tops[q] == -INFINITY ? 0 : tops[q];  // -INFINITY: the query sees none of them
      for (int v = 0; v < COUNT; v++) added += s[v] = powers_of_two((s[v] - top) * scaling);
      totals[first + q] += added;
      round(s, COUNT, weights[q]);
    }
  }

  // Adds the values at [low, high), times their weights, to the sums of queries from `first` on.
  void add_values(const Arithmetic& by, long first, long low, long high, const Number* values, long ahead) {
    multiply_panels(by, heads.width() / PANEL, up(high - low, STEP),
                    {weights[first % QUERIES] + low / STEP * Kind::INPUTS, weights.apart, 0},
                    {values, PANEL * STEP, BLOCK * PANEL}, {sums[first], sums.apart, PANEL}, ahead, false);
  }

  // Stores the result in `kept`, joined with earlier chunks unless this is the first.
  void store(float* kept, bool first) const {
    for (long q = 0; q < queries; q++, kept += room(heads, 1)) {
      const float* const sum = sums[q];
      const float weights = sum_of(totals[q]);
      if (!first)
        join(heads, kept, reference[q], weights, sum);
      else
        kept[0] = reference[q], kept[1] = weights, std::copy_n(sum, heads.width(), kept + HEADER);
    }
  }

  void cap(float* line) const {
    for (long i = 0; i < BLOCK; i++)
      line[i] = heads.softcap * hyperbolic_tangent(line[i] * heads.scaling / heads.softcap);
  }

  static void join(const Heads& heads, float* kept, float reference, float total, const float* sums) {
    const float scaling = heads.softcap ? 1 : heads.scaling, top = std::max(kept[0], reference);
    if (top == -INFINITY) return;
    const float before = exponential((kept[0] - top) * scaling),
                after = exponential((reference - top) * scaling);
    kept[0] = top, kept[1] = kept[1] * before + total * after;
    for (long j = 0; j < heads.width(); j++)
      kept[HEADER + j] = kept[HEADER + j] * before + sums[j] * after;
  }
};

// A span in one layer.
struct Text {
  const Span& span;
  const float* rotations;  // [rows, rotated / 2] cosines and sines
  Store store;
};

// How a text is split into work: tiles of rows that read keys and values together, and chunks, if few
// rows have a long text. No sum depends on the split.
struct Parts {
  long tile, tiles, chunks;
  bool by_chunk;

  explicit Parts(const Span& span) {
    tile = span.rows <= FEW_ROWS ? span.rows : std::min(16L, (span.rows + 1) / 2);
    tiles = up(span.rows, tile), chunks = up(span.held + span.rows, CHUNK);
    by_chunk = tiles <= 2 && chunks > 1;
  }
};

// The work that the threads of a pass share, for each key head.
struct Work {
  struct Item {
    long text, part, chunk;  // chunk -1: all chunks, one after the other
    long room;               // with chunks: the number of rows of stored sums before its own
  };
  std::vector<Item> items, joins;  // joins: one for the chunks of each part
  std::vector<long> owners;        // for each row of the pass: its text
  long most = 0, room = 0;         // maximum rows of a tile; rows of stored sums

  void add(long text, const Span& span) {
    if (!span.rows) return;
    const Parts parts(span);
    for (long part = 0; part < parts.tiles; part++) {
      if (!parts.by_chunk) {
        items.push_back({text, part, -1, 0});
        continue;
      }
      joins.push_back({text, part, 0, room});
      for (long chunk = 0; chunk < parts.chunks; chunk++, room += parts.tile)
        items.push_back({text, part, chunk, room});
    }
    owners.insert(owners.end(), span.rows, text);
    most = std::max(most, parts.tile);
  }

  // Numbers in the buffer that threads share.
  long shared(const Heads& heads) const { return room * heads.kv * Softmax::room(heads, heads.group); }
};

// Adds keys and values of the new rows to the pages.
void append_rows(const Heads& heads, const Work& work, const std::vector<Text>& texts,
                 const Number* projected) {
  thread_local std::vector<float> rotated_head;
  thread_local std::vector<Number> numbers;
  rotated_head.resize(heads.size), numbers.assign(heads.width(), Number(0));
  const long rows = work.owners.size();
#pragma omp for collapse(2)
  for (long head = 0; head < heads.kv; head++)
    for (long first = 0; first < rows; first += BLOCK)  // one thread: neighbours share cache lines
      for (long at = first; at < std::min(first + BLOCK, rows); at++) {
        const Text& text = texts[work.owners[at]];
        const long row = at - text.span.first, slot = text.span.held + row, place = slot % BLOCK;
        const long number = heads.queries() + head;
        const Number* const key = projected + at * heads.row() + number * heads.size;
        const Store store = text.store.of(heads, head);
        norm_and_rotate(heads, number, key, text.rotations + row * heads.rotated, rotated_head.data());
        for (long j = 0; j < heads.size; j++) numbers[j] = narrow(rotated_head[j]);
        store.put_key(numbers.data(), place, store.key_block(slot));
        std::copy_n(key + heads.kv * heads.size, heads.size, numbers.data());
        store.put_value(numbers.data(), place, store.value_block(slot));
        if (row + 1 < text.span.rows || !((place + 1) % STEP)) continue;
        // the slot may hold another text's numbers, and 0 times infinity or NaN is NaN
        store.clear_value(place + 1, store.value_block(slot));
      }
}

// The queries of one key head and some rows: reads their projections, writes their results.
struct Tile {
  const Heads& heads;
  const Text& text;
  const Parts parts;
  long head, first, last;  // the key head; first and last row

  Tile(const Heads& heads, const Text& text, long part, long head)
      : heads(heads), text(text), parts(text.span), head(head), first(part * parts.tile),
        last(std::min(first + parts.tile, text.span.rows)) {}

  // The offset of its sums in the stored ones, after `room` rows.
  long offset(long room) const {
    return (room * heads.kv + head * parts.tile) * Softmax::room(heads, heads.group);
  }
  long queries() const { return (last - first) * heads.group; }
  long row(long query) const { return first + query / heads.group; }
  long number(long query) const { return head * heads.group + query % heads.group; }

  void load_queries(const Number* projected, Softmax& softmax) const {
    thread_local std::vector<float> rotated_head;
    rotated_head.resize(heads.size);
    const Span& span = text.span;
    softmax.shape(heads, queries(), span.parents ? span.held + span.rows - span.common() : 0);
    for (long q = 0; q < queries(); q++) {
      const Number* const row_of_pass = projected + (text.span.first + row(q)) * heads.row();
      norm_and_rotate(heads, number(q), row_of_pass + number(q) * heads.size,
                      text.rotations + row(q) * heads.rotated, rotated_head.data());
      softmax.set_query(q, rotated_head.data());
    }
  }

  void write_results(const float* kept, Number* out) const {
    for (long q = 0; q < queries(); q++, kept += Softmax::room(heads, 1)) {
      Number* o = out + ((text.span.first + row(q)) * heads.queries() + number(q)) * heads.size;
      for (long j = 0; j < heads.size; j++) o[j] = narrow(kept[HEADER + j] / kept[1]);
    }
  }
};

// Copies the values of a block that one row sees from `cut` on to the first positions of `to`: `same`
// of them from the block itself, the others up to `count` from `slots`. Those before `unseen` are 0.
inline void gather_values(const Store& store, long block, long cut, long count, long same,
                          const long* slots, long unseen, Number* to) {
  const long line = PANEL * STEP, panel = PANEL * BLOCK;
  for (long p = 0; p < store.width / PANEL; p++)
    std::copy_n(store.value_block(block) + p * panel + cut * PANEL, up(same, STEP) * line,
                to + p * panel);
  for (long i = same; i < count; i++)
    store.copy_value(store.value_block(slots[i]), slots[i] % BLOCK, i, to);
  if (count % STEP) store.clear_value(count, to);
  for (long i = 0; i < unseen; i++) store.clear_value(i, to);
}

// Whether a block's values at [low, high), or a little more, are finite: others times 0 are NaN.
inline bool are_finite(const Number* values, long low, long high, long width) {
  float sum = 0;
  for (long panel = 0; panel < width; panel += PANEL) {
    const Number* const from = values + panel * BLOCK;
#pragma omp simd reduction(+ : sum)
    for (long i = low / STEP * STEP * PANEL; i < up(high, STEP) * STEP * PANEL; i++)
      sum += wide(from[i]) * 0;
  }
  return sum == 0;
}

// The queries of a tile attend to the part of one chunk that they see. `room`: BLOCK * width.
void attend_to_chunk(const Tile& tile, long chunk, const Arithmetic& by, Softmax& softmax, Number* room) {
  const Heads& heads = tile.heads;
  const Span& span = tile.text.span;
  const Store store = tile.text.store.of(heads, tile.head);
  const auto start = [&](long position) {
    return heads.window ? std::max(0L, position + 1 - heads.window) : 0;
  };
  const long held = span.common();
  long low = span.position(tile.first), high = low;  // of the rows
  for (long row = tile.first; row < tile.last; row++) {
    low = std::min(low, span.position(row));
    high = std::max(high, span.position(row));
  }
  const long end = std::min(high + 1, (chunk + 1) * CHUNK);
  for (long at = std::max(start(low) / BLOCK * BLOCK, chunk * CHUNK); at < end; at += BLOCK) {
    const Number *const keys = store.key_block(at), *const values = store.value_block(at);
    const long next = at + BLOCK < end ? at + BLOCK : at, there = std::min(BLOCK, end - at);
    const bool alike = start(high) <= at && at + there <= low + 1, whole = alike && there == BLOCK;
    // from `cut` on, values are added row by row: those of its own path, or only those that it sees
    const long old = std::max(0L, std::min(BLOCK, held - at)), seen_by_all = start(high) > at ? 0 : old;
    const bool apart = !alike && !are_finite(values, seen_by_all, there, store.width);
    const long common = span.parents ? old : BLOCK;
    const long cut = apart ? 0 : common / UNBROKEN * UNBROKEN, shared = std::min(cut, there);
    // for a row of a tree, keys of this block's positions are in this block or later ones, in order
    const bool tree = span.parents && held < at + BLOCK;
    const long reach = tree ? span.held + span.rows : at + there;
    for (long first = 0; first < tile.queries(); first += QUERIES) {
      const long last = std::min(first + QUERIES, tile.queries());
      for (long b = at; b < reach; b += BLOCK)
        softmax.score(by, first, b - at, std::min(BLOCK, reach - b), store.key_block(b),
                      b == at && !first ? bytes(keys, store.key_block(next)) : 0);
      long slots[BLOCK];
      for (long q = first; tree && q < last; q++) {
        const long row = tile.row(q), from = std::max(at, held);
        const long to = std::min(at + BLOCK, span.position(row) + 1);
        float* const scores = softmax.scores[q % QUERIES];
        span.path(row, from, to, slots);
        for (long p = from; p < to; p++) scores[p - at] = scores[slots[p - from] - at];
      }
      softmax.weigh_positions(first, last - first, whole, [&](long query) {
        const long position = span.position(tile.row(query));
        return std::pair(std::max(0L, start(position) - at), std::min(BLOCK, position + 1 - at));
      });
      const long ahead = first ? 0 : bytes(values, store.value_block(next));
      if (shared) softmax.add_values(by, first, 0, shared, values, ahead);
      if (cut == BLOCK) continue;
      std::optional<Arithmetic> few;
      for (long q = first, end, height = 0; q < last; q = end) {
        const long row = tile.row(q), position = span.position(row);
        const long to = std::min(BLOCK, position + 1 - at);
        end = std::min(last, (row + 1 - tile.first) * heads.group);
        if (to <= cut) continue;
        if (height != end - q) few.emplace(height = end - q);
        span.path(row, at + cut, at + to, slots);
        const long same = std::max(0L, std::min(common, to) - cut);
        gather_values(store, at, cut, to - cut, same, slots, start(position) - at - cut, room);
        softmax.add_values(*few, q, cut, to, room, 0);
      }
      few.reset();
      by.use();
    }
  }
}

// projected [rows, queries + 2 kv, size]: queries, keys, values -> out [rows, queries, size]. Called
// by all threads of a team, which share the buffer `shared`.
void attend(const Heads& heads, const Work& work, const std::vector<Text>& texts,
            const Number* projected, Number* out, float* shared) {
  const long of_query = Softmax::room(heads, 1);  // of sums
  thread_local Softmax softmax;
  thread_local std::vector<float> sums;
  thread_local std::vector<Number> room;
  room.resize(BLOCK * heads.width()), sums.resize(work.most * heads.group * of_query);
  append_rows(heads, work, texts, projected);
  const long items = work.items.size(), joins = work.joins.size();
#pragma omp for collapse(2) schedule(dynamic, 1)
  for (long head = 0; head < heads.kv; head++)  // outer loop: its keys and values stay in the cache
    for (long i = 0; i < items; i++) {
      const Work::Item& item = work.items[i];
      const Tile tile(heads, texts[item.text], item.part, head);
      const Arithmetic by(std::min(QUERIES, tile.queries()));
      tile.load_queries(projected, softmax);
      const bool all = item.chunk < 0;
      float* const kept = all ? sums.data() : shared + tile.offset(item.room);
      const long first = all ? 0 : item.chunk, end = all ? tile.parts.chunks : first + 1;
      for (long chunk = first; chunk < end; chunk++) {
        softmax.reset();
        attend_to_chunk(tile, chunk, by, softmax, room.data());
        softmax.store(kept, chunk == first);
      }
      if (all) tile.write_results(kept, out);
    }
  if (!joins) return;
#pragma omp for collapse(2)
  for (long i = 0; i < joins; i++)
    for (long head = 0; head < heads.kv; head++) {
      const Work::Item& item = work.joins[i];
      const Tile tile(heads, texts[item.text], item.part, head);
      float* const kept = shared + tile.offset(item.room);
      for (long chunk = 1; chunk < tile.parts.chunks; chunk++)
        for (long q = 0; q < tile.queries(); q++) {
          const float* const next =
              shared + tile.offset(item.room + chunk * tile.parts.tile) + q * of_query;
          Softmax::join(heads, kept + q * of_query, next[0], next[1], next + HEADER);
        }
      tile.write_results(kept, out);
    }
}

}  // namespace
