// What Python calls, once for every precision of caches, T.

#include "step.h"

#define NVIUM_FUNCTIONS(T, type)                                               \
  extern "C" void run_##type(const nvium::Model<T>* model, nvium::Call* call) { \
    nvium::Calls<T>(*model, *call).run();                                      \
  }

NVIUM_FUNCTIONS(double, float64)
NVIUM_FUNCTIONS(float, float32)
NVIUM_FUNCTIONS(nvium::BFloat16, bfloat16)

// The width that matrices have to be stored for.
extern "C" int64_t vector_bytes() { return nvium::kVectorBytes; }

// Whether calls may ask for tiles.
extern "C" int64_t has_tiles() { return nvium::has_tiles(); }

// logits [R, V]; what is asked of each row, and its token.
extern "C" void draw(const double* logits, int64_t num_rows, int64_t vocab_size, const nvium::DrawRequest* asked,
                     int64_t* tokens) {
  std::vector<double> weights;
  for (int64_t r = 0; r < num_rows; ++r)
    tokens[r] = nvium::draw_row(logits + r * vocab_size, vocab_size, asked[r], weights);
}

// keys [R, 2]: seed and choice of each row; its position. out [2, N, room], of which R are written: for tokens behind
// each block, and for routing there.
extern "C" void uniforms(const int64_t* keys, const int64_t* positions, int64_t num_rows, int64_t num_blocks,
                         double* out, int64_t room) {
  for (const char* purpose : {"token", "route"})
    for (int64_t block = 0; block < num_blocks; ++block, out += room)
      for (int64_t r = 0; r < num_rows; ++r)
        out[r] = nvium::uniform(keys[2 * r], keys[2 * r + 1], positions[r], block, purpose);
}
