// Which tokens top-k and top-p keep, as `truncate_all` of nvium_core/engine/device/sampling.py says, without a sort of all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace nvium {

constexpr double kFirstShare = 0x1p-6, kNextShare = 0x1p-4;  // of the peak's weight, that tokens are looked for above
constexpr double kLeastShare = 0x1p-40;                      // below which all are looked at
constexpr double kSumsDiffer = 1e-9;                         // more than the order of a sum can change of it

struct Candidate {
  double weight;
  int64_t token;
  // The heavier one, and of equal ones that of the lower id.
  bool operator<(const Candidate& other) const {
    return weight > other.weight || (weight == other.weight && token < other.token);
  }
};

// Tokens among which all are that can be kept: those above some share of the peak's weight, which is 1, lowered until there
// are k of them, or with top-p alone until they hold more than its part of the total.
inline void find_candidates(const std::vector<double>& weights, double total, int64_t top_k, double top_p,
                            std::vector<Candidate>& found) {
  for (double share = kFirstShare;; share *= kNextShare) {
    const bool is_last = share < kLeastShare;
    double mass = 0;
    found.clear();
    for (size_t v = 0; v < weights.size(); ++v)
      if (is_last ? weights[v] > 0 : weights[v] >= share) found.push_back({weights[v], static_cast<int64_t>(v)}), mass += weights[v];
    const bool is_enough = top_k ? static_cast<int64_t>(found.size()) >= top_k : mass > (top_p + kSumsDiffer) * total;
    if (is_last || is_enough) return;
  }
}

// Zeroes all but the k heaviest, if k is not 0, and then all but the fewest, the heaviest first, that hold top-p of what is
// left, one at least. `total` is the sum of the weights.
inline void truncate(std::vector<double>& weights, double total, int64_t top_k, double top_p) {
  static thread_local std::vector<Candidate> kept;
  find_candidates(weights, total, top_k, top_p, kept);
  if (top_k && top_k < static_cast<int64_t>(kept.size())) {
    std::nth_element(kept.begin(), kept.begin() + top_k, kept.end());
    kept.resize(top_k);
  }
  if (top_p < 1) {
    std::sort(kept.begin(), kept.end());
    double left = total, before = 0;
    if (top_k) {
      left = 0;
      for (const Candidate& each : kept) left += each.weight;
    }
    size_t count = 0;
    while (count < kept.size() && (!count || before < top_p * left)) before += kept[count++].weight;
    kept.resize(count);
  }
  std::fill(weights.begin(), weights.end(), 0.0);
  for (const Candidate& each : kept) weights[each.token] = each.weight;
}

}  // namespace nvium
