// log π_mix of tokens, the most probable ones, and all p_k, for rows that have passed every block.
//
// Shapes: E exits, R rows, D width, V vocabulary, K most probable tokens.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "exits.h"

namespace nvium {

constexpr int64_t kScoredAtOnce = 32;  // rows of the head's product

// What is asked of rows, and what comes of it: log-probabilities [R] of the targets, the best tokens [R, K] with theirs, and
// p_k [R, E].
struct Scores {
  int64_t num_rows;
  const int64_t *slots, *targets, *are_original;  // the last: by the last exit alone
  int64_t num_top;
  double* logprobs;
  int64_t* top_tokens;
  double* top_logprobs;
  double* exit_probabilities;
};

// log Σ e^x; overwrites x.
template <typename A> double log_sum_exp(A* x, int64_t length) {
  const A peak = largest(x, length);
  return peak + std::log(static_cast<double>(exponentials(x, peak, length)));
}

// Of one row: log π_mix of any token, from the logits [E, V] and what is to be added to each exit's.
template <typename A> class Mixture {
 public:
  Mixture(const A* logits, const double* shifts, int64_t num_exits, int64_t vocab_size)
      : logits_(logits), shifts_(shifts), num_exits_(num_exits), vocab_size_(vocab_size) {}

  // The largest exit's share of any of these tokens: at least this and at most log E more is what the mixture gives.
  double most(int64_t token, int64_t count = 1) const {
    double most = -INFINITY;
    for (int64_t e = 0; e < num_exits_; ++e)
      most = std::max(most, largest(logits_ + e * vocab_size_ + token, count) + shifts_[e]);
    return most;
  }

  double log_probability(int64_t token) const {
    const double peak = most(token);
    if (std::isinf(peak)) return peak;
    double sum = 0;
    for (int64_t e = 0; e < num_exits_; ++e) sum += std::exp(share(e, token) - peak);
    return peak + std::log(sum);
  }

  // The most probable ones, best first; of equals the lowest id.
  std::vector<std::pair<double, int64_t>> top(int64_t count) const {
    using Candidate = std::pair<double, int64_t>;
    const auto before = [](const Candidate& a, const Candidate& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    const double slack = std::log(static_cast<double>(num_exits_));
    std::vector<Candidate> heap;  // the worst of them in front
    const auto is_full = [&] { return static_cast<int64_t>(heap.size()) == count; };
    const auto is_beaten = [&](int64_t token, int64_t length) {
      return is_full() && most(token, length) + slack < heap.front().first;
    };
    each_block(count ? vocab_size_ : 0, [&](int64_t first, int64_t length) {
      if (is_beaten(first, length)) return;
      for (int64_t token = first; token < first + length; ++token) {
        if (is_beaten(token, 1)) continue;
        const Candidate found{log_probability(token), token};
        if (is_full() && !before(found, heap.front())) continue;
        if (is_full()) std::pop_heap(heap.begin(), heap.end(), before), heap.pop_back();
        heap.push_back(found), std::push_heap(heap.begin(), heap.end(), before);
      }
    });
    std::sort_heap(heap.begin(), heap.end(), before);
    return heap;
  }

 private:
  double share(int64_t e, int64_t token) const { return logits_[e * vocab_size_ + token] + shifts_[e]; }

  const A* logits_;
  const double* shifts_;
  int64_t num_exits_, vocab_size_;
};

// log p of each exit [R, E], and adapted states [R, E, D], from the states behind every block [E, S, D].
template <typename T>
void evaluate_exits(const ExitShape& shape, const Exit<Accumulator<T>>* const* exits, int64_t num_exits, const T* states,
                    int64_t num_slots, const int64_t* slots, int64_t num_rows, double* log_p, Accumulator<T>* outputs,
                    int num_threads) {
  using A = Accumulator<T>;
  const int64_t width = shape.width;
  std::vector<double> log_w(2 * num_rows), reached(num_rows);
  for (int64_t e = 0; e < num_exits; ++e) {
    std::vector<A> x(num_rows * width);
    route<T>(shape, *exits[e], states + e * num_slots * width, slots, num_rows, x.data(), log_w.data(), num_threads);
    adapt<A>(shape, *exits[e], x, num_threads);
    for (int64_t r = 0; r < num_rows; ++r) {
      log_p[r * num_exits + e] = reached[r] + log_w[2 * r + 1];
      reached[r] += log_w[2 * r];
      std::copy_n(&x[r * width], width, outputs + (r * num_exits + e) * width);
    }
  }
}

template <typename T>
void score(const ExitShape& shape, const Exit<Accumulator<T>>* const* exits, int64_t num_exits, const T* states,
           int64_t num_slots, const Scores& asked, int num_threads) {
  using A = Accumulator<T>;
  const int64_t vocab = shape.vocab_size, at_once = std::max(int64_t{1}, kScoredAtOnce / num_exits);
  for (int64_t first = 0; first < asked.num_rows; first += at_once) {
    const int64_t num_rows = std::min(at_once, asked.num_rows - first), of_exits = num_rows * num_exits;
    std::vector<double> log_p(of_exits);
    std::vector<A> outputs(of_exits * shape.width);
    static thread_local std::vector<A> logits;
    logits.resize(of_exits * vocab);
    A* const all_logits = logits.data();
    evaluate_exits<T>(shape, exits, num_exits, states, num_slots, asked.slots + first, num_rows, log_p.data(),
                      outputs.data(), num_threads);
    for (int64_t r = 0; r < num_rows; ++r)
      if (asked.are_original[first + r]) {
        std::fill_n(&log_p[r * num_exits], num_exits - 1, -INFINITY);
        log_p[(r + 1) * num_exits - 1] = 0;
      }
    linear<A>(outputs, exits[0]->head, nullptr, of_exits, shape.width, vocab, all_logits, num_threads);
    Team::shared().run(num_threads, num_rows, [&](int64_t begin, int64_t end) {
      std::vector<A> scratch(vocab);
      std::vector<double> shifts(num_exits);
      for (int64_t r = begin; r < end; ++r) {
        const A* own = all_logits + r * num_exits * vocab;
        for (int64_t e = 0; e < num_exits; ++e) {
          std::copy_n(own + e * vocab, vocab, scratch.data());
          const double log_p_k = log_p[r * num_exits + e];
          shifts[e] = log_p_k - log_sum_exp(scratch.data(), vocab);
          asked.exit_probabilities[(first + r) * num_exits + e] = std::exp(log_p_k);
        }
        const Mixture<A> mixture(own, shifts.data(), num_exits, vocab);
        asked.logprobs[first + r] = mixture.log_probability(asked.targets[first + r]);
        int64_t at = (first + r) * asked.num_top;
        for (const auto& [logprob, token] : mixture.top(asked.num_top))
          asked.top_logprobs[at] = logprob, asked.top_tokens[at++] = token;
      }
    });
  }
}

}  // namespace nvium
