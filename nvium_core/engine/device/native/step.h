// Steps, each of a block and of the junction behind it, one after another.
#pragma once

#include <algorithm>
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

// What a Step needs, and, from `log_w` [F, 2] on, what came of it. In place of a token [F] stands whether a front goes on or
// was not asked.
struct Step {
  const BlockShape* shape;
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

// The fronts of Steps that run one after another: the same in each, until they emit. Their draws come last, so that the head,
// which all exits share, is read once for all of them.
template <typename T> class Fronts {
  using A = Accumulator<T>;

 public:
  explicit Fronts(int64_t count) : has_emitted_(count) {}

  // How many have not emitted.
  int64_t num_left() const { return std::count(has_emitted_.begin(), has_emitted_.end(), false); }

  void skip(Step& step) const { std::fill_n(step.tokens, step.num_fronts, kNotAsked); }

  void ask(Step& step, const Pass<T>& pass, const T* states, int num_threads) {
    Clock clock;
    const Exit<A>& exit = *static_cast<const Exit<A>*>(step.exit);
    const int64_t width = step.shape->width;
    std::vector<int64_t> asked, slots;
    for (int64_t f = 0; f < step.num_fronts; ++f)
      if (!has_emitted_[f]) asked.push_back(f), slots.push_back(pass.own_slot(step.fronts[f].row));
    skip(step);
    std::vector<A> x(asked.size() * width), emitting;
    std::vector<double> log_w(2 * asked.size());
    route<T>(*step.exit_shape, exit, states, slots.data(), asked.size(), x.data(), log_w.data(), num_threads);
    for (size_t i = 0; i < asked.size(); ++i) {
      const int64_t f = asked[i];
      std::copy_n(&log_w[2 * i], 2, &step.log_w[2 * f]);
      if (!emits(step, pass, f)) continue;
      has_emitted_[f] = true;
      emitting.insert(emitting.end(), &x[i * width], &x[i * width] + width);
    }
    step.router_seconds = clock.lap();
    adapt<A>(*step.exit_shape, exit, emitting, num_threads);
    outputs_.insert(outputs_.end(), emitting.begin(), emitting.end());
    step.head_seconds = clock.lap();
  }

  // Tokens for those that have emitted in these Steps, which share the time by how many.
  void draw(Step* steps, int64_t count, int num_threads) {
    if (draws_.empty()) return;
    Clock clock;
    const ExitShape& shape = *steps->exit_shape;
    static thread_local std::vector<A> out;
    static thread_local std::vector<double> weights;
    out.resize(draws_.size() * shape.vocab_size);
    linear<A>(outputs_, static_cast<const Exit<A>*>(steps->exit)->head, nullptr, draws_.size(), shape.width,
              shape.vocab_size, out.data(), num_threads);
    for (size_t i = 0; i < draws_.size(); ++i)
      *draws_[i].token = draw_row(&out[i * shape.vocab_size], shape.vocab_size, draws_[i].asked, weights);
    const double seconds_each = clock.lap() / draws_.size();
    for (int64_t i = 0; i < count; ++i)
      for (const Drawn& drawn : draws_)
        if (drawn.step == steps + i) steps[i].head_seconds += seconds_each;
  }

 private:
  struct Drawn {
    const Step* step;
    int64_t* token;
    Draw asked;
  };

  // Whether the front emits here, and then what it draws, unless there is nothing to draw from.
  bool emits(Step& step, const Pass<T>& pass, int64_t f) {
    const Front& front = step.fronts[f];
    const auto drawn = [&](const char* purpose) {
      return uniform(front.seed, front.choice, pass.position(front.row), step.shape->boundary, purpose);
    };
    const double log_exit = step.log_w[2 * f + 1];
    step.tokens[f] = kNoToken;
    if (std::isnan(log_exit + step.log_w[2 * f])) {
      has_emitted_[f] = true;
      return false;
    }
    if (drawn("route") >= std::exp(log_exit)) {
      step.tokens[f] = kGoesOn;
      return false;
    }
    draws_.push_back({&step, &step.tokens[f], {step.truncations[2 * f], step.truncations[2 * f + 1], drawn("token")}});
    return true;
  }

  std::vector<bool> has_emitted_;
  std::vector<A> outputs_;  // of those that emit, adapted, row by row
  std::vector<Drawn> draws_;
};

// Returns how many Steps were run: all, or unless `goes_on_anyway` all up to the first behind which no front goes on. Fronts
// that have emitted are asked no more.
template <typename T>
int64_t run(Step* steps, int64_t count, bool goes_on_anyway, const Tensors<T>* tensors, int num_threads) {
  Fronts<T> fronts(steps->num_fronts);
  int64_t i = 0;
  for (; i < count && (i == 0 || goes_on_anyway || fronts.num_left()); ++i) {
    Clock clock;
    Step& step = steps[i];
    Pass<T> pass(*step.shape, *tensors, step.rows);
    pass.run(static_cast<const Layer<Accumulator<T>>*>(step.layers), num_threads);
    pass.keep();
    step.layer_seconds = clock.lap();
    step.router_seconds = step.head_seconds = 0;
    const T* states = tensors->states + step.shape->boundary * step.shape->num_slots * step.shape->width;
    if (fronts.num_left())
      fronts.ask(step, pass, states, num_threads);
    else
      fronts.skip(step);
  }
  fronts.draw(steps, i, num_threads);
  return i;
}

}  // namespace nvium
