// Evaluates exits for a few rows: router, adapter and head. The reference is nvium_core/model/exits.py. Scores rows: the
// log-probability of the next token before f, the most probable tokens, and all p_k.
//
// Shapes: R rows; others as in call.h.
#pragma once

#include <algorithm>
#include <vector>

#include "call.h"

namespace nvium {

// y = x Wᵀ + b
template <typename A>
void linear(int num_threads, const std::vector<A>& x, const Matrix& weight, const A* bias, int64_t num_rows,
            int64_t length, int64_t count, A* y) {
  static thread_local Forms forms;
  const Operand<A> rows = operand(num_threads, x.data(), num_rows, length, {weight}, 0, forms);
  ThreadPool::shared().run(num_threads, num_panels<A>(count), [&](int64_t begin, int64_t end) {
    project_into(rows, weight, count, begin, end, y);
  });
  if (bias)
    for (int64_t i = 0; i < num_rows * count; ++i) y[i] += bias[i % count];
}

// Compute the logits [R, V] of the outputs [R, D] of exits.
template <typename T>
void head_logits(const Model<T>& model, const std::vector<Accumulator<T>>& outputs, Accumulator<T>* logits) {
  using A = Accumulator<T>;
  const int64_t num_rows = outputs.size() / model.width, vocab = model.vocab_size;
  linear<A>(model.num_threads, outputs, model.exits->head, nullptr, num_rows, model.width, vocab, logits);
  const A scale = static_cast<A>(model.logit_scale), cap = static_cast<A>(model.logit_cap);
  if (scale == 1 && !cap) return;
  ThreadPool::shared().run(model.num_threads, num_rows * vocab, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) logits[i] *= scale;
    if (cap) limit(logits + begin, cap, end - begin);
  });
}

// Compute x [R, D], the RMSNorm of the states in these slots, and log_w [R, 2], the router's log(1 − w) and log w.
template <typename T>
void route(const Model<T>& model, int64_t block, const int64_t* slots, int64_t num_rows, Accumulator<T>* x,
           double* log_w) {
  using A = Accumulator<T>;
  const auto& exit = model.exits[block];
  const int64_t width = model.width, inner = model.router_width;
  const int num_threads = model.num_threads;
  const A eps = static_cast<A>(model.eps);
  for (int64_t r = 0; r < num_rows; ++r) {
    const T* state = model.state(block, slots[r]);
    A* const own = x + r * width;
    for (int64_t d = 0; d < width; ++d) own[d] = static_cast<A>(state[d]);
    if (exit.norm) rms_norm(own, exit.norm, width, eps, own);
  }
  if (!exit.router_head) {
    const int64_t impossible = block == model.last() ? 0 : 1;  // 0: to continue, 1: to exit
    for (int64_t i = 0; i < 2 * num_rows; ++i) log_w[i] = i % 2 == impossible ? -INFINITY : 0;
    return;
  }
  std::vector<A> normed(x, x + num_rows * width);
  if (exit.fc1) {
    std::vector<A> mid(num_rows * inner);
    linear(num_threads, normed, exit.fc1, exit.fc1_bias, num_rows, width, inner, mid.data());
    for (A& value : mid) value = gelu(value);
    linear(num_threads, mid, exit.fc2, exit.fc2_bias, num_rows, inner, width, normed.data());
    for (int64_t r = 0; r < num_rows; ++r)
      rms_norm(&normed[r * width], exit.router_norm, width, eps, &normed[r * width]);
  }
  std::vector<A> logits(2 * num_rows);
  linear(1, normed, exit.router_head, exit.router_bias, num_rows, width, 2, logits.data());
  for (int64_t r = 0; r < num_rows; ++r) {
    const A difference = (logits[2 * r + 1] - logits[2 * r]) / static_cast<A>(model.temperature);
    log_w[2 * r] = -softplus(difference);
    log_w[2 * r + 1] = -softplus(-difference);
  }
}

