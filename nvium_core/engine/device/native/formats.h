// Number formats of packed matrices.
#pragma once

#include "arithmetic.h"

namespace nvium {

// A step is the unit of packing: `kStep` elements of every lane, in `kBytes` bytes. `unpack` returns one element of
// every lane. A quantized format has groups of `kGroup` elements. Each group starts with `kScales` numbers per lane: a
// scale, or a scale and a minimum.
struct Ungrouped {
  static constexpr int kGroup = 0, kScales = 0, kScaleBytes = 0;
};

template <typename A> struct Plain : Ungrouped {
  static constexpr int64_t kLanes = lanes<A>;
  static constexpr int kStep = 1, kBytes = kVectorBytes;
  static Vector<A> unpack(const char* at, int) { return bits_at<Vector<A>>(at); }
};

struct Pairs : Ungrouped {  // two bfloat16 numbers in 32 bits, the first in the lower half
  static constexpr int64_t kLanes = lanes<float>;
  static constexpr int kStep = 2, kBytes = kVectorBytes;
  static floats unpack(const char* at, int element) {
    const ints both = bits_at<ints>(at);
    return bits_as<floats>(element ? both & static_cast<int32_t>(0xFFFF0000) : both << 16);
  }
};

struct Bytes {
  static constexpr int64_t kLanes = lanes<float>;
  static constexpr int kStep = 1, kBytes = kLanes;
  static floats unpack(const char* at, int) {
    return __builtin_convertvector(widened(reinterpret_cast<const int8_t*>(at)), floats);
  }
};

struct Nibbles {  // 4-bit numbers with an offset of 8, two per byte, the first in the lower half
  static constexpr int64_t kLanes = lanes<float>;
  static constexpr int kStep = 2, kBytes = kLanes;
  static floats unpack(const char* at, int element) {
    const ints both = widened(reinterpret_cast<const uint8_t*>(at));
    return __builtin_convertvector((element ? both >> 4 : both & 15) - 8, floats);
  }
};

// Convert finite IEEE halves to floats, exactly. A half's bits in a float are a number that is 2^112 times too small.
inline floats halves(const char* at) {
  const ints bits = widened(reinterpret_cast<const uint16_t*>(at));
  const floats size = bits_as<floats>((bits & 0x7FFF) << 13) * 0x1p112f;
  return bits_as<floats>(bits_as<ints>(size) | (bits & 0x8000) << 16);
}

// A weight is scale · number; with a minimum, it is minimum + scale · (unpacked number + 8).
template <typename Numbers, bool HasMin, bool HasHalves = true, int Group = 32> struct Grouped : Numbers {
  static constexpr int kGroup = Group, kScales = HasMin ? 2 : 1;
  static constexpr int kScaleBytes = (HasHalves ? 2 : 4) * Numbers::kLanes;
  static floats scale(const char* at) {
    if constexpr (HasHalves) return halves(at);
    return bits_at<floats>(at);
  }
};

using Q8 = Grouped<Bytes, false>;
using Q4 = Grouped<Nibbles, false>;
using Q4WithMin = Grouped<Nibbles, true>;
using Q4K = Grouped<Nibbles, true, false>;
using Q6K = Grouped<Bytes, false, false, 16>;
using Q8WithMin = Grouped<Bytes, true, false, 16>;

}  // namespace nvium
