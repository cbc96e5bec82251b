// A token by the inverse CDF or by a race, as nvium_core/engine/device/sampling.py draws it.
#pragma once

#include <numeric>
#include <vector>

#include "arithmetic.h"
#include "truncation.h"

namespace nvium {

constexpr int64_t kNoToken = -1;
constexpr int64_t kBlock = 256;  // weights that are summed together

// How a sequence's tokens are drawn from logits: part of `Draw` of nvium_core/engine/params.py.
struct Sampling {
  double temperature, log_min_p, top_k, top_p;
};

// Of a row: that, its uniform, and whether a race is run with it.
struct DrawRequest {
  Sampling sampling;
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

// Σ of eight partial sums, of every eighth number, so that the order is the same for vectors of any width.
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

// out = f(x), f being one of vectors of doubles; the sum of out. What is missing of the last eight x is `rest`, whose f is 0.
template <typename A, typename F> double sum_of(const A* x, int64_t length, A rest, double* out, F f) {
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
    std::fill(std::copy(x + i, x + length, last), last + PartialSums::kCount, rest);
    take(last, own);
    std::copy_n(own, length - i, out + i);
  }
  return sums.total();
}

// Calls f(first, length) for each block of [0, count).
template <typename F> void each_block(int64_t count, F&& f) {
  for (int64_t first = 0; first < count; first += kBlock) f(first, std::min(kBlock, count - first));
}

inline double sum_blocks(std::vector<double>& weights, std::vector<double>& sums) {
  sums.clear();
  each_block(weights.size(), [&](int64_t first, int64_t length) {
    double* const own = &weights[first];
    sums.push_back(sum_of(own, length, 0.0, own, [](const doubles& weight) { return weight; }));
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The first token whose cumulative weight exceeds uniform · total: the block is found first, then the token in it.
inline int64_t inverse_cdf(const std::vector<double>& weights, const std::vector<double>& sums, double target) {
  double before = 0, mass = 0;
  int64_t first = 0, token = kNoToken;
  for (size_t block = 0; block < sums.size() && mass <= target; ++block)
    if (sums[block] > 0) first = block * kBlock, before = mass, mass += sums[block];
  const int64_t end = std::min<int64_t>(first + kBlock, weights.size());
  for (int64_t v = first; v < end && before <= target; ++v)
    if (weights[v] > 0) before += weights[token = v];
  return token;
}

// A token by weights e^((x - peak) / temperature) of the tokens that are kept.
template <typename A> int64_t draw_row(const A* logits, int64_t vocab_size, const DrawRequest& asked, std::vector<double>& weights) {
  static thread_local std::vector<double> sums;
  const auto& [asked_temperature, log_min_p, top_k, top_p] = asked.sampling;
  const A top = largest(logits, vocab_size);
  const double peak = top, temperature = asked_temperature ? asked_temperature : 1, least = std::max(log_min_p, -708.0);
  weights.resize(vocab_size);
  sums.clear();
  each_block(vocab_size, [&](int64_t first, int64_t length) {
    const auto weigh = [&](auto f) { sums.push_back(sum_of(logits + first, length, A(-INFINITY), &weights[first], f)); };
    if (temperature == 1)
      weigh([=](const doubles& x) { return exp(x - peak, least); });
    else
      weigh([=](const doubles& x) { return exp((x - peak) / temperature, least); });
  });
  double total = std::accumulate(sums.begin(), sums.end(), 0.0);
  if (!std::isfinite(total)) return kNoToken;
  if (asked.is_race && !asked_temperature) return std::find(logits, logits + vocab_size, top) - logits;
  if (top_k || top_p < 1) {
    truncate(weights, total, static_cast<size_t>(top_k), top_p);
    total = sum_blocks(weights, sums);
  }
  if (asked.is_race) return first_of_race(weights, asked.uniform);
  return inverse_cdf(weights, sums, asked.uniform * total);
}

}  // namespace nvium
