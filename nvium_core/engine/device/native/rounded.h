// Multiplies rows by a quantized matrix in exact integers.
//
// Each group of 32 numbers of a row is rounded to int16 with its own scale, an error of at most 1/65,534 of the group's
// largest number. Weights are unpacked to int16, so the sums of a group are exact, in any order. Only the results of
// groups add as floats, in the order of the groups. So a row's results do not depend on the batch.
#pragma once

#include <vector>

#include "formats.h"

namespace nvium {

constexpr int64_t kPrefetchBytes = 4096;  // one memory page ahead: hardware prefetchers stop at the end of a page
constexpr int64_t kPanel = 4;             // vectors of a panel; a quantized matrix is padded to whole panels

constexpr int64_t kRoundedGroup = 32, kRoundedLimit = 32767;
constexpr int64_t kCounted = 16;       // elements that `counts` sums
constexpr int64_t kUnpackedRows = 64;  // maximum rows to multiply by a group's numbers once they are unpacked
// Rows to multiply at once by all vectors of a panel, so that all sums fit in registers.
constexpr int kRowsAtOnce = kRegisters == 32 ? 4 : 2;

// Rows as scale · number, in groups of 32 numbers. The same group of up to `kUnpackedRows` rows is contiguous, because
// these rows are multiplied group by group. `counts`: sums of the numbers of each half of a group.
struct RoundedRows {
  int64_t num_groups, rows_together;
  std::vector<int16_t> numbers;
  std::vector<float> scales;
  std::vector<int32_t> counts;

  RoundedRows& resized(int64_t num_rows, int64_t length) {
    num_groups = length / kRoundedGroup, rows_together = std::min(num_rows, kUnpackedRows);
    const int64_t count = index(num_rows - 1, num_groups - 1) + 1;
    numbers.resize(count * kRoundedGroup), scales.resize(count), counts.resize(2 * count);
    return *this;
  }

  // Return the place of a row's group.
  int64_t index(int64_t row, int64_t group) const {
    const int64_t within = row % rows_together;
    return (row - within) * num_groups + group * rows_together + within;
  }
};

// Round a group x to group i of `out`. A group with a number that is not finite gets a scale of NaN.
inline void round_group(const float* x, int64_t i, RoundedRows& out) {
  floats most{}, invalid{};
  for (int64_t at = 0; at < kRoundedGroup; at += lanes<float>) {
    const floats part = load(x + at), size = bits_as<floats>(bits_as<ints>(part) & 0x7FFFFFFF);
    most = size > most ? size : most, invalid += part - part;
  }
  float peak = most[0];
  for (int64_t n = 1; n < lanes<float>; ++n) peak = std::max(peak, most[n]);
  const float factor = peak > 1e-30f ? kRoundedLimit / peak : 0;  // smaller numbers become zero
  for (int64_t half = 0; half < 2; ++half) {
    ints sum{};
    for (int64_t at = half * kCounted; at < (half + 1) * kCounted; at += lanes<float>) {
      const floats shifted = load(x + at) * factor + 12582912.0f;  // 1.5 · 2^23, to round to an integer
      const ints rounded = bits_as<ints>(shifted) - 0x4B400000;
      store(__builtin_convertvector(rounded, Narrow<int16_t, float>), &out.numbers[i * kRoundedGroup + at]);
      sum += rounded;
    }
    out.counts[2 * i + half] = 0;
    for (int64_t n = 0; n < lanes<float>; ++n) out.counts[2 * i + half] += sum[n];
  }
  out.scales[i] = peak / kRoundedLimit + total<float>(invalid);
}

inline void round_rows(const float* x, int64_t length, int64_t begin, int64_t end, RoundedRows& out) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t g = 0; g < out.num_groups; ++g) round_group(x + r * length + g * kRoundedGroup, out.index(r, g), out);
}

#if defined(__x86_64__)
inline bool has_dot_products() { return __builtin_cpu_supports("avx512vnni"); }
#else
inline bool has_dot_products() { return false; }
#endif

