// Multiplies rows by a packed matrix [N, length]. Also has RMSNorm.
//
// A matrix is packed for the vector width of one build. A vector interleaves `lanes` rows of the matrix element by
// element, so that each lane sums one row. A panel is up to kPanelVectors vectors, interleaved step by step (a step is
// one or two elements), so that memory is read in order. The last vector is padded with zeros.
#pragma once

#include "tiles.h"

namespace nvium {

enum Format : int64_t { kFloat64, kFloat32, kBFloat16, kQ8, kQ4, kQ4WithMin, kQ4K, kQ6K, kQ8WithMin };

struct Matrix {
  int64_t kind;
  const char* data;

  explicit operator bool() const { return data; }
};

template <typename A> constexpr int kPanelVectors = std::is_same_v<A, float> ? 4 : 1;
// Number of vectors to multiply at once if there are many rows.
template <typename A> constexpr int kVectorsAtOnce = std::min(kPanelVectors<A>, kRegisters == 32 ? 4 : 2);
// Maximum rows to multiply by K vectors at once, few enough that all sums fit in registers.
template <typename A, int K>
constexpr int kMaxRows = std::is_same_v<A, float> ? (kRegisters == 32 ? 24 : 12) / std::max(K, 2) : 3;

constexpr int64_t kPrefetchBytes = 4096;  // one memory page ahead: hardware prefetchers stop at the end of a page

// A panel's first byte, its number of vectors, and the first vector to use.
struct Panel {
  const char* data;
  int64_t vectors, first;
};

// Add the dot products of R rows of x and K vectors to `sums`. The order of the additions does not depend on R or K, so
// a row's results do not depend on the batch. If `panel.first` is 0, prefetch all vectors of the panel.
template <typename F, int R, int K, typename A>
inline void add_products(const A* x, int64_t length, const char* steps, const Panel& panel, int64_t count,
                         Vector<A> (&sums)[K][R]) {
  const int64_t stride = panel.vectors * F::kBytes, prefetched = panel.first ? 0 : stride;
  const char* at = steps + panel.first * F::kBytes;
  Vector<A> own[K][R];  // a local copy stays in registers; `sums` would be stored to memory at every step
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r) own[k][r] = sums[k][r];
  for (int64_t s = 0; s < count; ++s, at += stride, x += F::kStep) {
    for (int64_t b = 0; b < prefetched; b += 64) __builtin_prefetch(at + b + kPrefetchBytes);
    for (int e = 0; e < F::kStep; ++e) {
      Vector<A> w[K];
      for (int k = 0; k < K; ++k) w[k] = F::unpack(at + k * F::kBytes, e);
      for (int r = 0; r < R; ++r)
        for (int k = 0; k < K; ++k) own[k][r] += w[k] * x[r * length + e];
    }
  }
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r) sums[k][r] = own[k][r];
}

template <typename F, int R, int K, typename A>
void panel_products(const A* x, int64_t length, const Panel& panel, Vector<A> (&sums)[K][R]) {
  const int64_t count = length / F::kStep;
  add_products<F>(x, length, panel.data, panel, count, sums);
  if (length % F::kStep == 0) return;
  for (int k = 0; k < K; ++k) {
    const Vector<A> w = F::unpack(panel.data + (count * panel.vectors + panel.first + k) * F::kBytes, 0);
    for (int r = 0; r < R; ++r) sums[k][r] += w * x[r * length + length - 1];
  }
}

template <typename F, int R, int K, typename A>
void grouped_panel_products(const A* x, int64_t length, const Panel& panel, Vector<A> (&sums)[K][R]) {
  constexpr int64_t scale_bytes = F::kScaleBytes, all_scales = F::kScales * scale_bytes, steps = F::kGroup / F::kStep;
  const char* group = panel.data;
  for (int64_t i = 0; i < length; i += F::kGroup, group += panel.vectors * (all_scales + steps * F::kBytes)) {
    Vector<A> own[K][R] = {};
    add_products<F>(x + i, length, group + panel.vectors * all_scales, panel, steps, own);
    [[maybe_unused]] Vector<A> totals[R];
    if constexpr (F::kScales == 2)
      for (int r = 0; r < R; ++r) totals[r] = total_everywhere<A>(x + r * length + i, F::kGroup);
    for (int k = 0; k < K; ++k) {
      const char* at = group + (panel.first + k) * scale_bytes;
      const Vector<A> scale = F::scale(at);
      for (int r = 0; r < R; ++r) sums[k][r] += scale * own[k][r];
      if constexpr (F::kScales == 2) {
        const Vector<A> offset = F::scale(at + panel.vectors * scale_bytes) + scale * 8;
        for (int r = 0; r < R; ++r) sums[k][r] += offset * totals[r];
      }
    }
  }
}

// Multiply R rows by K vectors of a panel. Call use(row, vector, products) with the vector's number in the panel.
template <typename F, int R, int K, typename A, typename Use>
void multiply(const A* x, int64_t length, const Panel& panel, Use&& use) {
  Vector<A> sums[K][R] = {};
  if constexpr (F::kGroup)
    grouped_panel_products<F>(x, length, panel, sums);
  else
    panel_products<F>(x, length, panel, sums);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) use(r, panel.first + k, sums[k][r]);
}

