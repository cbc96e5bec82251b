// An exit for a few rows: what nvium_core/model/exits.py and the head compute, as block.h computes a block.
//
// Shapes: R rows, D width, M router's inner width, N adapter's inner width, V vocabulary.

#pragma once

#include <vector>

#include "draw.h"
#include "matrix.h"
#include "team.h"

namespace nvium {

struct ExitShape {
  int64_t width, router_width, adapter_width, vocab_size;
  double eps, temperature;
};

// In the order of the caller's list; null where the last exit has no router, or none has an adapter.
template <typename A> struct Exit {
  const A* norm;
  Matrix fc1;
  const A* fc1_bias;
  Matrix fc2;
  const A *fc2_bias, *router_norm;
  Matrix router_head;
  const A* router_bias;
  Matrix up, down, head;
};

// y = x Wᵀ + b, by all threads.
template <typename A>
void linear(const std::vector<A>& x, const Matrix& weight, const A* bias, int64_t num_rows, int64_t length, int64_t count,
            A* y, int num_threads) {
  Team::shared().run(num_threads, num_panels<A>(count), [&](int64_t begin, int64_t end) {
    project_into<A>({x.data(), num_rows, length}, weight, count, begin, end, y);
  });
  if (bias)
    for (int64_t i = 0; i < num_rows * count; ++i) y[i] += bias[i % count];
}

// Of the states in these slots: x = RMSNorm(h) [R, D], and log w [R, 2] of going on and of leaving.
template <typename T>
void route(const ExitShape& shape, const Exit<Accumulator<T>>& exit, const T* states, const int64_t* slots,
           int64_t num_rows, Accumulator<T>* x, double* log_w, int num_threads) {
  using A = Accumulator<T>;
  const int64_t width = shape.width, inner = shape.router_width;
  const A eps = static_cast<A>(shape.eps);
  std::vector<A> hidden(num_rows * width), mid(num_rows * inner), normed(num_rows * width);
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t d = 0; d < width; ++d) hidden[r * width + d] = static_cast<A>(states[slots[r] * width + d]);
  for (int64_t r = 0; r < num_rows; ++r) rms_norm(&hidden[r * width], exit.norm, width, eps, x + r * width);
  if (!exit.fc1) {
    for (int64_t r = 0; r < num_rows; ++r) log_w[2 * r] = -INFINITY, log_w[2 * r + 1] = 0;
    return;
  }
  std::copy_n(x, num_rows * width, normed.begin());
  linear(normed, exit.fc1, exit.fc1_bias, num_rows, width, inner, mid.data(), num_threads);
  for (A& value : mid) value = gelu(value);
  linear(mid, exit.fc2, exit.fc2_bias, num_rows, inner, width, hidden.data(), num_threads);
  for (int64_t r = 0; r < num_rows; ++r)
    rms_norm(&hidden[r * width], exit.router_norm, width, eps, &normed[r * width]);
  std::vector<A> logits(2 * num_rows);
  linear(normed, exit.router_head, exit.router_bias, num_rows, width, 2, logits.data(), 1);
  for (int64_t r = 0; r < num_rows; ++r) {
    const A difference = (logits[2 * r + 1] - logits[2 * r]) / static_cast<A>(shape.temperature);
    log_w[2 * r] = -softplus(difference);
    log_w[2 * r + 1] = -softplus(-difference);
  }
}

// x + down(SiLU(up(x))) in place of normed rows x [R, D].
template <typename A>
void adapt(const ExitShape& shape, const Exit<A>& exit, std::vector<A>& x, int num_threads) {
  const int64_t width = shape.width, inner = shape.adapter_width, num_rows = x.size() / width;
  if (!exit.up || !num_rows) return;
  std::vector<A> mid(num_rows * inner), added(num_rows * width);
  const std::vector<A> ones(inner, 1);
  linear<A>(x, exit.up, nullptr, num_rows, width, inner, mid.data(), num_threads);
  for (int64_t r = 0; r < num_rows; ++r) silu_times(&mid[r * inner], ones.data(), inner);
  linear<A>(mid, exit.down, nullptr, num_rows, inner, width, added.data(), num_threads);
  for (size_t i = 0; i < x.size(); ++i) x[i] += added[i];
}

}  // namespace nvium
