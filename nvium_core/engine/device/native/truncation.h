// Top-k and top-p without sorting the vocabulary. The reference is `truncate` of nvium_core/engine/device/sampling.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace nvium {

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

// Keep only the `top_k` heaviest weights (0 keeps all). Of these keep only the heaviest that have `top_p` of their
// mass, but at least one. Set all other weights to zero. `total` is the sum of all weights.
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

}  // namespace nvium
