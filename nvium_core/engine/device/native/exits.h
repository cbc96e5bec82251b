// Evaluates exits for a few rows: router, adapter and head. The reference is nvium_core/model/exits.py.
//
// Shapes: R rows; others as in call.h.
#pragma once

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

// For the first `num_exits` exits, compute log p_k and log Π_{j≤k} (1 − w_j) [R, num_exits] and the outputs
// [R, num_exits, D].
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

}  // namespace nvium
