// Rows times a matrix [N, length], and the norm before.
//
// A matrix is packed for the vectors of one build: as many of its rows as a vector has lanes are interleaved, element by
// element, and no sum ever crosses lanes. Up to kAcross such vectors make a panel, interleaved again at every step of one
// or two elements, so that memory is read in order. The last vector is padded with zeros.
#pragma once

#include "arithmetic.h"

namespace nvium {

enum Kind : int64_t { kFloat64, kFloat32, kBFloat16, kQ8, kQ4 };

struct Matrix {
  int64_t kind;
  const char* data;

  explicit operator bool() const { return data; }
};

// Formats: how a step of one vector is unpacked. `kGroup` elements share a scale, stored before them for each lane as an
// IEEE half; 0 for formats without scales.
template <typename A> struct Plain {
  static constexpr int64_t kLanes = lanes<A>;
  static constexpr int kStep = 1, kBytes = kVectorBytes, kGroup = 0;
  static Vector<A> unpack(const char* at, int) { return bits_at<Vector<A>>(at); }
};

template <typename A> struct Pairs;
template <> struct Pairs<float> {  // two of bfloat16 in 32 bits, the first in the lower half
  static constexpr int64_t kLanes = lanes<float>;
  static constexpr int kStep = 2, kBytes = kVectorBytes, kGroup = 0;
  static floats unpack(const char* at, int element) {
    const ints both = bits_at<ints>(at);
    return bits_as<floats>(element ? both & static_cast<int32_t>(0xFFFF0000) : both << 16);
  }
};

template <typename A, typename E> inline Vector<A> whole_numbers(const E* from) {
  if constexpr (std::is_same_v<A, float>)
    return __builtin_convertvector(widened(from), floats);
  else
    return __builtin_convertvector(__builtin_convertvector(bits_at<Narrow<E, A>>(from), Narrow<int32_t, A>), Vector<A>);
}

template <typename A> struct Bytes {
  static constexpr int64_t kLanes = lanes<A>;
  static constexpr int kStep = 1, kBytes = lanes<A>, kGroup = 32;
  static Vector<A> unpack(const char* at, int) { return whole_numbers<A>(reinterpret_cast<const int8_t*>(at)); }
};

template <typename A> struct Nibbles {  // of 4 bits less 8, the first in the lower half of a byte
  static constexpr int64_t kLanes = lanes<A>;
  static constexpr int kStep = 2, kBytes = lanes<A>, kGroup = 32;
  static Vector<A> unpack(const char* at, int element) {
    if constexpr (std::is_same_v<A, float>) {
      const ints both = widened(reinterpret_cast<const uint8_t*>(at));
      return __builtin_convertvector((element ? both >> 4 : both & 15) - 8, floats);
    } else {
      const auto both = bits_at<Narrow<uint8_t, A>>(at);
      return __builtin_convertvector(element ? both >> 4 : both & 15, Vector<A>) - 8;
    }
  }
};

// Finite halves, exactly: their bits as those of a float are 2^112 times too small.
template <typename A> inline Vector<A> halves(const char* at) {
  if constexpr (std::is_same_v<A, float>) {
    const ints bits = widened(reinterpret_cast<const uint16_t*>(at));
    const floats size = bits_as<floats>((bits & 0x7FFF) << 13) * 0x1p112f;
    return bits_as<floats>(bits_as<ints>(size) | (bits & 0x8000) << 16);
  } else {
    Vector<A> out{};
    for (int i = 0; i < lanes<A>; ++i) {
      uint16_t bits;
      std::memcpy(&bits, at + 2 * i, 2);
      const uint32_t scaled = (bits & 0x7FFF) << 13;
      out[i] = bits_as<float>(scaled) * 0x1p112f * (bits & 0x8000 ? -1 : 1);
    }
    return out;
  }
}

// Vectors of a panel; how many of them a product of many rows takes at once; and the rows whose sums then fit in registers.
// Float64 is for checks: one vector and a few rows.
template <typename A> constexpr int kAcross = std::is_same_v<A, float> ? 4 : 1;
template <typename A> constexpr int kAtOnce = std::min(kAcross<A>, kRegisters == 32 ? 4 : 2);
template <typename A, int K> constexpr int kMostRows = std::is_same_v<A, float> ? (kRegisters == 32 ? 24 : 12) / std::max(K, 2) : 3;

constexpr int64_t kAhead = 4096;  // bytes: prefetches the next page of memory, as hardware prefetchers stop at a page's end

// A panel's first byte, its number of vectors, and the first of them to use.
struct Panel {
  const char* data;
  int64_t vectors, first;
};

// Dot products of R rows of x and K vectors. The order of each sum does not depend on R and K, so a row's results do not
// depend on its company. The first to read a panel prefetches all of it.
template <typename F, int R, int K, typename A>
inline void add_products(const A* x, int64_t length, const char* steps, const Panel& panel, int64_t count,
                         Vector<A> (&sums)[K][R]) {
  const int64_t apart = panel.vectors * F::kBytes, fetched = panel.first ? 0 : apart;
  const char* at = steps + panel.first * F::kBytes;
  Vector<A> own[K][R];  // in registers: `sums` is the caller's memory, and would be stored at every step
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r) own[k][r] = sums[k][r];
  for (int64_t s = 0; s < count; ++s, at += apart, x += F::kStep) {
    for (int64_t b = 0; b < fetched; b += 64) __builtin_prefetch(at + b + kAhead);
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
  constexpr int64_t scale_bytes = 2 * lanes<A>, steps = F::kGroup / F::kStep;
  const char* group = panel.data;
  for (int64_t i = 0; i < length; i += F::kGroup, group += panel.vectors * (scale_bytes + steps * F::kBytes)) {
    Vector<A> own[K][R] = {};
    add_products<F>(x + i, length, group + panel.vectors * scale_bytes, panel, steps, own);
    for (int k = 0; k < K; ++k) {
      const Vector<A> scale = halves<A>(group + (panel.first + k) * scale_bytes);
      for (int r = 0; r < R; ++r) sums[k][r] += scale * own[k][r];
    }
  }
}

// Calls `use` with (row, vector of the panel, its products).
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

// The same for any number of rows up to R.
template <typename F, int R, int K, typename A, typename Use>
void multiply_up_to(int64_t num_rows, const A* x, int64_t length, const Panel& panel, Use&& use) {
  if constexpr (R > 1)
    if (num_rows < R) return multiply_up_to<F, R - 1, K>(num_rows, x, length, panel, use);
  multiply<F, R, K>(x, length, panel, use);
}

// Any number of rows, split evenly, by K vectors.
template <typename F, int K, typename A, typename Use>
void multiply_all(int64_t num_rows, const A* x, int64_t length, const Panel& panel, Use&& use) {
  constexpr int64_t most = kMostRows<A, K>;
  const int64_t passes = (num_rows + most - 1) / most, taken = (num_rows + passes - 1) / passes;
  for (int64_t row = 0; row < num_rows; row += taken)
    multiply_up_to<F, most, K>(std::min(taken, num_rows - row), x + row * length, length, panel,
                               [&](int r, int64_t vector, const Vector<A>& products) { use(row + r, vector, products); });
}

// Few rows take the whole panel at once, for enough independent sums to keep the processor busy; many rows take as many
// vectors as leave registers for their sums.
template <typename F, typename A, typename Use>
void multiply_panel(int64_t num_rows, const A* x, int64_t length, Panel panel, Use&& use) {
  constexpr int all = kAcross<A>, some = kAtOnce<A>;
  while (panel.first < panel.vectors) {
    const int64_t left = panel.vectors - panel.first;
    if (left >= all && num_rows <= kMostRows<A, all>)
      multiply_all<F, all>(num_rows, x, length, panel, use), panel.first += all;
    else if (left >= some)
      multiply_all<F, some>(num_rows, x, length, panel, use), panel.first += some;
    else
      multiply_all<F, 1>(num_rows, x, length, panel, use), panel.first += 1;
  }
}

template <typename F> constexpr int64_t vector_bytes(int64_t length) {
  const int64_t of_scales = F::kGroup ? 2 * F::kLanes : 0, group = F::kGroup ? F::kGroup : F::kStep;
  return (length + group - 1) / group * (of_scales + group / F::kStep * F::kBytes);
}

template <typename A> constexpr int64_t panel_rows = kAcross<A> * lanes<A>;
template <typename A> constexpr int64_t num_panels(int64_t count) { return (count + panel_rows<A> - 1) / panel_rows<A>; }

template <typename F, typename A, typename Use>
void project_as(const A* x, const char* data, int64_t num_rows, int64_t length, int64_t count, int64_t begin, int64_t end,
                Use&& use) {
  const int64_t vectors = (count + lanes<A> - 1) / lanes<A>;
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t before = panel * kAcross<A>, here = std::min<int64_t>(kAcross<A>, vectors - before);
    multiply_panel<F>(num_rows, x, length, {data + before * vector_bytes<F>(length), here, 0},
                      [&](int64_t r, int64_t vector, const Vector<A>& products) {
                        const int64_t n = (before + vector) * lanes<A>;
                        use(r, n, reinterpret_cast<const A*>(&products), std::min(lanes<A>, count - n));
                      });
  }
}

