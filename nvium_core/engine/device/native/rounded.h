// Multiplies rows by a quantized matrix in exact integers.
//
// Each group of 32 numbers of a row is rounded to integers up to 32,639 with its own scale, an error of at most 1/65,278
// of the group's largest number. The sums of a group are exact, in any order. Only the results of groups add as floats,
// in the order of the groups. So a row's results do not depend on the batch.
#pragma once

#include <vector>

#include "formats.h"

namespace nvium {

constexpr int64_t kPrefetchBytes = 4096;  // one memory page ahead: hardware prefetchers stop at the end of a page
constexpr int64_t kPanel = 4;             // vectors of a panel; a quantized matrix is padded to whole panels
constexpr int64_t kPanelStep = kPanel * kVectorBytes;

constexpr int64_t kRoundedGroup = 32, kRoundedLimit = 127 * 256 + 127;  // two signed bytes
constexpr int64_t kCounted = 16;       // elements that `counts` sums
constexpr int64_t kUnpackedRows = 64;  // maximum rows to multiply by a group's numbers once they are unpacked

#if defined(__x86_64__)
inline const bool kHasDotProducts = kVectorBytes == 64 && has_feature(kAvx512Vnni);
#else
constexpr bool kHasDotProducts = false;
#endif

// Split each four int16 numbers into their high and low bytes, each in the order of a quad. Low bytes are signed.
inline void split_bytes([[maybe_unused]] Narrow<int16_t, float>& x) {
#if defined(__AVX512F__)
  const auto both = (__m256i)(((x + 128) & -256) | (x & 255));
  x = (Narrow<int16_t, float>)_mm256_shuffle_epi8(both, _mm256_set_epi64x(
      0x0E0A0C080F0B0D09, 0x0602040007030501, 0x0E0A0C080F0B0D09, 0x0602040007030501));
#endif
}

// Rows as scale · number, in groups of 32 numbers. The same group of up to `kUnpackedRows` rows is contiguous, because
// these rows are multiplied group by group. `numbers`: in the form of `Products`. `counts`: sums of the numbers of each
// half of a group.
struct RoundedRows {
  int64_t num_groups, rows_together;
  std::vector<int16_t> numbers;
  std::vector<float> scales;
  std::vector<int32_t> counts;

  void resize(int64_t num_rows, int64_t length) {
    num_groups = length / kRoundedGroup, rows_together = std::min(num_rows, kUnpackedRows);
    const int64_t count = index(num_rows - 1, num_groups - 1) + 1;
    numbers.resize(count * kRoundedGroup), scales.resize(count), counts.resize(2 * count);
  }

  // Return the place of a row's group.
  int64_t index(int64_t row, int64_t group) const {
    const int64_t within = row % rows_together;
    return (row - within) * num_groups + group * rows_together + within;
  }
};

inline int32_t total_of(const ints& x) {
  uint32_t sum = 0;  // sums of NaNs wrap around
  for (int64_t n = 0; n < lanes<float>; ++n) sum += x[n];
  return static_cast<int32_t>(sum);
}

// How to round some numbers. If one of them is not finite, the scale is NaN.
struct Rounding {
  float factor, scale;

  Rounding(const float* x, int64_t count) {
    floats most{}, invalid{};
    for (int64_t at = 0; at < count; at += lanes<float>) {
      const floats part = load(x + at), size = bits_as<floats>(bits_as<ints>(part) & 0x7FFFFFFF);
      most = size > most ? size : most, invalid += part - part;
    }
    float peak = most[0];
    for (int64_t n = 1; n < lanes<float>; ++n) peak = std::max(peak, most[n]);
    factor = peak > 1e-30f ? kRoundedLimit / peak : 0;  // smaller numbers become zero
    scale = peak / kRoundedLimit + total<float>(invalid);
  }

  ints rounded(const floats& x) const {
    const floats shifted = x * factor + 12582912.0f;  // 1.5 · 2^23, to round to an integer
    return bits_as<ints>(shifted) - 0x4B400000;
  }
};

// Round a group x to group i of `out`.
inline void round_group(const float* x, int64_t i, RoundedRows& out) {
  const Rounding rounding(x, kRoundedGroup);
  for (int64_t half = 0; half < 2; ++half) {
    Vector<uint32_t> sum{};
    for (int64_t at = half * kCounted; at < (half + 1) * kCounted; at += lanes<float>) {
      const ints rounded = rounding.rounded(load(x + at));
      auto numbers = __builtin_convertvector(rounded, Narrow<int16_t, float>);
      if (kHasDotProducts) split_bytes(numbers);
      store(numbers, &out.numbers[i * kRoundedGroup + at]);
      sum += (Vector<uint32_t>)rounded;
    }
    out.counts[2 * i + half] = total_of((ints)sum);
  }
  out.scales[i] = rounding.scale;
}

inline void round_rows(const float* x, int64_t length, int64_t begin, int64_t end, RoundedRows& out) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t g = 0; g < out.num_groups; ++g) round_group(x + r * length + g * kRoundedGroup, out.index(r, g), out);
}

