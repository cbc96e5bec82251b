// Draws tokens by the inverse CDF or by an exponential race. The reference is nvium_core/engine/device/sampling.py.
#pragma once

#include <numeric>
#include <vector>

#include "arithmetic.h"
#include "truncation.h"

namespace nvium {

constexpr int64_t kNoToken = -1;
constexpr int64_t kChunk = 256;  // weights per partial sum

// `ExitRule` in nvium_core/engine/draw.py.
enum ExitRule : int64_t { kExits, kArgmax, kMixture, kOriginal, kThreshold, kConfidence };

// `Draw` in nvium_core/engine/draw.py.
struct Draw {
  int64_t rule;
  double threshold, temperature, log_min_p;
  int64_t top_k;
  double top_p;
};

// Return the token with the smallest E / weight. E = -log u is an exponential variate; u is a hash of `uniform` and the
// token. E is at least 1 - u, so a token with (1 - u) / weight above the smallest so far needs no logarithm.
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

// Eight partial sums: number i is added to sum i % 8. Every build therefore adds in the same order.
struct PartialSums {
  static constexpr int64_t kCount = 8, kVectors = kCount / lanes<double>;
  doubles vectors[kVectors] = {};

  double total() const {
    double sums[kCount];
    std::memcpy(sums, vectors, sizeof sums);
    for (int w = kCount / 2; w; w /= 2)
      for (int j = 0; j < w; ++j) sums[j] += sums[j + w];
    return sums[0];
  }
};

// Write f(x) to `out` and return the sum of `out`. f takes and returns vectors of doubles. x is padded to whole vectors
// with `padding`, for which f must be 0.
template <typename A, typename F> double sum_of(const A* x, int64_t length, A padding, double* out, F f) {
  PartialSums sums;
  const auto take = [&](const A* from, double* to) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < PartialSums::kVectors; ++n) {
      const doubles y = f(load_doubles(from + n * lanes<double>));
      store(y, to + n * lanes<double>);
      sums.vectors[n] += y;
    }
  };
  int64_t i = 0;
  for (; i + PartialSums::kCount <= length; i += PartialSums::kCount) take(x + i, out + i);
  if (i < length) {
    A last[PartialSums::kCount];
    double own[PartialSums::kCount];
    std::fill(std::copy(x + i, x + length, last), last + PartialSums::kCount, padding);
    take(last, own);
    std::copy_n(own, length - i, out + i);
  }
  return sums.total();
}

// Call f(first, length) for each chunk of [0, count).
template <typename F> void each_chunk(int64_t count, F&& f) {
  for (int64_t first = 0; first < count; first += kChunk) f(first, std::min(kChunk, count - first));
}

// Return the first token whose cumulative weight exceeds `target`. Finds the chunk first, then the token in the chunk.
inline int64_t inverse_cdf(const std::vector<double>& weights, const std::vector<double>& sums, double target) {
  double before = 0, mass = 0;
  int64_t first = 0, token = kNoToken;
  for (size_t chunk = 0; chunk < sums.size() && mass <= target; ++chunk)
    if (sums[chunk] > 0) first = chunk * kChunk, before = mass, mass += sums[chunk];
  const int64_t end = std::min<int64_t>(first + kChunk, weights.size());
  for (int64_t v = first; v < end && before <= target; ++v)
    if (weights[v] > 0) before += weights[token = v];
  return token;
}

// Draw a token in proportion to its weight e^((logit - highest logit) / temperature), after min-p, top-k and top-p.
// Return kNoToken if a weight is not finite.
template <typename A> int64_t draw_row(const A* logits, int64_t vocab_size, const Draw& draw, double uniform) {
  static thread_local std::vector<double> weights, sums;
  const auto& [rule, threshold, temperature, log_min_p, top_k, top_p] = draw;
  const A top = largest(logits, vocab_size);
  const double peak = top, divisor = temperature ? temperature : 1, least = std::max(log_min_p, -708.0);
  const auto sum_chunks = [&](const auto* from, auto padding, auto f) {
    sums.clear();
    each_chunk(vocab_size, [&](int64_t first, int64_t length) {
      sums.push_back(sum_of(from + first, length, padding, &weights[first], f));
    });
    return std::accumulate(sums.begin(), sums.end(), 0.0);
  };
  weights.resize(vocab_size);
  const auto weight_of = [=](const doubles& x) { return exp((x - peak) / divisor, least); };
  double total = sum_chunks(logits, A(-INFINITY), weight_of);
  if (!std::isfinite(total)) return kNoToken;
  if (!temperature) return std::find(logits, logits + vocab_size, top) - logits;
  if (top_k || top_p < 1) {
    truncate(weights, total, top_k, top_p);
    total = sum_chunks(weights.data(), 0.0, [](const doubles& weight) { return weight; });
  }
  if (rule == kOriginal) return first_of_race(weights, uniform);
  return inverse_cdf(weights, sums, uniform * total);
}

}  // namespace nvium
