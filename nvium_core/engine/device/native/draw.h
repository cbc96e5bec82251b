// A token by the inverse CDF or by a race, as nvium_core/engine/device/sampling.py draws it.
#pragma once

#include <numeric>
#include <vector>

#include "arithmetic.h"
#include "truncation.h"

namespace nvium {

constexpr int64_t kNoToken = -1;

// How a sequence's tokens are drawn from logits: `Draw` of nvium_core/engine/params.py.
struct Manner {
  double temperature, log_min_p, top_k, top_p;
};

// Of a row: that, its uniform, and whether a race is run with it.
struct Draw {
  Manner manner;
  double uniform, is_race = 0;
};

// The token with the smallest E / weight, E = -log u being exponential numbers made of the uniform's bits and the token. The
// logarithm is only taken where 1 - u, which is less, could be in time.
inline int64_t first_of_race(const std::vector<double>& weights, double uniform) {
  const auto key = static_cast<uint64_t>(uniform * 0x1p53);
  double best = INFINITY;
  int64_t first = kNoToken;
  for (size_t v = 0; v < weights.size(); ++v) {
    uint64_t x = key + (v + 1) * 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    const double u = (static_cast<double>((x ^ x >> 31) >> 12) + 0.5) * 0x1p-52;
    if (!(1 - u < best * weights[v])) continue;
    const double time = -std::log(u) / weights[v];
    if (time < best) best = time, first = v;
  }
  return first;
}

// The first token whose cumulative weight exceeds uniform · total, weights being e^((x - peak) / temperature) of the tokens that
// are kept.
template <typename A> int64_t draw_row(const A* logits, int64_t vocab_size, const Draw& asked, std::vector<double>& weights) {
  weights.resize(vocab_size);
  const A* top = std::max_element(logits, logits + vocab_size);
  const auto& [asked_temperature, log_min_p, top_k, top_p] = asked.manner;
  const double peak = *top, temperature = asked_temperature ? asked_temperature : 1;
  for (int64_t v = 0; v < vocab_size; ++v) {
    const double below = (logits[v] - peak) / temperature;
    weights[v] = below < log_min_p ? -INFINITY : below;
  }
  exponentials(weights.data(), 0.0, vocab_size);
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (!std::isfinite(total)) return kNoToken;
  if (asked.is_race && !asked_temperature) return top - logits;
  if (top_k || top_p < 1) {
    truncate(weights, total, static_cast<size_t>(top_k), top_p);
    total = std::accumulate(weights.begin(), weights.end(), 0.0);
  }
  if (asked.is_race) return first_of_race(weights, asked.uniform);
  double mass = 0;
  int64_t token = kNoToken;
  for (int64_t v = 0; v < vocab_size && mass <= asked.uniform * total; ++v)
    if (weights[v] > 0) mass += weights[token = v];
  return token;
}

}  // namespace nvium
