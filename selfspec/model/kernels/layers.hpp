// Decoder layers as a list of operations that all threads of one team run together.
//
// Every row is computed separately, in an order that depends only on its position, so its bits cannot
// depend on the other rows of a pass.

#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "attention.hpp"

namespace {

// An MLP of gated experts: each row takes a few of them, and adds up their outputs. The rows of one
// expert run together, and experts one after the other. So a row always adds its experts in the same
// order, whatever the other rows are.
struct Experts {
  long count, each;              // experts; experts per row
  long normalised, rounds;       // whether a row's shares sum up to 1; are rounded to Number
  long inner, activation;
  const Number *into, *down;     // panels of all experts
  long into_size, down_size;     // numbers of one expert's panels
  long gathered, opened, activated, closed;  // buffers by number
};

// The rows of each expert, and their shares. The same in every thread.
struct Route {
  std::vector<long> starts, rows;  // by expert: start in `rows`; its rows
  std::vector<float> shares;       // by row in `rows`

  // logits [rows, count]
  void find(const Experts& experts, long count, const Number* logits) {
    const long each = experts.each;
    std::vector<long> chosen(count * each);
    std::vector<float> chosen_shares(count * each);
    starts.assign(experts.count + 1, 0);
    for (long row = 0; row < count; row++) {
      long* const experts_of_row = &chosen[row * each];
      float* const share = &chosen_shares[row * each];
      likeliest(experts.count, logits + row * experts.count, 1, each, experts_of_row, share);
      const float total = experts.normalised ? std::accumulate(share, share + each, 0.0f) : 1;
      for (long i = 0; i < each; i++) {
        share[i] = experts.rounds ? wide(narrow(share[i] / total)) : share[i] / total;
        starts[experts_of_row[i] + 1]++;
      }
    }
    for (long e = 0; e < experts.count; e++) starts[e + 1] += starts[e];
    std::vector<long> next(starts.begin(), starts.end() - 1);
    rows.resize(count * each), shares.resize(count * each);
    for (long i = 0; i < count * each; i++) {
      const long place = next[chosen[i]]++;
      rows[place] = i / each, shares[place] = chosen_shares[i];
    }
  }
};

// from [rows, width], logits [rows, experts] -> to [rows, width]. Called by all threads.
void mix_experts(const Experts& experts, long rows, long width, const Number* from,
                 const Number* logits, Number* const* buffers, Number* to, Input* room) {
  thread_local Route route;
  route.find(experts, rows, logits);
  Number *gathered = buffers[experts.gathered], *opened = buffers[experts.opened],
         *activated = buffers[experts.activated], *closed = buffers[experts.closed];
#pragma omp for
  for (long i = 0; i < rows * width; i++) to[i] = narrow(0.0f);
  for (long e = 0; e < experts.count; e++) {
    const long first = route.starts[e], count = route.starts[e + 1] - first;
    if (!count) continue;
#pragma omp for
    for (long i = 0; i < count; i++)
      std::copy_n(from + route.rows[first + i] * width, width, gathered + i * width);
    const Stripe into = {up(2 * experts.inner, PANEL), 0, experts.into + e * experts.into_size};
    const Stripe down = {up(width, PANEL), 0, experts.down + e * experts.down_size};
    Linear{width, 2 * experts.inner, &into, nullptr}.run(count, gathered, opened, 0, room);
    activate(experts.activation, true, count, experts.inner, opened, activated);
    Linear{experts.inner, width, &down, nullptr}.run(count, activated, closed, 0, room);
#pragma omp for
    for (long i = 0; i < count; i++)
      for (long j = 0; j < width; j++) {
        Number& sum = to[route.rows[first + i] * width + j];
        sum = added(sum, narrow(wide(closed[i * width + j]) * route.shares[first + i]), 1);
      }
  }
}

// The kinds of operations and their fields; fused.py has the same.
enum Kinds { NORM, LINEAR, ATTEND, ACTIVATE, EXPERTS, ADD };

struct Operation {
  long kind, from, to;   // buffers by number
  long in, out;          // numbers of a row that are read and written; ATTEND: unused
  const void* weight;    // NORM float [in]; LINEAR stripes
  const void* bias;      // NORM float [in]; LINEAR Number [out]; or none
  float adds;            // NORM, LINEAR, ADD: 0: overwrite the buffer; else add the result times this
  float eps;             // NORM
  long at, row;          // NORM: the first number of a row to norm; numbers of a row in the buffer
  long centred, rounds;  // NORM: subtract a mean; round before multiplying by the weight
  long activation;       // ACTIVATE
  long gated;            // ACTIVATE: multiply by the second half of a row
  long keys, rotation;   // ATTEND: offset of the layer's keys and values in a page; rotation kind
  Heads heads;           // ATTEND
  long logits;           // EXPERTS: the buffer of the router's logits
  Experts experts;       // EXPERTS
};

struct Pass {
  long rows;
  Number* const* buffers;         // [rows, ..] each
  const float* const* rotations;  // by kind, [rows, rotated / 2] cosines and sines
  long spans;
  const Span* span;
  Input* room;  // for linear layers of many rows
};

std::vector<Text> texts(const Operation& op, const Pass& pass) {
  std::vector<Text> list;
  for (const Span* s = pass.span; s < pass.span + pass.spans; s++) {
    const float* rotations = pass.rotations[op.rotation] + s->first * op.heads.rotated;
    list.push_back({*s, rotations, {s->pages, op.keys, 0, 0}});
  }
  return list;
}

// RMSNorm or LayerNorm.
void norm(const Operation& op, long rows, const Number* from, Number* to) {
  const float *weight = (const float*)op.weight, *bias = (const float*)op.bias;
  thread_local std::vector<float> normed;
  normed.resize(op.in);
#pragma omp for
  for (long row = 0; row < rows; row++) {
    const Number* h = from + row * op.row + op.at;
    float* const x = normed.data();
    standardise(op.centred, op.eps, op.in, h, x);
#pragma omp simd
    for (long j = 0; j < op.in; j++) x[j] = (op.rounds ? wide(narrow(x[j])) : x[j]) * weight[j];
    if (bias) {
#pragma omp simd
      for (long j = 0; j < op.in; j++) x[j] += bias[j];
    }
    put(op.in, x, op.adds, to + row * op.row + op.at);
  }
}

void step(const Operation& op, const Pass& pass, const Work& work, float* shared) {
  const Number* from = pass.buffers[op.from];
  Number* to = pass.buffers[op.to];
  switch (op.kind) {
    case NORM:
      return norm(op, pass.rows, from, to);
    case LINEAR:
      return Linear{op.in, op.out, (const Stripe*)op.weight, (const Number*)op.bias}.run(
          pass.rows, from, to, op.adds, pass.room);
    case ATTEND:
      return attend(op.heads, work, texts(op, pass), from, to, shared);
    case ACTIVATE:
      return activate(op.activation, op.gated, pass.rows, op.out, from, to);
    case EXPERTS:
      return mix_experts(op.experts, pass.rows, op.in, from, pass.buffers[op.logits], pass.buffers,
                         to, pass.room);
    case ADD:
#pragma omp for
      for (long i = 0; i < pass.rows * op.in; i++) to[i] = added(to[i], from[i], op.adds);
  }
}

}  // namespace

extern "C" {

// Runs all operations, one after the other, on one team of threads.
void run(long count, const Operation* operations, const Pass* pass) {
  if (!pass->rows) return;
  Work work;
  for (long i = 0; i < pass->spans; i++) work.add(i, pass->span[i]);
  long most = 0;
  for (long i = 0; i < count; i++)
    if (operations[i].kind == ATTEND) most = std::max(most, work.shared(operations[i].heads));
  const std::unique_ptr<float[]> shared(new float[most]);
#pragma omp parallel
  for (long i = 0; i < count; i++) step(operations[i], *pass, work, shared.get());
}

}
