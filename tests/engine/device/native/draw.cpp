// Draws and random numbers, for test_draw.py.

#include "draw.h"

// logits [R, V], draws [R], uniforms [R] -> tokens [R]
extern "C" void draw(const double* logits, int64_t num_rows, int64_t vocab_size, const nvium::Draw* draws,
                     const double* uniforms, int64_t* tokens) {
  for (int64_t r = 0; r < num_rows; ++r)
    tokens[r] = nvium::draw_row(logits + r * vocab_size, vocab_size, draws[r], uniforms[r]);
}

extern "C" double uniform(int64_t seed, int64_t choice, int64_t position, int64_t exit, int64_t purpose) {
  return nvium::uniform(seed, choice, position, exit, static_cast<nvium::Purpose>(purpose));
}
