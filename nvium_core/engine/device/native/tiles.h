// Multiplies many rows by bfloat16 weights with AMX tiles, which multiply bfloat16 and accumulate in float32.
//
// Every float32 is exactly the sum of three bfloat16 parts. So with three parts the results are as precise as in float32.
// A model in bfloat16 rounds its rows to one part. Tiles sum in another order than matrix.h, so the last bits of a result
// may differ. Weights of other floats do not use tiles: those that need three parts are no faster in tiles.
#pragma once

#include <vector>

#include "formats.h"

#if defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nvium {

constexpr int64_t kTile = 16, kTileDepth = 32, kTileNumbers = kTile * kTileDepth, kTileParts = 3;

// Rows x [R, length], where each number is rounded to one part or split into three. Two tiles of rows are multiplied at
// once, so the order is [R / 32, length / 32, part, tile, 16, 32].
struct TiledRows {
  int64_t num_parts, num_groups;
  std::vector<uint16_t> parts;

  // Resize for `num_rows` rows, padded to whole pairs of tiles. The results of padding rows are never read.
  void resize(int64_t num_rows, int64_t length, int64_t num_parts_) {
    num_parts = num_parts_, num_groups = length / kTileDepth;
    parts.resize(index((num_rows + 2 * kTile - 1) / (2 * kTile) * 2 * kTile, 0));
  }

  // Return the place of the first part of a row's group.
  int64_t index(int64_t row, int64_t group) const {
    return (row / (2 * kTile) * num_groups + group) * num_parts * 2 * kTileNumbers + row % (2 * kTile) * kTileDepth;
  }
};

#if defined(__AVX512F__) && defined(__linux__)

template <typename A> constexpr bool kMayTile = std::is_same_v<A, float>;
#define NVIUM_TILES __attribute__((target("amx-tile,amx-bf16,amx-int8")))

// Return true if the processor has AMX tiles and the operating system grants them to this process.
inline bool has_tiles() {
  static const bool granted = has_feature(kAmxBf16) && has_feature(kAmxInt8) && !syscall(SYS_arch_prctl, 0x1023, 18);
  return granted;
}

// Configures the thread's tiles, and releases them when destroyed.
class TilesInUse {
 public:
  NVIUM_TILES TilesInUse() {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.bytes[tile] = 64, config.rows[tile] = kTile;
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  NVIUM_TILES ~TilesInUse() { _tile_release(); }
};

// Move the leading 8 significant bits of `left` into a bfloat16. Return it in the upper half of each lane.
inline ints next_part(floats& left) {
  const ints part = bits_as<ints>(left) & static_cast<int32_t>(0xFFFF0000);
  left -= bits_as<floats>(part);
  return part;
}

// Round to the nearest bfloat16, ties to even.
inline floats rounded_to_part(const floats& x) {
  const ints bits = bits_as<ints>(x);
  return bits_as<floats>(bits + 0x7FFF + (bits >> 16 & 1));
}

inline void split_rows(const float* x, int64_t length, int64_t begin, int64_t end, TiledRows& out) {
  using Halves = VectorOf<uint16_t, kVectorBytes / 2>::type;
  for (int64_t r = begin; r < end; ++r)
    for (int64_t g = 0; g < out.num_groups; ++g) {
      const float* at = x + r * length + g * kTileDepth;
      uint16_t* to = &out.parts[out.index(r, g)];
      for (int half = 0; half < 2; ++half) {
        floats left = load(at + 16 * half);
        if (out.num_parts == 1) left = rounded_to_part(left);
        for (int part = 0; part < out.num_parts; ++part)
          store(__builtin_convertvector(bits_as<Vector<uint32_t>>(next_part(left)) >> 16, Halves),
                to + part * 2 * kTileNumbers + 16 * half);
      }
    }
}

// Multiply rows by all vectors of a panel of `Pairs`, whose order is that of tiles of weights. Call use(row, vector,
// products) with the vector's number in the panel.
template <int64_t Parts, typename Use>
NVIUM_TILES void multiply_tiled(const TiledRows& x, int64_t num_rows, const char* panel, int64_t vectors, Use&& use) {
  const int64_t stride = vectors * kVectorBytes;
  const TilesInUse tiles;
  for (int64_t first = 0; first < vectors; first += 2) {
    const int64_t here = std::min<int64_t>(2, vectors - first);
    for (int64_t row = 0; row < num_rows; row += 2 * kTile) {
      const uint16_t* rows = &x.parts[x.index(row, 0)];
      const char* weights = panel + first * kVectorBytes;
      floats sums[2][2][kTile];  // [row tile, vector, row]
      asm volatile("" : : : "memory");  // the compiler must not move stores past the tile loads
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
      for (int64_t g = 0; g < x.num_groups; ++g, weights += kTile * stride) {
        _tile_loadd(4, weights, stride);
        _tile_loadd(5, weights + (here - 1) * kVectorBytes, stride);
        for (int64_t part = 0; part < Parts; ++part, rows += 2 * kTileNumbers) {
          _tile_loadd(6, rows, 64);
          _tile_loadd(7, rows + kTileNumbers, 64);
          _tile_dpbf16ps(0, 6, 4);
          _tile_dpbf16ps(1, 6, 5);
          _tile_dpbf16ps(2, 7, 4);
          _tile_dpbf16ps(3, 7, 5);
        }
      }
      _tile_stored(0, sums[0][0], 64);
      _tile_stored(1, sums[0][1], 64);
      _tile_stored(2, sums[1][0], 64);
      _tile_stored(3, sums[1][1], 64);
      for (int64_t r = 0; r < std::min(2 * kTile, num_rows - row); ++r)
        for (int64_t v = 0; v < here; ++v) use(row + r, first + v, sums[r / kTile][v][r % kTile]);
    }
  }
}

#else

template <typename A> constexpr bool kMayTile = false;

inline bool has_tiles() { return false; }

#endif

}  // namespace nvium