// How to multiply a quad of weights. Without dot products of bytes, the weights become two vectors of pairs of int16, and
// so do the rows. With them, the numbers of a row are split into high and low bytes, whose products have sums of their own.
template <bool HasDotProducts> struct Products {
  static constexpr int kVectors = HasDotProducts ? 1 : 2, kSums = 3 - kVectors;  // of a quad

  static void split(const ints& quad, ints* out) {
    if constexpr (HasDotProducts)
      out[0] = quad;
    else
      out[0] = quad & 0x00FF00FF, out[1] = bits_as<ints>(bits_as<Vector<uint16_t>>(quad) >> 8);
  }

  static void add(ints& sums, const ints& weights, const ints& x) {
#if defined(__AVX512F__)
    if constexpr (HasDotProducts)
      asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
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
};

// 32 elements of a panel: the scales and minima of its vectors, for each part with its own.
template <typename N> struct PanelGroup {
  static constexpr int kParts = kRoundedGroup / N::kGroup;
  const char* numbers[kParts];
  floats scales[kParts][kPanel], minima[kParts][kPanel]{};
  bool has_min;
  int32_t offset;

  // Return the factor of a packing with levels. They come before the numbers, and before those of the minima.
  ints factor(int part, int k) const {
    const char* factors = numbers[part] - (has_min ? 2 : 1) * kPanel * lanes<float>;
    return widened(reinterpret_cast<const int8_t*>(factors + k * lanes<float>));
  }
};

// Add the products of R groups of x, from `first` on, and a panel to `sums` [R, kPanel]. `unpack(part, w, vector, weights)`.
template <typename N, typename P, int R, typename Unpack>
inline void add_rounded(const RoundedRows& x, int64_t first, Unpack&& unpack, const PanelGroup<N>& of, floats* sums) {
  floats products[R][kPanel]{};
  const auto add_part = [&](int part) {
    ints sums_of[R][kPanel][P::kSums];
    int32_t counts[R];
    for (int r = 0; r < R; ++r) {
      const int32_t* count = &x.counts[2 * (first + r) + part];
      counts[r] = of.kParts == 2 ? *count : count[0] + count[1];
      for (auto& each : sums_of[r]) each[0] = ints{}, each[P::kSums - 1] = ints{} - of.offset * counts[r];
    }
#pragma GCC unroll 1
    for (int w = 0; w < N::kGroup / 8; ++w) {
      ints weights[kPanel][2 * P::kVectors];
      for (int k = 0; k < kPanel; ++k) unpack(part, w, k, weights[k]);
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const int16_t* pair = &x.numbers[(first + r) * kRoundedGroup + part * N::kGroup + 8 * w + 2 * word];
          const ints both = ints{} + bits_at<int32_t>(pair);
#pragma GCC unroll 4
          for (int k = 0; k < kPanel; ++k)
            P::add(sums_of[r][k][word % P::kSums], weights[k][word / P::kSums], both);
        }
    }
    // One product per addition: with two, the compiler could choose which to round, differently for other R.
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < kPanel; ++k) {
        const ints* sum = sums_of[r][k];
        const ints dots = P::kSums == 2 ? (sum[0] << 8) + sum[1] : sum[0];
        products[r][k] += __builtin_convertvector(dots, floats) * of.scales[part][k];
        if (of.has_min) products[r][k] += of.minima[part][k] * static_cast<float>(counts[r]);
      }
  };
  add_part(0);
  if constexpr (N::kGroup < kRoundedGroup) add_part(1);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < kPanel; ++k) sums[r * kPanel + k] += products[r][k] * x.scales[first + r];
}

