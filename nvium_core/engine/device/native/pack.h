// Packs rows as their file stores them into the panels of matrix.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "matrix.h"
#include "thread_pool.h"

namespace nvium {

// `num_rows` consecutive rows of a matrix, from row `first` on, which is the first of a panel. `stored`: their type.
struct StoredRows {
  int64_t stored;
  const char* data;
  int64_t first, num_rows, length;
  int64_t num_all;  // rows of the whole matrix

  const char* row(int64_t r) const { return data + r * row_bytes(stored, length); }
};

// Where a row goes in its panel: a vector of `vectors`, and a lane of it.
struct Place {
  int64_t vectors, vector, lane;

  template <typename E> void put(E x, char*& panel) const {  // and move on to what follows in the panel
    std::memcpy(panel + (vector * lanes<float> + lane) * sizeof x, &x, sizeof x);
    panel += vectors * lanes<float> * sizeof x;
  }
};

// Write a row of blocks to its panel. Return false if a scale is not finite.
template <typename N> bool put_blocks(const StoredRows& in, const char* row, const Place& place, char* panel) {
  const BlockShape shape = block_shape(in.stored);
  const Packing& packing = shape.packing;
  const int64_t stride = place.vectors * kVectorBytes, own = place.vector * kVectorBytes + place.lane * 4;
  bool is_finite = true;
  Block block;
  for (int64_t begin = 0; begin < in.length; begin += shape.elements, row += shape.bytes) {
    decode(in.stored, reinterpret_cast<const uint8_t*>(row), block);
    is_finite &= std::isfinite(block.scale) && std::isfinite(block.minimum);
    const auto put_halves = [&] {
      place.put(Half(block.scale), panel);
      if (packing.has_min) place.put(Half(block.minimum), panel);
    };
    if (packing.has_levels) put_halves();
    for (int64_t i = 0; i < shape.elements; i += N::kGroup, panel += N::kWords * stride) {
      if (!packing.has_levels) put_halves();
      if (packing.has_levels) place.put(block.factors[i / shape.group], panel);
      if (packing.has_levels && packing.has_min) place.put(block.min_factors[i / shape.group], panel);
      uint8_t numbers[N::kGroup];
      for (int n = 0; n < N::kGroup; ++n) numbers[n] = block.numbers[i + n] + packing.offset;
      N::put(numbers, stride, panel + own);
    }
  }
  return is_finite;
}

// Write a row of floats of type T to one lane. Return false if a number is not finite.
template <typename F, typename T> bool put_floats(const StoredRows& in, const char* row, const Place& place, char* panel) {
  char* const first = panel + place.vector * kVectorBytes + place.lane * F::kLaneStride;
  bool is_finite = true;
  for (int64_t i = 0; i < in.length; ++i, row += sizeof(T)) {
    T x;
    std::memcpy(&x, row, sizeof x);
    is_finite &= std::isfinite(static_cast<Accumulator<T>>(x));
    std::memcpy(first + i / F::kStep * place.vectors * kVectorBytes + i % F::kStep * F::kStride, &x, sizeof x);
  }
  return is_finite;
}

// Pack rows with `put`, which writes one row to its panel. A vector takes `vector_bytes`. The last panel of a matrix has
// only as many vectors as it needs, unless the matrix is quantized. Return false if a number is not finite.
template <typename Put>
bool pack_rows(const StoredRows& in, int num_threads, int64_t lanes, int64_t vector_bytes, char* out, Put&& put) {
  const bool is_quantized = block_shape(in.stored).elements;
  const int64_t panel_vectors = lanes == nvium::lanes<float> ? kPanelVectors<float> : kPanelVectors<double>;
  const int64_t rows = panel_vectors * lanes, all_vectors = (in.num_all + lanes - 1) / lanes;
  std::atomic<bool> is_finite{true};
  ThreadPool::shared().run(num_threads, (in.num_rows + rows - 1) / rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * rows; r < std::min(end * rows, in.num_rows); ++r) {
      const int64_t at = in.first + r, before = at / rows * panel_vectors;
      const int64_t vectors = is_quantized ? kPanel : std::min(panel_vectors, all_vectors - before);
      if (!put(in, in.row(r), {vectors, at / lanes - before, at % lanes}, out + before * vector_bytes))
        is_finite.store(false, std::memory_order_relaxed);
    }
  });
  return is_finite;
}

