// Causal attention of one layer: queries, keys and values in, one row of heads out.
//
// Every row sums what it sees by chunks at fixed places, which are then added in order: its bits
// depend neither on the rows that run beside it nor on how the text came, and threads can share a
// long text. A row of a tree sees the held text and the rows that it follows, each at the position
// that it would have in a chain.

#pragma once

#include <vector>

#include "functions.hpp"
#include "linear.hpp"

namespace {

constexpr long BLOCK = 64;         // positions whose scores are weighed together, from 0 on
constexpr long CHUNK = 8 * BLOCK;  // positions that are summed by themselves, from 0 on
constexpr long HEADER = PANEL;     // of a query's sums: its largest score, and all its weights

struct Heads {
  long size, group, kv;         // numbers of a head; query heads that share a key head; key heads
  long rotated;                 // numbers of a head that positions rotate, its first ones
  const float* norms;           // [queries() + kv, size], or none
  long centred, norms_last;     // of the norms: a mean is taken off; they come behind the rotation
  long window;                  // positions that a query may look at, 0 for all
  float eps, scaling, softcap;  // of the norms; of scores; 0: none

  long queries() const { return group * kv; }
  long row() const { return (queries() + 2 * kv) * size; }  // of queries, keys and values
  long width() const { return up(size, PANEL) * PANEL; }    // of a value, filled up with 0
};

// The keys and values of a layer and a key head, in pages of BLOCK positions. Keys lie in panels of
// PANEL positions, [BLOCK / PANEL][size][PANEL], values one after the other, [BLOCK][width]. Both
// take BLOCK * width numbers, of which keys leave some unused.
struct Store {
  Number* const* pages;  // of all positions
  long keys, values;     // where they are in a page
  long width;

  Store of(const Heads& heads, long head) const {
    const long size = BLOCK * heads.width();
    return {pages, keys + head * size, keys + (heads.kv + head) * size, heads.width()};
  }

  // Where the keys and values of a block begin.
  Number* key_block(long slot) const { return pages[slot / BLOCK] + keys; }
  Number* value_block(long slot) const { return pages[slot / BLOCK] + values; }

  // The first number of a slot's key, of which the next are PANEL apart; and of its value.
  Number* key(long slot) const {
    const long place = slot % BLOCK;
    return key_block(slot) + place / PANEL * PANEL * width + place % PANEL;
  }
  Number* value(long slot) const { return value_block(slot) + slot % BLOCK * width; }
};

// Rows of one sequence, and what is before them.
struct Places {
  long rows, held;
  const long* parents;     // [rows] the row that each follows; -1: the newest held position, -2 the
                           // one before, and so on. None: a chain
  const float* rotations;  // [rows, rotated / 2] cosines and sines

  long position(long row) const {
    if (!parents) return held + row;
    long depth = 0;
    while ((row = parents[row]) >= 0) depth++;
    return held + row + 1 + depth;
  }

  // Positions that all rows see where they are held.
  long common() const {
    long found = held;
    for (long row = 0; parents && row < rows; row++) found = std::min(found, held + parents[row] + 1);
    return found;
  }

  // The slots of positions [at, last) as a row sees them.
  void path(long row, long at, long last, long* slots) const {
    for (long place = at; place < last; place++) slots[place - at] = place;
    for (long place = position(row); row >= 0 && place >= at; place--, row = parents[row])
      if (place < last) slots[place - at] = held + row;
  }
};

inline float dot(const float* a, const float* b, long size) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (long j = 0; j < size; j++) sum += a[j] * b[j];
  return sum;
}

inline void norm_head(const Heads& heads, const float* weight, float* x) {
  if (heads.centred) {
    float sum = 0;
    for (long j = 0; j < heads.size; j++) sum += x[j];
    for (long j = 0; j < heads.size; j++) x[j] -= sum / heads.size;
  }
  const float scale = 1 / std::sqrt(dot(x, x, heads.size) / heads.size + heads.eps);
  for (long j = 0; j < heads.size; j++) x[j] *= scale * weight[j];
}

