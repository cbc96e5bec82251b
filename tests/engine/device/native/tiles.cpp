// Multiplies rows by bfloat16 weights in AMX tiles, which this file emulates, and compares the products with sums in
// double. So the code for AMX is tested on every processor with AVX-512. Prints what differs.

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

namespace emulated {

uint8_t tiles[8][16][64];  // rows of 64 bytes

void load(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}

void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], 64);
}

float number(int tile, int row, int column) {
  uint16_t half;
  std::memcpy(&half, &tiles[tile][row][2 * column], 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// sums[m][n] += Σ_k rows[m][2k] pairs[k][2n] + rows[m][2k + 1] pairs[k][2n + 1], as Intel's manual defines TDPBF16PS.
void multiply(int sums, int rows, int pairs) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      float sum;
      std::memcpy(&sum, &tiles[sums][m][4 * n], 4);
      for (int k = 0; k < 32; ++k) sum += number(rows, m, k) * number(pairs, k / 2, 2 * n + k % 2);
      std::memcpy(&tiles[sums][m][4 * n], &sum, 4);
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)
#define _tile_release()
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof emulated::tiles[tile])
#define _tile_dpbf16ps emulated::multiply

#include "pack.h"

using namespace nvium;

namespace {

constexpr int64_t kLength = 96, kCount = 70;
std::mt19937 random_bits(0);

std::vector<float> drawn(int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<float> out(size);
  for (float& each : out) each = normal(random_bits);
  return out;
}

// Return the largest difference from the sum in double, over the sum of absolute products.
double difference(int64_t row_parts, int64_t num_rows) {
  const std::vector<float> x = drawn(num_rows * kLength), drawn_weights = drawn(kCount * kLength);
  const std::vector<BFloat16> stored(drawn_weights.begin(), drawn_weights.end());
  const StoredRows in{kStoredBF16, reinterpret_cast<const char*>(stored.data()), 0, kCount, kLength, kCount};
  std::vector<char> packed(packed_bytes(kStoredBF16, kCount, kLength) + kPrefetchBytes);
  pack(in, 1, packed.data());
  std::vector<float> y(num_rows * kCount), weights(kLength);
  Forms forms;
  project_into(operand(1, x.data(), num_rows, kLength, false, row_parts, forms), Matrix{kStoredBF16, packed.data()}, kCount, 0,
               num_panels<float>(kCount), y.data());
  double worst = 0;
  for (int64_t n = 0; n < kCount; ++n) {
    read_row(kStoredBF16, in.row(n), kLength, weights.data());
    for (int64_t r = 0; r < num_rows; ++r) {
      double sum = 0, size = 0;
      for (int64_t d = 0; d < kLength; ++d) {
        const float own = x[r * kLength + d], used = row_parts == 1 ? static_cast<float>(BFloat16(own)) : own;
        sum += static_cast<double>(weights[d]) * used, size += std::abs(weights[d] * used);
      }
      worst = std::max(worst, std::abs(y[r * kCount + n] - sum) / size);
    }
  }
  return worst;
}

}  // namespace

int main() {
  for (int64_t row_parts : {int64_t{1}, kTileParts})
    for (int64_t num_rows : {1, 16, 17, 33, 71}) {
      const double found = difference(row_parts, num_rows);
      if (!(found < 1e-6)) std::printf("%d parts, %d rows: %g\n", int(row_parts), int(num_rows), found);
    }
}