// `multiply` for any number of rows from 1 to R.
template <typename F, int R, int K, typename A, typename Use>
void multiply_up_to(int64_t num_rows, const A* x, int64_t length, const Panel& panel, Use&& use) {
  if constexpr (R > 1)
    if (num_rows < R) return multiply_up_to<F, R - 1, K>(num_rows, x, length, panel, use);
  multiply<F, R, K>(x, length, panel, use);
}

// `multiply` for any number of rows, in parts of equal size.
template <typename F, int K, typename A, typename Use>
void multiply_all(int64_t num_rows, const A* x, int64_t length, const Panel& panel, Use&& use) {
  constexpr int64_t most = kMaxRows<A, K>;
  const int64_t passes = (num_rows + most - 1) / most, rows_per_pass = (num_rows + passes - 1) / passes;
  for (int64_t row = 0; row < num_rows; row += rows_per_pass)
    multiply_up_to<F, most, K>(std::min(rows_per_pass, num_rows - row), x + row * length, length, panel,
                               [&](int r, int64_t vector, const Vector<A>& products) { use(row + r, vector, products); });
}

// With few rows, multiply all vectors of the panel at once, which gives the processor enough independent sums. With
// many rows, multiply fewer vectors at once, so that the sums fit in registers.
template <typename F, typename A, typename Use>
void multiply_panel(int64_t num_rows, const A* x, int64_t length, Panel panel, Use&& use) {
  constexpr int all = kPanelVectors<A>, some = kVectorsAtOnce<A>;
  while (panel.first < panel.vectors) {
    const int64_t left = panel.vectors - panel.first;
    if (left >= all && num_rows <= kMaxRows<A, all>)
      multiply_all<F, all>(num_rows, x, length, panel, use), panel.first += all;
    else if (left >= some)
      multiply_all<F, some>(num_rows, x, length, panel, use), panel.first += some;
    else
      multiply_all<F, 1>(num_rows, x, length, panel, use), panel.first += 1;
  }
}

// Return the bytes of one packed vector.
template <typename F> constexpr int64_t packed_bytes(int64_t length) {
  const int64_t scales = F::kScales * F::kScaleBytes, group = F::kGroup ? F::kGroup : F::kStep;
  return (length + group - 1) / group * (scales + group / F::kStep * F::kBytes);
}

template <typename A> constexpr int64_t panel_rows = kPanelVectors<A> * lanes<A>;
template <typename A> constexpr int64_t num_panels(int64_t count) { return (count + panel_rows<A> - 1) / panel_rows<A>; }

// Rows [R, length] to multiply. `tiled`: the same rows as AMX tiles, or null if tiles are not used.
template <typename A> struct Operand {
  const A* x;
  int64_t num_rows, length;
  const TiledRows* tiled = nullptr;
};

template <typename F, typename A, typename Use>
void project_as(const Operand<A>& in, const char* data, int64_t count, int64_t begin, int64_t end, Use&& use) {
  const int64_t vectors = (count + lanes<A> - 1) / lanes<A>;
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t before = panel * kPanelVectors<A>, here = std::min<int64_t>(kPanelVectors<A>, vectors - before);
    const char* at = data + before * packed_bytes<F>(in.length);
    const auto use_vector = [&](int64_t r, int64_t vector, const Vector<A>& products) {
      const int64_t n = (before + vector) * lanes<A>;
      use(r, n, reinterpret_cast<const A*>(&products), std::min(lanes<A>, count - n));
    };
    if constexpr (kMayTile<A> && F::kGroup % kTileDepth == 0)
      if (in.tiled) {
        multiply_tiled<F>(*in.tiled, in.num_rows, in.length, at, here, use_vector);
        continue;
      }
    multiply_panel<F>(in.num_rows, in.x, in.length, {at, here, 0}, use_vector);
  }
}

// Compute Σ_d x[r, d] W[n, d] for the rows n of W in panels [begin, end). Call use(r, n, products, count) with the
// products of rows n … n + count - 1 of W.
template <typename A, typename Use>
void project(const Operand<A>& in, const Matrix& matrix, int64_t count, int64_t begin, int64_t end, Use&& use) {
  const auto as = [&](auto format) { project_as<decltype(format)>(in, matrix.data, count, begin, end, use); };
  if constexpr (std::is_same_v<A, float>) {
    if (matrix.kind == kQ8) return as(Q8{});
    if (matrix.kind == kQ4) return as(Q4{});
    if (matrix.kind == kQ4WithMin) return as(Q4WithMin{});
    if (matrix.kind == kQ4K) return as(Q4K{});
    if (matrix.kind == kQ6K) return as(Q6K{});
    if (matrix.kind == kQ8WithMin) return as(Q8WithMin{});
    if (matrix.kind == kBFloat16) return as(Pairs{});
  }
  as(Plain<A>{});
}

// Write the results of `project` to y [R, N].
template <typename A>
void project_into(const Operand<A>& in, const Matrix& matrix, int64_t count, int64_t begin, int64_t end, A* y) {
  project(in, matrix, count, begin, end, [&](int64_t r, int64_t n, const A* products, int64_t num) {
    std::copy_n(products, num, y + r * count + n);
  });
}

template <typename A> void rms_norm(const A* h, const A* weight, int64_t width, A eps, A* x) {
  const A scale = 1 / std::sqrt(dot(h, h, width) / width + eps);
  for (int64_t d = 0; d < width; ++d) x[d] = h[d] * scale * weight[d];
}

}  // namespace nvium
