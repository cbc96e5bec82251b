// Number formats of packed matrices: floats, and numbers of quantized matrices, which are packed in groups.
#pragma once

#include "arithmetic.h"
#include "blocks.h"

namespace nvium {

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
