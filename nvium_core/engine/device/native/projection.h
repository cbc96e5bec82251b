// Rows times a matrix, a part of it for each thread, and the norm before.
//
// A matrix [N, length] is stored in panels of as many of its rows as a vector has lanes, element by element: what belongs
// to one vector lies side by side, memory is read in order, and no sum ever crosses lanes. The last panel is filled up
// with zeros.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace nvium {

// One of the parts that work is divided into, as even as can be.
struct Part {
  int64_t begin, end;

  Part(int64_t count, int number, int of) : begin(count * number / of), end(count * (number + 1) / of) {}
};

template <typename A> constexpr int64_t num_panels(int64_t count) { return (count + lanes<A> - 1) / lanes<A>; }

constexpr int64_t kAhead = 4096;  // bytes, so that the next page of memory is on its way: no prefetcher goes beyond one

// Of R rows x [R, length] and a panel: all products. Each is summed in the same order whatever R is, so a row's results
// do not depend on which rows it is taken with.
template <int R, typename A, typename W>
void panel_products(const A* x, const W* panel, int64_t length, Vector<A>* out) {
  Vector<A> even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = Vector<A>{};
  int64_t i = 0;
  for (; i + 2 <= length; i += 2) {
    __builtin_prefetch(reinterpret_cast<const char*>(panel + i * lanes<A>) + kAhead);
    const Vector<A> first = load(panel + i * lanes<A>), second = load(panel + (i + 1) * lanes<A>);
    for (int r = 0; r < R; ++r) {
      even[r] += first * x[r * length + i];
      odd[r] += second * x[r * length + i + 1];
    }
  }
  for (int r = 0; r < R; ++r) out[r] = even[r] + odd[r];
  if (i < length)
    for (int r = 0; r < R; ++r) out[r] += load(panel + i * lanes<A>) * x[r * length + i];
}

// Rows whose sums fit into the registers.
#ifdef __AVX512F__
constexpr int64_t kMostRows = 12;
#else
constexpr int64_t kMostRows = 3;
#endif

// The same for any number of rows up to that.
template <int R = kMostRows, typename A, typename W>
void some_panel_products(int64_t num_rows, const A* x, const W* panel, int64_t length, Vector<A>* out) {
  if constexpr (R > 1)
    if (num_rows < R) return some_panel_products<R - 1>(num_rows, x, panel, length, out);
  panel_products<R>(x, panel, length, out);
}

// Σ_d x[r, d] W[n, d] for the n of a part of the matrix's panels; `use` gets (r, n, products of n and those after it,
// how many).
template <typename A, typename W, typename Use>
void project(const A* x, const W* matrix, int64_t num_rows, int64_t length, int64_t count, Part panels, Use&& use) {
  Vector<A> out[kMostRows];
  const int64_t passes = (num_rows + kMostRows - 1) / kMostRows, most = (num_rows + passes - 1) / passes;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t n = panel * lanes<A>;
    for (int64_t row = 0; row < num_rows; row += most) {
      const int64_t taken = std::min(most, num_rows - row);
      some_panel_products(taken, x + row * length, matrix + n * length, length, out);
      for (int64_t r = 0; r < taken; ++r)
        use(row + r, n, reinterpret_cast<const A*>(&out[r]), std::min(lanes<A>, count - n));
    }
  }
}

// The same, into y [R, N].
template <typename A, typename W>
void project_into(const A* x, const W* matrix, int64_t num_rows, int64_t length, int64_t count, Part panels, A* y) {
  project(x, matrix, num_rows, length, count, panels, [&](int64_t r, int64_t n, const A* products, int64_t num) {
    std::copy_n(products, num, y + r * count + n);
  });
}

template <typename A, typename W> void rms_norm(const A* h, const W* weight, int64_t width, A eps, A* x) {
  const A scale = 1 / std::sqrt(dot(h, h, width) / width + eps);
  for (int64_t d = 0; d < width; ++d) x[d] = h[d] * scale * static_cast<A>(weight[d]);
}

}  // namespace nvium