// Apply the exit's adapter to normed rows x [R, D]: x += down(SiLU(up(x))).
template <typename T> void adapt(const Model<T>& model, int64_t block, std::vector<Accumulator<T>>& x) {
  using A = Accumulator<T>;
  const auto& exit = model.exits[block];
  const int64_t width = model.width, inner = model.adapter_width, num_rows = x.size() / width;
  const int num_threads = model.num_threads;
  if (!exit.up || !num_rows) return;
  std::vector<A> mid(num_rows * inner), added(num_rows * width);
  linear<A>(num_threads, x, exit.up, nullptr, num_rows, width, inner, mid.data());
  for (int64_t r = 0; r < num_rows; ++r) silu_times<A>(&mid[r * inner], nullptr, inner);
  linear<A>(num_threads, mid, exit.down, nullptr, num_rows, inner, width, added.data());
  for (size_t i = 0; i < x.size(); ++i) x[i] += added[i];
}

// For the first E = `num_exits` exits, compute log p_k and log Π_{j≤k} (1 − w_j) [R, E] and the outputs [R, E, D].
template <typename T>
void evaluate_exits(const Model<T>& model, int64_t num_exits, const int64_t* slots, int64_t num_rows, double* log_p,
                    double* log_remaining, Accumulator<T>* outputs) {
  const int64_t width = model.width;
  std::vector<double> log_w(2 * num_rows), log_reached(num_rows);
  for (int64_t e = 0; e < num_exits; ++e) {
    std::vector<Accumulator<T>> x(num_rows * width);
    route(model, e, slots, num_rows, x.data(), log_w.data());
    adapt(model, e, x);
    for (int64_t r = 0; r < num_rows; ++r) {
      log_p[r * num_exits + e] = log_reached[r] + log_w[2 * r + 1];
      log_remaining[r * num_exits + e] = log_reached[r] += log_w[2 * r];
      std::copy_n(&x[r * width], width, outputs + (r * num_exits + e) * width);
    }
  }
}

constexpr int64_t kHeadRows = 64;  // maximum outputs that the head multiplies at once

constexpr int64_t kNotEmitted = -1, kEveryExit = -1;

struct ScoredRow {
  int64_t slot, target;
  int64_t exit;  // the exit that emitted the token, or kNotEmitted
  const Draw& draw;

  // Return the exit that alone counts, or kEveryExit. A threshold that is never reached chooses the last exit.
  int64_t alone(const double* log_remaining, int64_t num_exits) const {
    if (draw.rule < kOriginal) return kEveryExit;
    if (exit != kNotEmitted) return exit;
    const auto stops = [&](double log_continue) { return -std::expm1(log_continue) >= draw.threshold; };
    return std::min(num_exits - 1, std::find_if(log_remaining, log_remaining + num_exits, stops) - log_remaining);
  }
};

// Return log Σ e^x. Overwrites x.
template <typename A> double log_sum_exp(A* x, int64_t length) {
  const A peak = largest(x, length);
  return peak + std::log(static_cast<double>(exponentials(x, peak, length)));
}

// The distribution π_mix of one row. `logits` [N, V]: of all exits. `shifts` [N]: log p_k − log Σ e^logit of each exit,
// so that logit + shift = log p_k π_k.
template <typename A> struct Mixture {
  const A* logits;
  const double* shifts;
  int64_t num_exits, vocab_size;

  double log_probability(int64_t token) const {
    const double peak = largest_share(token, 1);
    if (!std::isfinite(peak)) return peak;
    double sum = 0;
    for (int64_t e = 0; e < num_exits; ++e) sum += std::exp(logits[e * vocab_size + token] + shifts[e] - peak);
    return peak + std::log(sum);
  }

  // Return the most probable tokens, best first. Among equally probable tokens the lowest id is first.
  Candidates top(int64_t count) const {
    const double slack = std::log(static_cast<double>(num_exits));
    Candidates heap;  // of log-probabilities; the worst candidate is in front
    const auto is_full = [&] { return static_cast<int64_t>(heap.size()) == count; };
    const auto is_beaten = [&](int64_t token, int64_t length) {
      return is_full() && largest_share(token, length) + slack < heap.front().weight;
    };
    each_chunk(count ? vocab_size : 0, [&](int64_t first, int64_t length) {
      if (is_beaten(first, length)) return;
      for (int64_t token = first; token < first + length; ++token) {
        if (is_beaten(token, 1)) continue;
        const Candidate found{log_probability(token), token};
        if (is_full() && !(found < heap.front())) continue;
        if (is_full()) std::pop_heap(heap.begin(), heap.end()), heap.pop_back();
        heap.push_back(found), std::push_heap(heap.begin(), heap.end());
      }
    });
    std::sort_heap(heap.begin(), heap.end());
    return heap;
  }

  // Return the largest log p_k π_k of all exits k and `count` tokens. Their log π_mix is at most log N above it. NaN stays.
  double largest_share(int64_t token, int64_t count) const {
    double most = -INFINITY;
    for (int64_t e = 0; e < num_exits; ++e) {
      const double share = largest(logits + e * vocab_size + token, count) + shifts[e];
      if (!(share <= most)) most = share;
      if (std::isnan(share)) break;
    }
    return most;
  }
};

