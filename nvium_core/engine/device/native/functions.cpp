// The functions that Python calls.

#include "step.h"

#define NVIUM_RUN(T, type)                                                     \
  extern "C" void run_##type(const nvium::Model<T>* model, nvium::Call* call) { \
    nvium::StepRun<T>(*model, *call).run();                                    \
  }

NVIUM_RUN(double, float64)
NVIUM_RUN(float, float32)
NVIUM_RUN(nvium::BFloat16, bfloat16)

// Return the width of this build's vectors. Matrices must be packed for this width.
extern "C" int64_t vector_bytes() { return nvium::kVectorBytes; }

extern "C" int64_t has_tiles() { return nvium::has_tiles(); }

// Compute uniforms of R rows, for drawing a token after each of the N blocks, then for routing. They are written to the
// first R columns of out [2, N, stride]. keys [R, 2]: each row's seed and choice. positions [R].
extern "C" void uniforms(const int64_t* keys, const int64_t* positions, int64_t num_rows, int64_t num_blocks,
                         double* out, int64_t stride) {
  for (const char* purpose : {"token", "route"})
    for (int64_t block = 0; block < num_blocks; ++block, out += stride)
      for (int64_t r = 0; r < num_rows; ++r)
        out[r] = nvium::uniform(keys[2 * r], keys[2 * r + 1], positions[r], block, purpose);
}
