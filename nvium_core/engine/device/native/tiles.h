// Multiplies many rows with AMX tiles: by bfloat16 weights, or by quantized ones in bytes.
//
// Tiles of bfloat16 accumulate in float32. Every float32 is exactly the sum of three bfloat16 parts. So with three parts the
// results are as precise as in float32. A model in bfloat16 rounds its rows to one part. Tiles sum in another order than
// matrix.h, so the last bits of a result may differ. Weights of other floats do not use tiles: those that need three parts
// are no faster in tiles.
//
// Tiles of bytes multiply blocks of 256 elements (K-quants, IQ4_XS). A weight's number times its group's factor is an integer
// of 16 bits, so a block needs only one scale. Rows are rounded as in rounded.h, but in groups of 256. High and low bytes
// multiply separately, to four sums that are exact.
#pragma once

#include <vector>

#include "rounded.h"

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

constexpr int64_t kBlock = 256, kBlockGroups = kBlock / kRoundedGroup, kByteDepth = 64, kByteTiles = kBlock / kByteDepth;

// 256 elements of sixteen rows, or of one vector of weights, as high and low bytes: each four tiles of 16 x 64 bytes.
struct ByteBlock {
  alignas(64) int8_t bytes[2][kByteTiles][kTile][kByteDepth];
};

// Rows as scale · number. `blocks`: [R / 16, length / 256]. `scales`: [R / 16, length / 256, 16 rows]. `sums`: of groups of 32
// numbers, times their scale: [R / 16, length / 256, 16 rows, 8].
struct ByteRows {
  int64_t num_blocks;
  std::vector<ByteBlock> blocks;
  std::vector<float> scales, sums;

  void resize(int64_t num_rows, int64_t length) {
    num_blocks = length / kBlock;
    const int64_t count = (num_rows + kTile - 1) / kTile * num_blocks;
    blocks.resize(count), scales.resize(count * kTile), sums.resize(count * kTile * kBlockGroups);
  }
};

// Return whether a block's weights are integers of 16 bits times one scale. Q2_K has too many minima.
constexpr bool fits_byte_tiles(int64_t kind) { return block_shape(kind).packing.has_levels && kind != kQ2_K; }

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

