// Decoder layers as a list of operations that all threads of one team run together.
//
// Compiled with BFLOAT16 (0 or 1: float32), for a wheel or on the machine that runs it. Every row
// is computed by itself, in an order that depends on its own position alone: its bits cannot depend
// on the rows that run beside it.

#include <memory>
#include <vector>

#include "attention.hpp"
#include "experts.hpp"

namespace {

// What an operation is, and what its fields mean, as in fused.py.
enum Kinds { NORM, PRODUCT, ATTEND, ACTIVATE, EXPERTS, ADD };

struct Operation {
  long kind, from, to;   // buffers by number
  long in, out;          // numbers of a row that are read and written; ATTEND: unused
  const void* weight;    // NORM float [in]; PRODUCT stripes
  const void* bias;      // NORM float [in]; PRODUCT Number [out]; or none
  float adds;            // NORM, PRODUCT, ADD: 0, or to what its buffer holds, times this
  float eps;             // NORM
  long at, row;          // NORM: the first number of a row that is read; numbers of a row there
  long centred, rounds;  // NORM: a mean is taken off; what is normed is rounded before its weight
  long activation;       // ACTIVATE
  long gated;            // ACTIVATE: times the second half of a row
  long keys, rotation;   // ATTEND: where a page has the layer's keys, which its values follow
  Heads heads;           // ATTEND
  long logits;           // EXPERTS: the buffer of what chooses them
  Experts experts;       // EXPERTS
};

// Rows of one sequence, side by side in a pass.
struct Span {
  long first, rows;        // of the pass
  long held;               // positions before these rows
  const long* parents;     // [rows], none: a chain
  Number* const* pages;    // of BLOCK positions and all layers each
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
  std::vector<Text> found;
  for (const Span* s = pass.span; s < pass.span + pass.spans; s++) {
    const float* rotations = pass.rotations[op.rotation] + s->first * op.heads.rotated;
    found.push_back({{s->rows, s->held, s->parents, rotations},
                     {s->pages, op.keys, 0, 0},
                     s->first});
  }
  return found;
}

// RMSNorm or LayerNorm.
void norm(const Operation& op, long rows, const Number* from, Number* to) {
  const float *weight = (const float*)op.weight, *bias = (const float*)op.bias;
  thread_local std::vector<float> normed;
  normed.resize(op.in);
#pragma omp for
  for (long row = 0; row < rows; row++) {
    const Number* h = from + row * op.row + op.at;
    float sum = 0, squares = 0;
    if (op.centred) {
#pragma omp simd reduction(+ : sum)
      for (long j = 0; j < op.in; j++) sum += wide(h[j]);
    }
    const float mean = sum / op.in;
#pragma omp simd reduction(+ : squares)
    for (long j = 0; j < op.in; j++) squares += (wide(h[j]) - mean) * (wide(h[j]) - mean);
    const float scale = 1 / std::sqrt(squares / op.in + op.eps);
    float* const x = normed.data();
#pragma omp simd
    for (long j = 0; j < op.in; j++) x[j] = (wide(h[j]) - mean) * scale;
    if (op.rounds) {
#pragma omp simd
      for (long j = 0; j < op.in; j++) x[j] = wide(narrow(x[j]));
    }
#pragma omp simd
    for (long j = 0; j < op.in; j++) x[j] *= weight[j];
    if (bias) {
#pragma omp simd
      for (long j = 0; j < op.in; j++) x[j] += bias[j];
    }
    put(op.in, x, op.adds, to + row * op.row + op.at);
  }
}

// to [rows, width] += from, `times` times.
void add(long rows, long width, float times, const Number* from, Number* to) {
#pragma omp for
  for (long i = 0; i < rows * width; i++) to[i] = added(to[i], from[i], times);
}

void step(const Operation& op, const Pass& pass, const Work& work, float* shared) {
  const Number* from = pass.buffers[op.from];
  Number* to = pass.buffers[op.to];
  switch (op.kind) {
    case NORM:
      return norm(op, pass.rows, from, to);
    case PRODUCT:
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
      return add(pass.rows, op.in, op.adds, from, to);
  }
}

}  // namespace

extern "C" {

// All operations, one after the other, on one team of threads.
void run(const Operation* operations, long count, const Pass* pass) {
  if (!pass->rows) return;
  Work work;
  for (long i = 0; i < pass->spans; i++) work.add(i, pass->span[i].rows, pass->span[i].held);
  long most = 0;
  for (long i = 0; i < count; i++)
    if (operations[i].kind == ATTEND) most = std::max(most, work.shared(operations[i].heads));
  const std::unique_ptr<float[]> shared(new float[most]);
#pragma omp parallel
  for (long i = 0; i < count; i++) step(operations[i], *pass, work, shared.get());
}

}