// One query or key, normed if the model does that, and rotated. `number`: of the head, queries
// first. What a rotation turns together are neighbours.
inline void turn(const Heads& heads, long number, const Number* head, const float* rotation,
                 float* out) {
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

// As what a few queries read keys and values; many share floats that are made once.
using Stored = std::conditional_t<BFLOAT16, Widened, Float32>;

template <typename To>
To as(Number number) {
  if constexpr (std::is_same_v<To, Number>)
    return number;
  else
    return wide(number);
}

// BLOCK positions of one head, as Kind reads them.
template <typename Kind>
struct Positions {
  using Weight = typename Kind::Weight;
  const Weight *keys, *values;
  long ahead_of_keys, ahead_of_values;  // in bytes: what is looked at next

  // Those from slot `at` on, before those from `next` on. `room` is for numbers of another kind.
  static Positions at(const Store& store, long at, long next, Weight* room) {
    const Number *const keys = store.key_block(at), *const values = store.value_block(at);
    if constexpr (std::is_same_v<Weight, Number>) {
      (void)room;
      return {keys, values, bytes(keys, store.key_block(next)), bytes(values, store.value_block(next))};
    } else {
      const long width = store.width;
      for (long i = 0; i < BLOCK * width; i++) {
        room[i] = as<Weight>(keys[i]);
        room[BLOCK * width + i] = as<Weight>(values[i]);
      }
      return {room, room + BLOCK * width, 0, 0};
    }
  }

  // Those at [low, high) gathered from `slots`.
  static Positions of(const Store& store, const long* slots, long low, long high, Weight* room) {
    const long width = store.width;
    Weight* const to_values = room + BLOCK * width;
    for (long i = low; i < high; i++) {
      const Number *key = store.key(slots[i]), *value = store.value(slots[i]);
      Weight* to = room + i / PANEL * PANEL * width + i % PANEL;
      for (long j = 0; j < width; j++) {
        to[j * PANEL] = as<Weight>(key[j * PANEL]);
        to_values[i * width + j] = as<Weight>(value[j]);
      }
    }
    return {room, to_values, 0, 0};
  }

 private:
  // From one to the other, which may be anywhere.
  static long bytes(const Number* from, const Number* to) { return intptr_t(to) - intptr_t(from); }
};

// What queries of one key head see of a text: a softmax that runs along.
struct Running {
  Heads heads = {};
  long queries = 0;
  float* seen = nullptr;              // [queries, HEADER + width]
  std::vector<float> turned, scores;  // [queries, size]; [queries, BLOCK]

  // The room that `count` queries need.
  static long room(const Heads& heads, long count) { return count * (HEADER + heads.width()); }
  float* of(long query) const { return seen + room(heads, query); }

  // Nothing yet; it will be at `to`.
  void start(float* to) {
    seen = to;
    std::fill_n(seen, room(heads, queries), 0.0f);
    for (long q = 0; q < queries; q++) *of(q) = -INFINITY;
  }

  // Joins what was seen behind it.
  void join(const float* next) {
    const float scaling = heads.softcap ? 1 : heads.scaling;
    for (long q = 0; q < queries; q++, next += room(heads, 1)) {
      float* mine = of(q);
      const float best = std::max(mine[0], next[0]);
      if (best == -INFINITY) continue;
      const float shrunk = exponential((mine[0] - best) * scaling),
                  its = exponential((next[0] - best) * scaling);
      mine[0] = best, mine[1] = mine[1] * shrunk + next[1] * its;
      for (long j = HEADER; j < room(heads, 1); j++) mine[j] = mine[j] * shrunk + next[j] * its;
    }
  }

  // `count` queries from `first` on meet the keys at [low, high): a panel's first, or more.
  template <typename Kind>
  void meet(const Positions<Kind>& block, long first, long count, long low, long high) {
    float* s = &scores[first * BLOCK + low];
    for (long q = 0; q < count; q++) std::fill_n(s + q * BLOCK, up(high - low, PANEL) * PANEL, 0.0f);
    multiply<Kind>(count, up(high - low, PANEL), heads.size,
                   {&turned[first * heads.size], heads.size, 0},
                   {block.keys + low * heads.width(), PANEL, PANEL * heads.width()},
                   {s, BLOCK, PANEL}, block.ahead_of_keys);
  }

  // Scores of one query to weights, those outside of [low, high) to 0.
  void weigh(long query, long low, long high) {
    float *s = &scores[query * BLOCK], *mine = of(query);
    float scaling = heads.scaling, best = mine[0], added = 0;
    if (heads.softcap) {
      for (long i = 0; i < BLOCK; i++)
        s[i] = heads.softcap * hyperbolic_tangent(s[i] * scaling / heads.softcap);
      scaling = 1;
    }
#pragma omp simd reduction(max : best)
    for (long i = low; i < high; i++) best = std::max(best, s[i]);
    const float shrunk = exponential((mine[0] - best) * scaling);
    for (long i = 0; i < BLOCK; i++) {
      const float weight = exponential((s[i] - best) * scaling);
      s[i] = i >= low && i < high ? weight : 0.0f;
    }
#pragma omp simd reduction(+ : added)
    for (long i = 0; i < BLOCK; i++) added += s[i];
    mine[0] = best, mine[1] = mine[1] * shrunk + added;
    for (long j = HEADER; j < room(heads, 1); j++) mine[j] *= shrunk;
  }

  // `count` queries from `first` on add the values at [low, high).
  template <typename Kind>
  void mix(const Positions<Kind>& block, long first, long count, long low, long high) {
    const long width = heads.width();
    multiply<Kind>(count, width / PANEL, high - low, {&scores[first * BLOCK + low], BLOCK, 0},
                   {block.values + low * width, width, PANEL},
                   {of(first) + HEADER, HEADER + width, PANEL}, block.ahead_of_values);
  }
};

// Rows of one sequence, side by side in a pass.
struct Text {
  Places places;
  Store store;
  long first;  // of the pass's rows
};

// How a text is shared out: rows that read keys and values together, and where few of them have a
// long text, its chunks. No sum depends on it.
struct Parts {
  long tile, tiles, chunks;
  bool by_chunk;

  Parts(long rows, long held) {
    tile = std::min(16L, (rows + 1) / 2), tiles = up(rows, tile);
    chunks = up(held + rows, CHUNK);
    by_chunk = tiles <= 2 && chunks > 1;
  }
  explicit Parts(const Places& places) : Parts(places.rows, places.held) {}
};

// What the threads of a pass share among them, for each key head.
struct Work {
  struct Item {
    long text, part, chunk;  // chunk -1: all of them, one after the other
    long room;               // rows of sums that are kept before its own, where there are chunks
  };
  std::vector<Item> items, joins;  // joins: one for the chunks of each part
  std::vector<long> owners;        // of each row of the pass, its text
  long most = 0, room = 0;         // rows of a tile; of sums

  void add(long text, long rows, long held) {
    if (!rows) return;
    const Parts parts(rows, held);
    for (long part = 0; part < parts.tiles; part++) {
      if (parts.by_chunk) joins.push_back({text, part, 0, room});
      for (long chunk = parts.by_chunk ? 0 : -1; chunk < (parts.by_chunk ? parts.chunks : 0);
           chunk++) {
        items.push_back({text, part, chunk, room});
        if (parts.by_chunk) room += parts.tile;
      }
    }
    owners.insert(owners.end(), rows, text);
    most = std::max(most, parts.tile);
  }

  // Numbers that threads share.
  long shared(const Heads& heads) const { return room * heads.kv * Running::room(heads, heads.group); }
};

// Keys and values of the new rows join those that are held.
void keep(const Heads& heads, const Work& work, const std::vector<Text>& texts,
          const Number* projected) {
  thread_local std::vector<float> turned;
  turned.resize(heads.size);
  const long rows = work.owners.size();
#pragma omp for collapse(2)
  for (long at = 0; at < rows; at++)
    for (long head = 0; head < heads.kv; head++) {
      const Text& text = texts[work.owners[at]];
      const long row = at - text.first, slot = text.places.held + row;
      const long number = heads.queries() + head;
      const Number* key = projected + at * heads.row() + number * heads.size;
      const Number* value = key + heads.kv * heads.size;
      turn(heads, number, key, text.places.rotations + row * heads.rotated, turned.data());
      const Store store = text.store.of(heads, head);
      Number *keys = store.key(slot), *values = store.value(slot);
      for (long j = 0; j < heads.size; j++)
        keys[j * PANEL] = narrow(turned[j]), values[j] = value[j];
    }
}

// The queries of one key head and some rows: from projections to what they see, and back.
struct Tile {
  const Heads& heads;
  const Places& places;
  long head, first, last;  // of the rows

  Tile(const Heads& heads, const Places& places, const Parts& parts, long part, long head)
      : heads(heads), places(places), head(head), first(part * parts.tile),
        last(std::min(first + parts.tile, places.rows)) {}

  long row(long query) const { return first + query / heads.group; }
  long number(long query) const { return head * heads.group + query % heads.group; }

  void take(Running& seen) const { seen.heads = heads, seen.queries = (last - first) * heads.group; }

  void open(const Number* projected, Running& seen) const {
    take(seen);
    seen.turned.resize(seen.queries * heads.size), seen.scores.resize(seen.queries * BLOCK);
    for (long q = 0; q < seen.queries; q++)
      turn(heads, number(q), projected + row(q) * heads.row() + number(q) * heads.size,
           places.rotations + row(q) * heads.rotated, &seen.turned[q * heads.size]);
  }

  void close(const Running& seen, Number* out) const {
    for (long q = 0; q < seen.queries; q++) {
      Number* o = out + (row(q) * heads.queries() + number(q)) * heads.size;
      const float* mine = seen.of(q);
      for (long j = 0; j < heads.size; j++) o[j] = narrow(mine[HEADER + j] / mine[1]);
    }
  }
};

// The queries of a tile look at what they may see of one chunk.
template <typename Kind>
void look(const Store& store, const Tile& tile, long chunk, Running& seen, float* floats) {
  using Read = Positions<Kind>;
  const auto room = (typename Kind::Weight*)floats;
  const Heads& heads = tile.heads;
  const Places& places = tile.places;
  const long first = tile.first, last = tile.last, width = heads.width();
  const Store own_head = store.of(heads, tile.head);
  const auto start = [&](long position) {
    return heads.window ? std::max(0L, position + 1 - heads.window) : 0;
  };
  const long common = places.common();
  long low = places.position(first), end = low + 1;  // of what any of the rows sees
  for (long row = first; row < last; row++) {
    low = std::min(low, places.position(row));
    end = std::max(end, places.position(row) + 1);
  }
  end = std::min(end, (chunk + 1) * CHUNK);
  for (long at = std::max(start(low) / BLOCK * BLOCK, chunk * CHUNK); at < end; at += BLOCK) {
    const Read block = Read::at(own_head, at, at + BLOCK < end ? at + BLOCK : at, room);
    seen.meet(block, 0, (last - first) * heads.group, 0, BLOCK);
    // from here on each row of a tree sees its own path
    const long cut = places.parents ? std::max(0L, std::min(BLOCK, common - at)) : BLOCK;
    long whole = 0;  // queries so far that add all values of this block, and wait to do so together
    const auto flush = [&](long query) {
      if (whole) seen.mix(block, query - whole, whole, 0, BLOCK);
      whole = 0;
    };
    for (long row = first; row < last; row++) {
      const long query = (row - first) * heads.group, position = places.position(row);
      const long from = std::max(0L, start(position) - at);
      const long to = std::min(BLOCK, position + 1 - at);
      if (from >= to) {
        flush(query);
        continue;
      }
      Read own = block;
      if (to > cut) {
        const long low = cut / PANEL * PANEL;
        long slots[BLOCK];
        places.path(row, at, at + to, slots);
        own = Read::of(own_head, slots, low, to, room + 2 * BLOCK * width);
        seen.meet(own, query, heads.group, low, to);
      }
      for (long g = 0; g < heads.group; g++) seen.weigh(query + g, from, to);
      if (from == 0 && to == BLOCK && to <= cut) {
        whole += heads.group;
        continue;
      }
      flush(query);
      if (from < cut) seen.mix(block, query, heads.group, from, std::min(to, cut));
      if (to > cut) seen.mix(own, query, heads.group, std::max(from, cut), to);
    }
    flush((last - first) * heads.group);
  }
}

void look(const Store& store, const Tile& tile, long chunk, Running& seen, float* room) {
  (seen.queries <= MOST_ROWS ? look<Stored> : look<Float32>)(store, tile, chunk, seen, room);
}

// projected [rows, queries + 2 kv, size]: queries, keys, values -> out [rows, queries, size]. For
// all threads of a team, which share `shared`.
void attend(const Heads& heads, const Work& work, const std::vector<Text>& texts,
            const Number* projected, Number* out, float* shared) {
  const long row = Running::room(heads, heads.group);  // of sums
  thread_local Running seen;
  thread_local std::vector<float> room, own;
  room.resize(4 * BLOCK * heads.width()), own.resize(2 * work.most * row);
  keep(heads, work, texts, projected);
  const long items = work.items.size(), joins = work.joins.size();
#pragma omp for collapse(2) schedule(dynamic, 1)
  for (long i = 0; i < items; i++)
    for (long head = 0; head < heads.kv; head++) {
      const Work::Item& item = work.items[i];
      const Text& text = texts[item.text];
      const Parts parts(text.places);
      const Tile tile(heads, text.places, parts, item.part, head);
      tile.open(projected + text.first * heads.row(), seen);
      if (item.chunk >= 0) {
        seen.start(shared + (item.room * heads.kv + head * parts.tile) * row);
        look(text.store, tile, item.chunk, seen, room.data());
        continue;
      }
      for (long chunk = 0; chunk < parts.chunks; chunk++) {
        float* const here = own.data() + (chunk ? parts.tile * row : 0);
        seen.start(here);
        look(text.store, tile, chunk, seen, room.data());
        seen.seen = own.data();
        if (chunk) seen.join(here);
      }
      tile.close(seen, out + text.first * heads.queries() * heads.size);
    }
  if (!joins) return;
#pragma omp for collapse(2)
  for (long i = 0; i < joins; i++)
    for (long head = 0; head < heads.kv; head++) {
      const Work::Item& item = work.joins[i];
      const Text& text = texts[item.text];
      const Parts parts(text.places);
      const Tile tile(heads, text.places, parts, item.part, head);
      tile.take(seen);
      seen.seen = shared + (item.room * heads.kv + head * parts.tile) * row;
      for (long chunk = 1; chunk < parts.chunks; chunk++)
        seen.join(seen.seen + chunk * parts.tile * heads.kv * row);
      tile.close(seen, out + text.first * heads.queries() * heads.size);
    }
}

}  // namespace
