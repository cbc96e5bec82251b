#include "draw.h"

// logits [R, V]; what is asked of each row, and its token.
extern "C" void draw(const double* logits, int64_t num_rows, int64_t vocab_size, const nvium::Draw* asked,
                     int64_t* tokens) {
  std::vector<double> weights;
  for (int64_t r = 0; r < num_rows; ++r)
    tokens[r] = nvium::draw_row(logits + r * vocab_size, vocab_size, asked[r], weights);
}
