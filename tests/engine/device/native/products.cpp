// Packs random blocks of every quantized type. Compares their products with sums in double, whose rows are rounded as
// slowly and obviously as possible, and with themselves for other numbers of rows.

#include <cstdio>
#include <random>

#include "pack.h"

using namespace nvium;

namespace {

constexpr int64_t kLength = 512, kCount = 70, kRows = 71;
std::mt19937 random_bits(0);

bool is_moderate(float x) { return !x || (std::abs(x) > 1e-3f && std::abs(x) < 10); }

std::vector<char> random_rows(int64_t stored) {
  const BlockShape shape = block_shape(stored);
  std::vector<char> rows(kCount * row_bytes(stored, kLength));
  Block block;
  for (size_t at = 0; at < rows.size(); at += shape.bytes)
    do {
      for (int64_t i = 0; i < shape.bytes; ++i) rows[at + i] = static_cast<char>(random_bits());
      decode(stored, reinterpret_cast<uint8_t*>(&rows[at]), block);
    } while (!is_moderate(block.scale) || !is_moderate(block.minimum));
  return rows;
}

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
using Product = double;  // exact: the compiler fuses the multiplication with the addition that rounds
#else
using Product = float;
#endif

// Round groups of 32 numbers to multiples of 1/32,639 of the largest.
std::vector<double> rounded(const float* x) {
  std::vector<double> out(kLength);
  for (int64_t first = 0; first < kLength; first += 32) {
    float peak = 0;
    for (int64_t i = first; i < first + 32; ++i) peak = std::max(peak, std::abs(x[i]));
    for (int64_t i = first; i < first + 32; ++i)
      out[i] = peak > 1e-30f ? std::nearbyint(static_cast<Product>(x[i]) * (32639 / peak)) * (peak / 32639) : 0;
  }
  return out;
}

bool is_right(int64_t stored) {
  const std::vector<char> rows = random_rows(stored);
  const StoredRows in{stored, rows.data(), 0, kCount, kLength, kCount};
  std::vector<char> packed(packed_bytes(stored, kCount, kLength) + kPrefetchBytes);
  if (!pack(in, 2, packed.data())) return false;
  std::vector<float> x(kRows * kLength), y(kRows * kCount), alone(kCount), weights(kLength);
  std::normal_distribution<float> normal;
  for (float& each : x) each = normal(random_bits);
  std::fill_n(x.begin(), 32, 0.0f), std::fill_n(x.begin() + 32, 32, 1e-31f);
  const auto multiply = [&](const float* of, int64_t num_rows, float* to) {
    Forms forms;
    const Matrix matrix{stored, packed.data()};
    project_into(operand(2, of, num_rows, kLength, {matrix}, 0, forms), matrix, kCount, 0, num_panels<float>(kCount), to);
  };
  multiply(x.data(), kRows, y.data());
  for (int64_t r = 0; r < kRows; ++r) {
    const std::vector<double> row = rounded(&x[r * kLength]);
    const int64_t some = std::min(1 + r % 5, kRows - r);  // of them, use the first
    std::vector<float> few(some * kCount);
    multiply(&x[r * kLength], some, few.data());
    if (std::memcmp(few.data(), &y[r * kCount], kCount * sizeof(float))) return false;
    for (int64_t n = 0; n < kCount; ++n) {
      read_row(stored, in.row(n), kLength, weights.data());
      double sum = 0, size = 0;
      for (int64_t d = 0; d < kLength; ++d) sum += weights[d] * row[d], size += std::abs(weights[d] * row[d]);
      if (std::abs(y[r * kCount + n] - sum) > 2e-6 * size) return false;
    }
  }
  x[5] = NAN;
  multiply(x.data(), 1, alone.data());
  return std::all_of(alone.begin(), alone.end(), [](float each) { return std::isnan(each); });
}

}  // namespace

int main() {
  for (int64_t stored : {kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS})
    if (!is_right(stored)) std::printf("type %d\n", static_cast<int>(stored));
}