// Add the products of pairs of int16 to 32-bit sums.
template <bool HasDotProducts> inline void add_pairs(ints& sums, const ints& weights, const ints& x) {
#if defined(__AVX512F__)
  if constexpr (HasDotProducts)
    asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
  else
    sums += (ints)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__)
  sums += (ints)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#elif defined(__x86_64__)
  sums += (ints)_mm_madd_epi16((__m128i)weights, (__m128i)x);
#else
  sums += (weights << 16 >> 16) * (x << 16 >> 16) + (weights >> 16) * (x >> 16);
#endif
}

// Return a vector with the same two int16 in every lane.
inline ints spread_pair(const int16_t* x) {
  int32_t both;
  std::memcpy(&both, x, sizeof both);
  return ints{} + both;
}

// 32 elements of a panel: the scales and minima of its vectors, for each part with its own.
template <typename N> struct PanelGroup {
  static constexpr int kParts = kRoundedGroup / N::kGroup;
  const char* numbers[kParts];
  floats scales[kParts][kPanel], minima[kParts][kPanel]{};
  bool has_min;
  int32_t offset;
};

// Add the products of R groups of x, from `first` on, and a panel to `sums` [R, kPanel]. `unpack(part, w, vector, pairs)`.
template <typename N, bool HasDotProducts, int R, typename Unpack>
inline void add_rounded(const RoundedRows& x, int64_t first, Unpack&& unpack, const PanelGroup<N>& of, floats* sums) {
  floats products[R][kPanel]{};
  for (int part = 0; part < of.kParts; ++part) {
    ints dots[R][kPanel];
    int32_t counts[R];
    for (int r = 0; r < R; ++r) {
      const int32_t* count = &x.counts[2 * (first + r) + part];
      counts[r] = of.kParts == 2 ? *count : count[0] + count[1];
      for (int k = 0; k < kPanel; ++k) dots[r][k] = ints{} - of.offset * counts[r];
    }
#pragma GCC unroll 1
    for (int w = 0; w < N::kGroup / 8; ++w) {
      ints pairs[kPanel][4];
      for (int k = 0; k < kPanel; ++k) unpack(part, w, k, pairs[k]);
      for (int p = 0; p < 4; ++p)
        for (int r = 0; r < R; ++r) {
          const int64_t at = (first + r) * kRoundedGroup + part * N::kGroup + 8 * w + 2 * p;
          const ints both = spread_pair(&x.numbers[at]);
          for (int k = 0; k < kPanel; ++k) add_pairs<HasDotProducts>(dots[r][k], pairs[k][p], both);
        }
    }
    // One product per addition: with two, the compiler could choose which to round, differently for other R.
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < kPanel; ++k) {
        products[r][k] += __builtin_convertvector(dots[r][k], floats) * of.scales[part][k];
        if (of.has_min) products[r][k] += of.minima[part][k] * static_cast<float>(counts[r]);
      }
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < kPanel; ++k) sums[r * kPanel + k] += products[r][k] * x.scales[first + r];
}

template <typename N, bool HasDotProducts, int R, typename Unpack>
inline void add_rounded_up_to(int64_t num_rows, const RoundedRows& x, int64_t first, Unpack&& unpack,
                              const PanelGroup<N>& of, floats* sums) {
  if constexpr (R > 1)
    if (num_rows < R)
      return add_rounded_up_to<N, HasDotProducts, R - 1>(num_rows, x, first, unpack, of, sums);
  add_rounded<N, HasDotProducts, R>(x, first, unpack, of, sums);
}

