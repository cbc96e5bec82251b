// Uniform numbers for routing and for drawing tokens. The reference is nvium_core/engine/schedule/randomness.py.
#pragma once

#include <array>
#include <cstdint>

namespace nvium {

enum Purpose { kDraw, kRoute };

// Philox4x64-10 (Salmon et al. 2011).
inline std::array<uint64_t, 4> philox(std::array<uint64_t, 4> counter, uint64_t key0, uint64_t key1) {
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B97F4A7C15, key1 += 0xBB67AE8584CAA73B) {
    const auto a = static_cast<unsigned __int128>(counter[0]) * 0xD2E7470EE14C6C93;
    const auto b = static_cast<unsigned __int128>(counter[2]) * 0xCA5A826395121157;
    counter = {static_cast<uint64_t>(b >> 64) ^ counter[1] ^ key0, static_cast<uint64_t>(b),
               static_cast<uint64_t>(a >> 64) ^ counter[3] ^ key1, static_cast<uint64_t>(a)};
  }
  return counter;
}

// Return a number in [0, 1) with 53 random bits.
inline double uniform(int64_t seed, int64_t choice, int64_t position, int64_t exit, Purpose purpose) {
  const std::array<uint64_t, 4> counter = {static_cast<uint64_t>(position) + 1, static_cast<uint64_t>(exit), 0, 0};
  return static_cast<double>(philox(counter, seed, choice)[purpose] >> 11) * 0x1p-53;
}

}  // namespace nvium
