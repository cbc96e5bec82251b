// Uniform numbers for routing and for drawing tokens. The reference is nvium_core/engine/schedule/randomness.py.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace nvium {

// Return the 8-byte BLAKE2b hash (RFC 7693) of a message of at most 128 bytes.
inline uint64_t blake2b_8(const uint64_t (&words)[16], uint64_t length) {
  constexpr uint64_t initial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                   0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  constexpr uint8_t order[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
  uint64_t v[16];
  const uint64_t first = initial[0] ^ 0x01010000 ^ 8;  // parameters: no key, fanout 1, depth 1, digest of 8 bytes
  for (int i = 0; i < 8; ++i) v[i] = v[i + 8] = initial[i];
  v[0] = first;
  v[12] ^= length;
  v[14] = ~v[14];  // marks the message's last block
  const auto mix = [&](int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x, v[d] = std::rotr(v[d] ^ v[a], 32);
    v[c] += v[d], v[b] = std::rotr(v[b] ^ v[c], 24);
    v[a] += v[b] + y, v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d], v[b] = std::rotr(v[b] ^ v[c], 63);
  };
  for (int round = 0; round < 12; ++round) {
    const uint8_t* s = order[round % 10];
    for (int i = 0; i < 4; ++i) mix(i, i + 4, i + 8, i + 12, words[s[2 * i]], words[s[2 * i + 1]]);
    for (int i = 0; i < 4; ++i)
      mix(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, words[s[2 * i + 8]], words[s[2 * i + 9]]);
  }
  return first ^ v[0] ^ v[8];
}

// Return a number in [0, 1) with 53 random bits. `purpose` must have five letters.
inline double uniform(int64_t seed, int64_t choice, int64_t position, int64_t junction, const char* purpose) {
  const int64_t numbers[4] = {seed, choice, position, junction};
  uint64_t words[16] = {};
  std::memcpy(words, numbers, sizeof numbers);
  std::memcpy(&words[4], purpose, 5);
  return static_cast<double>(blake2b_8(words, 37) >> 11) * 0x1p-53;
}

}  // namespace nvium
