// Which tokens top-k and top-p keep, as `truncate_all` of nvium_core/engine/device/sampling.py says, without a sort of all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace nvium {

constexpr double kFirstShare = 0x1p-6, kNextShare = 0x1p-4;  // of the peak's weight, that tokens are looked for above
constexpr double kLeastShare = 0x1p-40;                      // below which all are looked at
constexpr double kSumsDiffer = 1e-9;                         // more than the order of a sum can change of it
constexpr size_t kFew = 32;                                  // that are sorted at once

struct Candidate {
  double weight;
  int64_t token;
  // The heavier one, and of equal ones that of the lower id.
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

// The k heaviest, in one pass: a token has to be heavier than the k-th of those before it, which win where it is not.
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

// Some that hold more than top-p of the total, none of which is lighter than another token: those above a share of the
// peak's weight, which is 1, that is lowered until they do.
inline void find_mass(const std::vector<double>& weights, double total, double top_p, Candidates& found) {
  const double wanted = top_p + kSumsDiffer;
  for (double share = kFirstShare;; share *= kNextShare) {
    const bool takes_all = wanted >= 1 || share < kLeastShare;
    found.clear();
    for (size_t v = 0; v < weights.size(); ++v)
      if (takes_all ? weights[v] > 0 : weights[v] >= share) found.push_back({weights[v], static_cast<int64_t>(v)});
    if (takes_all || mass_of(found, 0, found.size()) > wanted * total) return;
  }
}

// Puts the fewest in front that hold this mass, the heaviest being taken first, and says how many they are: one at least. Each
// turn halves those among which the last one is.
inline size_t fewest_with(Candidates& found, double mass) {
  size_t begin = 0, end = found.size();
  double before = 0;
  while (end - begin > kFew) {
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

// Zeroes all but the k heaviest, if k is not 0, and then all but the fewest, the heaviest first, that hold top-p of what is
// left, one at least. `total` is the sum of the weights.
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