// Reads the groups of a panel in order.
template <typename N> class PanelReader {
 public:
  PanelReader(const Packing& packing, const char* panel) : packing_(packing), at_(panel) {}

  // Read the next 32 elements. If asked to, prefetch as many later ones.
  void next(PanelGroup<N>& out, bool prefetches = false) {
    const char* read = at_;
    out.has_min = packing_.has_min, out.offset = packing_.offset;
    for (int part = 0; part < out.kParts; ++part, element_ += N::kGroup) {
      if (packing_.has_levels && element_ % 256 == 0) read_halves(levels_[0], levels_[1]);
      if (packing_.has_levels) {
        read_factors(levels_[0], out.scales[part]);
        if (packing_.has_min) read_factors(levels_[1], out.minima[part]);
      } else {
        read_halves(out.scales[part], out.minima[part]);
      }
      out.numbers[part] = at_;
      at_ += N::kWords * kPanelStep;
    }
    if (prefetches)
      for (; read < at_; read += 64) __builtin_prefetch(read + kPrefetchBytes);
  }

  const floats* levels() const { return levels_[0]; }

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

// Unpack the numbers 8w … of a part of vector k.
template <typename N, typename P>
inline void unpack(const PanelGroup<N>& of, int part, int w, int k, ints (&out)[2 * P::kVectors]) {
  ints quads[2];
  N::unpack(of.numbers[part] + k * kVectorBytes, kPanelStep, w, quads);
  for (int q = 0; q < 2; ++q) P::split(quads[q], out + q * P::kVectors);
}

// Add the products of all R rows and a panel to `sums` [R, kPanel]. With so few rows, processors prefetch faster by
// themselves. Both functions are not inlined, because compilers keep more sums in registers in a small function.
template <typename N, typename P, int R>
__attribute__((noinline)) void multiply_few(const RoundedRows& x, const Packing& packing, const char* panel, floats* sums) {
  PanelReader<N> reader(packing, panel);
  PanelGroup<N> of;
  for (int64_t g = 0; g < x.num_groups; ++g) {
    reader.next(of);
    const auto weights_of = [&](int part, int w, int k, auto& out) { unpack<N, P>(of, part, w, k, out); };
    add_rounded<N, P, R>(x, g * R, weights_of, of, sums);
  }
}

// Do the same for up to `kUnpackedRows` rows. Unpack the numbers of a group once for all of them. With more than two rows
// at once, 32 registers would not hold the sums.
template <typename N, typename P>
__attribute__((noinline)) void multiply_many(const RoundedRows& x, int64_t row, int64_t num_rows, const Packing& packing,
                                             const char* panel, floats* sums) {
  PanelReader<N> reader(packing, panel);
  PanelGroup<N> of;
  constexpr int kParts = PanelGroup<N>::kParts, kWords = N::kGroup / 8, kVectors = 2 * P::kVectors;
  ints weights[kParts][kWords][kPanel][kVectors];
  for (int64_t g = 0; g < x.num_groups; ++g) {
    reader.next(of, true);
#pragma GCC unroll 1
    for (int i = 0; i < kParts * kWords; ++i)
      for (int k = 0; k < kPanel; ++k) unpack<N, P>(of, i / kWords, i % kWords, k, weights[i / kWords][i % kWords][k]);
    const auto weights_of = [&](int part, int w, int k, ints (&out)[kVectors]) {
      for (int v = 0; v < kVectors; ++v) out[v] = weights[part][w][k][v];
    };
    const int64_t first = x.index(row, g);
    int64_t r = 0;
    for (; r + 1 < num_rows; r += 2) add_rounded<N, P, 2>(x, first + r, weights_of, of, sums + r * kPanel);
    if (r < num_rows) add_rounded<N, P, 1>(x, first + r, weights_of, of, sums + r * kPanel);
  }
}

// Multiply rows by a panel. Call use(row, vector, products) with the vector's number in the panel.
template <typename Use>
void multiply_rounded(const RoundedRows& x, int64_t num_rows, const Packing& packing, const char* panel, Use&& use) {
  floats sums[kUnpackedRows * kPanel];
  for (int64_t row = 0; row < num_rows; row += kUnpackedRows) {
    const int64_t count = std::min(kUnpackedRows, num_rows - row);
    std::fill_n(sums, count * kPanel, floats{});
    with_numbers(packing.bits, [&]<typename N>(N) {
      const auto multiply = [&]<typename P>(P) {
        if (num_rows > 2) return multiply_many<N, P>(x, row, count, packing, panel, sums);
        (num_rows == 1 ? multiply_few<N, P, 1> : multiply_few<N, P, 2>)(x, packing, panel, sums);
      };
      kHasDotProducts ? multiply(Products<kVectorBytes == 64>{}) : multiply(Products<false>{});
    });
    for (int64_t r = 0; r < count; ++r)
      for (int64_t k = 0; k < kPanel; ++k) use(row + r, k, sums[r * kPanel + k]);
  }
}

}  // namespace nvium