// Σ_d x[r, d] W[n, d] for the n of panels [begin, end). Calls `use` with (r, n, products of n and those after it, how many).
template <typename A, typename Use>
void project(const A* x, const Matrix& matrix, int64_t num_rows, int64_t length, int64_t count, int64_t begin, int64_t end,
             Use&& use) {
  const auto as = [&](auto format) {
    project_as<decltype(format)>(x, matrix.data, num_rows, length, count, begin, end, use);
  };
  if (matrix.kind == kQ8) return as(Bytes<A>{});
  if (matrix.kind == kQ4) return as(Nibbles<A>{});
  if constexpr (std::is_same_v<A, float>)
    if (matrix.kind == kBFloat16) return as(Pairs<A>{});
  as(Plain<A>{});
}

// The same, into y [R, N].
template <typename A>
void project_into(const A* x, const Matrix& matrix, int64_t num_rows, int64_t length, int64_t count, int64_t begin,
                  int64_t end, A* y) {
  project(x, matrix, num_rows, length, count, begin, end, [&](int64_t r, int64_t n, const A* products, int64_t num) {
    std::copy_n(products, num, y + r * count + n);
  });
}

template <typename A> void rms_norm(const A* h, const A* weight, int64_t width, A eps, A* x) {
  const A scale = 1 / std::sqrt(dot(h, h, width) / width + eps);
  for (int64_t d = 0; d < width; ++d) x[d] = h[d] * scale * weight[d];
}

}  // namespace nvium
