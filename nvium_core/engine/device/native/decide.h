// Decides after a block which front rows emit a token. The reference is nvium_core/engine/device/decide.py.
//
// The head is a large matrix, so it multiplies many outputs at once. An exit's output is *pending* until its front may
// emit a token. Then the head computes the logits of all pending outputs of all fronts that may emit.
#pragma once

#include <chrono>
#include <vector>

#include "block.h"
#include "exits.h"

namespace nvium {

constexpr double kMargin = 1e-9;  // margin of the certificate, larger than the rounding error of a sum of probabilities

class Clock {
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();

 public:
  // Return the seconds since the last call.
  double lap() {
    const auto before = last_;
    last_ = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(last_ - before).count();
  }
};

// A front row during a pass. For kArgmax and kMixture, `mixture` is m_k = Σ p_j π_j over the exits with known logits.
template <typename A> struct Front {
  // An exit whose output has been computed, but whose logits have not. For kOriginal, one entry per row to verify.
  struct Pending {
    int64_t block, row;
    double log_p, remaining;  // log p_k of this exit, and the probability of all later exits
  };
  Run* run;
  const Seat* seat;
  int64_t block = -1;         // the last block that the front has passed
  int64_t stop = 0;           // the rows before this one have passed it
  int64_t only;  // the only token that the constraint allows; kNoToken if it allows several, or if logits are needed
  bool has_emitted = false;
  int64_t num_exits = 0;  // for kArgmax and kMixture: exits that are in `mixture` or pending
  std::vector<Pending> pending;
  std::vector<A> outputs;  // outputs of the pending exits [·, D]
  std::vector<double> mixture;
  double mass = 0;  // Σ p_j over the exits in `mixture`
  int64_t num_emitted_before, first_scored;  // emissions before this pass, and the first row that it may score

  Front(Run& run, const Seat& seat, int64_t vocab_size, int64_t last)
      : run(&run), seat(&seat), num_emitted_before(run.num_emitted),
        first_scored(std::max(run.first_scored, run.filled[last])) {
    only = seat.draw.rule == kConfidence ? kNoToken : seat.only_token(vocab_size);
  }

  // Return whether later exits have less than half of the probability. If not, no token can have a certificate.
  bool may_be_certain() const { return std::exp(run->log_reached) < 0.5; }

  void emit(int64_t token, int64_t block, double log_p) {
    run->emissions[run->num_emitted++] = {token, block, log_p};
    has_emitted = true;
  }
};

template <typename T> class Decisions {
  using A = Accumulator<T>;
  using F = Front<A>;

 public:
  Decisions(const Model<T>& model, Call& call) : model_(model), call_(call), last_(model.last()), width_(model.width) {}

  // Route the fronts that have just passed this block. They set `block` and `stop`. If a front needs the logits of this exit, make the exit pending.
  void route_fronts(int64_t block, const std::vector<F*>& fronts) {
    std::vector<Routed> rows;
    for (F* front : fronts) {
      const Run& run = *front->run;
      if (front->seat->draw.rule != kOriginal)
        rows.push_back({front, run.stop - 1});
      else if (block == last_)
        for (int64_t row = run.first_verified; row < front->stop; ++row) rows.push_back({front, row});
    }
    if (rows.empty()) return;
    Clock clock;
    std::vector<A> x(rows.size() * width_);
    std::vector<double> log_w(2 * rows.size());
    std::vector<int64_t> slots;
    for (const auto& each : rows) slots.push_back(each.front->seat->slot(each.row, model_.cache.page_size));
    route(model_, block, slots.data(), slots.size(), x.data(), log_w.data());
    call_.router_seconds += clock.lap();
    std::vector<Routed> kept;
    std::vector<A> outputs;
    for (size_t i = 0; i < rows.size(); ++i)
      if (needs_head(block, rows[i], log_w[2 * i], log_w[2 * i + 1])) {
        kept.push_back(rows[i]);
        outputs.insert(outputs.end(), &x[i * width_], &x[i * width_] + width_);
      }
    adapt(model_, block, outputs);
    for (size_t i = 0; i < kept.size(); ++i) {
      F& front = *kept[i].front;
      front.pending.push_back({block, kept[i].row, kept[i].log_p, kept[i].remaining});
      front.outputs.insert(front.outputs.end(), &outputs[i * width_], &outputs[i * width_] + width_);
      front.num_exits = block + 1;
    }
  }

  // Decide the tokens of all fronts that can emit.
  void emit(std::vector<F>& fronts) {
    Clock clock;
    std::vector<F*> ready;
    std::vector<int64_t> offsets;
    std::vector<A> outputs;
    const auto decide_ready = [&] {
      const int64_t vocab = model_.vocab_size, num_rows = outputs.size() / width_;
      static thread_local std::vector<A> out;
      out.resize(num_rows * vocab);
      A* const logits = out.data();
      if (num_rows) head_logits(model_, outputs, logits);
      ThreadPool::shared().run(model_.num_threads, ready.size(), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) decide(*ready[i], logits + offsets[i] * vocab);
      });
      ready.clear(), offsets.clear(), outputs.clear();
    };
    for (F& front : fronts) {
      if (!can_emit(front)) continue;
      if (outputs.size() + front.outputs.size() > static_cast<size_t>(kHeadRows * width_)) decide_ready();
      ready.push_back(&front);
      offsets.push_back(outputs.size() / width_);
      if (front.only == kNoToken) outputs.insert(outputs.end(), front.outputs.begin(), front.outputs.end());
    }
    if (ready.empty()) return;
    decide_ready();
    call_.head_seconds += clock.lap();
  }

 private:
  struct Routed {
    F* front;
    int64_t row;
    double log_p = 0, remaining = 0;
  };

  double uniform_of(const F& front, int64_t row, int64_t block, Purpose purpose) const {
    return uniform(front.seat->seed, front.seat->choice, row, block, purpose);
  }

  // Update the front's log_reached. Return whether the front needs the logits of this exit.
  bool needs_head(int64_t block, Routed& routed, double log_continue, double log_exit) {
    F& front = *routed.front;
    if (front.seat->draw.rule == kOriginal) return true;
    Run& run = *front.run;
    routed.log_p = run.log_reached + log_exit;
    run.log_reached += log_continue;
    routed.remaining = std::exp(run.log_reached);
    if (std::isnan(log_exit + log_continue)) {
      front.emit(kNoToken, block, routed.log_p);
      return false;
    }
    const Draw& draw = front.seat->draw;
    if (draw.rule == kExits) return uniform_of(front, run.stop - 1, block, kRoute) < std::exp(log_exit);
    if (draw.rule == kThreshold) return block == last_ || -std::expm1(run.log_reached) >= draw.threshold;
    if (draw.rule == kConfidence) return true;
    if (front.num_exits < block && (block == last_ || (draw.rule == kArgmax && front.may_be_certain())))
      evaluate_earlier(front, block);
    return front.num_exits == block;
  }

  // Make all exits before `block` pending. Their outputs are computed from the states in the cache.
  void evaluate_earlier(F& front, int64_t block) {
    const int64_t row = front.run->stop - 1, slot = front.seat->slot(row, model_.cache.page_size);
    std::vector<double> log_p(block), log_remaining(block);
    front.pending.clear();
    front.outputs.resize(block * width_);
    evaluate_exits(model_, block, &slot, 1, log_p.data(), log_remaining.data(), front.outputs.data());
    for (int64_t e = 0; e < block; ++e) front.pending.push_back({e, row, log_p[e], 1});
    front.num_exits = block;
  }

  bool can_emit(const F& front) const {
    if (front.has_emitted || front.pending.empty()) return false;
    const int64_t rule = front.seat->draw.rule;
    return front.block == last_ || (rule == kArgmax ? front.may_be_certain() : rule != kMixture);
  }

  void decide(F& front, const A* logits) const {
    for (size_t i = 0; i < front.pending.size() && !front.has_emitted; ++i) {
      const auto& [block, row, log_p, remaining] = front.pending[i];
      const A* own = logits + (front.only == kNoToken ? i * model_.vocab_size : 0);
      switch (front.seat->draw.rule) {
        case kConfidence:
          if (block != last_ && !(confidence(own) > front.seat->draw.threshold)) break;
          [[fallthrough]];
        case kExits:
        case kThreshold:
          front.emit(draw(front, own, uniform_of(front, row, block, kDraw)), block, log_p);
          break;
        case kOriginal: {
          const int64_t next = draw(front, own, uniform_of(front, row, 0, kDraw));
          front.emit(next, block, 0);
          front.has_emitted = next == kNoToken || row + 1 >= front.run->num_tokens || next != front.seat->tokens[row + 1];
          break;
        }
        case kArgmax:
          add(front, own, std::exp(log_p));
          if (block == last_ || remaining < 0.5) emit_if_certain(front, block, log_p, remaining);
          break;
        case kMixture:
          add(front, own, std::exp(log_p));
          if (block == last_) front.emit(draw_from_mixture(front, uniform_of(front, row, block, kDraw)), block, log_p);
      }
    }
    front.pending.clear(), front.outputs.clear();
  }

  // Return the largest probability.
  double confidence(const A* logits) const {
    static thread_local std::vector<double> weights;
    weights.assign(logits, logits + model_.vocab_size);
    return 1 / exponentials(weights.data(), largest(weights.data(), model_.vocab_size), model_.vocab_size);
  }

  // Apply penalties, biases and masks, then draw.
  int64_t draw(const F& front, const A* logits, double uniform) const {
    if (front.only != kNoToken) return front.only;
    const int64_t vocab = model_.vocab_size;
    if (!front.seat->changes_logits()) return draw_row(logits, vocab, front.seat->draw, uniform);
    static thread_local std::vector<double> changed;
    changed.assign(logits, logits + vocab);
    front.seat->change(changed.data(), vocab);
    return draw_row(changed.data(), vocab, front.seat->draw, uniform);
  }

  // Add p π_k to m_k. For kArgmax, first apply penalties, biases and masks to the exit's logits.
  void add(F& front, const A* logits, double p) const {
    front.mass += p;
    if (front.only != kNoToken) return;
    const int64_t vocab = model_.vocab_size;
    static thread_local std::vector<double> weights;
    weights.assign(logits, logits + vocab);
    if (front.seat->draw.rule == kArgmax) front.seat->change(weights.data(), vocab);
    const double total = exponentials(weights.data(), largest(weights.data(), vocab), vocab);
    front.mixture.resize(vocab);
    const double share = p / total;
    for (int64_t v = 0; v < vocab; ++v) front.mixture[v] += share * weights[v];
  }

  void emit_if_certain(F& front, int64_t block, double log_p, double remaining) const {
    const bool is_last = block == last_;
    if (front.only != kNoToken) {
      if (is_last || front.mass > remaining + kMargin) front.emit(front.only, block, log_p);
      return;
    }
    std::vector<double>& m = front.mixture;
    const double highest = largest(m.data(), m.size());
    if (!std::isfinite(highest)) {  // one NaN makes the whole mixture NaN
      if (is_last) front.emit(kNoToken, block, log_p);
      return;
    }
    const int64_t best = std::find(m.begin(), m.end(), highest) - m.begin();
    m[best] = -INFINITY;
    const double second = largest(m.data(), m.size());
    m[best] = highest;
    if (is_last || highest - second > remaining + kMargin) front.emit(best, block, log_p);
  }

  // Apply penalties, biases and masks to log π_mix, then draw.
  int64_t draw_from_mixture(F& front, double uniform) const {
    if (front.only != kNoToken) return front.only;
    for (double& m : front.mixture) m = std::log(m);
    front.seat->change(front.mixture.data(), front.mixture.size());
    return draw_row(front.mixture.data(), front.mixture.size(), front.seat->draw, uniform);
  }

  const Model<T>& model_;
  Call& call_;
  const int64_t last_, width_;
};

}  // namespace nvium
