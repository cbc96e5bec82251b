// Multiplies rows by matrices in AMX tiles, which this file emulates, and compares the products with sums in double. So
// the code for AMX is tested on every processor with AVX-512. Prints what differs.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

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

#include "products.h"

using namespace nvium;

namespace {

// Return the rows as the tiles use them: in bfloat16, unchanged, or rounded in blocks of 256.
std::vector<double> used(int64_t kind, int64_t row_parts, const std::vector<float>& x) {
  if (kind != kStoredBF16) return rounded(x, kBlock);
  std::vector<double> out(x.begin(), x.end());
  if (row_parts == 1)
    for (double& each : out) each = static_cast<float>(BFloat16(static_cast<float>(each)));
  return out;
}

void check(int64_t kind, int64_t row_parts, int64_t num_rows) {
  const RandomMatrix weights(kind);
  const std::vector<float> x = drawn(num_rows * kLength);
  Forms forms;
  std::vector<float> y(num_rows * kCount);
  const Operand<float> rows = operand(1, x.data(), num_rows, kLength, {weights.matrix()}, row_parts, forms);
  if (!rows.tiled && !rows.bytes) std::printf("type %d is not in tiles\n", int(kind));
  project_into(rows, weights.matrix(), kCount, 0, num_panels<float>(kCount), y.data());
  const double found = weights.difference(used(kind, row_parts, x), y);
  if (!(found < 1e-6)) std::printf("type %d, %d parts, %d rows: %g\n", int(kind), int(row_parts), int(num_rows), found);
}

}  // namespace

int main() {
  for (int64_t row_parts : {int64_t{1}, kTileParts})
    for (int64_t num_rows : {1, 16, 17, 33, 71}) check(kStoredBF16, row_parts, num_rows);
  for (int64_t kind : {kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_XS})
    for (int64_t num_rows : {1, 33}) check(kind, 1, num_rows);
}
