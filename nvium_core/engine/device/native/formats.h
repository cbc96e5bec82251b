// Formats of matrices: rows as a file stores them, blocks of a GGUF type or floats, and the numbers of packed matrices.
//
// The layouts of blocks are llama.cpp's (ggml-common.h and ggml-quants.c in ggml/src); the reference is the package gguf.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "arithmetic.h"

namespace nvium {

// Numbers of the types in GGUF files.
enum Stored : int64_t {
  kStoredF32 = 0, kStoredF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ2_K = 10, kQ3_K = 11,
  kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kIQ4_NL = 20, kIQ4_XS = 23, kStoredF64 = 28, kStoredBF16 = 30
};

// Weight i of a block is scale · factors[g] · numbers[i] + minimum · min_factors[g], where g = i / group.
struct Block {
  float scale = 0, minimum = 0;
  int8_t factors[16] = {1}, min_factors[16] = {1}, numbers[256];
};

// How a quantized matrix is packed. A weight is scale · (number − offset), plus a minimum if there are minima. Scales and
// minima are IEEE halves of one group; or, if `has_levels`, halves of 256 elements times an 8-bit factor of one group.
struct Packing {
  int bits;
  bool has_levels, has_min;
  int offset;
};

// Elements and bytes of a block, elements of a group, which share a scale, and how such matrices are packed. No elements:
// not a type of blocks.
struct BlockShape {
  int64_t elements, bytes, group;
  Packing packing;
};

constexpr BlockShape block_shape(int64_t stored) {
  switch (stored) {
    case kQ4_0: return {32, 18, 32, {4, false, false, 8}};
    case kQ4_1: return {32, 20, 32, {4, false, true, 0}};
    case kQ5_0: return {32, 22, 32, {5, false, false, 16}};
    case kQ5_1: return {32, 24, 32, {5, false, true, 0}};
    case kQ8_0: return {32, 34, 32, {8, false, false, 128}};
    case kQ2_K: return {256, 84, 16, {6, true, true, 0}};
    case kQ3_K: return {256, 110, 16, {6, true, false, 32}};
    case kQ4_K: return {256, 144, 32, {4, true, true, 0}};
    case kQ5_K: return {256, 176, 32, {5, true, true, 0}};
    case kQ6_K: return {256, 210, 16, {6, true, false, 32}};
    case kIQ4_NL: return {32, 18, 32, {8, false, false, 128}};
    case kIQ4_XS: return {256, 136, 32, {8, true, false, 128}};
    default: return {};
  }
}

// Bytes of a stored row.
constexpr int64_t row_bytes(int64_t stored, int64_t length) {
  const BlockShape shape = block_shape(stored);
  if (shape.elements) return length / shape.elements * shape.bytes;
  return length * (stored == kStoredF64 ? 8 : stored == kStoredF32 ? 4 : 2);
}

inline float half_at(const uint8_t* at) { return static_cast<float>(bits_at<Half>(at)); }

namespace decoding {

constexpr int8_t kNonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 16 bytes hold 32 numbers: first the lower halves, then the upper ones.
template <typename Use> void each_nibble(const uint8_t* at, Use&& use) {
  for (int i = 0; i < 16; ++i) use(i, at[i] & 15), use(i + 16, at[i] >> 4);
}

// The scales and minima of Q4_K and Q5_K: 16 numbers of 6 bits in 12 bytes.
inline void scales_k(const uint8_t* at, Block& out) {
  for (int g = 0; g < 8; ++g)
    if (g < 4) {
      out.factors[g] = at[g] & 63, out.min_factors[g] = at[g + 4] & 63;
    } else {
      out.factors[g] = (at[g + 4] & 15) | (at[g - 4] >> 6) << 4;
      out.min_factors[g] = (at[g + 4] >> 4) | (at[g] >> 6) << 4;
    }
}

// Q4_K and Q5_K: `high` has the fifth bits, or is null.
inline void numbers_k(const uint8_t* at, const uint8_t* high, Block& out) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < 32; ++i) {
      const int low = at[32 * (g / 2) + i] >> (g % 2 * 4) & 15;
      out.numbers[32 * g + i] = high ? low | (high[i] >> g & 1) << 4 : low;
    }
}

