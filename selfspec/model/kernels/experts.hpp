// An MLP of experts with gates: each row takes a few of them, and adds what they make of it.
//
// The rows of one expert run in one product, and experts one after the other, so that a row adds
// up its own in their order, whichever rows run beside it.

#pragma once

#include <vector>

#include "activations.hpp"
#include "linear.hpp"

namespace {

struct Experts {
  long count, each;              // experts; that a row takes
  long normalised, rounds;       // shares of a row sum up to 1; are rounded as numbers of the model
  long inner, activation;
  const Number *into, *down;     // panels of all experts
  long into_size, down_size;     // numbers of one expert's panels
  long gathered, opened, activated, closed;  // buffers by number
};

// Which rows an expert takes, and with which shares. The same in every thread.
struct Route {
  std::vector<long> starts, rows;  // by expert; of its rows
  std::vector<float> shares;       // by row in `rows`

  // logits [rows, count]
  void find(const Experts& experts, long count, const Number* logits) {
    const long each = experts.each;
    std::vector<long> chosen(count * each);
    std::vector<float> of_chosen(count * each), weights(experts.count);
    starts.assign(experts.count + 1, 0);
    for (long row = 0; row < count; row++) {
      choose(experts, logits + row * experts.count, weights, &chosen[row * each],
             &of_chosen[row * each]);
      for (long i = 0; i < each; i++) starts[chosen[row * each + i] + 1]++;
    }
    for (long e = 0; e < experts.count; e++) starts[e + 1] += starts[e];
    std::vector<long> next(starts.begin(), starts.end() - 1);
    rows.resize(count * each), shares.resize(count * each);
    for (long i = 0; i < count * each; i++) {
      const long place = next[chosen[i]]++;
      rows[place] = i / each, shares[place] = of_chosen[i];
    }
  }

 private:
  // The `each` largest of a softmax; of equals the first.
  static void choose(const Experts& experts, const Number* logits, std::vector<float>& weights,
                     long* chosen, float* of_chosen) {
    float top = -INFINITY, total = 0, taken = 0;
    for (long e = 0; e < experts.count; e++) top = std::max(top, wide(logits[e]));
    for (long e = 0; e < experts.count; e++) {
      weights[e] = exponential(wide(logits[e]) - top);
      total += weights[e];
    }
    for (long i = 0; i < experts.each; i++) {
      const long best = std::max_element(weights.begin(), weights.end()) - weights.begin();
      chosen[i] = best, of_chosen[i] = weights[best] / total;
      taken += of_chosen[i];
      weights[best] = -1;
    }
    for (long i = 0; i < experts.each; i++) {
      if (experts.normalised) of_chosen[i] /= taken;
      if (experts.rounds) of_chosen[i] = wide(narrow(of_chosen[i]));
    }
  }
};

// from [rows, width], logits [rows, experts] -> to [rows, width]. For all threads of a team.
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

}  // namespace
