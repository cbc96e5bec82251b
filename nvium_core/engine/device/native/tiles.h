// Multiplies many rows with AMX tiles, which multiply bfloat16 and accumulate in float32.
//
// Every float32 is exactly the sum of three bfloat16 parts, and a bfloat16 weight needs only one. So with three parts the
// results are as precise as in float32. A model in bfloat16 rounds its rows to one part. Tiles sum in another order than
// matrix.h, so the last bits of a result may differ. Quantized matrices do not use tiles.
#pragma once

#include <vector>

#include "formats.h"

#if defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nvium {

constexpr int64_t kTile = 16, kTileDepth = 32, kTileParts = 3;

// Rows x [R, length], where each number is rounded to one part or split into three: [R / 16, length / 32, part, 16, 32].
struct TiledRows {
  int64_t num_parts;
  std::vector<uint16_t> parts;

  // Resize for `num_rows` rows, padded to whole tiles. The results of padding rows are never read.
  TiledRows& resized(int64_t num_rows, int64_t length, int64_t num_parts_) {
    const int64_t padded = (num_rows + 2 * kTile - 1) / (2 * kTile) * 2 * kTile;
    num_parts = num_parts_;
    parts.resize(padded * length * num_parts);
    return *this;
  }
};

#if defined(__AVX512F__) && defined(__linux__)

template <typename A> constexpr bool kMayTile = std::is_same_v<A, float>;
#define NVIUM_TILES __attribute__((target("amx-tile,amx-bf16")))
constexpr int64_t kTileNumbers = kTile * kTileDepth;

// Return true if the processor has AMX tiles and the operating system grants them to this process.
inline bool has_tiles() {
  static const bool granted = __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, 0x1023, 18);
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
  const int64_t groups = length / kTileDepth;
  for (int64_t r = begin; r < end; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const float* at = x + r * length + g * kTileDepth;
      uint16_t* to = &out.parts[((r / kTile * groups + g) * out.num_parts * kTile + r % kTile) * kTileDepth];
      for (int half = 0; half < 2; ++half) {
        floats left = load(at + 16 * half);
        if (out.num_parts == 1) left = rounded_to_part(left);
        for (int part = 0; part < out.num_parts; ++part)
          store(__builtin_convertvector(bits_as<Vector<uint32_t>>(next_part(left)) >> 16, Halves),
                to + part * kTileNumbers + 16 * half);
      }
    }
}

// Number of bfloat16 parts of a weight.
template <typename F> constexpr int64_t kPartsOf = std::is_same_v<F, Pairs> ? 1 : kTileParts;

// Unpack two vectors of a panel into tiles [group, part, vector, 16 pairs, 16 lanes].
template <typename F>
void unpack_tiles(const char* panel, int64_t vectors, int64_t first, int64_t groups, std::vector<ints>& tiles) {
  constexpr int64_t parts = kPartsOf<F>;
  tiles.assign(groups * parts * 2 * kTile, ints{});
  const int64_t here = std::min<int64_t>(2, vectors - first);
  for (int64_t g = 0; g < groups; ++g) {
    const char* group = panel + g * vectors * kTileDepth / F::kStep * kVectorBytes;
    for (int64_t v = 0; v < here; ++v)
      for (int64_t pair = 0; pair < kTile; ++pair) {
        const auto element = [&](int64_t i) {
          return F::unpack(group + (i / F::kStep * vectors + first + v) * kVectorBytes, i % F::kStep);
        };
        floats even = element(2 * pair), odd = element(2 * pair + 1);
        for (int64_t part = 0; part < parts; ++part)
          tiles[((g * parts + part) * 2 + v) * kTile + pair] =
              (next_part(even) >> 16 & 0xFFFF) | next_part(odd);
      }
  }
}

// Multiply two tiles of rows (registers 6 and 7) by two tiles of weights (4 and 5). Registers 0 to 3 hold the sums.
template <int64_t Parts, int64_t RowParts>
NVIUM_TILES inline void add_tiles(const uint16_t* rows, const uint16_t* next_rows, const ints* weights) {
#pragma GCC unroll 3
  for (int64_t q = 0; q < Parts; ++q) {
    _tile_loadd(4, weights + q * 2 * kTile, 64);
    _tile_loadd(5, weights + (q * 2 + 1) * kTile, 64);
    for (int64_t p = 0; p < RowParts && p + q < kTileParts; ++p) {
      _tile_loadd(6, rows + p * kTileNumbers, 64);
      _tile_loadd(7, next_rows + p * kTileNumbers, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
}

NVIUM_TILES inline void zero_sums() { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

NVIUM_TILES inline void store_sums(floats* to) {
  _tile_stored(0, to, 64); _tile_stored(1, to + 16, 64);
  _tile_stored(2, to + 32, 64); _tile_stored(3, to + 48, 64);
}

// Multiply rows by all vectors of a panel. Call use(row, vector, products) with the vector's number in the panel.
template <typename F, int64_t RowParts, typename Use>
NVIUM_TILES void multiply_tiled(const TiledRows& x, int64_t num_rows, int64_t length, const char* panel, int64_t vectors, Use&& use) {
  constexpr int64_t parts = kPartsOf<F>;
  const int64_t groups = length / kTileDepth, row_tile = groups * RowParts * kTileNumbers;
  static thread_local std::vector<ints> weights;
  const TilesInUse tiles;
  for (int64_t first = 0; first < vectors; first += 2) {
    const int64_t here = std::min<int64_t>(2, vectors - first);
    unpack_tiles<F>(panel, vectors, first, groups, weights);
    for (int64_t row = 0; row < num_rows; row += 2 * kTile) {
      const uint16_t* rows = &x.parts[row / kTile * row_tile];
      floats sums[2 * 2 * kTile];  // [row tile, vector, row]
      asm volatile("" : : : "memory");  // the compiler must not move stores past the tile loads
      zero_sums();
      for (int64_t g = 0; g < groups; ++g, rows += RowParts * kTileNumbers)
        add_tiles<parts, RowParts>(rows, rows + row_tile, &weights[g * parts * 2 * kTile]);
      store_sums(sums);
      for (int64_t r = 0; r < std::min(2 * kTile, num_rows - row); ++r)
        for (int64_t v = 0; v < here; ++v)
          use(row + r, first + v, sums[(r / kTile * 2 + v) * kTile + r % kTile]);
    }
  }
}

#else

template <typename A> constexpr bool kMayTile = false;

inline bool has_tiles() { return false; }

#endif

}  // namespace nvium