inline void split_rows(const float* x, int64_t length, int64_t begin, int64_t end, TiledRows& out) {
  using Halves = VectorOf<uint16_t, kVectorBytes / 2>::type;
  for (int64_t r = begin; r < end; ++r)
    for (int64_t g = 0; g < out.num_groups; ++g) {
      const float* at = x + r * length + g * kTileDepth;
      uint16_t* to = &out.parts[out.index(r, g)];
      for (int half = 0; half < 2; ++half) {
        floats left = load(at + 16 * half);
        if (const ints bits = bits_as<ints>(left); out.num_parts == 1)  // round to nearest, ties to even
          left = bits_as<floats>(bits + 0x7FFF + (bits >> 16 & 1));
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

// Round each block of these rows. A block with a number that is not finite gets a scale of NaN.
inline void round_blocks(const float* x, int64_t length, int64_t begin, int64_t end, ByteRows& out) {
  using Bytes = VectorOf<int8_t, 16>::type;
  for (int64_t r = begin; r < end; ++r)
    for (int64_t b = 0; b < out.num_blocks; ++b) {
      const float* at = x + r * length + b * kBlock;
      const int64_t i = r / kTile * out.num_blocks + b, row = r % kTile;
      const Rounding rounding(at, kBlock);
      out.scales[i * kTile + row] = rounding.scale;
      float* const sums = &out.sums[(i * kTile + row) * kBlockGroups];
      std::fill_n(sums, kBlockGroups, 0.0f);
      for (int64_t part = 0; part < kBlock / kCounted; ++part) {
        const ints numbers = rounding.rounded(load(at + kCounted * part)), high = (numbers + 128) >> 8;
        sums[part / 2] += static_cast<float>(total_of(numbers)) * rounding.scale;
        for (int byte = 0; byte < 2; ++byte) {
          const Bytes bytes = __builtin_convertvector(byte ? numbers - (high << 8) : high, Bytes);
          const __m128i quads = _mm_set_epi64x(0x0F0D0E0C0B090A08, 0x0705060403010200);
          store(_mm_shuffle_epi8((__m128i)bytes, quads), &out.blocks[i].bytes[byte][part / 4][row][part % 4 * kCounted]);
        }
      }
    }
}

// A block of a panel.
template <typename N> struct PanelBlock {
  ByteBlock weights[kPanel];
  floats scales[kPanel], minima[kPanel][kBlockGroups];
  bool has_min;

  void read(PanelReader<N>& reader) {
    PanelGroup<N> of;
    for (int64_t group = 0; group < kBlock / kRoundedGroup; ++group) {
      reader.next(of, true);
      for (int k = 0; k < kPanel; ++k) {
        minima[k][group] = of.minima[0][k];
        for (int pair = 0; pair < kRoundedGroup / 8; ++pair) put(of, pair, k, group * kRoundedGroup / 4 + 2 * pair);
      }
    }
    has_min = of.has_min;
    std::copy_n(reader.levels(), kPanel, scales);
  }

 private:
  using Shorts = Vector<int16_t>;

  // Write two quads of (number − offset) · factor as high and low bytes.
  void put(const PanelGroup<N>& of, int pair, int k, int64_t at) {
    const int part = 8 * pair / N::kGroup;
    const ints factor = of.factor(part, k);
    const Shorts factors = bits_as<Shorts>((factor & 0xFFFF) | factor << 16);
    ints pairs[4];
    unpack<N, Products<false>>(of, part, pair % (N::kGroup / 8), k, pairs);
    for (int quad = 0; quad < 2; ++quad) {
      Shorts low[2], high[2];
      for (int i = 0; i < 2; ++i) {
        low[i] = (bits_as<Shorts>(pairs[2 * quad + i]) - static_cast<int16_t>(of.offset)) * factors;
        high[i] = (low[i] + 128) >> 8;
      }
      const auto to = [&](int byte) { return &weights[k].bytes[byte][(at + quad) / kTile][(at + quad) % kTile]; };
      store((high[0] & 255) | high[1] << 8, to(0));
      store((low[0] & 255) | low[1] << 8, to(1));
    }
  }
};

// Products of high and low bytes: of both high ones, high by low, low by high, both low ones.
using ByteSums = ints[4][kTile];

// Multiply sixteen rows by a vector. Call `meanwhile` while tiles multiply.
template <typename Meanwhile>
NVIUM_TILES inline void multiply_bytes(const ByteBlock& rows, const ByteBlock& weights, ByteSums& out, Meanwhile&& meanwhile) {
  asm volatile("" : : : "memory");  // the compiler must not move stores past the tile loads
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
#pragma GCC unroll 4
  for (int64_t i = 0; i < kByteTiles; ++i) {
    _tile_loadd(4, rows.bytes[0][i], 64);
    _tile_loadd(5, rows.bytes[1][i], 64);
    _tile_loadd(6, weights.bytes[0][i], 64);
    _tile_loadd(7, weights.bytes[1][i], 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  meanwhile();
  _tile_stored(0, out[0], 64);
  _tile_stored(1, out[1], 64);
  _tile_stored(2, out[2], 64);
  _tile_stored(3, out[3], 64);
}

// Multiply rows by a panel of numbers of this format. Call use(row, vector, products) with the vector's number in the panel.
// The sums of one multiplication are added while tiles do the next.
template <typename N, typename Use>
NVIUM_TILES void multiply_blocks(const ByteRows& x, int64_t num_rows, const Packing& packing, const char* panel, Use&& use) {
  static thread_local std::vector<floats> memory;
  static thread_local PanelBlock<N> block;
  const int64_t num_tiles = (num_rows + kTile - 1) / kTile;
  memory.assign(num_tiles * kPanel * kTile, floats{});
  PanelReader<N> reader(packing, panel);
  ByteSums sums;
  const TilesInUse tiles;
  for (int64_t b = 0; b < x.num_blocks; ++b) {
    block.read(reader);
    const auto add = [&](int64_t step) {
      const int64_t i = step / kPanel * x.num_blocks + b, k = step % kPanel;
      for (int64_t r = 0; r < kTile; ++r) {
        const ints high = (sums[0][r] << 8) + sums[1][r] + sums[2][r];
        const floats dots = __builtin_convertvector(high, floats) * 256.0f + __builtin_convertvector(sums[3][r], floats);
        floats result = memory[step * kTile + r] + dots * block.scales[k] * x.scales[i * kTile + r];
        if (block.has_min)
          for (int64_t g = 0; g < kBlockGroups; ++g)
            result += block.minima[k][g] * x.sums[(i * kTile + r) * kBlockGroups + g];
        memory[step * kTile + r] = result;
      }
    };
    for (int64_t step = 0; step < num_tiles * kPanel; ++step)
      multiply_bytes(x.blocks[step / kPanel * x.num_blocks + b], block.weights[step % kPanel], sums, [&] {
        if (step) add(step - 1);
      });
    add(num_tiles * kPanel - 1);
  }
  for (int64_t r = 0; r < num_rows; ++r)
    for (int64_t k = 0; k < kPanel; ++k) use(r, k, memory[(r / kTile * kPanel + k) * kTile + r % kTile]);
}

#else

template <typename A> constexpr bool kMayTile = false;

inline bool has_tiles() { return false; }

#endif

}  // namespace nvium
