// Steps, each of a block and of the junction behind it, one after another while fronts go on.
#pragma once

#include <chrono>
#include <vector>

#include "block.h"
#include "exits.h"
#include "randomness.h"

namespace nvium {

constexpr int64_t kGoesOn = -2, kNotAsked = -3;

// A front that draws from exits: its row in the Step, and what its draws depend on.
struct Front {
  int64_t row, seed, choice;
};

// What a Step needs, and, from `log_w` [F, 2] on, what came of it. Instead of a token [F] may stand that a front goes on,
// or was not asked.
struct Step {
  const Shape* shape;
  const void* layers;
  const ExitShape* exit_shape;
  const void* exit;
  Rows rows;
  int64_t num_fronts;
  const Front* fronts;
  const double* truncations;  // [F, 2]: temperature, log min-p
  double* log_w;
  int64_t* tokens;
  double layer_seconds, router_seconds, head_seconds;
};

// Seconds since the last time it was asked.
class Clock {
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();

 public:
  double lap() {
    const auto before = last_;
    last_ = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(last_ - before).count();
  }
};

// Whether any front goes on.
template <typename T>
bool ask(Step& step, const Pass<T>& pass, const T* states, int num_threads) {
  Clock clock;
  using A = Accumulator<T>;
  const Exit<A>& exit = *static_cast<const Exit<A>*>(step.exit);
  std::vector<int64_t> slots(step.num_fronts), speaking;
  for (int64_t f = 0; f < step.num_fronts; ++f) slots[f] = pass.own_slot(step.fronts[f].row);
  static thread_local std::vector<A> x;
  x.resize(step.num_fronts * step.shape->width);
  route<T>(*step.exit_shape, exit, states, slots.data(), step.num_fronts, x.data(), step.log_w, num_threads);
  step.router_seconds = clock.lap();
  std::vector<Draw> draws;
  for (int64_t f = 0; f < step.num_fronts; ++f) {
    const Front& front = step.fronts[f];
    const auto drawn = [&](const char* purpose) {
      return uniform(front.seed, front.choice, pass.position(front.row), step.shape->boundary, purpose);
    };
    const double log_exit = step.log_w[2 * f + 1];
    step.tokens[f] = std::isnan(log_exit + step.log_w[2 * f]) ? kNoToken : kGoesOn;
    if (step.tokens[f] == kGoesOn && drawn("route") < std::exp(log_exit)) {
      speaking.push_back(f);
      draws.push_back({step.truncations[2 * f], step.truncations[2 * f + 1], drawn("token")});
    }
  }
  const int64_t num_speaking = speaking.size();
  std::vector<int64_t> tokens(num_speaking);
  if (num_speaking)
    speak<A>(*step.exit_shape, exit, x.data(), speaking.data(), num_speaking, draws.data(), tokens.data(), num_threads);
  for (int64_t i = 0; i < num_speaking; ++i) step.tokens[speaking[i]] = tokens[i];
  step.head_seconds = clock.lap();
  return std::count(step.tokens, step.tokens + step.num_fronts, kGoesOn) > 0;
}

// Returns how many Steps were run: all, or unless `goes_on_anyway` all up to the first in which no front goes on. The
// later Steps' fronts are then asked no more.
template <typename T>
int64_t run(Step* steps, int64_t count, bool goes_on_anyway, const Tensors<T>* tensors, int num_threads) {
  bool goes_on = true;
  int64_t i = 0;
  for (; i < count && (goes_on || goes_on_anyway); ++i) {
    Clock clock;
    Step& step = steps[i];
    Pass<T> pass(*step.shape, *tensors, step.rows);
    pass.run(static_cast<const Layer<Accumulator<T>>*>(step.layers), num_threads);
    pass.keep();
    step.layer_seconds = clock.lap();
    step.router_seconds = step.head_seconds = 0;
    const T* states = tensors->states + (step.shape->boundary + 1) % 2 * step.shape->num_slots * step.shape->width;
    if (goes_on)
      goes_on = step.num_fronts && ask(step, pass, states, num_threads);
    else
      std::fill_n(step.tokens, step.num_fronts, kNotAsked);
  }
  return i;
}

}  // namespace nvium
