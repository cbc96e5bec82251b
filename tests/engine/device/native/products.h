// What the tests of products share: random matrices, and rows rounded as slowly and obviously as possible.
#pragma once

#include <cstdio>
#include <random>

#include "pack.h"

namespace nvium {

constexpr int64_t kLength = 512, kCount = 70;
inline std::mt19937 random_bits(0);

inline std::vector<float> drawn(int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<float> out(size);
  for (float& each : out) each = normal(random_bits);
  return out;
}

inline bool is_moderate(float x) { return !x || (std::abs(x) > 1e-3f && std::abs(x) < 10); }

// A random matrix [kCount, kLength], as stored and packed.
struct RandomMatrix {
  int64_t kind;
  std::vector<char> rows, packed;

  explicit RandomMatrix(int64_t kind)
      : kind(kind), rows(kCount * row_bytes(kind, kLength)), packed(packed_bytes(kind, kCount, kLength) + kPrefetchBytes) {
    if (const BlockShape shape = block_shape(kind); shape.elements) {
      Block block;
      for (size_t at = 0; at < rows.size(); at += shape.bytes)
        do {
          for (int64_t i = 0; i < shape.bytes; ++i) rows[at + i] = static_cast<char>(random_bits());
          decode(kind, reinterpret_cast<uint8_t*>(&rows[at]), block);
        } while (!is_moderate(block.scale) || !is_moderate(block.minimum));
    } else {
      const std::vector<float> weights = drawn(kCount * kLength);
      std::memcpy(rows.data(), std::vector<BFloat16>(weights.begin(), weights.end()).data(), rows.size());
    }
    if (!pack(stored(), 2, packed.data())) std::printf("type %d has a number that is not finite\n", int(kind));
  }

  StoredRows stored() const { return {kind, rows.data(), 0, kCount, kLength, kCount}; }
  Matrix matrix() const { return {kind, packed.data()}; }

  // Return the largest difference between y [R, kCount] and products in double with rows [R, kLength], over the sum of
  // absolute products.
  double difference(const std::vector<double>& x, const std::vector<float>& y) const {
    std::vector<float> weights(kLength);
    double worst = 0;
    for (int64_t n = 0; n < kCount; ++n) {
      read_row(kind, stored().row(n), kLength, weights.data());
      for (size_t r = 0; r < x.size() / kLength; ++r) {
        double sum = 0, size = 0;
        for (int64_t d = 0; d < kLength; ++d) {
          const double product = weights[d] * x[r * kLength + d];
          sum += product, size += std::abs(product);
        }
        const double found = std::abs(y[r * kCount + n] - sum) / size;
        if (!(found <= worst)) worst = found;  // NaN, too
      }
    }
    return worst;
  }
};

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
using Product = double;  // exact: the compiler fuses the multiplication with the addition that rounds
#else
using Product = float;
#endif

// Round groups of this size to multiples of 1/32,639 of the largest number.
inline std::vector<double> rounded(const std::vector<float>& x, size_t group) {
  std::vector<double> out(x.size());
  for (size_t first = 0; first < x.size(); first += group) {
    float peak = 0;
    for (size_t i = first; i < first + group; ++i) peak = std::max(peak, std::abs(x[i]));
    for (size_t i = first; i < first + group; ++i)
      out[i] = peak > 1e-30f ? std::nearbyint(static_cast<Product>(x[i]) * (32639 / peak)) * (peak / 32639) : 0;
  }
  return out;
}

}  // namespace nvium
