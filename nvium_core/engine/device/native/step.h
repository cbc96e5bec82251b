// Steps, each of a block and of the junction behind it, one after another.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "block.h"
#include "exits.h"
#include "randomness.h"

namespace nvium {

constexpr int64_t kGoesOn = -2;

// What became of a front in Steps that ran one after another: the block behind which it was asked last, the token it emitted
// there or kGoesOn, and log of the probability to exit there and to go on, from where the front stood before the first.
struct Outcome {
  int64_t block, token;
  double log_exit, log_continue;
};

// What a Step needs, and, from `outcomes` [F] on, what came of it; those of the first Step are of all that ran with it.
struct Step {
  const BlockShape* shape;
  const void* layers;
  const ExitShape* exit_shape;
  const void* exit;
  Rows rows;
  int64_t num_fronts;
  const int64_t* fronts;  // their rows [F]
  Outcome* outcomes;
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
  Fronts(int64_t count, Outcome* outcomes) : outcomes_(outcomes), left_(count) {
    for (int64_t f = 0; f < count; ++f) left_[f] = f, outcomes_[f] = {0, kGoesOn, 0, 0};
  }

  // Whether any has not emitted.
  bool are_left() const { return !left_.empty(); }

  void ask(Step& step, const Pass<T>& pass, const T* states, int num_threads) {
    Clock clock;
    const Exit<A>& exit = *static_cast<const Exit<A>*>(step.exit);
    const int64_t width = step.shape->width;
    std::vector<int64_t> slots, going;
    for (int64_t f : left_) slots.push_back(pass.own_slot(step.fronts[f]));
    std::vector<A> x(left_.size() * width), emitting;
    std::vector<double> log_w(2 * left_.size());
    route<T>(*step.exit_shape, exit, states, slots.data(), left_.size(), x.data(), log_w.data(), num_threads);
    for (size_t i = 0; i < left_.size(); ++i) {
      const int64_t f = left_[i], row = step.fronts[f], block = step.shape->boundary;
      const double log_continue = log_w[2 * i], log_exit = log_w[2 * i + 1], before = outcomes_[f].log_continue;
      outcomes_[f] = {block, kNoToken, before + log_exit, before + log_continue};
      if (std::isnan(log_exit + log_continue)) continue;
      const Seat& seat = pass.seat(row);
      const auto drawn = [&](const char* purpose) {
        return uniform(seat.seed, seat.choice, pass.position(row), block, purpose);
      };
      if (drawn("route") >= std::exp(log_exit)) {
        outcomes_[f].token = kGoesOn;
        going.push_back(f);
        continue;
      }
      draws_.push_back({&step, &outcomes_[f].token, {seat.manner, drawn("token")}});
      emitting.insert(emitting.end(), &x[i * width], &x[i * width] + width);
    }
    left_.swap(going);
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

  Outcome* outcomes_;
  std::vector<int64_t> left_;
  std::vector<A> outputs_;  // of those that emit, adapted, row by row
  std::vector<Drawn> draws_;
};

// Returns how many Steps were run: all, or unless `goes_on_anyway` all up to the first behind which no front goes on. Fronts
// that have emitted are asked no more.
template <typename T>
int64_t run(Step* steps, int64_t count, bool goes_on_anyway, const Tensors<T>* tensors, int num_threads) {
  Fronts<T> fronts(steps->num_fronts, steps->outcomes);
  int64_t i = 0;
  for (; i < count && (i == 0 || goes_on_anyway || fronts.are_left()); ++i) {
    Clock clock;
    Step& step = steps[i];
    Pass<T> pass(*step.shape, *tensors, step.rows);
    pass.run(static_cast<const Layer<Accumulator<T>>*>(step.layers), num_threads);
    pass.keep();
    step.layer_seconds = clock.lap();
    step.router_seconds = step.head_seconds = 0;
    const T* states = tensors->states + step.shape->boundary * step.shape->num_slots * step.shape->width;
    if (fronts.are_left()) fronts.ask(step, pass, states, num_threads);
  }
  fronts.draw(steps, i, num_threads);
  return i;
}

}  // namespace nvium
