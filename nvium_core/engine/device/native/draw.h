// A token by the inverse CDF, as nvium_core/engine/sampling.py draws it without top-k and top-p.
#pragma once

#include <vector>

#include "arithmetic.h"

namespace nvium {

constexpr int64_t kNoToken = -1;

// Of a row's draw: temperature, log min-p and uniform.
struct Draw {
  double temperature, log_min_p, uniform;
};

// The first token whose cumulative weight exceeds uniform · total, weights being e^((x - peak) / temperature).
template <typename A> int64_t draw_row(const A* logits, int64_t vocab_size, const Draw& asked, std::vector<double>& weights) {
  weights.resize(vocab_size);
  const double peak = *std::max_element(logits, logits + vocab_size);
  for (int64_t v = 0; v < vocab_size; ++v) {
    const double below = (logits[v] - peak) / asked.temperature;
    weights[v] = below < asked.log_min_p ? -INFINITY : below;
  }
  exponentials(weights.data(), 0.0, vocab_size);
  double total = 0;
  for (int64_t v = 0; v < vocab_size; ++v) total += weights[v];
  if (!std::isfinite(total)) return kNoToken;
  double mass = 0;
  int64_t token = kNoToken;
  for (int64_t v = 0; v < vocab_size && mass <= asked.uniform * total; ++v)
    if (weights[v] > 0) mass += weights[token = v];
  return token;
}

}  // namespace nvium
