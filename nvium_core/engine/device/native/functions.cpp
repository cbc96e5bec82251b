// What Python calls, once for every precision of caches, T.

#include "score.h"
#include "step.h"

#define NVIUM_FUNCTIONS(T, type)                                                                                      \
  extern "C" int64_t run_##type(nvium::Step* steps, int64_t count, bool goes_on_anyway, const void* tensors,          \
                                int32_t threads) {                                                                    \
    return nvium::run<T>(steps, count, goes_on_anyway, static_cast<const nvium::Tensors<T>*>(tensors), threads);      \
  }                                                                                                                   \
  extern "C" void route_##type(const nvium::ExitShape* shape, const void* weights, const void* states,                \
                               const int64_t* slots, int64_t num_rows, void* x, double* log_w, int32_t num_threads) { \
    using A = nvium::Accumulator<T>;                                                                                  \
    nvium::route<T>(*shape, *static_cast<const nvium::Exit<A>*>(weights), static_cast<const T*>(states), slots,       \
                    num_rows, static_cast<A*>(x), log_w, num_threads);                                                \
  }                                                                                                                   \
  extern "C" void logits_##type(const nvium::ExitShape* shape, const void* weights, const void* x, void* out,         \
                                int64_t num_rows, int32_t num_threads) {                                              \
    using A = nvium::Accumulator<T>;                                                                                  \
    nvium::logits<A>(*shape, *static_cast<const nvium::Exit<A>*>(weights), static_cast<const A*>(x),                  \
                     static_cast<A*>(out), num_rows, num_threads);                                                    \
  }                                                                                                                   \
  extern "C" void sample_##type(const nvium::ExitShape* shape, const void* weights, const void* x,                     \
                               const int64_t* rows, int64_t num_rows, const nvium::Draw* asked, int64_t* tokens,      \
                               int32_t num_threads) {                                                                 \
    using A = nvium::Accumulator<T>;                                                                                  \
    nvium::sample<A>(*shape, *static_cast<const nvium::Exit<A>*>(weights), static_cast<const A*>(x), rows, num_rows,   \
                    asked, tokens, num_threads);                                                                      \
  }                                                                                                                   \
  extern "C" void score_##type(const nvium::ExitShape* shape, const void* exits, int64_t num_exits,                   \
                               const void* states, int64_t num_slots, const nvium::Scores* asked,                     \
                               int32_t num_threads) {                                                                 \
    nvium::score<T>(*shape, static_cast<const nvium::Exit<nvium::Accumulator<T>>* const*>(exits), num_exits,          \
                    static_cast<const T*>(states), num_slots, *asked, num_threads);                                   \
  }

NVIUM_FUNCTIONS(double, float64)
NVIUM_FUNCTIONS(float, float32)
NVIUM_FUNCTIONS(nvium::BFloat16, bfloat16)

// The width that matrices have to be stored for.
extern "C" int64_t vector_bytes() { return nvium::kVectorBytes; }

// logits [R, V]; what is asked of each row, and its token.
extern "C" void draw(const double* logits, int64_t num_rows, int64_t vocab_size, const nvium::Draw* asked,
                     int64_t* tokens) {
  std::vector<double> weights;
  for (int64_t r = 0; r < num_rows; ++r)
    tokens[r] = nvium::draw_row(logits + r * vocab_size, vocab_size, asked[r], weights);
}

// keys [R, 2]: seed and choice of each row; its position. out [2, N, room], of which R are written: for tokens behind
// each block, and for routing there.
extern "C" void uniforms(const int64_t* keys, const int64_t* positions, int64_t num_rows, int64_t num_blocks,
                         double* out, int64_t room) {
  nvium::uniforms(keys, positions, num_rows, num_blocks, out, room);
}
