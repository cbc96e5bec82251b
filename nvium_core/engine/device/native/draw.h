// Random numbers, and tokens drawn with them by the inverse CDF or an exponential race. Reference: engine/device/sampling.py.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "arithmetic.h"

namespace nvium {

constexpr int64_t kNoToken = -1;
constexpr int64_t kChunk = 256;  // weights per partial sum

// `ExitRule` in nvium_core/engine/sampling_params.py.
enum ExitRule : int64_t { kExits, kArgmax, kMixture, kOriginal, kThreshold, kConfidence };

// `Draw` in nvium_core/engine/sampling_params.py.
struct Draw {
  int64_t rule;
  double threshold, temperature, log_min_p;
  int64_t top_k;
  double top_p;
};

enum Purpose { kDraw, kRoute };

// Philox4x64-10 (Salmon et al. 2011). The reference is nvium_core/engine/sampling_params.py.
inline std::array<uint64_t, 4> philox(std::array<uint64_t, 4> counter, uint64_t key0, uint64_t key1) {
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B97F4A7C15, key1 += 0xBB67AE8584CAA73B) {
    const auto a = static_cast<unsigned __int128>(counter[0]) * 0xD2E7470EE14C6C93;
    const auto b = static_cast<unsigned __int128>(counter[2]) * 0xCA5A826395121157;
    counter = {static_cast<uint64_t>(b >> 64) ^ counter[1] ^ key0, static_cast<uint64_t>(b),
               static_cast<uint64_t>(a >> 64) ^ counter[3] ^ key1, static_cast<uint64_t>(a)};
  }
  return counter;
}

// Return a number in [0, 1) with 53 random bits.
inline double uniform(int64_t seed, int64_t choice, int64_t position, int64_t exit, Purpose purpose) {
  const std::array<uint64_t, 4> counter = {static_cast<uint64_t>(position) + 1, static_cast<uint64_t>(exit), 0, 0};
  return static_cast<double>(philox(counter, seed, choice)[purpose] >> 11) * 0x1p-53;
}

constexpr double kFirstShare = 0x1p-6;   // initial threshold of top-p, relative to the largest weight
constexpr double kNextShare = 0x1p-4;    // factor by which the threshold decreases
constexpr double kLeastShare = 0x1p-40;  // below this threshold, all tokens are candidates
constexpr double kSumError = 1e-9;       // larger than the rounding error of a sum
constexpr size_t kMaxSorted = 32;        // a range with more candidates is halved before it is sorted

struct Candidate {
  double weight;
  int64_t token;
  // Order by descending weight. Among equal weights the lower id is first.
  bool operator<(const Candidate& other) const {
    return weight > other.weight || (weight == other.weight && token < other.token);
  }
};

using Candidates = std::vector<Candidate>;

inline double mass_of(const Candidates& found, size_t begin, size_t end) {
  double mass = 0;
  for (size_t i = begin; i < end; ++i) mass += found[i].weight;
  return mass;
}

// Find the k heaviest tokens in one pass. Among equal weights, lower ids win.
inline void find_heaviest(const std::vector<double>& weights, size_t k, Candidates& found) {
  const auto cut = [&] {
    std::nth_element(found.begin(), found.begin() + k - 1, found.end());
    found.resize(k);
  };
  double least = 0;
  found.clear();
  for (size_t v = 0; v < weights.size(); ++v) {
    if (!(weights[v] > least)) continue;
    found.push_back({weights[v], static_cast<int64_t>(v)});
    if (found.size() == 2 * k) cut(), least = found.back().weight;
  }
  if (found.size() > k) cut();
}

// Find candidates for top-p: the tokens with a weight above a threshold. Lower the threshold until the candidates have
// more than top-p of `total`. The largest weight must be 1.
inline void find_mass(const std::vector<double>& weights, double total, double top_p, Candidates& found) {
  const double wanted = top_p + kSumError;
  for (double share = kFirstShare;; share *= kNextShare) {
    const bool takes_all = wanted >= 1 || share < kLeastShare;
    found.clear();
    for (size_t v = 0; v < weights.size(); ++v)
      if (takes_all ? weights[v] > 0 : weights[v] >= share) found.push_back({weights[v], static_cast<int64_t>(v)});
    if (takes_all || mass_of(found, 0, found.size()) > wanted * total) return;
  }
}

// Return how many of the heaviest candidates are needed to have `mass` in total, at least 1, and move these to the
// front. Each iteration halves the range that contains the last needed candidate.
inline size_t fewest_with(Candidates& found, double mass) {
  size_t begin = 0, end = found.size();
  double before = 0;
  while (end - begin > kMaxSorted) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(found.begin() + begin, found.begin() + middle, found.begin() + end);
    const double heavier = mass_of(found, begin, middle);
    if (before + heavier < mass)
      begin = middle, before += heavier;
    else
      end = middle;
  }
  std::sort(found.begin() + begin, found.begin() + end);
  while (begin < end && (!begin || before < mass)) before += found[begin++].weight;
  return begin;
}

// Truncate without sorting the vocabulary. Keep only the `top_k` heaviest weights (0: all), and of these only the heaviest
// that have `top_p` of their mass, but at least one. Set all others to zero. `total` is the sum of all weights.
inline void truncate(std::vector<double>& weights, double total, size_t top_k, double top_p) {
  static thread_local Candidates kept;
  if (top_k)
    find_heaviest(weights, top_k, kept);
  else
    find_mass(weights, total, top_p, kept);
  if (top_p < 1) kept.resize(fewest_with(kept, top_p * (top_k ? mass_of(kept, 0, kept.size()) : total)));
  std::fill(weights.begin(), weights.end(), 0.0);
  for (const Candidate& each : kept) weights[each.token] = each.weight;
}

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
    return combined(sums, std::plus());
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
