// Tokens drawn by the inverse CDF, as nvium_core/engine/sampling.py does without top-k and top-p.
//
// Shapes: R rows, V vocabulary.

#include <vector>

#include "arithmetic.h"

namespace nvium {
namespace {

constexpr int64_t kNoToken = -1;

// The first token whose cumulative weight exceeds uniform · total, weights being e^((x - peak) / temperature).
int64_t draw_row(const double* logits, int64_t vocab_size, double temperature, double log_min_p, double uniform,
                 std::vector<double>& weights) {
  const double peak = *std::max_element(logits, logits + vocab_size);
  for (int64_t v = 0; v < vocab_size; ++v) {
    const double below = (logits[v] - peak) / temperature;
    weights[v] = below < log_min_p ? -INFINITY : below;
  }
  exponentials(weights.data(), 0.0, vocab_size);
  double total = 0;
  for (int64_t v = 0; v < vocab_size; ++v) total += weights[v];
  if (!std::isfinite(total)) return kNoToken;
  double mass = 0;
  int64_t token = kNoToken;
  for (int64_t v = 0; v < vocab_size && mass <= uniform * total; ++v)
    if (weights[v] > 0) mass += weights[token = v];
  return token;
}

}  // namespace
}  // namespace nvium

// logits [R, V]; temperature, log min-p, uniform and token of each row.
extern "C" void draw(const double* logits, int64_t num_rows, int64_t vocab_size, const double* temperature,
                     const double* log_min_p, const double* uniform, int64_t* token) {
  std::vector<double> weights(vocab_size);
  for (int64_t r = 0; r < num_rows; ++r)
    token[r] = nvium::draw_row(logits + r * vocab_size, vocab_size, temperature[r], log_min_p[r], uniform[r], weights);
}
