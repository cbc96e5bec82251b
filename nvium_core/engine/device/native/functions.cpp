// The functions that Python calls.

#include <cerrno>
#include <system_error>

#include "pack.h"
#include "step.h"

// Return f(), or minus the system's number of an error if memory runs out or a thread cannot start.
template <typename F> int64_t caught(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  } catch (const std::system_error& error) {
    return -error.code().value();
  }
}

#define NVIUM_RUN(T, type)                                                        \
  extern "C" int64_t run_##type(const nvium::Model<T>* model, nvium::Call* call) { \
    return caught([&] { return nvium::StepRun<T>(*model, *call).run(), 0; });      \
  }

NVIUM_RUN(double, float64)
NVIUM_RUN(float, float32)
NVIUM_RUN(nvium::BFloat16, bfloat16)

// Return the bytes of a packed matrix.
extern "C" int64_t packed_bytes(int64_t kind, int64_t num_rows, int64_t length) {
  return nvium::packed_bytes(kind, num_rows, length);
}

// Pack rows into the matrix `out`. Return 0 if a number or scale is not finite, else 1.
extern "C" int64_t pack(const nvium::StoredRows* rows, int64_t num_threads, char* out) {
  return caught([&] { return nvium::pack(*rows, static_cast<int>(num_threads), out); });
}

// Quantize rows of floats to this type of blocks.
extern "C" int64_t quantize(const nvium::StoredRows* rows, int64_t num_threads, int64_t kind, char* out) {
  return caught([&] { return nvium::quantize(*rows, static_cast<int>(num_threads), kind, out), 0; });
}

extern "C" int64_t has_tiles() { return nvium::has_tiles(); }

// Return how many nanoseconds calls have run alone because other threads of the pool were held up.
extern "C" int64_t alone_nanoseconds() { return nvium::ThreadPool::shared().alone_nanoseconds(); }