inline void q2_k(const uint8_t* at, Block& out) {
  out.scale = half_at(at + 80), out.minimum = -half_at(at + 82);
  for (int g = 0; g < 16; ++g) out.factors[g] = at[g] & 15, out.min_factors[g] = at[g] >> 4;
  for (int i = 0; i < 256; ++i) out.numbers[i] = at[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

inline void q3_k(const uint8_t* at, Block& out) {
  const uint8_t *numbers = at + 32, *scales = at + 96;
  out.scale = half_at(at + 108);
  for (int g = 0; g < 16; ++g)
    out.factors[g] = ((scales[g % 8] >> (g / 8 * 4) & 15) | (scales[8 + g % 4] >> (g / 4 * 2) & 3) << 4) - 32;
  for (int i = 0; i < 256; ++i) {
    const int low = numbers[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    out.numbers[i] = low - (at[i % 32] >> i / 32 & 1 ? 0 : 4);
  }
}

inline void q6_k(const uint8_t* at, Block& out) {
  out.scale = half_at(at + 208);
  std::memcpy(out.factors, at + 192, 16);
  for (int q = 0; q < 8; ++q) {  // quarters of 128 numbers
    const uint8_t *low = at + 64 * (q / 4) + 32 * (q % 2), *high = at + 128 + 32 * (q / 4);
    for (int i = 0; i < 32; ++i)
      out.numbers[32 * q + i] = ((low[i] >> (q % 4 / 2 * 4) & 15) | (high[i] >> 2 * (q % 4) & 3) << 4) - 32;
  }
}

inline void iq4_xs(const uint8_t* at, Block& out) {
  for (int g = 0; g < 8; ++g) {
    out.factors[g] = ((at[4 + g / 2] >> (g % 2 * 4) & 15) | (at[2 + g / 4] >> (g % 4 * 2) & 3) << 4) - 32;
    each_nibble(at + 8 + 16 * g, [&](int i, int number) { out.numbers[32 * g + i] = kNonlinear[number]; });
  }
}

}  // namespace decoding

inline void decode(int64_t stored, const uint8_t* at, Block& out) {
  using namespace decoding;
  const auto fifth_bit = [&](const uint8_t* bits, int i) { return (bits[i / 8] >> i % 8 & 1) << 4; };
  out.scale = half_at(at);  // the next three types store their scale elsewhere
  switch (stored) {
    case kQ2_K: q2_k(at, out); break;
    case kQ3_K: q3_k(at, out); break;
    case kQ6_K: q6_k(at, out); break;
    case kIQ4_XS: iq4_xs(at, out); break;
    case kQ8_0: std::memcpy(out.numbers, at + 2, 32); break;
    case kQ4_0: each_nibble(at + 2, [&](int i, int number) { out.numbers[i] = number - 8; }); break;
    case kIQ4_NL: each_nibble(at + 2, [&](int i, int number) { out.numbers[i] = kNonlinear[number]; }); break;
    case kQ5_0: each_nibble(at + 6, [&](int i, int n) { out.numbers[i] = (n | fifth_bit(at + 2, i)) - 16; }); break;
    case kQ4_1: each_nibble(at + 4, [&](int i, int number) { out.numbers[i] = number; }); break;
    case kQ5_1: each_nibble(at + 8, [&](int i, int n) { out.numbers[i] = n | fifth_bit(at + 4, i); }); break;
    case kQ4_K: scales_k(at + 4, out), numbers_k(at + 16, nullptr, out); break;
    case kQ5_K: scales_k(at + 4, out), numbers_k(at + 48, at + 16, out); break;
  }
  if (stored == kQ4_1 || stored == kQ5_1) out.minimum = half_at(at + 2);
  if (stored == kQ4_K || stored == kQ5_K) out.minimum = -half_at(at + 2);
}

// Convert a row to float, or to double if the row has doubles.
template <typename A> void read_row(int64_t stored, const char* row, int64_t length, A* out) {
  const auto* at = reinterpret_cast<const uint8_t*>(row);
  if (const BlockShape shape = block_shape(stored); shape.elements) {
    Block block;
    for (int64_t begin = 0; begin < length; begin += shape.elements, at += shape.bytes, out += shape.elements) {
      decode(stored, at, block);
      for (int64_t i = 0; i < shape.elements; ++i) {
        const int64_t g = i / shape.group;
        out[i] = block.scale * block.factors[g] * block.numbers[i] + block.minimum * block.min_factors[g];
      }
    }
    return;
  }
  for (int64_t i = 0; i < length; ++i) switch (stored) {
      case kStoredF64: out[i] = static_cast<A>(bits_at<double>(at + 8 * i)); break;
      case kStoredF32: out[i] = bits_at<float>(at + 4 * i); break;
      case kStoredF16: out[i] = half_at(at + 2 * i); break;
      default: out[i] = static_cast<float>(bits_at<BFloat16>(at + 2 * i));
    }
}

// A step is the unit of packing: one vector, with `kStep` elements of every lane, of which `unpack` returns one. The
// elements of a lane are `kStride` bytes apart, and the lanes `kLaneStride`.
template <typename A> struct Plain {
  static constexpr int64_t kLanes = lanes<A>, kStride = 0, kLaneStride = sizeof(A);
  static constexpr int kStep = 1;
  static Vector<A> unpack(const char* at, int) { return bits_at<Vector<A>>(at); }
};

struct Pairs {  // two bfloat16 numbers in 32 bits, the first in the lower half
  static constexpr int64_t kLanes = lanes<float>, kStride = 2, kLaneStride = 4;
  static constexpr int kStep = 2;
  static floats unpack(const char* at, int element) {
    const ints both = bits_at<ints>(at);
    return bits_as<floats>(element ? both & static_cast<int32_t>(0xFFFF0000) : both << 16);
  }
};

struct Halves {  // the first IEEE half of every lane, then the second of every lane
  static constexpr int64_t kLanes = lanes<float>, kStride = kVectorBytes / 2, kLaneStride = 2;
  static constexpr int kStep = 2;
  static floats unpack(const char* at, int element) { return halves(at + element * kStride); }
};

// Quantized numbers come in groups of `kGroup`, which take `kWords` 32-bit words of each lane. A step has one word of
// every lane, and steps are `stride` bytes apart. `put` writes a group of one lane. `unpack` returns the numbers 8w … as
// two quads: four unsigned bytes of each lane, in the order 0, 2, 1, 3.

// Return four numbers as a quad of one lane.
inline uint32_t quad_of(const uint8_t* numbers) {
  const auto in_order = bits_at<uint32_t>(numbers);
  return (in_order & 0xFF0000FF) | (in_order >> 8 & 0x0000FF00) | (in_order << 8 & 0x00FF0000);
}

// Numbers of 4 + High bits. Each word has the lower bits of two quads: one in the lower half of each byte, one in the
// upper half. A word before them has the upper bits of all quads: of quad q in bits High · q … of each byte.
template <int High, int Group> struct Nibbles {
  static constexpr int kGroup = Group, kFirst = High ? 1 : 0, kWords = kFirst + Group / 8;

  static void put(const uint8_t* numbers, int64_t stride, char* to) {
    uint32_t words[kWords] = {};
    for (int q = 0; q < Group / 4; ++q) {
      const uint32_t quad = quad_of(numbers + 4 * q);
      words[kFirst + q / 2] |= (quad & 0x0F0F0F0F) << 4 * (q % 2);
      if (High) words[0] |= (quad >> 4 & 0x0F0F0F0F) << High * q;
    }
    for (int word = 0; word < kWords; ++word) std::memcpy(to + word * stride, &words[word], 4);
  }

  static void unpack(const char* at, int64_t stride, int w, ints (&quads)[2]) {
    const ints lower = bits_at<ints>(at + (kFirst + w) * stride);
    quads[0] = lower & 0x0F0F0F0F, quads[1] = lower >> 4 & 0x0F0F0F0F;
    if constexpr (High) {
      const ints upper = bits_at<ints>(at) >> 2 * High * w;
      for (int q = 0; q < 2; ++q) quads[q] |= upper << (4 - High * q) & ((1 << High) - 1) * 0x10101010;
    }
  }
};

struct Bytes {  // one quad in each word
  static constexpr int kGroup = 32, kWords = 8;

  static void put(const uint8_t* numbers, int64_t stride, char* to) {
    for (int q = 0; q < kWords; ++q) store(quad_of(numbers + 4 * q), to + q * stride);
  }

  static void unpack(const char* at, int64_t stride, int w, ints (&quads)[2]) {
    for (int q = 0; q < 2; ++q) quads[q] = bits_at<ints>(at + (2 * w + q) * stride);
  }
};

// Call use(numbers) with the format of a quantized matrix's numbers.
template <typename Use> constexpr auto with_numbers(int bits, Use&& use) {
  switch (bits) {
    case 4: return use(Nibbles<0, 32>{});
    case 5: return use(Nibbles<1, 32>{});
    case 6: return use(Nibbles<2, 16>{});
    default: return use(Bytes{});
  }
}

// Return the bytes of one lane of a quantized matrix.
constexpr int64_t lane_bytes(const Packing& packing, int64_t length) {
  const int64_t scales = packing.has_min ? 2 : 1, of_levels = packing.has_levels ? length / 256 * 2 * scales : 0;
  return with_numbers(packing.bits, [&]<typename N>(N) {
    return of_levels + length / N::kGroup * (scales * (packing.has_levels ? 1 : 2) + 4 * N::kWords);
  });
}

}  // namespace nvium
