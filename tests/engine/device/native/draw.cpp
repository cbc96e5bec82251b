// The draws of draw.h, for test_draw.py.

#include "draw.h"

// logits [R, V], requests [R] -> tokens [R]
extern "C" void draw(const double* logits, int64_t num_rows, int64_t vocab_size, const nvium::DrawRequest* requests,
                     int64_t* tokens) {
  for (int64_t r = 0; r < num_rows; ++r)
    tokens[r] = nvium::draw_row(logits + r * vocab_size, vocab_size, requests[r]);
}
