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