// Write the scores of these rows to `out` [rows, 1 + N + 2 · num_top], as in call.h.
template <typename T> void score(const Model<T>& model, const std::vector<ScoredRow>& rows, int64_t num_top, double* out) {
  using A = Accumulator<T>;
  const int64_t vocab = model.vocab_size, num_exits = model.num_blocks, count = rows.size();
  const int64_t most = std::max(int64_t{1}, kHeadRows / num_exits);
  for (int64_t first = 0; first < count; first += most) {
    const int64_t num_rows = std::min(most, count - first), width = model.width;
    std::vector<int64_t> slots, alone, offsets;
    for (int64_t r = 0; r < num_rows; ++r) slots.push_back(rows[first + r].slot);
    std::vector<double> log_p(num_rows * num_exits), log_remaining(log_p.size());
    std::vector<A> all_outputs(log_p.size() * width), outputs;
    evaluate_exits(model, num_exits, slots.data(), num_rows, log_p.data(), log_remaining.data(), all_outputs.data());
    for (int64_t r = 0; r < num_rows; ++r) {
      alone.push_back(rows[first + r].alone(&log_remaining[r * num_exits], num_exits));
      offsets.push_back(outputs.size() / width);
      const auto from = all_outputs.begin() + (r * num_exits + std::max(int64_t{0}, alone[r])) * width;
      outputs.insert(outputs.end(), from, from + (alone[r] == kEveryExit ? num_exits : 1) * width);
    }
    const int64_t num_outputs = outputs.size() / width;
    static thread_local std::vector<A> logits;
    logits.resize(num_outputs * vocab);
    A* const all_logits = logits.data();
    head_logits(model, outputs, all_logits);
    ThreadPool::shared().run(model.num_threads, num_rows, [&](int64_t begin, int64_t end) {
      std::vector<A> scratch(vocab);
      std::vector<double> shifts(num_exits);
      for (int64_t r = begin; r < end; ++r) {
        const A* own = all_logits + offsets[r] * vocab;
        double* const to = out + (first + r) * (1 + num_exits + 2 * num_top);
        const bool is_original = rows[first + r].draw.rule == kOriginal;
        for (int64_t e = 0; e < num_exits; ++e) to[1 + e] = is_original ? e == alone[r] : std::exp(log_p[r * num_exits + e]);
        const int64_t num_mixed = alone[r] == kEveryExit ? num_exits : 1;
        for (int64_t e = 0; e < num_mixed; ++e) {
          std::copy_n(own + e * vocab, vocab, scratch.data());
          shifts[e] = (alone[r] == kEveryExit ? log_p[r * num_exits + e] : 0) - log_sum_exp(scratch.data(), vocab);
        }
        const Mixture<A> mixture{own, shifts.data(), num_mixed, vocab};
        to[0] = mixture.log_probability(rows[first + r].target);
        double* at = to + 1 + num_exits;
        for (const auto& [logprob, token] : mixture.top(num_top)) at[num_top] = token, *at++ = logprob;
      }
    });
  }
}

}  // namespace nvium
