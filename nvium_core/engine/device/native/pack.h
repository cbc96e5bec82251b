// Packs rows as their file stores them into the panels of matrix.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "blocks.h"
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

// Return the bits of the half that equals x.
inline uint16_t half_bits(float x) {
  const uint32_t size = std::bit_cast<uint32_t>(std::abs(x) * 0x1p-112f) >> 13;
  return static_cast<uint16_t>(size | (std::signbit(x) ? 0x8000 : 0));
}

template <typename F> void put_scale(float x, char* to) {
  if constexpr (F::kScaleBytes == 2 * F::kLanes) {
    const uint16_t bits = half_bits(x);
    std::memcpy(to, &bits, sizeof bits);
  } else {
    std::memcpy(to, &x, sizeof x);
  }
}

// Write a group's `numbers` to one lane. Steps are `stride` bytes apart. See `Nibbles` and `Grouped` for the offsets.
template <typename F> void put_numbers(const int8_t* numbers, int64_t stride, char* to) {
  constexpr int offset = (F::kStep == 2 ? 8 : 0) - (F::kScales == 2 ? 8 : 0);
  for (int i = 0; i < F::kGroup; i += F::kStep, to += stride)
    *to = F::kStep == 2 ? (numbers[i] + offset) | (numbers[i + 1] + offset) << 4 : numbers[i] + offset;
}

// Write a row of blocks to one lane of its panel. Return false if a scale is not finite.
template <typename F> bool put_blocks(const StoredRows& in, const char* row, int64_t vectors, int64_t vector,
                                      int64_t lane, char* panel) {
  constexpr int64_t scale_bytes = F::kScaleBytes, steps = F::kGroup / F::kStep;
  const BlockShape shape = block_shape(in.stored);
  const int64_t group_bytes = vectors * (F::kScales * scale_bytes + steps * F::kBytes);
  const int64_t scale_at = vector * scale_bytes + lane * (scale_bytes / F::kLanes);
  const int64_t numbers_at = vectors * F::kScales * scale_bytes + vector * F::kBytes + lane;
  bool is_finite = true;
  Block block;
  for (int64_t begin = 0; begin < in.length; begin += shape.elements, row += shape.bytes) {
    decode(in.stored, reinterpret_cast<const uint8_t*>(row), block);
    is_finite &= std::isfinite(block.scale) && std::isfinite(block.minimum);
    for (int64_t i = 0; i < shape.elements; i += F::kGroup, panel += group_bytes) {
      const int64_t g = i / shape.group;
      put_scale<F>(block.scale * block.factors[g], panel + scale_at);
      if (F::kScales == 2)
        put_scale<F>(block.minimum * block.min_factors[g], panel + vectors * scale_bytes + scale_at);
      put_numbers<F>(block.numbers + i, vectors * F::kBytes, panel + numbers_at);
    }
  }
  return is_finite;
}

// Write a row of floats of type T, `kStep` of them at a time, to one lane. Return false if a number is not finite.
template <typename F, typename T> bool put_floats(const StoredRows& in, const char* row, int64_t vectors,
                                                  int64_t vector, int64_t lane, char* panel) {
  constexpr int64_t word_bytes = F::kBytes / F::kLanes;
  char* to = panel + vector * F::kBytes + lane * word_bytes;
  bool is_finite = true;
  for (int64_t i = 0; i < in.length; i += F::kStep, to += vectors * F::kBytes, row += word_bytes) {
    T numbers[F::kStep] = {};
    std::memcpy(numbers, row, sizeof(T) * std::min<int64_t>(F::kStep, in.length - i));
    for (const T& x : numbers) is_finite &= std::isfinite(static_cast<Accumulator<T>>(x));
    std::memcpy(to, numbers, word_bytes);
  }
  return is_finite;
}

// Pack rows with `put`, which writes one row. `out`: the packed matrix. Return false if a number is not finite.
template <typename F, typename Put> bool pack_rows(const StoredRows& in, int num_threads, char* out, Put&& put) {
  constexpr int64_t panel_vectors = F::kLanes == lanes<float> ? kPanelVectors<float> : kPanelVectors<double>;
  constexpr int64_t rows = panel_vectors * F::kLanes;
  const int64_t all_vectors = (in.num_all + F::kLanes - 1) / F::kLanes;
  std::atomic<bool> is_finite{true};
  ThreadPool::shared().run(num_threads, (in.num_rows + rows - 1) / rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * rows; r < std::min(end * rows, in.num_rows); ++r) {
      const int64_t at = in.first + r, before = at / rows * panel_vectors;
      const int64_t vectors = std::min(panel_vectors, all_vectors - before);
      char* panel = out + before * packed_bytes<F>(in.length);
      if (!put(in, in.row(r), vectors, at / F::kLanes - before, at % F::kLanes, panel))
        is_finite.store(false, std::memory_order_relaxed);
    }
  });
  return is_finite;
}

inline bool all_finite(const StoredRows& in, int num_threads) {
  std::atomic<bool> is_finite{true};
  ThreadPool::shared().run(num_threads, in.num_rows, [&](int64_t begin, int64_t end) {
    std::vector<double> numbers(in.length);
    for (int64_t r = begin; r < end; ++r) {
      read_row(in.stored, in.row(r), in.length, numbers.data());
      for (double x : numbers)
        if (!std::isfinite(x)) is_finite.store(false, std::memory_order_relaxed);
    }
  });
  return is_finite;
}

// Call use(format) with the number format of a packed matrix.
template <typename Use> auto with_format(int64_t format, Use&& use) {
  switch (format) {
    case kFloat64: return use(Plain<double>{});
    case kFloat32: return use(Plain<float>{});
    case kBFloat16: return use(Pairs{});
    case kQ8: return use(Q8{});
    case kQ4: return use(Q4{});
    case kQ4WithMin: return use(Q4WithMin{});
    case kQ4K: return use(Q4K{});
    case kQ6K: return use(Q6K{});
    default: return use(Q8WithMin{});
  }
}

inline bool pack(const StoredRows& in, int64_t format, int num_threads, char* out) {
  return with_format(format, [&]<typename F>(F) {
    if constexpr (F::kGroup)
      return pack_rows<F>(in, num_threads, out, put_blocks<F>);
    else if constexpr (F::kStep == 2)
      return pack_rows<F>(in, num_threads, out, put_floats<F, BFloat16>);
    else if constexpr (F::kLanes == lanes<float>)
      return pack_rows<F>(in, num_threads, out, put_floats<F, float>);
    else
      return pack_rows<F>(in, num_threads, out, put_floats<F, double>);
  });
}

}  // namespace nvium
