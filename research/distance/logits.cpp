// The logits that the engine's kernels compute, which the engine itself never returns.

#include <vector>

#include "exits.h"

// Write the logits [rows, V] of rows that have passed the last block of a model with one exit.
template <typename T>
void logits(const nvium::Model<T>& model, const int64_t* slots, int64_t num_rows, float* out) {
  std::vector<double> log_p(num_rows), log_remaining(num_rows);
  std::vector<float> outputs(num_rows * model.width);
  nvium::evaluate_exits(model, 1, slots, num_rows, log_p.data(), log_remaining.data(), outputs.data());
  nvium::head_logits(model, outputs, out);
}

extern "C" void logits_float32(const nvium::Model<float>* model, const int64_t* slots, int64_t num_rows, float* out) {
  logits(*model, slots, num_rows, out);
}

extern "C" void logits_bfloat16(const nvium::Model<nvium::BFloat16>* model, const int64_t* slots, int64_t num_rows,
                                   float* out) {
  logits(*model, slots, num_rows, out);
}