// Quantize floats x to a block of Q8_0 or Q4_0. The reference is `quantized` in nvium_core/model/stored.py.
inline void quantize_block(int64_t kind, const double* x, char* out) {
  constexpr int kSize = 32;
  double extreme = x[0];
  for (int i = 1; i < kSize && !std::isnan(extreme); ++i)
    if (!(std::abs(x[i]) <= std::abs(extreme))) extreme = x[i];
  const Half scale(static_cast<float>(kind == kQ8_0 ? std::abs(extreme) / 127 : extreme / -8));
  std::memcpy(out, &scale, sizeof scale);
  uint8_t numbers[kSize];
  const int least = kind == kQ8_0 ? -127 : -8, most = kind == kQ8_0 ? 127 : 7;
  for (int i = 0; i < kSize; ++i) {
    const double ratio = x[i] / static_cast<float>(scale);
    numbers[i] = std::clamp(std::isfinite(ratio) ? static_cast<int>(std::nearbyint(ratio)) : 0, least, most);
  }
  if (kind == kQ4_0)
    for (int i = 0; i < kSize / 2; ++i) numbers[i] = (numbers[i] + 8) % 16 | (numbers[i + kSize / 2] + 8) % 16 << 4;
  std::memcpy(out + sizeof scale, numbers, kind == kQ8_0 ? kSize : kSize / 2);
}

// Quantize rows of floats to rows of blocks of this kind.
inline void quantize(const StoredRows& in, int num_threads, int64_t kind, char* out) {
  const BlockShape shape = block_shape(kind);
  ThreadPool::shared().run(num_threads, in.num_rows, [&](int64_t begin, int64_t end) {
    std::vector<double> row(in.length);
    char* to = out + begin * row_bytes(kind, in.length);
    for (int64_t r = begin; r < end; ++r) {
      read_row(in.stored, in.row(r), in.length, row.data());
      for (int64_t i = 0; i < in.length; i += shape.elements, to += shape.bytes) quantize_block(kind, &row[i], to);
    }
  });
}

// Return the bytes of a packed matrix.
inline int64_t packed_bytes(int64_t kind, int64_t num_rows, int64_t length) {
  if (const BlockShape shape = block_shape(kind); shape.elements)
    return num_panels<float>(num_rows) * panel_rows<float> * lane_bytes(shape.packing, length);
  const int64_t lanes = kind == kStoredF64 ? nvium::lanes<double> : nvium::lanes<float>, step = kind == kStoredBF16 || kind == kStoredF16 ? 2 : 1;
  return (num_rows + lanes - 1) / lanes * ((length + step - 1) / step * kVectorBytes);
}

inline bool pack(const StoredRows& in, int num_threads, char* out) {
  const auto floats_of = [&]<typename F, typename T>(F, T) {
    return pack_rows(in, num_threads, F::kLanes, packed_bytes<F>(in.length), out, put_floats<F, T>);
  };
  if (in.stored == kStoredF64) return floats_of(Plain<double>{}, double{});
  if (in.stored == kStoredF32) return floats_of(Plain<float>{}, float{});
  if (in.stored == kStoredBF16) return floats_of(Pairs{}, BFloat16{});
  if (in.stored == kStoredF16) return floats_of(Halves{}, Half{});
  const Packing packing = block_shape(in.stored).packing;
  return with_numbers(packing.bits, [&]<typename N>(N) {
    const int64_t vector_bytes = lanes<float> * lane_bytes(packing, in.length);
    return pack_rows(in, num_threads, lanes<float>, vector_bytes, out, put_blocks<N>);
  });
}

}  // namespace nvium
