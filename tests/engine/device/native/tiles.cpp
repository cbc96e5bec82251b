// Multiplies rows by matrices in AMX tiles, which this file emulates, and compares the products with sums in double. So
// the code for AMX is tested on every processor with AVX-512. Prints what differs.

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

// sums[m][n] += Σ_k rows[m][k] quads[k / 4][4n + k % 4], as Intel's manual defines TDPBSSD.
void multiply_bytes(int sums, int rows, int quads) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      std::memcpy(&sum, &tiles[sums][m][4 * n], 4);
      for (int k = 0; k < 64; ++k)
        sum += static_cast<int8_t>(tiles[rows][m][k]) * static_cast<int8_t>(tiles[quads][k / 4][4 * n + k % 4]);
      std::memcpy(&tiles[sums][m][4 * n], &sum, 4);
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config)
#define _tile_release()
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof emulated::tiles[tile])
#define _tile_dpbf16ps emulated::multiply
#define _tile_dpbssd emulated::multiply_bytes

#include "pack.h"

using namespace nvium;

namespace {

constexpr int64_t kLength = 512, kCount = 70;
std::mt19937 random_bits(0);

std::vector<float> drawn(int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<float> out(size);
  for (float& each : out) each = normal(random_bits);
  return out;
}

std::vector<char> random_matrix(int64_t stored) {
  std::vector<char> rows(kCount * row_bytes(stored, kLength));
  const BlockShape shape = block_shape(stored);
  if (!shape.elements) {
    const std::vector<float> weights = drawn(kCount * kLength);
    const std::vector<BFloat16> halves(weights.begin(), weights.end());
    std::memcpy(rows.data(), halves.data(), rows.size());
    return rows;
  }
  Block block;
  for (size_t at = 0; at < rows.size(); at += shape.bytes)
    do {
      for (int64_t i = 0; i < shape.bytes; ++i) rows[at + i] = static_cast<char>(random_bits());
      decode(stored, reinterpret_cast<uint8_t*>(&rows[at]), block);
    } while (!(std::abs(block.scale) < 10) || !(std::abs(block.minimum) < 10));
  return rows;
}

// Return a row as the tiles use it: in bfloat16, unchanged, or rounded to multiples of 1/32,639 of each block's largest number.
std::vector<double> used(int64_t stored, int64_t row_parts, const float* x) {
  std::vector<double> out(x, x + kLength);
  if (stored == kStoredBF16) {
    if (row_parts == 1)
      for (double& each : out) each = static_cast<float>(BFloat16(static_cast<float>(each)));
    return out;
  }
  for (int64_t first = 0; first < kLength; first += kBlock) {
    float peak = 0;
    for (int64_t i = first; i < first + kBlock; ++i) peak = std::max(peak, std::abs(x[i]));
    for (int64_t i = first; i < first + kBlock; ++i) out[i] = std::nearbyint(out[i] * (32639 / peak)) * (peak / 32639);
  }
  return out;
}

// Return the largest difference from the sum in double, over the sum of absolute products.
double difference(int64_t stored, int64_t row_parts, int64_t num_rows) {
  const std::vector<float> x = drawn(num_rows * kLength);
  const std::vector<char> matrix = random_matrix(stored);
  const StoredRows in{stored, matrix.data(), 0, kCount, kLength, kCount};
  std::vector<char> packed(packed_bytes(stored, kCount, kLength) + kPrefetchBytes);
  pack(in, 1, packed.data());
  std::vector<float> y(num_rows * kCount), weights(kLength);
  Forms forms;
  const Matrix own{stored, packed.data()};
  const Operand<float> rows = operand(1, x.data(), num_rows, kLength, {own}, row_parts, forms);
  if (!rows.tiled && !rows.bytes) return INFINITY;
  project_into(rows, own, kCount, 0, num_panels<float>(kCount), y.data());
  double worst = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const std::vector<double> row = used(stored, row_parts, &x[r * kLength]);
    for (int64_t n = 0; n < kCount; ++n) {
      read_row(stored, in.row(n), kLength, weights.data());
      double sum = 0, size = 0;
      for (int64_t d = 0; d < kLength; ++d) sum += weights[d] * row[d], size += std::abs(weights[d] * row[d]);
      worst = std::max(worst, std::abs(y[r * kCount + n] - sum) / size);
    }
  }
  return worst;
}

}  // namespace

int main() {
  const auto check = [](int64_t stored, int64_t row_parts, int64_t num_rows) {
    const double found = difference(stored, row_parts, num_rows);
    if (!(found < 1e-6)) std::printf("type %d, %d parts, %d rows: %g\n", int(stored), int(row_parts), int(num_rows), found);
  };
  for (int64_t row_parts : {int64_t{1}, kTileParts})
    for (int64_t num_rows : {1, 16, 17, 33, 71}) check(kStoredBF16, row_parts, num_rows);
  for (int64_t stored : {kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_XS})
    for (int64_t num_rows : {1, 33}) check(stored, 1, num_rows);
}