// Reads the groups of a panel in order.
template <typename N> class PanelReader {
 public:
  PanelReader(const Packing& packing, const char* panel) : packing_(packing), at_(panel) {}

  // Read the next 32 elements.
  void next(PanelGroup<N>& out) {
    out.has_min = packing_.has_min, out.offset = packing_.offset;
    for (int part = 0; part < out.kParts; ++part, element_ += N::kGroup) {
      if (packing_.has_levels && element_ % packing_.span(N::kGroup) == 0) read_halves(levels_[0], levels_[1]);
      if (packing_.has_levels) {
        read_factors(levels_[0], out.scales[part]);
        if (packing_.has_min) read_factors(levels_[1], out.minima[part]);
      } else {
        read_halves(out.scales[part], out.minima[part]);
      }
      out.numbers[part] = at_;
      at_ += N::kWords * kStride;
    }
  }

  static constexpr int64_t kStride = kPanel * kVectorBytes;  // bytes of a step

 private:
  void read_halves(floats (&scales)[kPanel], floats (&minima)[kPanel]) {
    for (int k = 0; k < kPanel; ++k, at_ += 2 * lanes<float>) scales[k] = halves(at_);
    if (packing_.has_min)
      for (int k = 0; k < kPanel; ++k, at_ += 2 * lanes<float>) minima[k] = halves(at_);
  }

  void read_factors(const floats (&levels)[kPanel], floats (&out)[kPanel]) {
    for (int k = 0; k < kPanel; ++k, at_ += lanes<float>)
      out[k] = levels[k] * __builtin_convertvector(widened(reinterpret_cast<const int8_t*>(at_)), floats);
  }

  const Packing packing_;
  const char* at_;
  int64_t element_ = 0;
  floats levels_[2][kPanel]{};
};

// Multiply up to `kUnpackedRows` rows, which are contiguous in x, by a panel. `sums` [num_rows, kPanel].
template <typename N, bool HasDotProducts>
__attribute__((noinline)) void multiply_rounded_rows(const RoundedRows& x, int64_t row, int64_t num_rows,
                                                     const Packing& packing, const char* panel, floats* sums) {
  constexpr int64_t stride = PanelReader<N>::kStride;
  const int64_t group_bytes = packing.bytes(256) / 8 * kPanel * lanes<float>;
  std::fill_n(sums, num_rows * kPanel, floats{});
  PanelReader<N> reader(packing, panel);
  PanelGroup<N> of;
  ints pairs[kRoundedGroup / 8][kPanel][4];
  for (int64_t g = 0; g < x.num_groups; ++g) {
    const int64_t first = x.index(row, g);
    reader.next(of);
    if (row == 0)
      for (int64_t b = 0; b < group_bytes; b += 64) __builtin_prefetch(of.numbers[0] + b + kPrefetchBytes);
    const auto unpack = [&](int part, int w, int k, ints (&out)[4]) {
      N::unpack(of.numbers[part] + k * kVectorBytes, stride, w, out);
    };
    if (num_rows <= kRowsAtOnce) {
      add_rounded_up_to<N, HasDotProducts, kRowsAtOnce>(num_rows, x, first, unpack, of, sums);
      continue;
    }
#pragma GCC unroll 1
    for (int w = 0; w < kRoundedGroup / 8; ++w)
      for (int k = 0; k < kPanel; ++k) unpack(w / (N::kGroup / 8), w % (N::kGroup / 8), k, pairs[w][k]);
    const auto unpacked = [&](int part, int w, int k, ints (&out)[4]) {
      for (int p = 0; p < 4; ++p) out[p] = pairs[part * N::kGroup / 8 + w][k][p];
    };
    for (int64_t r = 0; r < num_rows; r += kRowsAtOnce)
      add_rounded_up_to<N, HasDotProducts, kRowsAtOnce>(num_rows - r, x, first + r, unpacked, of, sums + r * kPanel);
  }
}

// Multiply rows by a panel. Call use(row, vector, products) with the vector's number in the panel.
template <typename Use>
void multiply_rounded(const RoundedRows& x, int64_t num_rows, const Packing& packing, const char* panel, Use&& use) {
  static const bool has = has_dot_products();
  constexpr bool may_have = kVectorBytes == 64;
  floats sums[kUnpackedRows * kPanel];
  for (int64_t row = 0; row < num_rows; row += kUnpackedRows) {
    const int64_t count = std::min(kUnpackedRows, num_rows - row);
    with_numbers(packing.bits, [&]<typename N>(N) {
      const auto multiply = has ? multiply_rounded_rows<N, may_have> : multiply_rounded_rows<N, false>;
      multiply(x, row, count, packing, panel, sums);
    });
    for (int64_t r = 0; r < count; ++r)
      for (int64_t k = 0; k < kPanel; ++k) use(row + r, k, sums[r * kPanel + k]);
  }
}

}  // namespace nvium
