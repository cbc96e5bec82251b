// Rows times a matrix, a part of it for each thread, and the norm before.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace nvium {

// One of the parts that work is divided into: even, but for whole multiples of `grain`.
struct Part {
  int64_t begin, end;

  Part(int64_t count, int64_t grain, int number, int of) {
    const int64_t pieces = (count + grain - 1) / grain;
    begin = std::min(count, pieces * number / of * grain);
    end = std::min(count, pieces * (number + 1) / of * grain);
  }
};

// R rows times as many rows of the matrix as a vector has lanes.
template <int R, typename A, typename T, typename Use>
void project_tile(const A* x, const T* weight, int64_t length, int64_t row, int64_t n, Use&& use) {
  constexpr int N = lanes<A> / R;
  for (const int64_t end = n + lanes<A>; n < end; n += N) {
    const Vector<A> out = products<R>(x + row * length, weight + n * length, length, length);
    for (int i = 0; i < R * N; ++i) use(row + i / N, n + i % N, out[i]);
  }
}

// Σ_d x[r, d] W[n, d] for n of a part; `use` gets (r, n, product).
template <typename A, typename T, typename Use>
void project(const A* x, const T* weight, int64_t num_rows, int64_t length, Part part, Use&& use) {
  int64_t n = part.begin;
  for (; n + lanes<A> <= part.end; n += lanes<A>) {
    int64_t row = 0;
    for (; row + 4 <= num_rows; row += 4) project_tile<4>(x, weight, length, row, n, use);
    for (; row + 2 <= num_rows; row += 2) project_tile<2>(x, weight, length, row, n, use);
    for (; row < num_rows; ++row) project_tile<1>(x, weight, length, row, n, use);
  }
  for (; n < part.end; ++n)
    for (int64_t r = 0; r < num_rows; ++r) use(r, n, dot(x + r * length, weight + n * length, length));
}

template <typename A, typename T> void rms_norm(const A* h, const T* weight, int64_t width, A eps, A* x) {
  const A scale = 1 / std::sqrt(dot(h, h, width) / width + eps);
  for (int64_t d = 0; d < width; ++d) x[d] = h[d] * scale * static_cast<A>(weight[d]);
}

}  // namespace nvium
